"""Copy units of one GPU, copied and fingerprinted by one launch of the fused kernel.

Tables of tiles are built once for fixed memory and launched again for every update. The kernel
is used on a GPU once it has agreed with torch there; else torch copies.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any, ClassVar, cast

import torch

from weightsync.cuda.staging import CopyWork, CudaCopyStream
from weightsync.cuda.tiles import TILE_WORDS, Kernel, Tiles
from weightsync.cuda.wait import wait_for
from weightsync.tensors import as_bytes, as_integers
from weightsync.weights.copying.checksums import MASK, WORD, settled
from weightsync.weights.copying.copy_plan import (
    CompiledUnit,
    CopyPlan,
    DeviceCopyUnit,
    slices_and_gaps,
)
from weightsync.weights.copying.fingerprint import mix64
from weightsync.weights.copying.layout import Chunk, StreamLayout

logger = logging.getLogger(__name__)

_WIDEST = 16
"""Bytes of the widest load and store."""
_TRIAL_NBYTES = (64 << 10) + 5
"""Bytes of the trial on each GPU: one whole tile, and an incomplete word."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`nbytes` bytes at address `source`, to be copied to address `target` (0: only read).

    In fingerprint number `sum` they are `words` words from position `first`, filled up with zeros.
    """

    source: int
    target: int
    nbytes: int
    words: int
    first: int
    sum: int


def tile(segments: Iterable[Segment], device: torch.device, *, fills: bool) -> Tiles:
    """Cut segments into tiles; with `fills` the zeros that follow a segment are written too."""
    rows: dict[int, list[tuple[int, ...]]] = {}
    for segment in segments:
        for alignment, row in _parts(segment, fills=fills):
            rows.setdefault(alignment, []).append(row)
    tables = {alignment: _cut(torch.tensor(rows[alignment])) for alignment in sorted(rows)}
    return {alignment: table.to(device) for alignment, table in tables.items()}


def _parts(segment: Segment, *, fills: bool) -> Iterable[tuple[int, tuple[int, ...]]]:
    """Yield `(alignment, row)` of a segment: whole words first, then an incomplete last word."""
    tail = segment.nbytes % WORD
    body = segment.nbytes - tail
    ends = math.gcd(segment.source, segment.target, _WIDEST)
    if body:
        words = body // WORD if tail else segment.words
        yield ends, _row(segment, 0, body, words, fills=fills)
    if tail or not body:
        words = segment.words - body // WORD
        # The zeros that follow are whole words, so the bytes that are read decide the width.
        yield math.gcd(ends, tail, WORD), _row(segment, body, tail, words, fills=fills)


def _row(segment: Segment, begin: int, nbytes: int, words: int, *, fills: bool) -> tuple[int, ...]:
    target = segment.target + begin if segment.target else 0
    stored = words * WORD if fills and target else nbytes
    first = segment.first + begin // WORD
    return segment.source + begin, target, nbytes, stored, words, first, segment.sum, 0


def _cut(rows: torch.Tensor) -> torch.Tensor:
    """Split each row into rows of at most TILE_WORDS words, addresses and positions advanced."""
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
    """Return the segments of the unit whose fingerprint is number `index`.

    Targets and sources are `uint8[nbytes]`; `gaps` as in DeviceCopyUnit. Every tensor begins at a
    word of the unit.
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


