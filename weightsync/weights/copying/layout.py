"""The layout of a model's bytes: tensors in one stream, cut into chunks and copy units.

Both sides derive it from the manifest. A chunk fits one bucket; a copy unit is copied and
fingerprinted at once. Every tensor begins at a multiple of `ALIGNMENT`, with zeros in the gaps.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from weightsync.errors import ConfigError
from weightsync.specs import Manifest

ALIGNMENT = 64
"""Bytes: every tensor and every copy unit of the stream begins at a multiple of it."""
UNIT_NBYTES = 512 << 10
"""Size of a copy unit in host memory: source and destination fit the L2 cache (measured)."""


def aligned(nbytes: int) -> int:
    """Round a number of bytes up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def layer_of(name: str) -> str:
    """Return a tensor's name up to its first part that is a number, else its module's name."""
    parts = name.split(".")
    end = next((i + 1 for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[:end])


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Bytes `begin` to `begin + nbytes` of tensor `index`, at byte `start` of the stream."""

    index: int
    begin: int
    nbytes: int
    start: int


@dataclass(frozen=True, slots=True)
class CopyUnit:
    """Bytes `start` to `stop` of the stream, copied and fingerprinted together."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes `start` to `stop` of the stream: units `first_unit` up to before `last_unit`."""

    start: int
    stop: int
    first_unit: int
    last_unit: int


class StreamLayout:
    """The stream of a manifest, cut into `chunks` of at most `bucket_nbytes`, and into `units`.

    `bucket_nbytes` None makes a single chunk. A tensor that fits into one bucket is never split
    over two. `offsets[i]` is the first byte of tensor i in the stream of `nbytes` bytes. Takes time
    linear in the number of tensors. Raises ConfigError for sizes that are not positive multiples
    of `ALIGNMENT`.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        bucket_nbytes: int | None = None,
        unit_nbytes: int = UNIT_NBYTES,
    ) -> None:
        for label, size in (("bucket_nbytes", bucket_nbytes), ("unit_nbytes", unit_nbytes)):
            if size is not None and (size <= 0 or size % ALIGNMENT):
                raise ConfigError(f"{label} must be a positive multiple of {ALIGNMENT}, not {size}")
        self.manifest = manifest
        self.bucket_nbytes = bucket_nbytes
        self.unit_nbytes = unit_nbytes
        self.offsets, self.nbytes = self._lay_out()

    @cached_property
    def units(self) -> list[CopyUnit]:
        """The copy units of the whole stream; cut when first used: that takes time by the byte."""
        return self._cut[0]

    @cached_property
    def chunks(self) -> list[Chunk]:
        """The chunks of the whole stream, and which units each has; cut when first used."""
        return self._cut[1]

    @cached_property
    def _cut(self) -> tuple[list[CopyUnit], list[Chunk]]:
        units: list[CopyUnit] = []
        return units, [self._cut_units(start, stop, units) for start, stop in self._cut_chunks()]

    def in_chunks(self, nbytes: int) -> StreamLayout:
        """Return the same stream and units, in chunks of at most `nbytes`, or of one unit.

        Tensors may be split over two chunks.
        """
        made = copy.copy(self)
        chunks: list[Chunk] = []
        first = 0
        for i, unit in enumerate(self.units):
            if i > first and unit.stop - self.units[first].start > nbytes:
                chunks.append(Chunk(self.units[first].start, unit.start, first, i))
                first = i
        if self.units:
            chunks.append(
                Chunk(self.units[first].start, self.units[-1].stop, first, len(self.units))
            )
        made.chunks = chunks
        return made

    def slices(self, start: int, stop: int) -> Iterator[TensorSlice]:
        """Yield the parts of tensors between bytes `start` and `stop` of the stream, in order."""
        index = max(0, bisect_right(self._starts, start) - 1)
        for i in self._filled[index:]:
            offset = self.offsets[i]
            if offset >= stop:
                return
            begin = max(start - offset, 0)
            end = min(stop - offset, self.manifest.specs[i].nbytes)
            if end > begin:
                yield TensorSlice(i, begin, end - begin, offset + begin)

    def gaps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield `(position, nbytes)` of the zeros between bytes `start` and `stop`."""
        at = start
        for part in self.slices(start, stop):
            if part.start > at:
                yield at, part.start - at
            at = part.start + part.nbytes
        if stop > at:
            yield at, stop - at

    def names(self, unit: CopyUnit) -> list[str]:
        """Return the names of the tensors of which a copy unit has bytes."""
        specs = self.manifest.specs
        return [specs[part.index].name for part in self.slices(unit.start, unit.stop)]

    @cached_property
    def largest_cut_nbytes(self) -> int:
        """Bytes of the largest tensor that does not fit into one bucket; 0 where all fit."""
        if self.bucket_nbytes is None:
            return 0
        sizes = [spec.nbytes for spec in self.manifest.specs]
        return max((size for size in sizes if aligned(size) > self.bucket_nbytes), default=0)

    @cached_property
    def _filled(self) -> list[int]:
        return [i for i, spec in enumerate(self.manifest.specs) if spec.nbytes]

    @cached_property
    def _starts(self) -> list[int]:
        return [self.offsets[i] for i in self._filled]

    def _lay_out(self) -> tuple[list[int], int]:
        offsets, at = [], 0
        for spec in self.manifest.specs:
            offsets.append(at)
            at += aligned(spec.nbytes)
        return offsets, at

    def _cut_chunks(self) -> Iterator[tuple[int, int]]:
        if self.bucket_nbytes is None:
            if self.nbytes:
                yield 0, self.nbytes
            return
        start = 0
        for i in self._filled:
            offset, size = self.offsets[i], aligned(self.manifest.specs[i].nbytes)
            if offset + size - start <= self.bucket_nbytes:
                continue
            if size <= self.bucket_nbytes:
                yield start, offset
                start = offset
                continue
            while offset + size - start > self.bucket_nbytes:
                yield start, start + self.bucket_nbytes
                start += self.bucket_nbytes
        if self.nbytes > start:
            yield start, self.nbytes

    def _cut_units(self, start: int, stop: int, units: list[CopyUnit]) -> Chunk:
        first = len(units)
        open_at = start
        for part in self.slices(start, stop):
            end = part.start + aligned(part.nbytes)
            if end - open_at <= self.unit_nbytes:
                continue
            if part.start > open_at:
                units.append(CopyUnit(open_at, part.start))
                open_at = part.start
            while end - open_at > self.unit_nbytes:
                units.append(CopyUnit(open_at, open_at + self.unit_nbytes))
                open_at += self.unit_nbytes
            if open_at > part.start:
                units.append(CopyUnit(open_at, end))
                open_at = end
        if stop > open_at:
            units.append(CopyUnit(open_at, stop))
        return Chunk(start, stop, first, len(units))


def units_per_chunk(bucket_nbytes: int, unit_nbytes: int) -> int:
    """Return the most copy units that a chunk can have: the ring holds a fingerprint for each."""
    return 3 * -(-bucket_nbytes // unit_nbytes) + 3
