"""A receiver is used by several threads at once, while other code changes its module."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle

import pytest
import torch
from torch import nn

import weightsync as ws
from weightsync.weights.sinks.module_sink import ModuleSink
from weightsync.wire.messages import CheckReply, CheckRequest

pytestmark = pytest.mark.usefixtures("shm_clean")

LAYERS = 100
ROUNDS = 8
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS)))


def replace_one(module: nn.Sequential, number: int) -> None:
    linear = module[number % LAYERS]
    assert isinstance(linear, nn.Linear)
    linear.weight = nn.Parameter(torch.full((4, 4), float(number)))


def at_once(calls: list[Callable[[], object]]) -> list[object]:
    """Run all calls at once, each in a thread; return their results, raise the first error."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> object:
        start.wait(WAIT_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [begun.result(WAIT_S) for begun in [pool.submit(run, call) for call in calls]]


def checksums(receiver: ws.WeightReceiver) -> dict[str, str]:
    reply = receiver.dispatch(CheckRequest())
    assert isinstance(reply, CheckReply)
    return reply.checksums


def test_checks_at_once_after_a_parameter_was_replaced() -> None:
    served, trained = model(), model()
    receiver = ws.WeightReceiver(served)
    with ws.connect(trained, to=receiver.handle) as sender:
        for number in range(ROUNDS):
            sender.send_weights()
            replace_one(served, number)
            first, *others = at_once([partial(checksums, receiver)] * 4)
            assert all(other == first for other in others)
            with torch.no_grad():
                trained[number].get_parameter("weight").add_(1)
        sender.send_weights()
        assert checksums(receiver) == ModuleSink(trained).checksums()
    receiver.close()


def test_checks_while_updates_arrive_and_parameters_are_replaced() -> None:
    served, trained = model(), model()
    receiver = ws.WeightReceiver(served)
    over = threading.Event()
    numbers = cycle(range(LAYERS))

    def until_over(call: Callable[[], object]) -> int:
        count = 0
        while not over.is_set():
            call()
            count += 1
        return count

    def updates() -> None:
        try:
            with ws.connect(trained, to=receiver.handle) as sender:
                for _ in range(ROUNDS):
                    with receiver.reading():
                        replace_one(served, next(numbers))
                    sender.send_weights()
        finally:
            over.set()

    checks = [partial(until_over, partial(checksums, receiver))] * 2
    looks = [partial(until_over, receiver.status), partial(until_over, receiver.report)]
    _, *counts = at_once([updates, *checks, *looks])
    assert all(counts)
    assert receiver.version == ROUNDS
    assert checksums(receiver) == ModuleSink(trained).checksums()
    receiver.close()
