"""Packers: write a model's tensors into buckets, chunk by chunk.

`Packer` writes each tensor to its place. `StagedPacker` assembles a chunk on the GPU and copies it
to the bucket in host memory at once. The code for GPUs has run with CPU tensors only, never on a
GPU.
"""

from __future__ import annotations

import ctypes
import operator
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain

import torch

from weightsync.cuda.staging import CopyWork, StagedBuckets
from weightsync.cuda.wait import wait_for_stream
from weightsync.errors import ManifestMismatchError, shorten
from weightsync.look import KnownForms, Look
from weightsync.specs import TensorSpec
from weightsync.tensors import (
    TORCH_DTYPES,
    as_bytes,
    as_flat,
    contiguous_bytes,
    from_bytes,
    is_plain,
)
from weightsync.weights.copying.copy_plan import (
    AddressMap,
    HostCopies,
    Memory,
    compile_host,
    host_view,
    zero,
)
from weightsync.weights.copying.fingerprint import xxh3
from weightsync.weights.copying.fused import Batch, bucket_reader, chunk_batches
from weightsync.weights.copying.layout import Chunk, StreamLayout, TensorSlice
from weightsync.weights.sources.base import NamedTensors, Writers
from weightsync.weights.tensor_kinds import check_sendable, no_memory

Acquire = Callable[[int], int]
"""Takes the number of a chunk; waits until its bucket is free and returns the bucket's number."""

Packed = tuple[int, list[int]]
"""The number of a chunk that is in its bucket, and the fingerprints of its units (or none)."""


