"""Copy plans: the copies of a stream, compiled once for fixed memory and executed in every update.

Compiled units hold addresses. While the caller uses a unit, it keeps the unit's memory alive and at
the same address. Units with an end on a GPU (`DeviceCopyUnit`) have run with CPU tensors only.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import ClassVar, NamedTuple, Protocol, TypeVar

import torch

from weightsync.weights.copying.fingerprint import mix64, xxh3, xxh3_parts
from weightsync.weights.copying.layout import ALIGNMENT, CopyUnit, StreamLayout, TensorSlice
from weightsync.weights.copying.shards import Block, Slice

S = TypeVar("S")
T = TypeVar("T")

_FEW_ROWS = 4
"""Up to this many rows, a memmove for each is faster than one call of torch (measured)."""
_SMALL_NBYTES = 32 << 10
"""Up to this many bytes, one call of torch for several copies is faster (measured)."""
_ALL_BITS = (1 << 64) - 1
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
Pair = tuple[torch.Tensor, torch.Tensor]
"""Target and source of many rows: strided views of equal shape as integers of one width."""


@dataclass(frozen=True, slots=True)
class Share:
    """The blocks of tensor `index` that one tensor of a Memory of shards holds.

    `box` is the part of the tensor that they are, where that is known.
    """

    index: int
    blocks: tuple[Block, ...]
    box: Slice | None = None


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Memory:
    """The memory of a stream's tensors, or of their shards, in one address space.

    Without `shares`, `tensors[i]` is `uint8[nbytes]` of tensor i. With `flat` these have the
    stream's offsets, zeros between them included, so that one copy can cover neighbours.

    Else `tensors[i]` is `uint8[nbytes]` of `shares[i]`: a full tensor may have several shares, or
    none. With `flat` the bytes between them are unused, so that copies may overwrite them.
    """

    tensors: Sequence[torch.Tensor]
    flat: bool = False
    shares: Sequence[Share] | None = None
    _devices: list[torch.device] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def of_stream(cls, layout: StreamLayout, buffer: torch.Tensor) -> Memory:
        """Return memory whose stream is `buffer` (`uint8[layout.nbytes]`), as views of it."""
        specs = layout.manifest.specs
        return cls(
            [
                buffer[start : start + spec.nbytes]
                for start, spec in zip(layout.offsets, specs, strict=True)
            ],
            flat=True,
        )

    @property
    def devices(self) -> Sequence[torch.device]:
        """The devices of the tensors, each once; asked of each tensor only once."""
        if not self._devices:
            self._devices.extend({tensor.device for tensor in self.tensors})
        return self._devices

    def on_host(self) -> bool:
        """Whether every tensor is in host memory."""
        return all(device.type == "cpu" for device in self.devices)

    def use_views(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have other views of the same bytes. What was compiled for their addresses stays valid."""
        object.__setattr__(self, "tensors", tensors)

    def forget(self) -> None:
        """Drop the tensors, so that the memory is freed though an error refers to this."""
        self.use_views(())


class Copy(NamedTuple):
    """One memmove: two host addresses and a number of bytes."""

    target: int
    source: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class HostCopyUnit:
    """The copies of one unit between host memories, into whole tensors or into `shards`.

    `views` are the bytes to fingerprint, in stream order: of whole tensors the target; of shards
    the source, all of it, also bytes of which no shard takes any.
    """

    on_host: ClassVar[bool] = True
    copies: tuple[Copy, ...]
    views: tuple[memoryview | bytes, ...]
    grids: tuple[Pair, ...] = ()
    shards: bool = False

    def copy(self) -> None:
        """Copy the unit's bytes; complete on return."""
        for copy in self.copies:
            ctypes.memmove(*copy)
        for target, source in self.grids:
            target.copy_(source)

    def holds(self) -> bool:
        """Read the targets back; return whether they equal the source."""
        same = not any(_memcmp(*copy) for copy in self.copies)
        return same and all(torch.equal(*grid) for grid in self.grids)

    def fingerprint(self) -> int:
        """Return the xxh3 of the whole tensors as read back, or of all bytes that arrived.

        Where shards differ from what arrived, its complement.
        """
        found = xxh3_parts(self.views)
        return _proof(found, holds=self.holds()) if self.shards else found