class Batch:
    """Units on one device that one launch copies, fingerprints or both, any number of times.

    `copies` False only reads the sources, `mixes` False takes no fingerprints, `reads_back` False
    takes those of what it stores instead of what the destination holds then, and `fills` also
    writes the zeros of gaps. The memory of the units must not move. The batch keeps it alive;
    with `keeps` False the caller checks before each launch that it is still there. For one thread.
    """

    def __init__(
        self,
        units: Sequence[DeviceCopyUnit],
        kernel: Kernel,
        *,
        copies: bool = True,
        mixes: bool = True,
        reads_back: bool = True,
        fills: bool = False,
        keeps: bool = True,
    ) -> None:
        self._reads_back = reads_back
        self._kept = units if keeps else ()
        self._kernel = kernel
        self._copies = copies
        self._device = units[0].sources[0].device
        segments = [
            segment
            for i, unit in enumerate(units)
            for segment in segments_of(unit.targets if copies else None, unit.sources, unit.gaps, i)
        ]
        self._stream = _stream_of(self._device)
        self._sums: torch.Tensor | None = None
        # Tensors made in inference mode cannot be written outside of it.
        with torch.inference_mode(False):
            self._tiles = tile(segments, self._device, fills=fills)
            if mixes:
                self._sums = torch.zeros(len(units), dtype=torch.int64, device=self._device)
                pinned = self._device.type == "cuda"
                self._host = torch.empty(len(units), dtype=torch.int64, pin_memory=pinned)
        self._sizes = [_nbytes(unit) for unit in units]
        self._found: list[int] | None = None
        self._done: CopyWork = _DONE

    def launch(self) -> None:
        """Enqueue the work after all work now on the caller's current stream; does not wait."""
        self._found = None
        self._done = self._stream.run(self._enqueue)

    def wait(self) -> None:
        """Return when the last launch is complete."""
        self._done.wait()

    def wait_on_stream(self) -> None:
        """Make later work on the caller's current stream wait for the last launch."""
        self._done.wait_on_stream()

    def fingerprints(self) -> list[int]:
        """Wait, and return mix64 of each unit: of its targets, or of its sources if only read."""
        if self._found is None:
            self.wait()
            totals = self._host.tolist()
            self._found = [
                settled(int(total) & MASK, nbytes)
                for total, nbytes in zip(totals, self._sizes, strict=True)
            ]
        return self._found

    def _enqueue(self) -> None:
        if self._sums is not None:
            self._sums.zero_()
        self._kernel.launch(
            self._tiles, self._sums, copies=self._copies, reads_back=self._reads_back
        )
        if self._sums is not None:
            self._host.copy_(self._sums, non_blocking=True)


class _Done:
    """A launch that is complete."""

    def wait(self) -> None:
        pass

    def wait_on_stream(self) -> None:
        pass


_DONE = _Done()


class _HostStream:
    """Runs kernels on the host, complete on return: those of Triton's interpreter."""

    def run(self, copy: Callable[[], object]) -> CopyWork:
        copy()
        return _DONE


def _nbytes(unit: DeviceCopyUnit) -> int:
    return sum(source.numel() for source in unit.sources) + sum(nbytes for _, nbytes in unit.gaps)


@cache
def _stream_of(device: torch.device) -> _HostStream | CudaCopyStream:
    """Return the stream of a device's fused copies, beside the streams of other kernels."""
    return CudaCopyStream(device) if device.type == "cuda" else _HostStream()


@dataclass(frozen=True, slots=True)
class FusedUnit:
    """Unit `index` of a batch; the batch is launched with its first unit."""

    on_host: ClassVar[bool] = False
    batch: Batch
    index: int

    def copy(self) -> None:
        """Launch the whole batch where this is its first unit; does not wait."""
        if self.index == 0:
            self.batch.launch()

    def fingerprint(self) -> int:
        """Wait for the batch and return the unit's fingerprint."""
        return self.batch.fingerprints()[self.index]

    def wait(self) -> None:
        """Wait for the batch."""
        self.batch.wait()


def fuse(
    units: Sequence[CompiledUnit], *, verify: bool, kernel: Kernel | None = None
) -> list[CompiledUnit]:
    """Return units that do the same in one launch where all are on one GPU, else `units`.

    Called once for fixed memory. `kernel` None takes the Triton kernel, if it works on the GPU.
    """
    plain = _whole(units)
    kernel = kernel or kernel_of(plain, among=len(units))
    if kernel is None or len(plain) < len(units):
        return list(units)
    batch = Batch(plain, kernel, mixes=verify)
    return [FusedUnit(batch, i) for i in range(len(units))]


def hashers(
    units: Sequence[CompiledUnit], *, kernel: Kernel | None = None
) -> list[Callable[[], int]]:
    """Return a function for each unit that fingerprints its sources; call all of them, in order.

    For units whose sources and targets are the same memory.
    """
    batch = reading(units, kernel=kernel)
    if batch is None:
        return [unit.fingerprint for unit in units]
    return [partial(_read_unit, batch, i) for i in range(len(units))]