class Packer:
    """Writes the stream of `layout` into `buckets` (`uint8[bucket_nbytes]` each), chunk by chunk.

    The methods are generators. They yield a chunk when its bytes are in the bucket, on a GPU too,
    so that the caller may publish it. `acquire` is called for each chunk in order. The caller owns
    the buckets; for one thread.
    """

    def __init__(self, layout: StreamLayout, buckets: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self._buckets = buckets
        self._on_host = buckets[0].device.type == "cpu"
        self._replayed: list[HostCopies] = []
        self._replayed_from: list[int] = []
        self._gaps = cache(
            lambda j: list(layout.gaps(layout.chunks[j].start, layout.chunks[j].stop))
        )
        self._views = cache(lambda j: bucket_views(layout, layout.chunks[j], self._bucket(j)))
        self._readers = cache(lambda j: bucket_reader(layout, layout.chunks[j], self._bucket(j)))
        self._written = cache(self._parts_of)
        self._batches: list[Batch] | None = None
        self._batched_from: list[int] = []
        self._forms = KnownForms()
        self._are_bytes = False

    def pack_stable(
        self, tensors: Sequence[torch.Tensor], acquire: Acquire, *, verify: bool
    ) -> Generator[Packed, None, None]:
        """Pack tensors whose memory does not move; the copies are compiled once.

        They are compiled again when an address changed. Tensors that need a cast or a gather go
        through `pack`. Raises ManifestMismatchError for tensors that are offloaded or of another
        shape.
        """
        specs = self.layout.manifest.specs
        look = self._forms.look(tensors, versions=False)
        check_whole(specs, tensors, look)
        if not look.known:
            self._are_bytes = self._on_host and all(map(_is_bytes, tensors, specs))
            self._forms.note(tensors)
        if not self._are_bytes:
            batches = self._batches_of(tensors, verify=verify)
            if batches is not None:
                yield from self._pack_batches(batches, acquire, verify=verify)
                return
            pairs = ((spec.name, t) for spec, t in zip(specs, tensors, strict=True))
            yield from self.pack(pairs, acquire, verify=verify)
            return
        if look.addresses != self._replayed_from:
            self._replayed = self._compile(tensors)
            self._replayed_from = look.addresses
        for j, copies in enumerate(self._replayed):
            bucket = acquire(j)
            self._clear_gaps(j, bucket)
            copies.run()
            yield j, self._fingerprints(j) if verify else []

    def pack(
        self, pairs: NamedTensors, acquire: Acquire, *, verify: bool
    ) -> Generator[Packed, None, None]:
        """Pack tensors of any device as they come, in the manifest's order, cast on the way.

        The bytes of a tensor are read before the next tensor is requested from `pairs`.
        """
        j = -1
        for chunk, part, source in self._cut(pairs):
            if chunk != j:
                if j >= 0:
                    yield j, self._complete(j, verify=verify)
                j = chunk
                self._clear_gaps(j, acquire(j))
            self._write(j, part, source)
        if j >= 0:
            yield j, self._complete(j, verify=verify)

    def pack_written(
        self, writers: Writers, acquire: Acquire, *, verify: bool
    ) -> Generator[Packed, None, None]:
        """Pack tensors that are written straight into buckets in host memory.

        Where they are verified, each unit is fingerprinted as soon as it is written.
        """
        coming = zip(writers, self.layout.manifest.specs, strict=True)
        index = -1
        for j, chunk in enumerate(self.layout.chunks):
            self._clear_gaps(j, acquire(j))
            bucket, fingerprints = self._bucket(j), []
            views = self._views(j) if verify else [None]
            for view, parts in zip(views, self._written(j, verify), strict=True):
                for part in parts:
                    while index < part.index:  # tensors without bytes are in no chunk
                        (_, write), _ = next(coming)
                        index += 1
                    at = part.start - chunk.start
                    write(bucket[at : at + part.nbytes])
                if view is not None:
                    fingerprints.append(xxh3(view))
            yield j, fingerprints
        for _ in coming:
            pass

    def _parts_of(self, j: int, verify: bool) -> list[list[TensorSlice]]:
        """Return what is written of tensors to a chunk, by units where these are verified."""
        layout, chunk = self.layout, self.layout.chunks[j]
        units = layout.units[chunk.first_unit : chunk.last_unit] if verify else [chunk]
        return [list(layout.slices(span.start, span.stop)) for span in units]

    def _cut(self, pairs: NamedTensors) -> Iterator[tuple[int, TensorSlice, torch.Tensor]]:
        """Yield the slices of tensors as they come, and the number of the chunk that each is in.

        With a slice comes the tensor itself where it is whole, else its elements in the slice.
        """
        chunks, j = self.layout.chunks, 0
        for index, (_, tensor) in enumerate(pairs):
            spec, position = self.layout.manifest.specs[index], self.layout.offsets[index]
            begin, flat = 0, None
            while begin < spec.nbytes:
                while position + begin >= chunks[j].stop:
                    j += 1
                take = min(spec.nbytes, chunks[j].stop - position) - begin
                part = TensorSlice(index, begin, take, position + begin)
                if take == spec.nbytes:
                    yield j, part, tensor.detach()
                else:
                    flat = _elements(tensor, spec) if flat is None else flat
                    itemsize = TORCH_DTYPES[spec.dtype].itemsize
                    yield j, part, flat[begin // itemsize :][: take // itemsize]
                begin += take

    def _batches_of(self, tensors: Sequence[torch.Tensor], *, verify: bool) -> list[Batch] | None:
        """Return a batch for each chunk; None for tensors on another device, or to be cast."""
        if self._on_host or not all(map(is_plain, tensors, self.layout.manifest.specs)):
            return None
        key = [int(verify), *(tensor.data_ptr() for tensor in tensors)]
        if key != self._batched_from:
            flats = [as_bytes(tensor) for tensor in tensors]
            self._batches = chunk_batches(self.layout, flats, self._buckets, verify=verify)
            self._batched_from = key
        return self._batches

    @staticmethod
    def _pack_batches(
        batches: Sequence[Batch], acquire: Acquire, *, verify: bool
    ) -> Generator[Packed, None, None]:
        for j, batch in enumerate(batches):
            acquire(j)
            batch.launch()
            batch.wait()
            yield j, batch.fingerprints() if verify else []

    def _write(self, j: int, part: TensorSlice, source: torch.Tensor) -> None:
        """Copy a slice, as `_cut` yields it, to its place in the bucket."""
        spec, at = self.layout.manifest.specs[part.index], part.start - self.layout.chunks[j].start
        target = self._bucket(j)[at : at + part.nbytes]
        if self._on_host and _is_bytes(source, spec):
            address = source.data_ptr()
            if not address:
                raise no_memory(spec.name)
            ctypes.memmove(target.data_ptr(), address, part.nbytes)
            return
        # A source may write its next tensor into the same pinned host memory.
        place = _place(target, part, spec)
        place.copy_(source, non_blocking=not self._on_host and source.device.type == "cuda")

    def _complete(self, j: int, *, verify: bool) -> list[int]:
        fingerprints = self._fingerprints(j) if verify else []
        if not self._on_host:
            wait_for_stream(self._buckets[0].device)
        return fingerprints

    def _compile(self, tensors: Sequence[torch.Tensor]) -> list[HostCopies]:
        source = AddressMap(Memory([as_bytes(tensor) for tensor in tensors]))
        compiled = []
        for j, chunk in enumerate(self.layout.chunks):
            target = AddressMap(None, self._bucket(j).data_ptr(), chunk.start)
            units = self.layout.units[chunk.first_unit : chunk.last_unit]
            planned = [compile_host(self.layout, unit, target, source) for unit in units]
            compiled.append(HostCopies.of(planned))
        return compiled

    def _bucket(self, j: int) -> torch.Tensor:
        return self._buckets[j % len(self._buckets)]

    def _clear_gaps(self, j: int, bucket: int) -> None:
        chunk = self.layout.chunks[j]
        for position, nbytes in self._gaps(j):
            at = position - chunk.start
            if self._on_host:
                zero(self._buckets[bucket].data_ptr() + at, nbytes)
            else:
                self._buckets[bucket][at : at + nbytes].zero_()

    def _fingerprints(self, j: int) -> list[int]:
        if self._on_host:
            return [xxh3(view) for view in self._views(j)]
        return self._readers(j)()


def bucket_views(layout: StreamLayout, chunk: Chunk, bucket: torch.Tensor) -> list[memoryview]:
    """View the units of a chunk in its bucket, host memory that the caller keeps alive."""
    address = bucket.data_ptr() - chunk.start
    return [
        host_view(address + unit.start, unit.stop - unit.start)
        for unit in layout.units[chunk.first_unit : chunk.last_unit]
    ]


def check_whole(
    specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor], look: Look | None = None
) -> None:
    """Raise ManifestMismatchError for tensors without memory, of another shape or number.

    Trainers offload with `parameter.data = torch.empty(0)`; a copy would read past its end. A
    `look` at them with known forms saves asking each: such forms were checked here before.
    """
    check_number(specs, tensors)
    if look is not None and look.known and all(look.addresses):
        return
    # The usual case without a loop in Python, and without tuples for the garbage collector.
    try:
        same = all(map(operator.eq, map(_SHAPE, tensors), map(_SHAPE, specs)))
        if same and all(map(torch.Tensor.data_ptr, tensors)):
            return
    except (RuntimeError, NotImplementedError):  # neither shape nor memory: named below
        pass
    check_sendable(((spec.name, t) for spec, t in zip(specs, tensors, strict=True)), or_meta=True)
    wrong = [
        f"{spec.name}: {spec}, now {list(tensor.shape)}"
        for spec, tensor in zip(specs, tensors, strict=True)
        if tensor.shape != spec.shape or (spec.nbytes and not tensor.data_ptr())
    ]
    if wrong:
        raise ManifestMismatchError(
            f"{len(wrong)} tensors have no memory (offloaded?) or a new shape since connect(): "
            f"{shorten(wrong)}; bring them back before send_weights(), or connect again",
            mismatched=wrong,
        )


def check_number(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> None:
    """Raise ManifestMismatchError for another number of tensors."""
    if len(tensors) != len(specs):
        raise ManifestMismatchError(
            f"the source has {len(tensors)} tensors, and its manifest {len(specs)}; connect again "
            "if the model has changed"
        )


def _is_bytes(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether a memmove of a tensor, or of elements of it, sends what `spec` describes."""
    return tensor.device.type == "cpu" and is_plain(tensor, spec)


def flatten(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the bytes that are sent (`uint8[spec.nbytes]`): a view, or a copy where cast."""
    return contiguous_bytes(tensor.detach().to(TORCH_DTYPES[spec.dtype]))


Filled = tuple[int, torch.Tensor | None]
"""A chunk's number, and its bytes where one tensor fills it, else None (device buffer)."""

_SHAPE = operator.attrgetter("shape")
_PIPELINED_BUCKETS = 3
"""With fewer buckets, readers may need a chunk before they can free the bucket of the next one."""


class StagedPacker(Packer):
    """A Packer into `buckets` in host memory, for tensors on the device of `stage`.

    A chunk of several tensors is assembled in the bucket's device buffer; a chunk that one tensor
    fills is copied from the tensor itself. With three buckets or more, the copy of one chunk
    overlaps the assembly of the next. Close the generators when you stop early: closing waits for
    copies in progress. Tensors on other devices go through Packer.
    """

    def __init__(
        self, layout: StreamLayout, buckets: Sequence[torch.Tensor], stage: StagedBuckets
    ) -> None:
        super().__init__(layout, buckets)
        self._stage = stage
        self._pieces = [list(layout.slices(chunk.start, chunk.stop)) for chunk in layout.chunks]

    def pack_stable(
        self, tensors: Sequence[torch.Tensor], acquire: Acquire, *, verify: bool
    ) -> Generator[Packed, None, None]:
        """Pack tensors whose memory does not move; one call copies all tensors of a chunk."""
        if not any(map(self._on_device, tensors)):
            yield from super().pack_stable(tensors, acquire, verify=verify)
            return
        specs = self.layout.manifest.specs
        check_whole(specs, tensors)
        if all(map(self._on_device, tensors)) and all(map(is_plain, tensors, specs)):
            filled = self._gather(tensors)
        else:
            names = (spec.name for spec in specs)
            filled = self._fill(zip(names, tensors, strict=True))
        yield from self._send(filled, acquire, verify=verify)

    def pack(
        self, pairs: NamedTensors, acquire: Acquire, *, verify: bool
    ) -> Generator[Packed, None, None]:
        """Pack tensors as they come; the device of the first one decides for all."""
        coming = iter(pairs)
        first = next(coming, None)
        if first is None:
            return
        staged = self._on_device(first[1])
        coming = chain([first], coming)
        del first
        if staged:
            yield from self._send(self._fill(coming), acquire, verify=verify)
        else:
            yield from super().pack(coming, acquire, verify=verify)

    def _send(
        self, filled: Iterable[Filled], acquire: Acquire, *, verify: bool
    ) -> Generator[Packed, None, None]:
        """Copy chunk after chunk to its bucket; yield each when its copy is complete."""
        ahead = 1 if len(self._buckets) >= _PIPELINED_BUCKETS else 0
        copying: deque[tuple[int, CopyWork]] = deque()
        try:
            for j, alone in filled:
                bucket = acquire(j)
                copying.append((j, self._start_copy(j, bucket, alone)))
                while len(copying) > ahead:
                    yield self._finish_copy(copying, verify=verify)
            while copying:
                yield self._finish_copy(copying, verify=verify)
        finally:
            for _, work in copying:
                work.wait()

    def _start_copy(self, j: int, bucket: int, alone: torch.Tensor | None) -> CopyWork:
        if alone is None:
            chunk = self.layout.chunks[j]
            return self._stage.copy_to_bucket(bucket, chunk.stop - chunk.start)
        self._clear_gaps(j, bucket)
        return self._stage.copy_directly_to_bucket(bucket, alone)

    def _finish_copy(self, copying: deque[tuple[int, CopyWork]], *, verify: bool) -> Packed:
        j, work = copying[0]
        work.wait()
        copying.popleft()
        return j, self._fingerprints(j) if verify else []

    def _gather(self, tensors: Sequence[torch.Tensor]) -> Iterator[Filled]:
        """Assemble chunks of plain tensors on the device, each by one call."""
        for j, slices in enumerate(self._pieces):
            sources = [_part(tensors[part.index], part) for part in slices]
            if len(slices) == 1:
                yield j, sources[0]
                continue
            device_buffer, start = self._clean_device_buffer(j), self.layout.chunks[j].start
            places = [device_buffer[p.start - start : p.start - start + p.nbytes] for p in slices]
            torch._foreach_copy_(places, sources, non_blocking=True)
            yield j, None

    def _fill(self, pairs: NamedTensors) -> Iterator[Filled]:
        """Assemble chunks of tensors as they come; each is copied before the next is requested."""
        j, device_buffer = -1, None
        for chunk, part, source in self._cut(pairs):
            if chunk != j:
                if device_buffer is not None:
                    yield j, None
                j = chunk
                alone = len(self._pieces[j]) == 1 and self._on_device(source)
                device_buffer = None if alone else self._clean_device_buffer(j)
            spec = self.layout.manifest.specs[part.index]
            if device_buffer is None:
                yield j, flatten(source, spec)
                continue
            at = part.start - self.layout.chunks[j].start
            place = _place(device_buffer[at : at + part.nbytes], part, spec)
            # Also from pinned memory: the source may overwrite it for its next tensor.
            place.copy_(source, non_blocking=source.device.type != "cpu")
        if device_buffer is not None:
            yield j, None

    def _on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._stage.device

    def _clean_device_buffer(self, j: int) -> torch.Tensor:
        chunk = self.layout.chunks[j]
        device_buffer = self._stage.device_buffer(j % len(self._buckets))[
            : chunk.stop - chunk.start
        ]
        return device_buffer.zero_() if self._gaps(j) else device_buffer


def _elements(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the elements of a tensor in one dimension; each slice is cast where it is written."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return as_flat(tensor)
    return flatten(tensor, spec).view(TORCH_DTYPES[spec.dtype])


def _place(flat: torch.Tensor, part: TensorSlice, spec: TensorSpec) -> torch.Tensor:
    """View the bytes of a slice, as `_cut` yields it, as what is written there."""
    if part.nbytes == spec.nbytes:
        return from_bytes(flat, spec)
    return flat.view(TORCH_DTYPES[spec.dtype])


def _part(tensor: torch.Tensor, part: TensorSlice) -> torch.Tensor:
    flat = as_bytes(tensor)
    return flat if part.nbytes == flat.numel() else flat[part.begin : part.begin + part.nbytes]
