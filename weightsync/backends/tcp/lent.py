"""Chunks that hosts read where the source's tensors lie, without a ring."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from weightsync.backends.tcp.window import Pieces
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.copying.copy_plan import host_view
from weightsync.weights.copying.fingerprint import xxh3_parts
from weightsync.weights.copying.layout import Chunk, CopyUnit, StreamLayout, TensorSlice, aligned

MOST_RUNS = 64
"""Runs of bytes as which a strided tensor is read where it lies; one of more is packed."""
SHORTEST_RUN_NBYTES = 16 << 10
"""Runs below which a strided tensor is packed: each costs a description and a request."""
_Place = tuple[int, tuple[int, ...], bool, bool]


class _Runs(NamedTuple):
    """The memory of a tensor: `nbytes` at each of `addresses`, in the order of its elements."""

    addresses: Sequence[int]
    nbytes: int

    def within(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield address and bytes of each run of the tensor's bytes from `begin` to `end`."""
        while begin < end:
            number, at = divmod(begin, self.nbytes)
            count = min(self.nbytes - at, end - begin)
            yield self.addresses[number] + at, count
            begin += count


class LentChunks:
    """The chunks of `layout` in the memory of `tensors`, for which `why_packed` has no reason.

    What lies in many runs, or short ones, is packed beside them, chunk by chunk, into memory for
    `slots` chunks. `memory` (`uint8[nbytes]` each) is all of both, to be registered. One thread
    calls `chunk` and then `fingerprints`; any thread may call `again`.
    """

    def __init__(
        self, layout: StreamLayout, tensors: Sequence[torch.Tensor], slots: int = 1
    ) -> None:
        self.layout = layout
        self.packed_nbytes = 0
        """Bytes that were packed since this was set to 0."""
        self._slots = slots
        self._tensors = [tensor.detach() for tensor in tensors]  # their memory is not used again
        self._places = [_place_of(tensor) for tensor in tensors]
        self._runs = [runs_of(tensor) for tensor in self._tensors]
        device = next((t.device for t in self._tensors if t.numel()), torch.device("cpu"))
        self.is_on_gpu = device.type == "cuda"
        self._device = device.index if self.is_on_gpu else None
        sizes = [self._packed_nbytes_of(chunk) for chunk in layout.chunks]
        self._slot_nbytes = max(sizes, default=0)
        self._spare = torch.empty(slots * self._slot_nbytes, dtype=torch.uint8)
        lying = zip(self._tensors, self._runs, strict=True)
        self.memory = [_extent(t) for t, runs in lying if runs is not None and t.numel()]
        if self._slot_nbytes:
            self.memory.append(self._spare)
        self._packs: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self._chunks: list[Pieces] = []
        self._hashed: list[Sequence[memoryview | bytes]] = []
        for j, chunk in enumerate(layout.chunks):
            self._add(j, chunk)

    @property
    def extra_nbytes(self) -> int:
        """Bytes of the memory into which parts are packed."""
        return self._spare.numel()

    def lie_in(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the source's tensors still lie in this memory, and in the same way."""
        places = [_place_of(tensor) for tensor in tensors]
        return places == self._places and not why_packed(self.layout, tensors)

    def chunk(self, j: int) -> Pieces:
        """Pack parts of chunk `j`, over those of chunk `j - slots`; return where all of it lies."""
        for target, source in self._packs[j]:
            target.copy_(source)
            self.packed_nbytes += target.nbytes
        return self._chunks[j]

    def fingerprints(self, j: int) -> list[int]:
        """Read chunk `j` after `chunk(j)`; return the fingerprints of its copy units."""
        chunk = self.layout.chunks[j]
        return [xxh3_parts(views) for views in self._hashed[chunk.first_unit : chunk.last_unit]]

    def again(self, j: int) -> Pieces | None:
        """Return where chunk `j` lies, None where a part of it would have to be packed again."""
        return None if self._packs[j] else self._chunks[j]

    def _packed_nbytes_of(self, chunk: Chunk) -> int:
        slices = self.layout.slices(chunk.start, chunk.stop)
        return sum(aligned(part.nbytes) for part in slices if self._runs[part.index] is None)

    def _add(self, j: int, chunk: Chunk) -> None:
        """Compile a chunk: the copies into its slot, its places, and what is fingerprinted."""
        packs: list[tuple[torch.Tensor, torch.Tensor]] = []
        runs: list[tuple[int, int, int]] = []
        at = j % self._slots * self._slot_nbytes
        for part in self.layout.slices(chunk.start, chunk.stop):
            lying = self._runs[part.index]
            if lying is None:
                own = self._spare[at : at + part.nbytes]
                packs += _copies(own, self._tensors[part.index], part)
                found: Iterator[tuple[int, int]] = iter([(own.data_ptr(), part.nbytes)])
                at += aligned(part.nbytes)
            else:
                found = lying.within(part.begin, part.begin + part.nbytes)
            position = part.start
            for address, nbytes in found:
                runs.append((position, address, nbytes))
                position += nbytes
        self._packs.append(packs)
        places = [(position - chunk.start, address, nbytes) for position, address, nbytes in runs]
        self._chunks.append(Pieces(places, self._device))
        if not self.is_on_gpu:
            for unit in self.layout.units[chunk.first_unit : chunk.last_unit]:
                self._hashed.append(_views(unit, runs))


def why_packed(layout: StreamLayout, tensors: Sequence[torch.Tensor]) -> str:
    """Return why no bytes of tensors can be sent as they lie; an empty string if some can.

    On a GPU: if all can.
    """
    if len({tensor.device for tensor in tensors}) > 1:
        return "they lie on several devices"
    in_pieces, some_lie = "", False
    for spec, tensor in zip(layout.manifest.specs, tensors, strict=True):
        if tensor.dtype is not TORCH_DTYPES[spec.dtype] or tensor.shape != spec.shape:
            return f"{spec.name} is stored otherwise than it is sent (a cast)"
        if runs_of(tensor) is None:
            in_pieces = in_pieces or spec.name
        else:
            some_lie = some_lie or bool(spec.nbytes)
    is_packed = in_pieces and (not some_lie or tensors[0].device.type == "cuda")
    return f"{in_pieces} is stored otherwise than it is sent (strides)" if is_packed else ""


def runs_of(tensor: torch.Tensor) -> _Runs | None:
    """Return the runs in which the bytes of a tensor lie in its order.

    None if there are too many or too short ones, or if other bytes are stored (conj, neg).
    """
    if tensor.is_conj() or tensor.is_neg():
        return None
    address, itemsize = tensor.data_ptr(), tensor.element_size()
    if tensor.is_contiguous():
        return _Runs([address], tensor.nbytes)
    inner = 1
    outer: list[tuple[int, int]] = []
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size == 1:
            continue
        if not outer and stride == inner:
            inner *= size
        else:
            outer.append((size, stride))
    count = math.prod(size for size, _ in outer)
    if count > MOST_RUNS or inner * itemsize < SHORTEST_RUN_NBYTES:
        return None
    steps = [[i * stride * itemsize for i in range(size)] for size, stride in reversed(outer)]
    return _Runs([address + sum(each) for each in itertools.product(*steps)], inner * itemsize)


def _place_of(tensor: torch.Tensor) -> _Place:
    strides = () if tensor.is_contiguous() else tensor.stride()
    return tensor.data_ptr(), strides, tensor.is_conj(), tensor.is_neg()


def _extent(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from the first to the last element of a tensor, as `uint8[nbytes]`."""
    steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    itemsize = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    begin = int(tensor.storage_offset()) * itemsize
    return flat.set_(tensor.untyped_storage(), begin, ((steps + 1) * itemsize,), (1,))


def _copies(
    into: torch.Tensor, tensor: torch.Tensor, part: TensorSlice
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the copies, targets and sources of equal shapes, of a part of a tensor's bytes."""
    itemsize, at = tensor.element_size(), 0
    begin, end = part.begin // itemsize, (part.begin + part.nbytes) // itemsize
    for source in _elements(tensor, begin, end):
        own = into[at : at + source.nbytes].view(tensor.dtype).view(source.shape)
        yield own, source
        at += source.nbytes


def _elements(tensor: torch.Tensor, begin: int, end: int) -> Iterator[torch.Tensor]:
    """Yield views of a tensor that are its elements from `begin` to `end`, in its order."""
    if (begin, end) == (0, tensor.numel()):
        yield tensor
        return
    inner = tensor.numel() // tensor.shape[0]
    (first, head), (last, tail) = divmod(begin, inner), divmod(end, inner)
    if first == last:
        yield from _elements(tensor[first], head, tail)
        return
    if head:
        yield from _elements(tensor[first], head, inner)
        first += 1
    if last > first:
        yield tensor[first:last]
    if tail:
        yield from _elements(tensor[last], 0, tail)


def _views(unit: CopyUnit, runs: Sequence[tuple[int, int, int]]) -> list[memoryview | bytes]:
    """Return the bytes of a unit in their order; `runs` are position, address and bytes."""
    views: list[memoryview | bytes] = []
    at = unit.start
    for position, address, nbytes in runs:
        begin, end = max(position, unit.start), min(position + nbytes, unit.stop)
        if begin >= end:
            continue
        if begin > at:
            views.append(bytes(begin - at))
        views.append(host_view(address + begin - position, end - begin))
        at = end
    if unit.stop > at:
        views.append(bytes(unit.stop - at))
    return views