class HostCopies:
    """The memmoves of several units, executed without Python in between.

    Each copy evicts the caches, so interpreter work between copies would run on cold ones. From the
    second run on, small copies to places that follow one another are one call of torch: a memmove
    of 4 KiB by ctypes takes 1.6 times as long.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        self._has_run = False
        self._joined: tuple[list[Join], list[Copy]] | None = None

    @classmethod
    def of(cls, units: Sequence[HostCopyUnit]) -> HostCopies:
        """Return the copies of `units`, in their order."""
        return cls([copy for unit in units for copy in unit.copies])

    def run(self) -> list[int]:
        """Copy everything; returns no fingerprints."""
        if not self._has_run or _torch_is_watched():
            deque(starmap(ctypes.memmove, self._copies), maxlen=0)
            self._has_run = True
            return []
        if self._joined is None:
            self._joined = _join(self._copies)
        joins, others = self._joined
        for sources, target in joins:
            torch.cat(sources, out=target)
        deque(starmap(ctypes.memmove, others), maxlen=0)
        return []


Join = tuple[list[torch.Tensor], torch.Tensor]
"""Small pieces of host memory, and the place for all of them."""


def _join(copies: Sequence[Copy]) -> tuple[list[Join], list[Copy]]:
    """Return the runs of small copies to places that follow one another, and the other copies."""
    runs: list[list[Copy]] = []
    for copy in copies:
        last = runs[-1][-1] if runs else None
        follows = last is not None and last.target + last.nbytes == copy.target
        if follows and last is not None and max(last.nbytes, copy.nbytes) <= _SMALL_NBYTES:
            runs[-1].append(copy)
        else:
            runs.append([copy])
    joins: list[Join] = []
    with torch.inference_mode(False):  # a tensor made in it cannot be written outside of it
        for run in runs:
            if len(run) > 1:
                sources = [_bytes_at(copy.source, copy.nbytes) for copy in run]
                joins.append((sources, _bytes_at(run[0].target, sum(c.nbytes for c in run))))
    return joins, [run[0] for run in runs if len(run) == 1]


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


def _torch_is_watched() -> bool:
    """Whether a mode of torch sees the calls of this thread, and may replace what they do."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


@dataclass(frozen=True, slots=True)
class CopyAndHash:
    """The memmoves of several units, each unit fingerprinted after its last copy.

    With as little Python in between as possible, for the reason given at HostCopies. A step is
    target, source, bytes, and the destination's view to fingerprint after the copy, or None.
    """

    steps: tuple[tuple[int, int, int, memoryview | None], ...]

    @classmethod
    def of(cls, units: Sequence[HostCopyUnit]) -> CopyAndHash | None:
        """Return the steps of `units` in order, None where a destination is not contiguous."""
        steps: list[tuple[int, int, int, memoryview | None]] = []
        for unit in units:
            view = unit.views[0]
            if len(unit.views) > 1 or not isinstance(view, memoryview):
                return None
            steps += [(*copy, None) for copy in unit.copies[:-1]]
            steps.append((*unit.copies[-1], view))
        return cls(tuple(steps))

    def run(self) -> list[int]:
        """Copy, and return the xxh3 of each unit's destination."""
        got: list[int] = []
        for target, source, nbytes, view in self.steps:
            ctypes.memmove(target, source, nbytes)
            if view is not None:
                got.append(xxh3(view))
        return got


@dataclass(frozen=True, slots=True)
class Reads:
    """Fingerprints of several units that are read where they are, and not copied."""

    hashers: Sequence[Callable[[], int]]

    def run(self) -> list[int]:
        """Return the fingerprint of each unit."""
        return [hasher() for hasher in self.hashers]


