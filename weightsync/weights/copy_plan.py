"""Copy plans: the copies of a stream, compiled once for fixed memory and then replayed."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from weightsync.weights.fingerprint import mix64, xxh3, xxh3_parts
from weightsync.weights.layout import ALIGNMENT, CopyUnit, StreamLayout, TensorSlice
from weightsync.weights.shards import Block


@dataclass(frozen=True, slots=True)
class Memory:
    """Where the stream, or parts of it, lie in one address space.

    `tensors[i]` is `uint8[nbytes]` of tensor i. `flat` says that they lie as the stream lies, with
    its zeros between them, so that neighbours may be copied together.
    """

    holds_whole: ClassVar[bool] = True
    tensors: Sequence[torch.Tensor]
    flat: bool = False

    @classmethod
    def of_stream(cls, plan: StreamLayout, buffer: torch.Tensor) -> Memory:
        """Memory whose stream begins at `buffer` (`uint8[plan.nbytes]`)."""
        specs = plan.manifest.specs
        return cls(
            [
                buffer[start : start + spec.nbytes]
                for start, spec in zip(plan.offsets, specs, strict=True)
            ],
            flat=True,
        )

    def on_host(self) -> bool:
        """Whether every tensor is in host memory."""
        return all(tensor.device.type == "cpu" for tensor in self.tensors)

    def forget(self) -> None:
        """Let go of the memory, whoever still refers to this: the error of an update may."""
        object.__setattr__(self, "tensors", ())


@dataclass(frozen=True, slots=True)
class Copy:
    """One memmove."""

    target: int
    source: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class HostCopyUnit:
    """What one run copies, and the destination's bytes in stream order."""

    on_host: ClassVar[bool] = True
    copies: tuple[Copy, ...]
    held: tuple[memoryview | bytes, ...]

    def copy(self) -> None:
        """Copy the run."""
        for copy in self.copies:
            ctypes.memmove(copy.target, copy.source, copy.nbytes)

    def fingerprint(self) -> int:
        """Read the destination back and return its xxh3."""
        return stream_xxh3(self.held)


@dataclass(frozen=True, slots=True)
class HostCopies:
    """The copies of several runs, with no line of Python between them: each copy empties caches."""

    targets: tuple[int, ...]
    sources: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, runs: Sequence[HostCopyUnit]) -> HostCopies:
        """Return what `runs` copy, in their order."""
        copies = [copy for run in runs for copy in run.copies]
        return cls(
            tuple(copy.target for copy in copies),
            tuple(copy.source for copy in copies),
            tuple(copy.nbytes for copy in copies),
        )

    def run(self) -> list[int]:
        """Copy; nothing is fingerprinted."""
        deque(map(ctypes.memmove, self.targets, self.sources, self.sizes), maxlen=0)
        return []


@dataclass(frozen=True, slots=True)
class CopyAndHash:
    """The copies of several runs, and after the last of each run what fingerprints it.

    As little Python as can be between them, for the same reason.
    """

    steps: tuple[tuple[int, int, int, memoryview | None], ...]

    @classmethod
    def of(cls, runs: Sequence[HostCopyUnit]) -> CopyAndHash | None:
        """Return what `runs` do, in their order; None where one lies in several pieces."""
        steps: list[tuple[int, int, int, memoryview | None]] = []
        for run in runs:
            view = run.held[0]
            if len(run.held) > 1 or not isinstance(view, memoryview):
                return None
            steps += [(copy.target, copy.source, copy.nbytes, None) for copy in run.copies[:-1]]
            last = run.copies[-1]
            steps.append((last.target, last.source, last.nbytes, view))
        return cls(tuple(steps))

    def run(self) -> list[int]:
        """Copy, and return each run's xxh3, of its destination."""
        got: list[int] = []
        for target, source, nbytes, view in self.steps:
            ctypes.memmove(target, source, nbytes)
            if view is not None:
                got.append(xxh3(view))
        return got


