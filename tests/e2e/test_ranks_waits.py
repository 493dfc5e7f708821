"""Ranks that wait for another one: what they raise when it failed, or does not come."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weightsync as ws
from tests.crew import Crew, crew

SIZE = 3
GATHER_TIMEOUT_S = 3.0
"""The timeout of the process group in which the sources gather."""
Seen = tuple[str, str, str, float]
"""An error: its class, its text and the class of its cause; and the seconds until it came."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(SIZE) as made:
        yield made


def seen(act: Callable[[], Any]) -> Seen:
    began = time.monotonic()
    try:
        act()
    except Exception as exc:  # noqa: BLE001  # which one it is, is asked
        cause = type(exc.__cause__).__name__
        return type(exc).__name__, str(exc), cause, time.monotonic() - began
    return "", "", "", time.monotonic() - began


class Gathering:
    """A callable that gathers each tensor by itself, and raises on some ranks."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.error: Exception | None = None

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(6):
            if i == 3 and self.error is not None:
                raise self.error
            whole = torch.ones(4)
            dist.all_reduce(whole, group=self.group)
            yield f"layers.{i // 2}.w{i}", whole


class Model(nn.Module):
    """What the source's tensors fit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(3))
        for i in range(6):
            self.layers[i // 2].register_parameter(f"w{i}", nn.Parameter(torch.zeros(4)))


def gather_in_vain(rank: int, errors: dict[int, Exception], early: bool) -> tuple[Seen, Seen]:
    """Return how a call ends in which the source raises on some ranks, and one with a new group."""

    def gathering() -> Gathering:
        return Gathering(dist.new_group(timeout=timedelta(seconds=GATHER_TIMEOUT_S)))

    source = gathering()
    receiver = ws.WeightReceiver(Model())
    if early:
        source.error = errors.get(rank)
        first = seen(lambda: ws.connect(source, to=receiver.handle, timeout_s=20.0))
        source = gathering()
    with ws.connect(source, to=receiver.handle, timeout_s=20.0) as sender:
        if not early:
            source.error = errors.get(rank)
            first = seen(sender.send_weights)
            source.error = None
            source.group = gathering().group
        return first, seen(sender.send_weights)


@pytest.mark.parametrize("early", [True, False], ids=["connect", "update"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_source_that_gathers_and_raises_on_one_rank(
    ranks: Crew, failing: int, early: bool
) -> None:
    """Its error is raised on all, though the others' collective ends later, by a timeout."""
    results = ranks.run(gather_in_vain, {failing: RuntimeError("my bug")}, early)
    others = [rank for rank in range(SIZE) if rank != failing]
    waited = f"ranks {others[0]} and {others[1]} then waited in a collective of the source"
    for rank, ((kind, text, cause, took_s), again) in enumerate(results):
        assert (kind, text) == ("RemoteError", f"rank {failing}: RuntimeError: my bug ({waited})")
        assert cause == "RuntimeError"
        assert took_s < 4 * GATHER_TIMEOUT_S
        assert again[:2] == ("", "")
        assert rank < SIZE


def test_of_two_ranks_that_raise_and_one_that_waits(ranks: Crew) -> None:
    errors: dict[int, Exception] = {1: KeyError("one"), 2: ValueError("two")}
    for (kind, text, _, _), again in ranks.run(gather_in_vain, errors, False):
        assert kind == "RemoteError"
        assert text == (
            "rank 1: KeyError: 'one' (rank 2 too; rank 0 then waited in a collective of the source)"
        )
        assert again[:2] == ("", "")


TIMEOUT_S = 6.0
"""`timeout_s` where ranks are stopped or slow; a wait for a slow one may take 246 s."""


class Standing:
    """A callable of plain tensors, whose rank stands still at one of them."""

    def __init__(self) -> None:
        self.halt: Callable[[], None] = lambda: None

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(6):
            if i == 3:
                self.halt()
            yield f"layers.{i // 2}.w{i}", torch.ones(4)


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_long() -> None:
    time.sleep(2.5 * TIMEOUT_S)


def hold_the_interpreter() -> None:
    """As an extension module does that does not release the interpreter's lock."""
    ctypes.PyDLL(None).usleep(int(TIMEOUT_S / 3 * 1e6))


def stand_still(rank: int, at: int, when: str, how: Callable[[], None]) -> tuple[Seen, str, float]:
    """Return how an update ends in which rank `at` stands still, and how `close` does."""
    source = Standing()
    receiver = ws.WeightReceiver(Model())
    sender = ws.connect(source, to=receiver.handle, timeout_s=TIMEOUT_S)
    sender.send_weights()
    if rank == at and when == "before":
        how()
    elif rank == at:
        source.halt = how
    found = seen(sender.send_weights)
    closed = seen(sender.close)
    return found, closed[1], closed[3]


@pytest.mark.parametrize(("stopped", "when"), [(1, "within"), (0, "within"), (2, "before")])
def test_a_rank_that_is_stopped_is_noticed(stopped: int, when: str) -> None:
    """It is named on the others, which can close; it notices when it goes on."""
    with crew(SIZE) as made:
        made.start(stand_still, stopped, when, stop_itself)
        others = [rank for rank in range(SIZE) if rank != stopped]
        for (kind, text, _, _), closed, took_s in made.results(others):
            assert kind == "TransferTimeout", text
            wanted = f"rank {stopped} of 3 did not answer the trainer's other ranks within 6 s"
            assert text.startswith(wanted)
            assert closed == ""
            assert took_s < 5 * TIMEOUT_S
        made.wake(stopped)
        ((kind, text, _, _), closed, _) = made.results([stopped])[0]
        assert kind in {"TransferTimeout", "TransferError"}
        assert "did not answer the trainer's other ranks" in text
        assert closed == ""


@pytest.mark.parametrize("how", [sleep_long, hold_the_interpreter])
def test_a_rank_that_is_slow_is_waited_for(ranks: Crew, how: Callable[[], None]) -> None:
    for slow in (0, 1):
        for found, closed, _ in ranks.run(stand_still, slow, "within", how):
            assert found[:2] == ("", "")
            assert closed == ""
