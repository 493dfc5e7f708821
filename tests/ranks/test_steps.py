"""One rank of a step fails while the others wait for a receiver: all leave the step at once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from tests.crew import Crew, crew
from weightsync.errors import TransferError
from weightsync.ranks.comm import join_ranks
from weightsync.ranks.sources import CollectiveSource
from weightsync.weights.source import StateDictSource

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
