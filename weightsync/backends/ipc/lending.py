"""Delivery of a sender's memory to a hook: tensors by parts, in memory that the hook may write.

A hook in place gets views of the sender's memory. It gets the tensors of one part (a decoder layer)
in one call, since it may fuse them; those that arrive before the last one are kept until then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from weightsync.cuda.memory import OpenMemory
from weightsync.shm.segment import PrivateMapping
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.layout import StreamLayout, aligned
from weightsync.weights.sinks.base import Together


@dataclass(frozen=True, slots=True)
class Lent:
    """A sender's memory as a hook gets it: buckets of the ring, and registered tensors.

    On the host these are views of private mappings: what a hook writes stays in its process. Pages
    that it wrote have to be restored before the next bytes are read from them. On a GPU there are
    no such mappings.
    """

    buckets: list[torch.Tensor]
    registered: Memory | None
    mappings: Sequence[PrivateMapping]

    @classmethod
    def of(
        cls,
        ring: OpenMemory,
        bucket_nbytes: int,
        num_buckets: int,
        storages: Sequence[OpenMemory],
        registered: Memory | None,
        places: Iterable[tuple[int, int]],
    ) -> Lent:
        """Map the memory that a sender offered. `places` are the storage and offset of tensors.

        Raises SegmentError.
        """
        mappings = [memory.private for memory in (ring, *storages)]
        lent = None
        if registered is not None:
            pairs = zip(places, registered.tensors, strict=True)
            parts = [
                storages[i].part(offset, known.numel(), private=True)
                for (i, offset), known in pairs
            ]
            lent = Memory(parts, flat=registered.flat)
        buckets = [
            ring.part(i * bucket_nbytes, bucket_nbytes, private=True) for i in range(num_buckets)
        ]
        return cls(buckets, lent, [mapping for mapping in mappings if mapping is not None])

    def forget(self) -> None:
        """Drop the views, so that the memory is unmapped though an error refers to this."""
        if self.registered is not None:
            self.registered.forget()
        self.buckets.clear()

    def restore(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Drop what was written to the pages of these tensors; False where none has such pages."""
        found = False
        for mapping, tensor in self._mapped(tensors):
            mapping.restore(tensor.data_ptr(), tensor.numel())
            found = True
        return found

    def restore_written(self, tensors: Iterable[torch.Tensor]) -> None:
        """The same, of the pages that were written, whoever wrote."""
        for mapping, tensor in self._mapped(tensors):
            mapping.restore_written(tensor.data_ptr(), tensor.numel())

    def _mapped(
        self, tensors: Iterable[torch.Tensor]
    ) -> Iterable[tuple[PrivateMapping, torch.Tensor]]:
        for tensor in tensors:
            if tensor.device.type != "cpu" or not tensor.numel():
                continue
            address = tensor.data_ptr()
            yield from ((m, tensor) for m in self.mappings if m.holds(address))


class DeliveryPlan:
    """When a hook gets each tensor of a layout: with its whole part, after the last of that.

    `due[j]` are the tensors that chunk j completes the parts of, by index; `due_at_end` those
    without bytes after the last chunk. `kept[i]` is where tensor i lies in memory of `nbytes`
    bytes until then: tensors of earlier chunks, and those that are split over chunks. The others
    stay in their bucket. With `together` None each tensor is a part.
    """

    def __init__(self, layout: StreamLayout, together: Together | None) -> None:
        specs = layout.manifest.specs
        chunks = layout.chunks
        stops = [chunk.stop for chunk in chunks]
        first, last = [0] * len(specs), [0] * len(specs)
        following = len(chunks)
        for i in reversed(range(len(specs))):
            if specs[i].nbytes:
                first[i] = bisect_right(stops, layout.offsets[i])
                last[i] = bisect_right(stops, layout.offsets[i] + specs[i].nbytes - 1)
                following = last[i]
            else:
                first[i] = last[i] = following  # with the next tensor that has bytes
        parts: dict[Hashable, list[int]] = {}
        for i, spec in enumerate(specs):
            parts.setdefault(i if together is None else together(spec.name), []).append(i)
        self.due: list[list[int]] = [[] for _ in chunks]
        self.due_at_end: list[int] = []
        self.kept: dict[int, int] = {}
        self.nbytes = 0
        self.parts: list[int] = [0] * len(specs)
        busy: list[tuple[int, int, int]] = []
        order = sorted(parts.values(), key=lambda part: min(first[i] for i in part))
        for number, part in enumerate(order):
            filled = [i for i in part if specs[i].nbytes]
            done = max(last[i] for i in filled or part)
            (self.due[done] if done < len(chunks) else self.due_at_end).extend(part)
            for i in part:
                self.parts[i] = number
            early = [i for i in filled if not first[i] == last[i] == done]
            size = sum(aligned(specs[i].nbytes) for i in early)
            if not size:
                continue
            # Memory is taken after the tensors that its first chunk completes were given away.
            begin = min(first[i] for i in early)
            busy = [piece for piece in busy if piece[2] > begin]
            at = _room(busy, size)
            busy.append((at, size, done))
            self.nbytes = max(self.nbytes, at + size)
            for i in early:
                self.kept[i] = at
                at += aligned(specs[i].nbytes)
        for due in (*self.due, self.due_at_end):
            due.sort()


def _room(busy: Iterable[tuple[int, int, int]], size: int) -> int:
    """Return the first offset at which `size` bytes overlap none of the busy ones."""
    at = 0
    for begin, nbytes, _ in sorted(busy):
        if begin - at >= size:
            break
        at = max(at, begin + nbytes)
    return at
