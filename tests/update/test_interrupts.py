"""An interrupt (Ctrl-C) at any point of a step or a send leaves nothing locked, held or in flight.

CPython looks for signals after a call and at a jump back. Each test raises KeyboardInterrupt at all
such points of one function, one after the other, and makes a whole update after each.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import weightsync as ws
from tests.interrupts import Interrupt
from tests.update.test_races import Sender, fill, make
from tests.update.uniform import values
from weightsync.update.lifecycle import ApplyChoice
from weightsync.weights.sinks.module_sink import ModuleSink
from weightsync.wire.messages import AbortRequest, FinishRequest

pytestmark = pytest.mark.usefixtures("shm_clean")

WAIT_S = 30.0


def update(sender: Sender, receiver: ws.WeightReceiver, value: float, update_id: str) -> None:
    sender.init(receiver)
    receiver.dispatch(sender.update(value, update_id))
    receiver.dispatch(FinishRequest(update_id=update_id))


def read(receiver: ws.WeightReceiver) -> int:
    with receiver.reading(timeout_s=1.0) as version:
        return version


def interrupted(function: str, at: int, sender: Sender, receiver: ws.WeightReceiver) -> bool:
    interrupt = Interrupt(function, at)
    with suppress(KeyboardInterrupt), interrupt.traced():
        update(sender, receiver, 1, f"u{at}")
        read(receiver)
    return bool(interrupt.raised)


@pytest.mark.parametrize(
    ("function", "apply"),
    [
        ("_turn", "staged"),
        ("_load_target", "staged"),
        ("hold", "in_place"),
        ("_join", "staged"),
        ("once", "staged"),
        ("_start", "staged"),
        ("_finish", "in_place"),
        ("_swap", "staged"),
        ("_swap", "in_place"),
        ("_settle", "staged"),
        ("_settle", "in_place"),
        ("reading", "staged"),
        ("_enter", "staged"),
        ("_leave", "staged"),
    ],
)
def test_the_next_update_succeeds(function: str, apply: ApplyChoice) -> None:
    sender = Sender()
    at = 0
    more = True
    while more:
        at += 1
        served = make(0)
        receiver = ws.WeightReceiver(ModuleSink(served), apply=apply, lease_s=WAIT_S)
        more = interrupted(function, at, sender, receiver)
        gc.collect()  # a generator that was interrupted ends with the error's traceback
        where = f"interrupted at point {at} of {function}"
        with ThreadPoolExecutor(1) as pool:  # the lock is free for other threads
            status = pool.submit(receiver.status).result(WAIT_S)
            assert not status.busy, where
            receiver.dispatch(AbortRequest(update_id=f"u{at}"))
            assert not receiver._session.gate.held, where
            again = pool.submit(update, sender, receiver, 9, f"next{at}")
            again.result(WAIT_S)
            version = pool.submit(read, receiver).result(WAIT_S)
        assert version == receiver.version, where
        assert values(served) == {9}, where
        receiver.close()
    assert at > 1
    sender.engine.close()


@pytest.mark.parametrize(
    ("function", "in_block"),
    [
        ("_call", False),
        ("_send_weights", False),
        ("_transfer", False),
        ("send_whole", False),
        ("_transfer", True),
        ("send", True),
    ],
)
def test_the_next_send_succeeds(function: str, in_block: bool) -> None:
    trained, served = make(0), make(0)
    receiver = ws.WeightReceiver(ModuleSink(served), lease_s=WAIT_S)
    with ws.connect(trained, to=receiver.handle, timeout_s=WAIT_S) as sender:
        sender.send_weights()
        interrupt = Interrupt(function, at=0)
        at = 0
        while at == 0 or interrupt.raised:
            at += 1
            interrupt = Interrupt(function, at)
            fill(trained, -at)
            with suppress(KeyboardInterrupt), interrupt.traced():
                if in_block:
                    with sender.update() as block:
                        block.send(trained.state_dict().items())
                else:
                    sender.send_weights()
            fill(trained, at)
            sender.send_weights()
            assert values(served) == {at}, f"interrupted at point {at} of {function}"
    receiver.close()
    assert at > 1
