"""Copies of a stream's runs into shards: of each full tensor the local slice alone.

A slice of rows is a few `memmove`s. A slice of columns is a strided copy by torch, over the widest
words that fit: of 512 KiB in rows of 1 to 64 KiB it copies the half in 3 to 5 us, one `memmove` a
row takes 4 us for 8 rows and 190 for 512 (measured). Tensors are cut into runs at any byte, so a
run copies the end of a row, whole rows at once, and the beginning of another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from weightsync.weights.buckets import CopyUnit, StreamLayout, TensorSlice
from weightsync.weights.copier import (
    AddressMap,
    Copy,
    Memory,
    UnitCompiler,
    append_copy,
    interleaved,
    joined,
    stream_views,
    stream_xxh3,
)
from weightsync.weights.fingerprint import mix64, xxh3_parts
from weightsync.weights.shards import Block

_FEW_ROWS = 4
"""Up to here a `memmove` for each row is quicker than one call of torch (measured)."""
_ALL_BITS = (1 << 64) - 1
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
Pair = tuple[torch.Tensor, torch.Tensor]


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
class Grid:
    """Many rows at once between host memories.

    Where the target is contiguous, rows are compared by a second copy into `scratch`, memory that
    all runs share. That is twice as quick as comparing rows that lie apart (measured).
    """

    target: torch.Tensor
    source: torch.Tensor
    scratch: torch.Tensor | None

    def copy(self) -> None:
        """Copy the rows."""
        self.target.copy_(self.source)

    def holds(self) -> bool:
        """Whether the target is what the source is."""
        if self.scratch is None:
            return torch.equal(self.target, self.source)
        self.scratch.copy_(self.source)
        ends = self.target.data_ptr(), self.scratch.data_ptr()
        return not _memcmp(*ends, self.target.numel() * self.target.element_size())


@dataclass(frozen=True, slots=True)
class HostShardRun:
    """What one run copies between host memories, and the source's bytes in stream order."""

    on_host: ClassVar[bool] = True
    copies: tuple[Copy, ...]
    grids: tuple[Grid, ...]
    arrived: tuple[memoryview | bytes, ...]

    def copy(self) -> None:
        """Copy the run's slices."""
        for copy in self.copies:
            ctypes.memmove(copy.target, copy.source, copy.nbytes)
        for grid in self.grids:
            grid.copy()

    def holds(self) -> bool:
        """Read the shards back: whether they are the same slices of the source."""
        return not any(
            _memcmp(copy.target, copy.source, copy.nbytes) for copy in self.copies
        ) and all(grid.holds() for grid in self.grids)

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
        self._echo: torch.Tensor | None = None
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
        grids: list[Grid] = []
        parts: list[tuple[int, int, int]] = []
        for piece in self._plan.pieces(run.start, run.stop):
            address = places.address(piece)
            parts.append((piece.start, address, piece.nbytes))
            for tensor, block in self._blocks(piece):
                source = address - piece.begin + block.source
                target = tensor.data_ptr() + block.target
                if block.height > _FEW_ROWS:
                    grids.append(self._grid(target, source, block))
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

    def _grid(self, target: int, source: int, block: Block) -> Grid:
        word = _word(block.width, block.target_stride, block.source_stride)
        ends = [
            _grid(_host_words(address, block, stride, word), block, stride)
            for address, stride in ((target, block.target_stride), (source, block.source_stride))
        ]
        if block.target_stride != block.width:
            return Grid(ends[0], ends[1], None)
        if self._echo is None:
            self._echo = torch.empty(self._plan.run_nbytes, dtype=torch.uint8)
        scratch = self._echo[: block.width * block.height].view(word).view(block.height, -1)
        return Grid(ends[0], ends[1], scratch)

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


def _host_words(address: int, block: Block, stride: int, word: torch.dtype) -> torch.Tensor:
    extent = (block.height - 1) * stride + block.width
    return torch.frombuffer((ctypes.c_ubyte * extent).from_address(address), dtype=word)


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
