"""Tensors into buckets: the writing half of the packed path."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Sequence
from functools import cache

import torch

from weightsync.errors import ManifestMismatchError, shorten
from weightsync.specs import TensorSpec
from weightsync.weights.buckets import Chunk, StreamLayout
from weightsync.weights.copier import AddressMap, HostCopies, Memory, compile_host, host_view, zero
from weightsync.weights.dtypes import TORCH_DTYPES, as_bytes, from_bytes
from weightsync.weights.fingerprint import xxh3
from weightsync.weights.fused import Batch, chunk_batches, slot_reader
from weightsync.weights.source import NamedTensors

Acquire = Callable[[int], int]
"""Returns the slot for a chunk once it is free."""

Packed = tuple[int, list[int]]
"""A chunk that is complete in its slot, and the fingerprints of its runs."""


class Packer:
    """Writes the stream of `plan` into `slots` (`uint8[slot_nbytes]` each), chunk by chunk.

    Every method yields a chunk once its bytes are in place, on a GPU too, so that it may be
    published. Without `wait` (for slots on a GPU, and `verify` False) that is left to others:
    nothing waits, and the bytes are in place for whatever is behind the caller's current stream.
    """

    def __init__(self, plan: StreamLayout, slots: Sequence[torch.Tensor]) -> None:
        self.plan = plan
        self._slots = slots
        self._on_host = slots[0].device.type == "cpu"
        self._replayed: list[HostCopies] = []
        self._replayed_from: list[int] = []
        self._gaps = cache(lambda j: list(plan.gaps(plan.chunks[j].start, plan.chunks[j].stop)))
        self._views = cache(self._make_views)
        self._readers = cache(lambda j: slot_reader(plan, plan.chunks[j], self._slot(j)))
        self._batches: list[Batch] | None = None
        self._batched_from: list[int] = []

    def pack_stable(
        self,
        tensors: Sequence[torch.Tensor],
        acquire: Acquire,
        *,
        verify: bool,
        wait: bool = True,
    ) -> Generator[Packed, None, None]:
        """Pack tensors that stay where they are: the copies are planned once and replayed.

        Falls back to `pack` for tensors that need more than a copy of bytes.
        """
        if not (self._on_host and all(map(_is_bytes, self.plan.manifest.specs, tensors))):
            specs = self.plan.manifest.specs
            check_whole(specs, tensors)
            batches = self._batches_of(tensors, verify=verify)
            if batches is not None:
                yield from self._pack_batches(batches, acquire, verify=verify, wait=wait)
                return
            pairs = ((spec.name, t) for spec, t in zip(specs, tensors, strict=True))
            yield from self.pack(pairs, acquire, verify=verify, wait=wait)
            return
        check_whole(self.plan.manifest.specs, tensors)
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._replayed_from:
            self._replayed = self._compile(tensors)
            self._replayed_from = addresses
        for j, copies in enumerate(self._replayed):
            slot = acquire(j)
            self._clear_gaps(j, slot)
            copies.run()
            yield j, self._fingerprints(j) if verify else []

    def pack(
        self, pairs: NamedTensors, acquire: Acquire, *, verify: bool, wait: bool = True
    ) -> Generator[Packed, None, None]:
        """Pack tensors as they come, in the manifest's order: cast, gathered, on any device."""
        j = -1
        for index, (_, tensor) in enumerate(pairs):
            spec = self.plan.manifest.specs[index]
            position = self.plan.offsets[index]
            end = position + spec.nbytes
            flat: torch.Tensor | None = None
            while position < end:
                if j < 0 or position >= self.plan.chunks[j].stop:
                    if j >= 0:
                        yield j, self._complete(j, verify=verify, wait=wait)
                    j += 1
                    self._clear_gaps(j, acquire(j))
                chunk = self.plan.chunks[j]
                take = min(end, chunk.stop) - position
                if take < spec.nbytes and flat is None:
                    flat = flatten(tensor, spec)
                self._write(j, position, take, tensor if flat is None else flat, spec, end)
                position += take
        if j >= 0:
            yield j, self._complete(j, verify=verify, wait=wait)

    def _batches_of(self, tensors: Sequence[torch.Tensor], *, verify: bool) -> list[Batch] | None:
        """Plan one launch a chunk for tensors on the slots' GPU that need no cast."""
        if self._on_host or not all(map(is_plain, self.plan.manifest.specs, tensors)):
            return None
        key = [int(verify), *(tensor.data_ptr() for tensor in tensors)]
        if key != self._batched_from:
            flats = [as_bytes(tensor.detach()) for tensor in tensors]
            self._batches = chunk_batches(self.plan, flats, self._slots, verify=verify)
            self._batched_from = key
        return self._batches

    @staticmethod
    def _pack_batches(
        batches: Sequence[Batch], acquire: Acquire, *, verify: bool, wait: bool
    ) -> Generator[Packed, None, None]:
        for j, batch in enumerate(batches):
            acquire(j)
            batch.launch()
            if wait:
                batch.wait()
            else:
                batch.wait_on_stream()
            yield j, batch.fingerprints() if verify else []

    def _write(
        self, j: int, position: int, take: int, tensor: torch.Tensor, spec: TensorSpec, end: int
    ) -> None:
        """Copy a whole tensor, or `take` bytes of its flat bytes, to its place in the slot."""
        at = position - self.plan.chunks[j].start
        target = self._slot(j)[at : at + take]
        if take < spec.nbytes:
            begin = spec.nbytes - (end - position)
            source = tensor[begin : begin + take]
        else:
            source = tensor.detach()
        # Whoever made a tensor on the host may write the next one into the same pinned memory.
        enqueued = source.is_cuda and not self._on_host
        if self._on_host and _is_bytes_like(source, take, spec):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), take)
        elif take < spec.nbytes:
            target.copy_(source, non_blocking=enqueued)
        else:
            from_bytes(target, spec).copy_(source, non_blocking=enqueued)

    def _complete(self, j: int, *, verify: bool, wait: bool) -> list[int]:
        fingerprints = self._fingerprints(j) if verify else []
        if wait and not self._on_host:
            torch.cuda.current_stream(self._slots[0].device).synchronize()
        return fingerprints

    def _compile(self, tensors: Sequence[torch.Tensor]) -> list[HostCopies]:
        source = AddressMap(Memory([as_bytes(tensor) for tensor in tensors]))
        compiled = []
        for j, chunk in enumerate(self.plan.chunks):
            target = AddressMap(None, self._slot(j).data_ptr(), chunk.start)
            runs = self.plan.runs[chunk.first_run : chunk.last_run]
            planned = [compile_host(self.plan, run, target, source) for run in runs]
            compiled.append(HostCopies.of(planned))
        return compiled

    def _slot(self, j: int) -> torch.Tensor:
        return self._slots[j % len(self._slots)]

    def _clear_gaps(self, j: int, slot: int) -> None:
        chunk = self.plan.chunks[j]
        for position, nbytes in self._gaps(j):
            at = position - chunk.start
            if self._on_host:
                zero(self._slots[slot].data_ptr() + at, nbytes)
            else:
                self._slots[slot][at : at + nbytes].zero_()

    def _fingerprints(self, j: int) -> list[int]:
        if self._on_host:
            return [xxh3(view) for view in self._views(j)]
        return self._readers(j)()

    def _make_views(self, j: int) -> list[memoryview]:
        return slot_views(self.plan, self.plan.chunks[j], self._slot(j))


