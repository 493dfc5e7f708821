"""Ranks that wait for another one: what they raise when it failed, or does not come."""

from __future__ import annotations

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
