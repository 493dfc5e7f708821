"""Updates that find a decode step which does not end: how long they wait, and what they say."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws

FAR_S = 60.0
"""Longer than any test here may wait; the lease of a receiver, and the timeout of a sender."""
TIMEOUT_S = 1.0

Apply = Any  # one of the literals


def make(value: float) -> nn.Linear:
    model = nn.Linear(6, 5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def value_of(model: nn.Module) -> set[float]:
    return {v for p in model.parameters() for v in p.detach().flatten().tolist()}


@contextmanager
def step(receiver: ws.WeightReceiver) -> Iterator[threading.Event]:
    """A decode step of another thread, which lasts as long as the block or until the event."""
    entered, leave = threading.Event(), threading.Event()

    def decode() -> None:
        with receiver.reading():
            entered.set()
            leave.wait(FAR_S)

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        assert entered.wait(FAR_S)
        yield leave
    finally:
        leave.set()
        thread.join()


@contextmanager
def soon() -> Iterator[None]:
    """Fail where the block waits for a lease or for the timeout of a sender that has time."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < FAR_S / 2


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_step_is_waited_for_as_long_as_the_sender_has_time(apply: Apply) -> None:
    server = make(0.0)
    with closing(ws.WeightReceiver(server, apply=apply, lease_s=FAR_S)) as receiver:
        with ws.connect(make(1.0), to=receiver, timeout_s=TIMEOUT_S) as sender:
            with (
                step(receiver),
                soon(),
                pytest.raises(ws.TransferTimeout, match="1 decode step did not end within 1 s"),
            ):
                sender.send_weights()
            assert (receiver.status().state, receiver.version) == ("READY", 0)
            assert value_of(server) == {0.0}
            sender.send_weights()
        assert value_of(server) == {1.0}


def test_a_receiver_that_has_less_time_than_the_sender_waits_for_that() -> None:
    with (
        closing(ws.WeightReceiver(make(0.0), lease_s=TIMEOUT_S)) as receiver,
        ws.connect(make(1.0), to=receiver, timeout_s=FAR_S) as sender,
        step(receiver),
        soon(),
        pytest.raises(ws.TransferTimeout, match="within 1 s"),
    ):
        sender.send_weights()


def test_a_connection_that_would_move_the_model_waits_no_longer_either() -> None:
    with closing(ws.WeightReceiver(make(0.0), apply="staged", lease_s=FAR_S)) as receiver:
        with step(receiver), soon(), pytest.raises(ws.TransferTimeout, match="1 decode step"):
            ws.connect(make(1.0), to=receiver, timeout_s=TIMEOUT_S)
        with ws.connect(make(1.0), to=receiver) as sender:
            sender.send_weights()


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_an_update_inside_a_step_of_its_own_thread_is_refused_at_once(apply: Apply) -> None:
    server = make(0.0)
    with closing(ws.WeightReceiver(server, apply=apply, lease_s=FAR_S)) as receiver:
        with ws.connect(make(1.0), to=receiver, timeout_s=FAR_S) as sender:
            calls: list[Callable[[], object]] = [
                sender.send_weights,
                lambda: ws.send_weights(make(2.0), to=receiver.handle, takeover=True),
            ]
            for call in calls:
                with soon(), receiver.reading():
                    with pytest.raises(ws.TransferError, match=r"inside a reading\(\) block"):
                        call()
                    assert receiver.status().state == "READY"
            ws.close()
        with ws.connect(make(3.0), to=receiver) as sender:
            sender.send_weights()
        assert value_of(server) == {3.0}


def test_messages_inside_a_step_of_their_thread_are_refused_at_once() -> None:
    """A server that hands a message to the receiver between the two ends of a step."""
    with closing(ws.WeightReceiver(make(0.0), apply="in_place", lease_s=FAR_S)) as receiver:

        def carry(message: dict[str, object]) -> object:
            if message["call"] != "update_weights":
                return receiver.handle(message)
            with receiver.reading():
                return receiver.handle(message)

        with (
            ws.connect(make(1.0), to=carry, timeout_s=FAR_S) as sender,
            soon(),
            pytest.raises(ws.TransferError, match=r"inside a reading\(\) block"),
        ):
            sender.send_weights()
        assert receiver.status().state == "READY"


def test_a_task_that_awaits_a_send_inside_its_own_step_is_told_at_once() -> None:
    async def run() -> None:
        with receiver.reading():
            await sender.asend_weights()

    with (
        closing(ws.WeightReceiver(make(0.0), lease_s=FAR_S)) as receiver,
        ws.connect(make(1.0), to=receiver, timeout_s=FAR_S) as sender,
    ):
        with soon(), pytest.raises(ws.TransferError, match=r"inside a reading\(\) block"):
            asyncio.run(run())
        assert sender.send_weights().version == 1


def test_a_send_that_the_step_does_not_wait_for_waits_for_the_step() -> None:
    server = make(0.0)

    async def run() -> None:
        with receiver.reading():
            sending = asyncio.create_task(sender.asend_weights())
            await asyncio.sleep(0.2)
            assert not sending.done()
        await sending

    with (
        closing(ws.WeightReceiver(server, lease_s=FAR_S)) as receiver,
        ws.connect(make(1.0), to=receiver, timeout_s=FAR_S) as sender,
    ):
        asyncio.run(run())
        assert value_of(server) == {1.0}
        with receiver.reading():
            sending = sender.send_async()
            time.sleep(0.2)
            assert not sending.done()
        assert sending.result(FAR_S).version == 2


def test_a_hook_that_sends_on_inside_a_step_is_told_at_once() -> None:
    """A receiver whose hook is itself a sender: the first thread waits for both."""
    with closing(ws.WeightReceiver(make(0.0), lease_s=FAR_S)) as last:

        def send_on(pairs: Any) -> None:
            ws.send_weights({name: t.clone() for name, t in pairs}, to=last.handle)

        with (
            closing(ws.WeightReceiver(send_on, lease_s=FAR_S)) as first,
            ws.connect(make(1.0), to=first, timeout_s=FAR_S) as sender,
        ):
            with soon(), last.reading(), pytest.raises(ws.WeightSyncError, match="inside a read"):
                sender.send_weights()
            ws.close()
