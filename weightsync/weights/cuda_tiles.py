"""What a fused copy does, as a table on the device: made once for fixed memory, then replayed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from weightsync.weights.fingerprint import WORD

FIELDS = 8
"""source, target, bytes read, bytes stored, words mixed, place of the first word, sum, unused."""
TILE_WORDS = 8192
"""What one program does: 64 KiB, thousands of programs for a bucket."""
_WIDEST = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """`nbytes` bytes at address `source`, to be copied to `target` (0: only read).

    They are word `first` and following of what `sum` fingerprints, with zeros up to `words` words.
    """

    source: int
    target: int
    nbytes: int
    words: int
    first: int
    sum: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tables of tiles (`int64[tiles, FIELDS]`) by the alignment of their ends, in bytes."""

    tables: dict[int, torch.Tensor]
    sums: int


def tile(segments: Iterable[Segment], device: torch.device, *, sums: int, fills: bool) -> Tiles:
    """Cut segments into tiles; `fills` also writes the zeros that follow a segment."""
    rows: dict[int, list[tuple[int, ...]]] = {}
    for segment in segments:
        for alignment, row in _parts(segment, fills=fills):
            rows.setdefault(alignment, []).append(row)
    tables = {alignment: _cut(torch.tensor(rows[alignment])) for alignment in sorted(rows)}
    return Tiles({a: table.to(device) for a, table in tables.items()}, sums)


def _parts(segment: Segment, *, fills: bool) -> Iterable[tuple[int, tuple[int, ...]]]:
    """Split off a last word that is not whole: the others can be read as words."""
    tail = segment.nbytes % WORD
    body = segment.nbytes - tail
    ends = math.gcd(segment.source, segment.target, _WIDEST)
    if body:
        words = body // WORD if tail else segment.words
        yield ends, _row(segment, 0, body, words, fills=fills)
    if tail or not body:
        words = segment.words - body // WORD
        # Zeros are whole words from here on, so only the bytes that are read decide the width.
        yield math.gcd(ends, tail, WORD), _row(segment, body, tail, words, fills=fills)


def _row(segment: Segment, begin: int, nbytes: int, words: int, *, fills: bool) -> tuple[int, ...]:
    target = segment.target + begin if segment.target else 0
    stored = words * WORD if fills and target else nbytes
    first = segment.first + begin // WORD
    return segment.source + begin, target, nbytes, stored, words, first, segment.sum, 0


def _cut(rows: torch.Tensor) -> torch.Tensor:
    """Repeat each row for every TILE_WORDS of its words, and move what moves."""
    counts = -(-rows[:, 4] // TILE_WORDS)
    starts = counts.cumsum(0) - counts
    table = rows.repeat_interleave(counts, 0)
    words = (torch.arange(len(table)) - starts.repeat_interleave(counts)) * TILE_WORDS
    nbytes = words * WORD
    table[:, 0] += nbytes
    table[:, 1] += nbytes
    for field in (2, 3):
        table[:, field] = (table[:, field] - nbytes).clamp(0, TILE_WORDS * WORD)
    table[:, 4] = (table[:, 4] - words).clamp(0, TILE_WORDS)
    table[:, 5] += words
    return table


def segments_of(
    targets: Sequence[torch.Tensor] | None,
    sources: Sequence[torch.Tensor],
    gaps: Sequence[tuple[int, int]],
    index: int,
) -> list[Segment]:
    """Return the segments of one run: `uint8[nbytes]` ends, and gaps as in `copier.joined`.

    Every tensor begins a word of the run.
    """
    after = [0] * (len(sources) + 1)
    for i, nbytes in gaps:
        after[i] += nbytes
    at = after[0] // WORD
    segments = [Segment(0, 0, 0, at, 0, index)] if at else []
    for i, source in enumerate(sources):
        nbytes = source.numel()
        words = -(-(nbytes + after[i + 1]) // WORD)
        target = targets[i].data_ptr() if targets is not None else 0
        segments.append(Segment(source.data_ptr(), target, nbytes, words, at, index))
        at += words
    return segments