class AddressMap:
    """Host addresses of a stream: of each tensor in `memory`, or of one chunk in a bucket.

    Without `memory`, `bucket` is the address at which the chunk begins, and `chunk_start` its first
    byte in the stream.
    """

    def __init__(self, memory: Memory | None, bucket: int = 0, chunk_start: int = 0) -> None:
        self._addresses = [t.data_ptr() for t in memory.tensors] if memory else None
        self._bucket = bucket - chunk_start
        self.flat = memory is None or memory.flat

    def address(self, part: TensorSlice) -> int:
        """Return the address of the first byte of `part`."""
        if self._addresses is None:
            return self._bucket + part.start
        return self._addresses[part.index] + part.begin


def compile_host(
    layout: StreamLayout, unit: CopyUnit, target: AddressMap, source: AddressMap
) -> HostCopyUnit:
    """Compile one unit of whole tensors between host memories."""
    copies: list[Copy] = []
    for part in layout.slices(unit.start, unit.stop):
        copy = Copy(target.address(part), source.address(part), part.nbytes)
        append_copy(copies, copy, padded=target.flat and source.flat)
    return HostCopyUnit(tuple(copies), stream_views(layout, unit, target))


def stream_views(
    layout: StreamLayout, unit: CopyUnit, places: AddressMap
) -> tuple[memoryview | bytes, ...]:
    """Return the bytes of a unit in stream order, with the zeros between its tensors.

    In flat memory the zeros are in memory too, and one view covers all.
    """
    slices, gaps = slices_and_gaps(layout, unit.start, unit.stop)
    if places.flat:
        begin = places.address(slices[0]) - (slices[0].start - unit.start)
        return (host_view(begin, unit.stop - unit.start),)
    views = [host_view(places.address(part), part.nbytes) for part in slices]
    return tuple(_with_gaps(views, gaps, bytes))


@dataclass(frozen=True, slots=True)
class DeviceCopyUnit:
    """The copies of one unit with a GPU on at least one end: `targets[i]` is one of `sources[i]`.

    torch copies them in order on the current stream. For whole tensors these are `uint8[nbytes]`,
    and the fingerprint is mix64 of the targets. For shards they are strided views, and the
    fingerprint is of all bytes that `arrived` (`uint8[nbytes]`). Where the bytes arrive in a bucket
    on the host it is their xxh3, and what a GPU holds is not read back.

    `gaps` are `(index of the tensor that follows, nbytes of zeros)`.
    """

    on_host: ClassVar[bool] = False
    targets: tuple[torch.Tensor, ...]
    sources: tuple[torch.Tensor, ...]
    gaps: tuple[tuple[int, int], ...]
    arrived: tuple[torch.Tensor, ...] | None = None

    def copy(self) -> None:
        """Enqueue the copies on the current stream; does not wait."""
        if self.targets:
            torch._foreach_copy_(list(self.targets), list(self.sources), non_blocking=True)

    def gpus(self) -> set[torch.device]:
        """Return the GPUs on which copies of this unit may still be in progress."""
        ends = (*self.targets, *self.sources, *(self.arrived or ()))
        return {end.device for end in ends if end.device.type == "cuda"}

    def holds(self) -> bool:
        """Wait for the copies; read the targets back and return whether they equal the source.

        One wait covers all of them.
        """
        pairs = zip(self.targets, self.sources, strict=True)
        different = [torch.ne(t.to(s.device), s).any() for t, s in pairs]
        return not different or not bool(torch.stack(different).any())

    def fingerprint(self) -> int:
        """Return the fingerprint, of shards that differ from what arrived its complement.

        Waits for the copies, except where it is of a bucket on the host.
        """
        arrived = self.sources if self.arrived is None else self.arrived
        if arrived and arrived[0].device.type == "cpu":
            views: list[memoryview] = [host_view(t.data_ptr(), t.numel()) for t in arrived]
            return xxh3_parts(_with_gaps(views, self.gaps, bytes))
        if self.arrived is None:
            return mix64(joined(self.targets, self.gaps))
        return _proof(mix64(joined(self.arrived, self.gaps)), holds=self.holds())