def reading(units: Sequence[CompiledUnit], *, kernel: Kernel | None = None) -> Batch | None:
    """Return a batch that fingerprints the sources of units; None where torch does it."""
    plain = _whole(units)
    kernel = kernel or kernel_of(plain, among=len(units))
    if kernel is None or len(plain) < len(units):
        return None
    return Batch(plain, kernel, copies=False)


def _whole(units: Sequence[CompiledUnit]) -> list[DeviceCopyUnit]:
    """Return the units of whole tensors that torch copies: a kernel copies no shards."""
    return [u for u in units if isinstance(u, DeviceCopyUnit) and u.arrived is None]


def settle(copy_plans: Sequence[CopyPlan]) -> None:
    """Wait for copies in progress on a GPU, after which their source may be overwritten."""
    if not any(copy_plan.units for copy_plan in copy_plans):
        return
    if next(copy_plan.units[0] for copy_plan in copy_plans if copy_plan.units).on_host:
        return
    units = [unit for copy_plan in copy_plans for unit in copy_plan.units]
    if isinstance(units[0], FusedUnit):
        for unit in units:
            if isinstance(unit, FusedUnit) and unit.index == 0:
                unit.wait()
        return
    moving = [unit.gpus() for unit in units if isinstance(unit, DeviceCopyUnit)]
    wait_for(set[torch.device]().union(*moving))


class PairCopies:
    """Copies of tensors to others of the same shapes, any number of times: bit for bit, or casts.

    Made once for memory that does not move; pairs of one GPU are copied by one launch.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        *,
        kernel: Kernel | None = None,
    ) -> None:
        self._batch: Batch | None = None
        self._written: list[torch.Tensor] = []
        ends = [as_integers(*pair) for pair in pairs if pair[0].numel()]
        pieces = [pair for pair in ends if all(map(_is_piece, pair))]
        targets, sources = zip(*pieces, strict=True) if pieces else ((), ())
        unit = DeviceCopyUnit(tuple(map(as_bytes, targets)), tuple(map(as_bytes, sources)), ())
        kernel = kernel or kernel_of([unit], among=1)
        if kernel is not None and pieces:
            self._batch = Batch([unit], kernel, mixes=False)
            self._written = [target for target in targets if not target.is_inference()]
            ends = [pair for pair in ends if not all(map(_is_piece, pair))]
        # torch's copy of lists takes no target that is a lazy conjugation or negation.
        self._views = [pair for pair in ends if pair[0].is_conj() or pair[0].is_neg()]
        if self._views:
            ends = [pair for pair in ends if not (pair[0].is_conj() or pair[0].is_neg())]
        self._rest = [target for target, _ in ends], [source for _, source in ends]

    def enqueue(self) -> None:
        """Copy; on a GPU all later work on the caller's current stream waits for the copies."""
        if self._batch is not None:
            self._batch.launch()
            self._batch.wait_on_stream()
            torch.autograd.graph.increment_version(self._written)  # as torch's own copies do
        if self._rest[0]:
            with torch.no_grad():
                torch._foreach_copy_(*self._rest)
        with torch.no_grad():
            for target, source in self._views:
                target.copy_(source)


def _is_piece(tensor: torch.Tensor) -> bool:
    flat = tensor.dim() == 1 and tensor.is_contiguous() and not tensor.is_conj()
    return flat and not tensor.dtype.is_floating_point


def bucket_reader(
    layout: StreamLayout, chunk: Chunk, bucket: torch.Tensor
) -> Callable[[], list[int]]:
    """Return a function that fingerprints the units of a chunk in its bucket, zeros included."""
    parts = [
        bucket[unit.start - chunk.start : unit.stop - chunk.start]
        for unit in layout.units[chunk.first_unit : chunk.last_unit]
    ]
    units = [DeviceCopyUnit((part,), (part,), ()) for part in parts]
    kernel = kernel_of(units, among=len(units))
    if kernel is None:
        return lambda: [mix64(part) for part in parts]
    batch = Batch(units, kernel, copies=False)
    return lambda: _read(batch)