def slot_views(plan: StreamLayout, chunk: Chunk, slot: torch.Tensor) -> list[memoryview]:
    """View the runs of a chunk in its slot (host memory, kept alive by the caller)."""
    address = slot.data_ptr() - chunk.start
    return [
        host_view(address + run.start, run.stop - run.start)
        for run in plan.runs[chunk.first_run : chunk.last_run]
    ]


def check_whole(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> None:
    """Raise ManifestMismatchError for tensors whose memory is gone or of another shape.

    `parameter.data = torch.empty(0)` is how trainers offload; a copy would read past its end.
    """
    wrong = [
        f"{spec.name}: {spec}, now {list(tensor.shape)}"
        for spec, tensor in zip(specs, tensors, strict=True)
        if tensor.shape != spec.shape or (spec.nbytes and not tensor.data_ptr())
    ]
    if wrong:
        raise ManifestMismatchError(
            f"{len(wrong)} tensors are not what they were at connect() (offloaded?): "
            f"{shorten(wrong)}; bring them back before send_weights(), or connect again",
            mismatched=wrong,
        )


def is_plain(spec: TensorSpec, tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory, on whatever device, is what travels: no cast, no odd stride."""
    return tensor.dtype is TORCH_DTYPES[spec.dtype] and tensor.is_contiguous()


def _is_bytes(spec: TensorSpec, tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and is_plain(spec, tensor)


def _is_bytes_like(source: torch.Tensor, take: int, spec: TensorSpec) -> bool:
    flat = take < spec.nbytes and source.device.type == "cpu"
    return flat or (take == spec.nbytes and _is_bytes(spec, source))


def flatten(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the bytes that travel, `uint8[spec.nbytes]`: the tensor's own, unless it is cast."""
    return as_bytes(tensor.detach().to(TORCH_DTYPES[spec.dtype]).contiguous())
