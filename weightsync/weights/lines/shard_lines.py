"""Lines of a stream in the memory of shards: each shard takes the bytes that it holds of a line."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from weightsync.errors import VerificationError
from weightsync.weights.copying.checksums import MASK
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.lines.memory import (
    LINE,
    WORDS,
    Indices,
    LineMemory,
    Marks,
    Words,
    count_lines,
    kernels,
    why_no_kernels,
)

T = TypeVar("T")
_READ_LINES = 1 << 14
"""Lines that are read together: a cache holds them."""


class ShardLines(LineMemory):
    """The lines of a stream, in memory that holds shards of its tensors on the host.

    A shard may hold a part of a line only, so the sum of what it held before is not known: `write`
    returns the sum of the lines that arrived, and compares the shards with them. Raises ValueError
    for memory on a GPU.
    """

    proves_base = False

    def __init__(self, layout: StreamLayout, memory: Memory) -> None:
        if memory.shares is None or not memory.on_host():
            raise ValueError("lines go to shards in host memory")
        self.lines = count_lines(layout)
        self._memory = memory
        by_tensor: dict[int, list[list[int]]] = {}
        for tensor, share in zip(memory.tensors, memory.shares, strict=True):
            begin = layout.offsets[share.index]
            by_tensor.setdefault(share.index, []).extend(
                [
                    begin + block.source,
                    tensor.data_ptr() + block.target,
                    block.width,
                    block.height,
                    block.source_stride,
                    block.target_stride,
                ]
                for block in share.blocks
            )
        self._blocks = [
            (
                layout.offsets[i] // LINE,
                -(-(layout.offsets[i] + layout.manifest.specs[i].nbytes) // LINE),
                np.array(blocks, np.uint64).reshape(-1, 6),
            )
            for i, blocks in sorted(by_tensor.items())
        ]
        self._starts = [first for first, _, _ in self._blocks]

    def write(self, indices: Indices, lines: Words) -> int:
        """Write what the shards hold of these lines; return the sum of the lines.

        Raises VerificationError where a shard does not hold what arrived.
        """
        compiled = kernels()
        for begin, end, blocks in parts_of(indices, self._starts, self._blocks):
            here, content = indices[begin:end], lines[begin * 8 : end * 8]
            compiled.scatter(blocks, here, content, True)
            if not compiled.scatter(blocks, here, content, False):
                raise VerificationError("a shard does not hold the lines that it was given")
        return int(compiled.sum_of_lines(indices, lines)) & MASK

    def read(self, indices: Indices) -> Words:
        raise ValueError("shards hold parts of lines only")

    def sum_of(self, first: int, count: int) -> int:
        raise ValueError("shards hold parts of lines only")

    def copy_from(self, other: LineMemory, marks: Marks | None) -> None:
        """Copy all shards."""
        for mine, theirs in zip(self._memory.tensors, other.memory.tensors, strict=True):
            mine.copy_(theirs)


class BoxLines(ShardLines):
    """The lines of a stream in memory that has each tensor of it in pieces, all of them.

    So what a line held before is known.
    """

    proves_base = True

    def write(self, indices: Indices, lines: Words) -> int:
        """Overwrite lines; return the sum of the new ones, read back, less that of the old ones."""
        compiled = kernels()
        before = int(compiled.sum_of_lines(indices, self.read(indices)))
        for begin, end, blocks in parts_of(indices, self._starts, self._blocks):
            compiled.scatter(blocks, indices[begin:end], lines[begin * 8 : end * 8], True)
        return int(compiled.sum_of_lines(indices, self.read(indices))) - before & MASK

    def read(self, indices: Indices) -> Words:
        lines = np.zeros(len(indices) * WORDS, np.uint64)
        for begin, end, blocks in parts_of(indices, self._starts, self._blocks):
            here = slice(begin * WORDS, end * WORDS)
            kernels().collect(blocks, indices[begin:end], lines[here])
        return lines

    def sum_of(self, first: int, count: int) -> int:
        total, stop = 0, first + count
        for at in range(first, stop, _READ_LINES):
            indices = np.arange(at, min(at + _READ_LINES, stop), dtype=np.uint32)
            total += int(kernels().sum_of_lines(indices, self.read(indices)))
        return total & MASK


def parts_of(
    indices: Indices, starts: Sequence[int], tensors: Sequence[tuple[int, int, T]]
) -> Iterator[tuple[int, int, T]]:
    """Yield the begin and end of the `indices`, which grow, of lines of each tensor, and its data.

    `tensors` has the first line of each, the line after its last one, and the data; `starts` has
    the first lines alone. Lines of no tensor are left out.
    """
    at = 0
    while at < len(indices):
        place = bisect_right(starts, int(indices[at])) - 1
        if place >= 0 and indices[at] < tensors[place][1]:
            end = at + int(np.searchsorted(indices[at:], tensors[place][1]))
            yield at, end, tensors[place][2]
            at = end
        elif place + 1 < len(starts):
            at += int(np.searchsorted(indices[at:], starts[place + 1]))
        else:
            return


def lines_of(layout: StreamLayout, memory: Memory) -> LineMemory | None:
    """Return the lines of a memory; None where it has none that a delta can be written to."""
    if why_no_kernels():
        return None
    try:
        if memory.shares is not None:
            return ShardLines(layout, memory)
        return LineMemory(layout, memory)
    except ValueError:
        return None


def takes_lines(memory: Memory) -> bool:
    """Whether deltas can be written to a memory of this kind, if there are compiled loops."""
    return memory.shares is None or memory.on_host()