def chunk_batches(
    layout: StreamLayout,
    tensors: Sequence[torch.Tensor],
    buckets: Sequence[torch.Tensor],
    *,
    verify: bool,
    kernel: Kernel | None = None,
) -> list[Batch] | None:
    """Return a batch for each chunk: it writes `tensors` (`uint8[nbytes]`) and zeros into a bucket.

    Its fingerprints are those of what it read of the tensors: a store that fails shows in those of
    the receiver, which reads back what it copied out of the bucket. None where tensors and buckets
    are not on one GPU on which the kernel works. The batches do not keep the tensors alive, since
    the trainer may offload them: before each launch the caller checks that all addresses are the
    same.
    """
    batches = []
    for j, chunk in enumerate(layout.chunks):
        bucket = buckets[j % len(buckets)]
        units = [
            _into_bucket(layout, start, stop, tensors, bucket[start - chunk.start :])
            for start, stop in (
                (unit.start, unit.stop) for unit in layout.units[chunk.first_unit : chunk.last_unit]
            )
        ]
        kernel = kernel or kernel_of(units, among=len(units))
        if kernel is None:
            return None
        batches.append(
            Batch(units, kernel, mixes=verify, reads_back=False, fills=True, keeps=False)
        )
    return batches


def kernel_of(units: Sequence[DeviceCopyUnit], *, among: int) -> Kernel | None:
    """Return the kernel for `units`, None where they are fewer than `among` or not on one GPU.

    Also None for tensors that are not contiguous, and where the kernel does not work on the GPU.
    """
    if not units or len(units) != among:
        return None
    ends = [end for unit in units for end in (*unit.targets, *unit.sources)]
    device = ends[0].device if ends else torch.device("cpu")
    if device.type != "cuda" or any(end.device != device for end in ends):
        return None
    if not all(unit.sources and end.is_contiguous() for unit in units for end in unit.sources):
        return None
    return _proved(device) if all(end.is_contiguous() for end in ends) else None


@cache
def _proved(device: torch.device) -> Kernel | None:
    """Return the fused kernel if it copies and fingerprints as torch does, else None.

    Tried once for each device of a process; a failure is one warning.
    """
    try:
        kernel: Kernel = cast(Any, import_module("weightsync.cuda.triton_kernels"))
        source = torch.arange(_TRIAL_NBYTES, device=device).to(torch.uint8)
        target = torch.zeros_like(source)
        for reads_back in (True, False):
            target.zero_()
            unit = DeviceCopyUnit((target,), (source,), ())
            batch = Batch([unit], kernel, reads_back=reads_back)
            batch.launch()
            if batch.fingerprints() != [mix64(source)] or not torch.equal(source, target):
                raise RuntimeError("it does not copy or fingerprint as torch does")
    except Exception as exc:  # noqa: BLE001 # a compiler at run time fails in many ways
        reason = str(exc).partition("\n")[0] or type(exc).__name__
        logger.warning(
            "the fused copy kernel is not used on %s (%s); torch copies and fingerprints instead, "
            "more slowly. The kernel needs triton, which torch for CUDA installs, and a C compiler",
            device,
            reason,
        )
        return None
    return kernel


def _read_unit(batch: Batch, index: int) -> int:
    """Return a unit's fingerprint; the first unit launches the batch."""
    if index == 0:
        batch.launch()
    return batch.fingerprints()[index]


def _read(batch: Batch) -> list[int]:
    batch.launch()
    return batch.fingerprints()


def _into_bucket(
    layout: StreamLayout,
    start: int,
    stop: int,
    tensors: Sequence[torch.Tensor],
    place: torch.Tensor,
) -> DeviceCopyUnit:
    """Return the unit of bytes `start` to `stop`; `place` is the bucket from its first byte on."""
    slices, gaps = slices_and_gaps(layout, start, stop)
    sources = [tensors[part.index][part.begin : part.begin + part.nbytes] for part in slices]
    targets = [place[part.start - start :][: part.nbytes] for part in slices]
    return DeviceCopyUnit(tuple(targets), tuple(sources), tuple(gaps))