class AddressMap:
    """Host addresses of a stream: one per tensor, or a slot that carries it from `chunk_start`."""

    def __init__(self, memory: Memory | None, slot: int = 0, chunk_start: int = 0) -> None:
        self._addresses = [t.data_ptr() for t in memory.tensors] if memory else None
        self._slot = slot - chunk_start
        self.flat = memory is None or memory.flat

    def address(self, piece: TensorSlice) -> int:
        """Where the first byte of `piece` is."""
        if self._addresses is None:
            return self._slot + piece.start
        return self._addresses[piece.index] + piece.begin


def compile_host(
    plan: StreamLayout, run: CopyUnit, target: AddressMap, source: AddressMap
) -> HostCopyUnit:
    """Plan one run between host memories."""
    copies: list[Copy] = []
    parts: list[tuple[int, int, int]] = []
    for piece in plan.pieces(run.start, run.stop):
        address = target.address(piece)
        copy = Copy(address, source.address(piece), piece.nbytes)
        append_copy(copies, copy, padded=target.flat and source.flat)
        parts.append((piece.start, address, piece.nbytes))
    return HostCopyUnit(tuple(copies), stream_views(run, parts, flat=target.flat))


def stream_views(
    run: CopyUnit, parts: list[tuple[int, int, int]], *, flat: bool
) -> tuple[memoryview | bytes, ...]:
    """The bytes of a run in stream order, with the zeros between its tensors."""
    if flat:
        start, address, _ = parts[0]
        return (host_view(address - (start - run.start), run.stop - run.start),)
    views: list[memoryview | bytes] = []
    at = run.start
    for start, address, nbytes in parts:
        if start > at:
            views.append(bytes(start - at))
        views.append(host_view(address, nbytes))
        at = start + nbytes
    if run.stop > at:
        views.append(bytes(run.stop - at))
    return tuple(views)


def stream_xxh3(views: tuple[memoryview | bytes, ...]) -> int:
    """Return the xxh3 of what `stream_views` gave."""
    if len(views) == 1 and isinstance(views[0], memoryview):
        return xxh3(views[0])
    return xxh3_parts(views)


@dataclass(frozen=True, slots=True)
class DeviceCopyUnit:
    """A run with a GPU on at least one end: torch copies, in order on the current stream.

    The fingerprint is mix64 of the destination's bytes, or xxh3 of the source's where those are
    on the host (a slot that a GPU reads from).
    """

    on_host: ClassVar[bool] = False
    targets: tuple[torch.Tensor, ...]
    sources: tuple[torch.Tensor, ...]
    gaps: tuple[tuple[int, int], ...]

    def copy(self) -> None:
        """Enqueue the copies of the run."""
        torch._foreach_copy_(list(self.targets), list(self.sources), non_blocking=True)

    def gpus(self) -> set[torch.device]:
        """Where copies of this run may be at work."""
        return {t.device for t in (*self.targets, *self.sources) if t.device.type == "cuda"}

    def fingerprint(self) -> int:
        """Wait for the copies and fingerprint."""
        if self.sources and self.sources[0].device.type == "cpu":
            return xxh3_parts(interleaved(self.sources, self.gaps))
        return mix64(joined(self.targets, self.gaps))


