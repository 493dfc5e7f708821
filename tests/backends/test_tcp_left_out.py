"""Chunks that a host does not want: what a receiver is promised, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from weightsync.backends.tcp.receiver import check_complete, chunks_without
from weightsync.errors import ProtocolError
from weightsync.specs import Manifest, TensorSpec
from weightsync.weights.copying.copy_plan import Memory, Share
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.copying.shards import Block
from weightsync.weights.sinks.base import PartTarget

NBYTES = 4096
NAMES = ("a", "b", "c")
LAYOUT = StreamLayout(
    Manifest(tuple(TensorSpec(name, "uint8", (NBYTES,)) for name in NAMES)),
    bucket_nbytes=NBYTES,
    unit_nbytes=NBYTES,
)
"""A chunk for each tensor."""


class _Target(PartTarget):
    """A load target of some tensors; of all where there are no shares."""

    def __init__(self, *held: int) -> None:
        flat = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in held or NAMES]
        shares = [Share(index, (Block(0, 0, NBYTES, 1, NBYTES, NBYTES),)) for index in held]
        self.memory = Memory(flat, shares=shares) if held else Memory(flat)


def test_the_chunks_that_do_not_come() -> None:
    assert chunks_without([(0, 1), (2, 3)], 3) == {1}
    assert chunks_without([], 3) == {0, 1, 2}


@pytest.mark.parametrize("chunks", [[(0, 4)], [(2, 3), (0, 1)], [(2, 1)]])
def test_a_list_that_is_damaged(chunks: list[tuple[int, int]]) -> None:
    with pytest.raises(ProtocolError, match="lists chunks"):
        chunks_without(chunks, 3)


def test_what_a_receiver_holds_has_to_come() -> None:
    """Without verification nothing else would notice that old bytes of a bucket were copied."""
    check_complete(LAYOUT, _Target(0, 2), [(0, 1), (2, 3)])
    check_complete(LAYOUT, _Target(), [(0, 3)])
    with pytest.raises(ProtocolError, match="leaves out bytes of b, which this receiver loads"):
        check_complete(LAYOUT, _Target(1, 2), [(0, 1), (2, 3)])
    with pytest.raises(ProtocolError, match="leaves out bytes of c"):
        check_complete(LAYOUT, _Target(), [(0, 2)])


def test_a_hook_needs_all() -> None:
    with pytest.raises(ProtocolError, match="leaves out bytes of a"):
        check_complete(LAYOUT, PartTarget(), [(1, 3)])
