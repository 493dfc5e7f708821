"""Tensors on a GPU into buckets on the host: put together on the GPU, sent over in one copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

import torch

from weightsync.weights.buckets import StreamLayout, TensorSlice
from weightsync.weights.dtypes import as_bytes, from_bytes
from weightsync.weights.packer import Acquire, Packed, Packer, check_whole, flatten, is_plain
from weightsync.weights.source import NamedTensors

Filled = tuple[int, torch.Tensor | None]
"""A chunk, and the one tensor's bytes that it consists of; None where it lies in its twin."""

_PIPELINED_SLOTS = 3
"""With fewer, readers may need a chunk before they can free the next one's slot."""


class HostCopyWork(Protocol):
    """A copy from the device to a slot."""

    def wait(self) -> None:
        """Return when it is complete."""


class Stage(Protocol):
    """The device's side of the slots. Streams order all uses of `device_buffer`."""

    @property
    def device(self) -> torch.device: ...

    def device_buffer(self, slot: int) -> torch.Tensor: ...

    def copy_to_slot(self, slot: int, nbytes: int) -> HostCopyWork: ...

    def copy_directly_to_slot(self, slot: int, source: torch.Tensor) -> HostCopyWork: ...


class StagedPacker(Packer):
    """A Packer into host `slots` for tensors on the device of `stage`; others go as they did.

    A chunk of several tensors is made in its twin; one that a single tensor fills crosses from
    where it lies. With three slots or more a chunk crosses while the next one is made. Close what
    the methods return when you stop early: it waits for copies into slots that are on their way.
    What crosses is always settled: slots on the host are published by the host.
    """

    def __init__(self, plan: StreamLayout, slots: Sequence[torch.Tensor], stage: Stage) -> None:
        super().__init__(plan, slots)
        self._stage = stage
        self._pieces = [list(plan.pieces(chunk.start, chunk.stop)) for chunk in plan.chunks]

    def pack_stable(
        self,
        tensors: Sequence[torch.Tensor],
        acquire: Acquire,
        *,
        verify: bool,
        wait: bool = True,
    ) -> Generator[Packed, None, None]:
        """Pack tensors that stay where they are, all those of a chunk at once."""
        if not any(map(self._here, tensors)):
            yield from super().pack_stable(tensors, acquire, verify=verify, wait=wait)
            return
        specs = self.plan.manifest.specs
        check_whole(specs, tensors)
        if all(map(self._here, tensors)) and all(map(is_plain, specs, tensors)):
            filled = self._gather(tensors)
        else:
            names = (spec.name for spec in specs)
            filled = self._fill(zip(names, tensors, strict=True))
        yield from self._send(filled, acquire, verify=verify)

    def pack(
        self, pairs: NamedTensors, acquire: Acquire, *, verify: bool, wait: bool = True
    ) -> Generator[Packed, None, None]:
        """Pack tensors as they come; the first one says on which side they are."""
        coming = iter(pairs)
        first = next(coming, None)
        if first is None:
            return
        staged = self._here(first[1])
        coming = chain([first], coming)
        del first
        if staged:
            yield from self._send(self._fill(coming), acquire, verify=verify)
        else:
            yield from super().pack(coming, acquire, verify=verify, wait=wait)

    def _send(
        self, filled: Iterable[Filled], acquire: Acquire, *, verify: bool
    ) -> Generator[Packed, None, None]:
        """Send chunk after chunk; each is complete in its slot before it is handed out."""
        ahead = 1 if len(self._slots) >= _PIPELINED_SLOTS else 0
        flying: deque[tuple[int, HostCopyWork]] = deque()
        try:
            for j, alone in filled:
                slot = acquire(j)
                flying.append((j, self._cross(j, slot, alone)))
                while len(flying) > ahead:
                    yield self._land(flying, verify=verify)
            while flying:
                yield self._land(flying, verify=verify)
        finally:
            for _, crossing in flying:
                crossing.wait()

    def _cross(self, j: int, slot: int, alone: torch.Tensor | None) -> HostCopyWork:
        if alone is None:
            chunk = self.plan.chunks[j]
            return self._stage.copy_to_slot(slot, chunk.stop - chunk.start)
        self._clear_gaps(j, slot)
        return self._stage.copy_directly_to_slot(slot, alone)

    def _land(self, flying: deque[tuple[int, HostCopyWork]], *, verify: bool) -> Packed:
        j, crossing = flying[0]
        crossing.wait()
        flying.popleft()
        return j, self._fingerprints(j) if verify else []

    def _gather(self, tensors: Sequence[torch.Tensor]) -> Iterator[Filled]:
        """Make chunks of tensors that are bytes on the device: one call copies a chunk's."""
        for j, pieces in enumerate(self._pieces):
            sources = [_part(tensors[piece.index], piece) for piece in pieces]
            if len(pieces) == 1:
                yield j, sources[0]
                continue
            device_buffer, start = self._clean_device_buffer(j), self.plan.chunks[j].start
            places = [device_buffer[p.start - start : p.start - start + p.nbytes] for p in pieces]
            torch._foreach_copy_(places, sources, non_blocking=True)
            yield j, None

    def _fill(self, pairs: NamedTensors) -> Iterator[Filled]:
        """Make chunks of tensors as they come, copied at once: their memory may be used again."""
        j, device_buffer = -1, None
        for index, (_, tensor) in enumerate(pairs):
            spec, position = self.plan.manifest.specs[index], self.plan.offsets[index]
            end = position + spec.nbytes
            flat: torch.Tensor | None = None
            while position < end:
                if j < 0 or position >= self.plan.chunks[j].stop:
                    if device_buffer is not None:
                        yield j, None
                    j += 1
                    alone = len(self._pieces[j]) == 1 and self._here(tensor)
                    device_buffer = None if alone else self._clean_device_buffer(j)
                chunk = self.plan.chunks[j]
                take = min(end, chunk.stop) - position
                begin = position + spec.nbytes - end
                if flat is None and (device_buffer is None or take < spec.nbytes):
                    flat = flatten(tensor, spec)
                at = position - chunk.start
                if device_buffer is None and flat is not None:
                    yield j, flat[begin : begin + take]
                elif device_buffer is not None:
                    place, part = device_buffer[at : at + take], tensor.detach()
                    if flat is not None:
                        part = flat[begin : begin + take]
                    else:
                        place = from_bytes(place, spec)
                    # From pinned host memory too the copy must be made before the source goes on.
                    place.copy_(part, non_blocking=part.device.type != "cpu")
                position += take
        if device_buffer is not None:
            yield j, None

    def _here(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._stage.device

    def _clean_device_buffer(self, j: int) -> torch.Tensor:
        chunk = self.plan.chunks[j]
        device_buffer = self._stage.device_buffer(j % len(self._slots))[: chunk.stop - chunk.start]
        return device_buffer.zero_() if self._gaps(j) else device_buffer


def _part(tensor: torch.Tensor, piece: TensorSlice) -> torch.Tensor:
    flat = as_bytes(tensor)
    return flat if piece.nbytes == flat.numel() else flat[piece.begin : piece.begin + piece.nbytes]
