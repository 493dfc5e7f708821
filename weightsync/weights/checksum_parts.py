"""mix64 of a tensor that several processes hold slices of, without one of them seeing all of it.

mix64 sums words that are mixed with their place, so the sum of a slice at its place in the full
tensor is a part of the whole sum. Words that a slice cuts are handed over as bytes, and mixed by
who adds the parts up (checksum_sums).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from weightsync.errors import ConfigError
from weightsync.weights.fingerprint import MASK, WORD, mixed_rows, to_hex
from weightsync.weights.shards import Block, Slice
from weightsync.wire.messages import TensorPart

MAX_PIECES = 1 << 16


def part_of(name: str, flat: torch.Tensor, held: Slice, itemsize: int) -> TensorPart:
    """Return the part of a full tensor's mix64 that its slice `flat` (uint8[nbytes]) makes.

    Raises ConfigError naming a tensor whose slices cut too many words.
    """
    nbytes = math.prod(held.shape) * itemsize
    pieces: dict[int, str] = {}
    total = words = 0
    for block in held.blocks(itemsize):
        for run in _phases(block):
            lead = min(-run.source % WORD, run.width)
            whole = (run.width - lead) // WORD
            begin = flat.storage_offset() + run.target
            rows = flat.as_strided((run.height, run.width), (run.target_stride, 1), begin)
            if whole:
                middle = rows[:, lead : lead + whole * WORD]
                total += mixed_rows(middle, (run.source + lead) // WORD, run.source_stride // WORD)
                words += whole * run.height
            _add_pieces(pieces, rows[:, :lead], run, 0)
            _add_pieces(pieces, rows[:, lead + whole * WORD :], run, lead + whole * WORD)
            if len(pieces) > MAX_PIECES:
                raise ConfigError(
                    f"{name}: its slices cut more than {MAX_PIECES} words of {WORD} bytes; name "
                    "other tensors, or compare with a model loaded from a checkpoint"
                )
    return TensorPart(
        shape=list(held.shape),
        spans=[list(spans) for spans in held.spans],
        nbytes=nbytes,
        total=to_hex(total & MASK),
        words=words,
        pieces=pieces,
    )


def _phases(block: Block) -> Iterator[Block]:
    """Cut a block into rows that lie alike within words: every so many bytes the same place."""
    period = min(WORD // math.gcd(block.source_stride, WORD), block.height)
    for first in range(period):
        yield Block(
            block.source + first * block.source_stride,
            block.target + first * block.target_stride,
            block.width,
            len(range(first, block.height, period)),
            block.source_stride * period,
            block.target_stride * period,
        )


def _add_pieces(pieces: dict[int, str], rows: torch.Tensor, run: Block, offset: int) -> None:
    height, width = rows.shape
    if not width or len(pieces) > MAX_PIECES:
        return
    data = bytes(rows.contiguous().cpu().numpy().tobytes())
    for row in range(height):
        at = run.source + offset + row * run.source_stride
        pieces[at] = data[row * width : (row + 1) * width].hex()