def joined(tensors: Sequence[torch.Tensor], gaps: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the bytes of a run in one tensor; gaps are zeros (before which tensor, how many)."""
    parts = list(tensors)
    for i, nbytes in reversed(gaps):
        parts.insert(i, torch.zeros(nbytes, dtype=torch.uint8, device=tensors[0].device))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def interleaved(
    tensors: Sequence[torch.Tensor], gaps: Sequence[tuple[int, int]]
) -> list[memoryview | bytes]:
    """Return the bytes of a run on the host, part after part; gaps as in `joined`."""
    parts: list[memoryview | bytes] = [host_view(t.data_ptr(), t.numel()) for t in tensors]
    for i, nbytes in reversed(gaps):
        parts.insert(i, bytes(nbytes))
    return parts


class DeviceCompiler:
    """Turns runs into torch copies; `source` is one tensor per tensor, or a slot."""

    def __init__(self, plan: StreamLayout, destination: Memory) -> None:
        self._plan = plan
        self._targets = destination.tensors

    def compile(
        self,
        run: CopyUnit,
        memory: Memory | None,
        slot: torch.Tensor | None = None,
        chunk_start: int = 0,
    ) -> DeviceCopyUnit:
        """Plan one run from `memory`, or from a `slot` with the stream from `chunk_start` on."""
        targets, sources, gaps = [], [], []
        at = run.start
        for i, piece in enumerate(self._plan.pieces(run.start, run.stop)):
            if piece.start > at:
                gaps.append((i, piece.start - at))
            end = piece.begin + piece.nbytes
            targets.append(self._targets[piece.index][piece.begin : end])
            if memory is not None:
                sources.append(memory.tensors[piece.index][piece.begin : end])
            elif slot is not None:
                place = piece.start - chunk_start
                sources.append(slot[place : place + piece.nbytes])
            at = piece.start + piece.nbytes
        if run.stop > at:
            gaps.append((len(targets), run.stop - at))
        return DeviceCopyUnit(tuple(targets), tuple(sources), tuple(gaps))


class CompiledUnit(Protocol):
    """A run whose copies are planned; one that is not `on_host` must be waited for."""

    on_host: ClassVar[bool]

    def copy(self) -> None: ...

    def fingerprint(self) -> int: ...


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Runs that follow one another from `start` of the stream on, and what is done with them.

    `joined` does the same for all of them, where they are on the host.
    """

    start: int
    runs: Sequence[CompiledUnit]
    verify: bool
    joined: HostCopies | CopyAndHash | None

    @classmethod
    def of(cls, start: int, runs: Sequence[CompiledUnit], *, verify: bool) -> CopyPlan:
        """Plan what is done with `runs`: copies, and fingerprints with `verify`."""
        on_host = [run for run in runs if isinstance(run, HostCopyUnit)]
        kind = CopyAndHash if verify else HostCopies
        joined = kind.of(on_host) if len(on_host) == len(runs) else None
        return cls(start, runs, verify, joined)

    def run(self) -> list[int]:
        """Copy, and return the fingerprints of what the runs' destinations hold, if asked for."""
        if self.joined is not None:
            return self.joined.run()
        got: list[int] = []
        for run in self.runs:
            run.copy()
            if self.verify:
                got.append(run.fingerprint())
        return got


class UnitCompiler:
    """Plans runs into one destination, from host or GPU memory alike.

    The source is `memory`, or else a slot given with each run.
    """

    def __init__(
        self, plan: StreamLayout, destination: Memory, memory: Memory | None = None
    ) -> None:
        if not destination.holds_whole:
            raise ValueError("this memory holds shards of tensors; compile with compiler_for()")
        self._plan = plan
        self._on_host = destination.on_host() and (memory is None or memory.on_host())
        self._memory = memory
        self._target = AddressMap(destination) if self._on_host else None
        self._source = AddressMap(memory) if self._on_host and memory else None
        self._device = DeviceCompiler(plan, destination)

    def compile(
        self, run: CopyUnit, slot: torch.Tensor | None = None, chunk_start: int = 0
    ) -> HostCopyUnit | DeviceCopyUnit:
        """Plan one run; `slot` carries the stream from `chunk_start` on."""
        if self._target is not None and (slot is None or slot.device.type == "cpu"):
            address = slot.data_ptr() if slot is not None else 0
            source = self._source or AddressMap(None, address, chunk_start)
            return compile_host(self._plan, run, self._target, source)
        return self._device.compile(run, self._memory, slot, chunk_start)


def host_view(address: int, nbytes: int) -> memoryview:
    """View host memory as bytes; the caller keeps it alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def zero(address: int, nbytes: int) -> None:
    """Clear host memory."""
    ctypes.memset(address, 0, nbytes)


def append_copy(copies: list[Copy], copy: Copy, *, padded: bool) -> None:
    """Add a copy, joined to the one before where both ends follow on."""
    if copies:
        last = copies[-1]
        gap = copy.target - last.target - last.nbytes
        follows = gap == copy.source - last.source - last.nbytes
        if follows and (gap == 0 or (padded and 0 < gap < ALIGNMENT)):
            copies[-1] = Copy(last.target, last.source, last.nbytes + gap + copy.nbytes)
            return
    copies.append(copy)


_FEW_ROWS = 4
"""Up to here a `memmove` for each row is quicker than one call of torch (measured)."""
_ALL_BITS = (1 << 64) - 1
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
Pair = tuple[torch.Tensor, torch.Tensor]
"""Target and source of many rows: strided views of equal shape as integers of one width."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which bytes of tensor `index` one part of a ShardMemory holds."""

    index: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class ShardMemory(Memory):
    """`tensors[i]` is `uint8[…]` of `shares[i]`; a full tensor may have several shares, or none.

    `flat` says that what lies between the tensors is nobody's.
    """

    holds_whole: ClassVar[bool] = False
    shares: Sequence[Share] = ()


@dataclass(frozen=True, slots=True)
class HostShardRun:
    """What one run copies between host memories, and the source's bytes in stream order."""

    on_host: ClassVar[bool] = True
    copies: tuple[Copy, ...]
    grids: tuple[Pair, ...]
    arrived: tuple[memoryview | bytes, ...]

    def copy(self) -> None:
        """Copy the run's slices."""
        for copy in self.copies:
            ctypes.memmove(copy.target, copy.source, copy.nbytes)
        for target, source in self.grids:
            target.copy_(source)

    def holds(self) -> bool:
        """Read the shards back: whether they are the same slices of the source."""
        return not any(
            _memcmp(copy.target, copy.source, copy.nbytes) for copy in self.copies
        ) and all(torch.equal(*grid) for grid in self.grids)

    def fingerprint(self) -> int:
        """Return xxh3 of all that arrived, or its complement where the shards are not of it."""
        return _proof(stream_xxh3(self.arrived), holds=self.holds())


@dataclass(frozen=True, slots=True)
class DeviceShardRun:
    """A run with a GPU on at least one end.

    The fingerprint is of all that arrived: mix64 on a GPU, which the shards are compared with too,
    or xxh3 of a slot on the host, which they are not.
    """

    on_host: ClassVar[bool] = False
    pairs: tuple[Pair, ...]
    sources: tuple[torch.Tensor, ...]
    gaps: tuple[tuple[int, int], ...]

    def copy(self) -> None:
        """Enqueue the copies of the run."""
        if self.pairs:
            targets, sources = zip(*self.pairs, strict=True)
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def gpus(self) -> set[torch.device]:
        """Where copies of this run may be at work."""
        ends = (end for pair in self.pairs for end in pair)
        return {end.device for end in (*ends, *self.sources) if end.device.type == "cuda"}

    def holds(self) -> bool:
        """Wait for the copies and read the shards back, all with one wait."""
        different = [torch.ne(t.to(s.device), s).any() for t, s in self.pairs]
        return not different or not bool(torch.stack(different).any())

    def fingerprint(self) -> int:
        """Wait for the copies and fingerprint."""
        if self.sources[0].device.type == "cpu":
            return xxh3_parts(interleaved(self.sources, self.gaps))
        return _proof(mix64(joined(self.sources, self.gaps)), holds=self.holds())


class ShardCompiler:
    """Plans runs into shards; the source is `memory`, or else a slot given with each run."""

    def __init__(
        self, plan: StreamLayout, destination: ShardMemory, memory: Memory | None = None
    ) -> None:
        self._plan = plan
        self._flat = destination.flat
        self._on_host = destination.on_host() and (memory is None or memory.on_host())
        self._memory = memory
        self._source = AddressMap(memory) if self._on_host and memory else None
        self._shares: dict[int, list[tuple[torch.Tensor, tuple[Block, ...]]]] = {}
        for tensor, share in zip(destination.tensors, destination.shares, strict=True):
            self._shares.setdefault(share.index, []).append((tensor, share.blocks))

    def compile(
        self, run: CopyUnit, slot: torch.Tensor | None = None, chunk_start: int = 0
    ) -> HostShardRun | DeviceShardRun:
        """Plan one run; `slot` carries the stream from `chunk_start` on."""
        # A tensor made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            if self._on_host and (slot is None or slot.device.type == "cpu"):
                address = slot.data_ptr() if slot is not None else 0
                return self._on_the_host(
                    run, self._source or AddressMap(None, address, chunk_start)
                )
            return self._on_devices(run, slot, chunk_start)

    def _on_the_host(self, run: CopyUnit, places: AddressMap) -> HostShardRun:
        copies: list[Copy] = []
        grids: list[Pair] = []
        parts: list[tuple[int, int, int]] = []
        for piece in self._plan.pieces(run.start, run.stop):
            address = places.address(piece)
            parts.append((piece.start, address, piece.nbytes))
            for tensor, block in self._blocks(piece):
                source = address - piece.begin + block.source
                target = tensor.data_ptr() + block.target
                if block.height > _FEW_ROWS:
                    grids.append(_host_grid(target, source, block))
                    continue
                for i in range(block.height):
                    row = Copy(
                        target + i * block.target_stride,
                        source + i * block.source_stride,
                        block.width,
                    )
                    append_copy(copies, row, padded=self._flat and places.flat)
        arrived = stream_views(run, parts, flat=places.flat)
        return HostShardRun(tuple(copies), tuple(grids), arrived)

    def _on_devices(
        self, run: CopyUnit, slot: torch.Tensor | None, chunk_start: int
    ) -> DeviceShardRun:
        pairs: list[Pair] = []
        sources: list[torch.Tensor] = []
        gaps: list[tuple[int, int]] = []
        at = run.start
        for i, piece in enumerate(self._plan.pieces(run.start, run.stop)):
            if piece.start > at:
                gaps.append((i, piece.start - at))
            sources.append(self._source_of(piece, slot, chunk_start))
            for tensor, block in self._blocks(piece):
                pairs.append(_device_grids(tensor, sources[-1], block, piece.begin))
            at = piece.start + piece.nbytes
        if run.stop > at:
            gaps.append((len(sources), run.stop - at))
        return DeviceShardRun(tuple(pairs), tuple(sources), tuple(gaps))

    def _source_of(
        self, piece: TensorSlice, slot: torch.Tensor | None, chunk_start: int
    ) -> torch.Tensor:
        if self._memory is not None:
            return self._memory.tensors[piece.index][piece.begin : piece.begin + piece.nbytes]
        if slot is None:
            raise ValueError("a run needs a slot where the compiler has no memory to copy from")
        return slot[piece.start - chunk_start :][: piece.nbytes]

    def _blocks(self, piece: TensorSlice) -> Iterator[tuple[torch.Tensor, Block]]:
        for tensor, blocks in self._shares.get(piece.index, ()):
            for block in blocks:
                for part in block.within(piece.begin, piece.begin + piece.nbytes):
                    yield tensor, part


def compiler_for(
    plan: StreamLayout, destination: Memory, memory: Memory | None = None
) -> UnitCompiler | ShardCompiler:
    """Return what plans runs into `destination`, whole tensors or shards."""
    if isinstance(destination, ShardMemory):
        return ShardCompiler(plan, destination, memory)
    return UnitCompiler(plan, destination, memory)


def _proof(arrived: int, *, holds: bool) -> int:
    """A complement fits nothing that was sent, so the tensors of the run are named."""
    return arrived if holds else arrived ^ _ALL_BITS


def _word(*places: int) -> torch.dtype:
    """The widest word of which all these are multiples."""
    return next(word for word in _WORDS if not any(place % word.itemsize for place in places))


def _host_grid(target: int, source: int, block: Block) -> Pair:
    word = _word(block.width, block.target_stride, block.source_stride)
    views = []
    for address, stride in ((target, block.target_stride), (source, block.source_stride)):
        extent = (block.height - 1) * stride + block.width
        words = torch.frombuffer((ctypes.c_ubyte * extent).from_address(address), dtype=word)
        views.append(_grid(words, block, stride))
    return views[0], views[1]


def _device_grids(target: torch.Tensor, source: torch.Tensor, block: Block, begin: int) -> Pair:
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
    size = words.element_size()
    # as_strided counts from the beginning of the storage.
    start = words.storage_offset()
    return words.as_strided((block.height, block.width // size), (stride // size, 1), start)
