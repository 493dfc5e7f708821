"""One rank of a step fails while the others wait for a receiver: all leave the step at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tests.crew import Crew, crew
from weightsync.errors import TransferError
from weightsync.ranks.comm import join_ranks
from weightsync.ranks.sources import CollectiveSource
from weightsync.weights.sources.base import StateDictSource, as_source

SIZE = 3
TIMEOUT_S = 30.0
"""How long a rank would wait for its receiver. The others' errors come long before."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(SIZE) as made:
        yield made


def wait_for_a_receiver(rank: int, failing: int, how: str) -> tuple[str, str, float, list[str]]:
    """Return the error of a step in which rank `failing` fails: its class, text and seconds."""
    comm = join_ranks(None, timeout_s=TIMEOUT_S)
    source = CollectiveSource(StateDictSource({"a": torch.zeros(4), "b": torch.ones(4)}), comm)

    def caller_left() -> None:
        if how == "its caller left" and rank == failing and time.monotonic() > began + 0.3:
            raise TransferError("the caller left")

    began = time.monotonic()
    kind, text = "", ""
    try:
        with source.step(caller_left):
            tensors = source.tensors()
            next(tensors)
            while time.monotonic() < began + TIMEOUT_S:
                source.check()
                if how == "its receiver died" and rank == failing:
                    raise TransferError("the receiver died")
                time.sleep(0.01)
    except Exception as exc:  # noqa: BLE001  # which one it is, is asked
        kind, text = type(exc).__name__, str(exc)
    seconds = time.monotonic() - began
    with source.step(lambda: None):  # the next step is not cancelled
        names = [name for name, _ in source.tensors()]
    comm.close()
    return kind, text, seconds, names


@pytest.mark.parametrize("failing", range(SIZE))
def test_ranks_that_wait_leave_with_the_error_of_one(ranks: Crew, failing: int) -> None:
    results = ranks.run(wait_for_a_receiver, failing, "its receiver died")
    for kind, text, seconds, names in results:
        assert kind == "TransferError"
        assert "the receiver died" in text
        assert f"rank {failing}" in text
        assert seconds < TIMEOUT_S / 2
        assert names == ["a", "b"]


@pytest.mark.parametrize("failing", range(SIZE))
def test_a_rank_whose_caller_left_takes_all_out_of_the_step(ranks: Crew, failing: int) -> None:
    results = ranks.run(wait_for_a_receiver, failing, "its caller left")
    for rank, (kind, text, seconds, names) in enumerate(results):
        assert kind == "TransferError"
        assert text == ("" if rank == failing else f"rank {failing}: ") + "the caller left"
        assert seconds < TIMEOUT_S / 2
        assert names == ["a", "b"]


class GathersItself:
    """A source of one layer that gathers each tensor while it is iterated, as vLLM's does."""

    def metadata(self) -> list[TensorDescription]:
        return [TensorDescription(f"layers.0.w{i}") for i in range(20)]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for described in self.metadata():
            whole = torch.ones(described.shape)
            dist.all_reduce(whole)
            yield described.name, whole


@dataclass
class TensorDescription:
    """What `metadata()` says of a tensor."""

    name: str
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (4,)


def leave_a_collective_iteration(rank: int, failing: int) -> tuple[str, float, int]:
    """Return the error of a step that `failing` leaves in the middle, its seconds, and a count."""
    comm = join_ranks(None, timeout_s=TIMEOUT_S)
    source = CollectiveSource(as_source(GathersItself()), comm)
    began = time.monotonic()
    text = ""
    try:
        with source.step(lambda: None):
            for i, _ in enumerate(source.tensors()):
                if rank == failing and i == 3:
                    raise TransferError("the receiver died")
                source.check()
    except TransferError as exc:
        text = str(exc)
    seconds = time.monotonic() - began
    with source.step(lambda: None):
        count = len(list(source.tensors()))
    comm.close()
    return text, seconds, count


@pytest.mark.parametrize("failing", range(SIZE))
def test_ranks_leave_an_iteration_that_is_a_collective(ranks: Crew, failing: int) -> None:
    for text, seconds, count in ranks.run(leave_a_collective_iteration, failing):
        assert text == f"rank {failing}: the receiver died"
        assert seconds < TIMEOUT_S / 2
        assert count == 20
