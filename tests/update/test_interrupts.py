"""An interrupt (Ctrl-C) at any point of a step or a send leaves nothing locked, held or in flight.

CPython looks for signals after a call and at a jump back. Each test raises KeyboardInterrupt at all
such points of one function, one after the other, and makes a whole update after each.
"""

from __future__ import annotations

import dis
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from types import CodeType, FrameType
from typing import Any

import pytest

import weightsync as ws
from tests.update.test_races import Sender, fill, make
from tests.update.uniform import values
from weightsync.update.lifecycle import ApplyChoice
from weightsync.weights.sinks.module_sink import ModuleSink
from weightsync.wire.messages import AbortRequest, FinishRequest

pytestmark = pytest.mark.usefixtures("shm_clean")

WAIT_S = 30.0
_LOOKS_FOR_SIGNALS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"}


class Interrupt:
    """Raises KeyboardInterrupt at the point number `at` of the functions with this name."""

    def __init__(self, function: str, at: int) -> None:
        self.raised = False
        self._function, self._left = function, at
        self._names: dict[CodeType, dict[int, str]] = {}

    def __call__(self, frame: FrameType, _: str, __: Any) -> Any:
        code = frame.f_code
        if code.co_name != self._function or "/weightsync/" not in code.co_filename:
            return None
        if code not in self._names:
            self._names[code] = {i.offset: i.opname for i in dis.get_instructions(code)}
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        before = ""

        def follow(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal before
            if event == "opcode":
                if before in _LOOKS_FOR_SIGNALS:
                    self._left -= 1
                    if not self._left:
                        self.raised = True
                        raise KeyboardInterrupt
                before = self._names[code].get(frame.f_lasti, "")
            return follow

        return follow


def update(sender: Sender, receiver: ws.WeightReceiver, value: float, update_id: str) -> None:
    sender.init(receiver)
    receiver.dispatch(sender.update(value, update_id))
    receiver.dispatch(FinishRequest(update_id=update_id))


def read(receiver: ws.WeightReceiver) -> int:
    with receiver.reading(timeout_s=1.0) as version:
        return version


def interrupted(function: str, at: int, sender: Sender, receiver: ws.WeightReceiver) -> bool:
    interrupt = Interrupt(function, at)
    traced = sys.gettrace()
    sys.settrace(interrupt)
    try:
        update(sender, receiver, 1, f"u{at}")
        read(receiver)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(traced)
    return interrupt.raised


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
            traced = sys.gettrace()
            sys.settrace(interrupt)
            try:
                if in_block:
                    with sender.update() as block:
                        block.send(trained.state_dict().items())
                else:
                    sender.send_weights()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(traced)
            fill(trained, at)
            sender.send_weights()
            assert values(served) == {at}, f"interrupted at point {at} of {function}"
    receiver.close()
    assert at > 1
