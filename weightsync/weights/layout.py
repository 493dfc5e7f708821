"""How a model is cut: its tensors in one stream, chunks for buckets, runs for copies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from weightsync.errors import ConfigError
from weightsync.specs import Manifest

ALIGNMENT = 64
RUN_NBYTES = 512 << 10
"""Host memory: source and destination of a run fit the second-level cache together (measured)."""


def aligned(nbytes: int) -> int:
    """Round up to the alignment of the stream."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Bytes `begin` to `begin + nbytes` of tensor `index`; they lie at `start` in the stream."""

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
    """Bytes `start` to `stop` of the stream; its runs are `first_run` to `last_run`, exclusive."""

    start: int
    stop: int
    first_run: int
    last_run: int


class StreamLayout:
    """The stream of a manifest, cut into chunks of at most `bucket_nbytes` and runs.

    `bucket_nbytes` None makes a single chunk. A tensor that fits a bucket is never cut across
    two. Linear in the number of tensors. Raises ConfigError for sizes that are no multiple of 64.
    """

    def __init__(
        self, manifest: Manifest, *, bucket_nbytes: int | None = None, run_nbytes: int = RUN_NBYTES
    ) -> None:
        for label, size in (("bucket_nbytes", bucket_nbytes), ("run_nbytes", run_nbytes)):
            if size is not None and (size <= 0 or size % ALIGNMENT):
                raise ConfigError(f"{label} must be a positive multiple of {ALIGNMENT}, not {size}")
        self.manifest = manifest
        self.bucket_nbytes = bucket_nbytes
        self.run_nbytes = run_nbytes
        self.offsets, self.nbytes = self._lay_out()
        self.runs: list[CopyUnit] = []
        self.chunks = [self._cut_runs(start, stop) for start, stop in self._cut_chunks()]

    def pieces(self, start: int, stop: int) -> Iterator[TensorSlice]:
        """Yield the parts of tensors that lie between two points of the stream."""
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
        """Yield (position, nbytes) of the zeros between two points of the stream."""
        at = start
        for piece in self.pieces(start, stop):
            if piece.start > at:
                yield at, piece.start - at
            at = piece.start + piece.nbytes
        if stop > at:
            yield at, stop - at

    def names(self, run: CopyUnit) -> list[str]:
        """Name the tensors that a run carries."""
        specs = self.manifest.specs
        return [specs[piece.index].name for piece in self.pieces(run.start, run.stop)]

    @cached_property
    def largest_cut_nbytes(self) -> int:
        """Bytes of the largest tensor that no bucket holds whole; 0 where there is none."""
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

    def _cut_runs(self, start: int, stop: int) -> Chunk:
        first = len(self.runs)
        open_at = start
        for piece in self.pieces(start, stop):
            end = piece.start + aligned(piece.nbytes)
            if end - open_at <= self.run_nbytes:
                continue
            if piece.start > open_at:
                self.runs.append(CopyUnit(open_at, piece.start))
                open_at = piece.start
            while end - open_at > self.run_nbytes:
                self.runs.append(CopyUnit(open_at, open_at + self.run_nbytes))
                open_at += self.run_nbytes
            if open_at > piece.start:
                self.runs.append(CopyUnit(open_at, end))
                open_at = end
        if stop > open_at:
            self.runs.append(CopyUnit(open_at, stop))
        return Chunk(start, stop, first, len(self.runs))


def runs_per_chunk(bucket_nbytes: int, run_nbytes: int) -> int:
    """The most runs that a chunk can have: the room its fingerprints need in the ring."""
    return 3 * -(-bucket_nbytes // run_nbytes) + 3
