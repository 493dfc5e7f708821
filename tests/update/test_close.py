"""`WeightReceiver.close()` while a step runs: inside of its hook, and beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.update.test_leases import until
from weightsync.update import session
from weightsync.update.lifecycle import ApplyChoice

pytestmark = pytest.mark.usefixtures("shm_clean")

LEASE_S = 60.0
WAIT_S = 50.0
"""Less than one lease, which `close` must not wait for."""


class Hook:
    """Does `act` once in a call, then loads."""

    def __init__(self) -> None:
        self.act: Callable[[], object] | None = None

    def __call__(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        act, self.act = self.act, None
        if act is not None:
            act()


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_inside_a_hook_it_waits_for_nothing(apply: ApplyChoice) -> None:
    hook = Hook()
    receiver = ws.WeightReceiver(hook, apply=apply, lease_s=LEASE_S)
    with ws.connect(nn.Linear(4, 4), to=receiver.handle) as sender:
        sender.send_weights()
        took: list[float] = []

        def close() -> None:
            began = time.monotonic()
            receiver.close()
            took.append(time.monotonic() - began)

        hook.act = close
        if apply == "in_place":
            with pytest.raises(ws.WeightSyncError, match="closed"):
                sender.send_weights()
        else:
            sender.send_weights()  # it was being committed
        assert took[0] < WAIT_S
        assert not receiver.shared_memory_usage(), "the engines stay open"
        assert not receiver.status().senders
        with pytest.raises(ws.ProtocolError, match="closed"):
            sender.send_weights()


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_beside_a_hook_that_works_on_its_end_closes_the_memory(
    apply: ApplyChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_CLOSE_S", 0.2)
    hook, entered, go_on = Hook(), threading.Event(), threading.Event()
    receiver = ws.WeightReceiver(hook, apply=apply, lease_s=LEASE_S)

    def work() -> None:
        entered.set()
        assert go_on.wait(WAIT_S)

    with (
        ThreadPoolExecutor(1) as pool,
        ws.connect(nn.Linear(4, 4), to=receiver.handle) as sender,
    ):
        sender.send_weights()
        hook.act = work
        sending = pool.submit(sender.send_weights)
        assert entered.wait(WAIT_S)
        began = time.monotonic()
        receiver.close()
        assert time.monotonic() - began < WAIT_S
        assert receiver.shared_memory_usage(), "memory that is read was unmapped"
        go_on.set()
        error = sending.exception(WAIT_S)
        assert error is None or isinstance(error, ws.WeightSyncError)
        until(lambda: not receiver.shared_memory_usage())
        assert not receiver.status().senders


def test_a_hook_that_calls_its_own_receiver_is_refused_at_once() -> None:
    hook = Hook()
    receiver = ws.WeightReceiver(hook, apply="in_place", lease_s=LEASE_S)
    raised: list[type[Exception]] = []

    def call() -> None:
        began = time.monotonic()
        for own in (
            lambda: receiver.handle({"call": "shutdown_weight_transfer_engine", "body": {}}),
            lambda: receiver.reading().__enter__(),
        ):
            with pytest.raises(ws.WeightSyncError) as error:
                own()
            raised.append(error.type)
            del error  # its frames hold views of the weights
        assert time.monotonic() - began < WAIT_S

    with ws.connect(nn.Linear(4, 4), to=receiver.handle) as sender:
        sender.send_weights()
        hook.act = call
        sender.send_weights()
    assert raised == [ws.UpdateConflictError, ws.NotReadyError]
    receiver.close()