def joined(tensors: Sequence[torch.Tensor], gaps: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the bytes of a unit as one `uint8[nbytes]`; `gaps` as in DeviceCopyUnit."""
    device = tensors[0].device
    parts = _with_gaps(
        tensors, gaps, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8, device=device)
    )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def slices_and_gaps(
    layout: StreamLayout, start: int, stop: int
) -> tuple[list[TensorSlice], list[tuple[int, int]]]:
    """Return the tensor slices between two bytes of the stream, and `gaps` as in DeviceCopyUnit."""
    slices = list(layout.slices(start, stop))
    gaps, at = [], start
    for i, part in enumerate(slices):
        if part.start > at:
            gaps.append((i, part.start - at))
        at = part.start + part.nbytes
    if stop > at:
        gaps.append((len(slices), stop - at))
    return slices, gaps


def _with_gaps(
    parts: Sequence[S], gaps: Sequence[tuple[int, int]], zeros: Callable[[int], T]
) -> list[S | T]:
    """Return the parts of a unit in order, with `zeros(nbytes)` in its gaps."""
    filled: list[S | T] = list(parts)
    for i, nbytes in reversed(gaps):
        filled.insert(i, zeros(nbytes))
    return filled


class CompiledUnit(Protocol):
    """A unit whose copies are compiled. Unless `on_host`, the caller waits for the device."""

    on_host: ClassVar[bool]

    def copy(self) -> None:
        """Copy, or enqueue the copies on the current stream."""

    def fingerprint(self) -> int:
        """Return the fingerprint of the unit, after its copies."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Compiled units that follow one another from byte `start` of the stream.

    `verify` says whether they are fingerprinted. `joined` executes all of them at once, where all
    copy whole tensors on the host, or instead of them.
    """

    start: int
    units: Sequence[CompiledUnit]
    verify: bool
    joined: HostCopies | CopyAndHash | Reads | None

    @classmethod
    def of(cls, start: int, units: Sequence[CompiledUnit], *, verify: bool) -> CopyPlan:
        """Return the CopyPlan that copies `units`, and with `verify` fingerprints them."""
        on_host = [unit for unit in units if isinstance(unit, HostCopyUnit) and not unit.shards]
        kind = CopyAndHash if verify else HostCopies
        joined = kind.of(on_host) if len(on_host) == len(units) else None
        return cls(start, units, verify, joined)

    def run(self) -> list[int]:
        """Copy all units; return their fingerprints with `verify`, else an empty list.

        Complete on return for units on the host; the caller waits for a GPU.
        """
        if self.joined is not None:
            return self.joined.run()
        got: list[int] = []
        for unit in self.units:
            unit.copy()
            if self.verify:
                got.append(unit.fingerprint())
        return got


class UnitCompiler:
    """Compiles units into whole tensors or shards, in host or GPU memory.

    The source is `memory`, or else a bucket given with each unit.
    """

    def __init__(
        self, layout: StreamLayout, destination: Memory, memory: Memory | None = None
    ) -> None:
        self._layout = layout
        self._destination = destination
        self._memory = memory
        on_host = destination.on_host() and (memory is None or memory.on_host())
        self._target = AddressMap(destination) if on_host else None
        self._source = AddressMap(memory) if on_host and memory else None
        self._shares: dict[int, list[tuple[torch.Tensor, tuple[Block, ...]]]] = {}
        if destination.shares is not None:
            for tensor, share in zip(destination.tensors, destination.shares, strict=True):
                self._shares.setdefault(share.index, []).append((tensor, share.blocks))

    def takes(self, unit: CopyUnit) -> bool:
        """Whether a byte of a unit has a place in the destination."""
        if self._destination.shares is None:
            return True
        parts = self._layout.slices(unit.start, unit.stop)
        return any(True for part in parts for _ in self._blocks(part))

    def compile(
        self, unit: CopyUnit, bucket: torch.Tensor | None = None, chunk_start: int = 0
    ) -> HostCopyUnit | DeviceCopyUnit:
        """Compile one unit; `bucket` holds the stream from byte `chunk_start`."""
        if self._target is None or (bucket is not None and bucket.device.type != "cpu"):
            return self.compile_on_devices(unit, bucket, chunk_start)
        address = bucket.data_ptr() if bucket is not None else 0
        source = self._source or AddressMap(None, address, chunk_start)
        if self._destination.shares is None:
            return compile_host(self._layout, unit, self._target, source)
        # A tensor made in inference mode cannot be written outside of it.
        with torch.inference_mode(False):
            return self._shards_on_host(unit, source)

    def compile_on_devices(
        self, unit: CopyUnit, bucket: torch.Tensor | None = None, chunk_start: int = 0
    ) -> DeviceCopyUnit:
        """Compile one unit as `compile` does, for torch to copy between any devices."""
        slices, gaps = slices_and_gaps(self._layout, unit.start, unit.stop)
        with torch.inference_mode(False):
            arrived = [self._source_of(part, bucket, chunk_start) for part in slices]
            if self._destination.shares is None:
                targets = [_part(self._destination.tensors, part) for part in slices]
                return DeviceCopyUnit(tuple(targets), tuple(arrived), tuple(gaps))
            pairs = [
                _device_grids(tensor, source, block, part.begin)
                for part, source in zip(slices, arrived, strict=True)
                for tensor, block in self._blocks(part)
            ]
        ends = [tuple(end) for end in zip(*pairs, strict=True)] or [(), ()]
        return DeviceCopyUnit(ends[0], ends[1], tuple(gaps), tuple(arrived))

    def _whole_on_host(self, unit: CopyUnit, places: AddressMap) -> HostCopyUnit | None:
        """Compile a unit whose bytes all have one contiguous place; None where some have not.

        Read back there, its bytes have the fingerprint of the unit: nothing else is compared.
        """
        slices, gaps = slices_and_gaps(self._layout, unit.start, unit.stop)
        copies: list[Copy] = []
        for part in slices:
            found = list(self._blocks(part))
            if len(found) != 1 or found[0][1].height != 1 or found[0][1].width != part.nbytes:
                return None
            tensor, block = found[0]
            copies.append(Copy(tensor.data_ptr() + block.target, places.address(part), part.nbytes))
        views = [host_view(copy.target, copy.nbytes) for copy in copies]
        joined: list[Copy] = []
        for copy in copies:
            append_copy(joined, copy, padded=False)
        return HostCopyUnit(tuple(joined), tuple(_with_gaps(views, gaps, bytes)))

    def _shards_on_host(self, unit: CopyUnit, places: AddressMap) -> HostCopyUnit:
        whole = self._whole_on_host(unit, places)
        if whole is not None:
            return whole
        copies: list[Copy] = []
        grids: list[Pair] = []
        flat = self._destination.flat and places.flat
        ended = 0  # the address after the last tensor that was copied to its end
        for part in self._layout.slices(unit.start, unit.stop):
            begin = places.address(part) - part.begin
            for tensor, block in self._blocks(part):
                source, target = begin + block.source, tensor.data_ptr() + block.target
                if block.height > _FEW_ROWS:
                    grids.append(_host_grid(target, source, block))
                    continue
                for i in range(block.height):
                    row = Copy(
                        target + i * block.target_stride,
                        source + i * block.source_stride,
                        block.width,
                    )
                    # Only padding is overwritten: rows may be those of another unit.
                    padded = flat and bool(copies) and sum(copies[-1][::2]) == ended
                    padded = padded and row.target == tensor.data_ptr()
                    append_copy(copies, row, padded=padded)
                    if row.target + row.nbytes == tensor.data_ptr() + tensor.numel():
                        ended = row.target + row.nbytes
        arrived = stream_views(self._layout, unit, places)
        return HostCopyUnit(tuple(copies), arrived, tuple(grids), shards=True)

    def _source_of(
        self, part: TensorSlice, bucket: torch.Tensor | None, chunk_start: int
    ) -> torch.Tensor:
        if self._memory is not None:
            return _part(self._memory.tensors, part)
        if bucket is None:
            raise ValueError("a unit needs a bucket where the compiler has no memory to copy from")
        return bucket[part.start - chunk_start :][: part.nbytes]

    def _blocks(self, part: TensorSlice) -> Iterator[tuple[torch.Tensor, Block]]:
        for tensor, blocks in self._shares.get(part.index, ()):
            for block in blocks:
                for rows in block.within(part.begin, part.begin + part.nbytes):
                    yield tensor, rows


def _part(tensors: Sequence[torch.Tensor], part: TensorSlice) -> torch.Tensor:
    return tensors[part.index][part.begin : part.begin + part.nbytes]


def host_view(address: int, nbytes: int) -> memoryview:
    """View host memory as writable bytes; the caller keeps the memory alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def zero(address: int, nbytes: int) -> None:
    """Fill host memory with zeros."""
    ctypes.memset(address, 0, nbytes)


def append_copy(copies: list[Copy], copy: Copy, *, padded: bool) -> None:
    """Append a copy, merged with the last one where both continue at the same distance.

    `padded`: the bytes between tensors may be copied too, up to `ALIGNMENT` of them.
    """
    if copies:
        last = copies[-1]
        gap = copy.target - last.target - last.nbytes
        follows = gap == copy.source - last.source - last.nbytes
        if follows and (gap == 0 or (padded and 0 < gap < ALIGNMENT)):
            copies[-1] = Copy(last.target, last.source, last.nbytes + gap + copy.nbytes)
            return
    copies.append(copy)


def _proof(arrived: int, *, holds: bool) -> int:
    """Return the fingerprint, complemented unless the shards hold the bytes that arrived.

    The complement differs from the sender's fingerprint, so that the receiver names the tensors.
    """
    return arrived if holds else arrived ^ _ALL_BITS


def _word(*places: int) -> torch.dtype:
    """Return the widest integer dtype whose size divides all these numbers of bytes."""
    return next(word for word in _WORDS if not any(place % word.itemsize for place in places))


def _host_grid(target: int, source: int, block: Block) -> Pair:
    """Return the views of a block at two host addresses."""
    word = _word(block.width, block.target_stride, block.source_stride)
    views = []
    for address, stride in ((target, block.target_stride), (source, block.source_stride)):
        extent = (block.height - 1) * stride + block.width
        words = torch.frombuffer((ctypes.c_ubyte * extent).from_address(address), dtype=word)
        views.append(_grid(words, block, stride))
    return views[0], views[1]


def _device_grids(target: torch.Tensor, source: torch.Tensor, block: Block, begin: int) -> Pair:
    """Return the views of a block; `source` holds the full tensor from byte `begin`."""
    ends = (
        (target[block.target :], block.target_stride),
        (source[block.source - begin :], block.source_stride),
    )
    places = [int(place) for flat, _ in ends for place in (flat.data_ptr(), flat.storage_offset())]
    word = _word(block.width, block.target_stride, block.source_stride, *places)
    views = []
    for flat, stride in ends:
        extent = (block.height - 1) * stride + block.width
        views.append(_grid(flat[:extent].view(word), block, stride))
    return views[0], views[1]


def _grid(words: torch.Tensor, block: Block, stride: int) -> torch.Tensor:
    """View `words` as the rows of a block, `stride` bytes apart."""
    size = words.element_size()
    # as_strided counts from the beginning of the storage.
    start = words.storage_offset()
    return words.as_strided((block.height, block.width // size), (stride // size, 1), start)
