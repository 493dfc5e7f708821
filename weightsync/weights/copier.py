"""Copies of a stream's runs, planned once for fixed memory and replayed every update.

On the host a run is a few `memmove`s: one thread, no OpenMP, the interpreter lock released, and the
destination still in cache when it is fingerprinted. With a GPU on either end torch copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weightsync.weights.buckets import ALIGNMENT, Plan, Run
from weightsync.weights.fingerprint import mix64, xxh3, xxh3_parts


@dataclass(frozen=True, slots=True)
class Memory:
    """Where the stream, or parts of it, lie in one address space.

    `tensors[i]` is `uint8[nbytes]` of tensor i. `flat` says that they lie as the stream lies, with
    its zeros between them, so that neighbours may be copied together.
    """

    tensors: Sequence[torch.Tensor]
    flat: bool = False

    @classmethod
    def of_stream(cls, plan: Plan, buffer: torch.Tensor) -> Memory:
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


@dataclass(frozen=True, slots=True)
class Copy:
    """One memmove."""

    target: int
    source: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class HostRun:
    """What one run copies, and the destination's bytes in stream order."""

    copies: tuple[Copy, ...]
    held: tuple[memoryview | bytes, ...]

    def copy(self) -> None:
        """Copy the run."""
        for copy in self.copies:
            ctypes.memmove(copy.target, copy.source, copy.nbytes)

    def fingerprint(self) -> int:
        """Read the destination back and return its xxh3."""
        if len(self.held) == 1 and isinstance(self.held[0], memoryview):
            return xxh3(self.held[0])
        return xxh3_parts(self.held)


class RunSource:
    """Addresses of the source of one run: either its place in a slot, or one per tensor."""

    def __init__(self, memory: Memory | None, slot: int = 0, chunk_start: int = 0) -> None:
        """`memory`, or the address of a `slot` that carries the stream from `chunk_start`."""
        self._addresses = [t.data_ptr() for t in memory.tensors] if memory else None
        self._slot = slot - chunk_start
        self.flat = memory is None or memory.flat

    def address(self, index: int, begin: int, start: int) -> int:
        """Where byte `begin` of tensor `index` is; it lies at `start` in the stream."""
        if self._addresses is None:
            return self._slot + start
        return self._addresses[index] + begin


class HostCompiler:
    """Turns runs into memmoves for one source and one destination, both host memory."""

    def __init__(self, plan: Plan, destination: Memory) -> None:
        self._plan = plan
        self._targets = [t.data_ptr() for t in destination.tensors]
        self._flat = destination.flat

    def compile(self, run: Run, source: RunSource) -> HostRun:
        """Plan one run."""
        copies: list[Copy] = []
        held: list[tuple[int, int]] = []
        for piece in self._plan.pieces(run.start, run.stop):
            target = self._targets[piece.index] + piece.begin
            _append(
                copies,
                Copy(target, source.address(piece.index, piece.begin, piece.start), piece.nbytes),
                padded=self._flat and source.flat,
            )
            held.append((target, piece.nbytes))
        return HostRun(tuple(copies), self._held(run, held))

    def _held(self, run: Run, places: list[tuple[int, int]]) -> tuple[memoryview | bytes, ...]:
        if self._flat and places:
            first = next(self._plan.pieces(run.start, run.stop))
            return (host_view(places[0][0] - (first.start - run.start), run.stop - run.start),)
        views: list[memoryview | bytes] = []
        at = run.start
        for piece, (address, nbytes) in zip(
            self._plan.pieces(run.start, run.stop), places, strict=True
        ):
            if piece.start > at:
                views.append(bytes(piece.start - at))
            views.append(host_view(address, nbytes))
            at = piece.start + piece.nbytes
        if run.stop > at:
            views.append(bytes(run.stop - at))
        return tuple(views)


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """A run with a GPU on at least one end: torch copies, in order on the current stream.

    The fingerprint is mix64 of the destination's bytes, or xxh3 of the source's where those are
    on the host (a slot that a GPU reads from).
    """

    targets: tuple[torch.Tensor, ...]
    sources: tuple[torch.Tensor, ...]
    gaps: tuple[tuple[int, int], ...]

    def copy(self) -> None:
        """Enqueue the copies of the run."""
        torch._foreach_copy_(list(self.targets), list(self.sources), non_blocking=True)

    def fingerprint(self) -> int:
        """Wait for the copies and fingerprint."""
        if self.sources and self.sources[0].device.type == "cpu":
            return xxh3_parts(self._interleaved())
        return mix64(self._joined())

    def _joined(self) -> torch.Tensor:
        device = self.targets[0].device
        parts: list[torch.Tensor] = []
        gaps = dict(self.gaps)
        for i, target in enumerate(self.targets):
            if i in gaps:
                parts.append(torch.zeros(gaps[i], dtype=torch.uint8, device=device))
            parts.append(target)
        if len(self.targets) in gaps:
            parts.append(torch.zeros(gaps[len(self.targets)], dtype=torch.uint8, device=device))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _interleaved(self) -> list[memoryview | bytes]:
        gaps = dict(self.gaps)
        parts: list[memoryview | bytes] = []
        for i, source in enumerate(self.sources):
            if i in gaps:
                parts.append(bytes(gaps[i]))
            parts.append(host_view(source.data_ptr(), source.numel()))
        if len(self.sources) in gaps:
            parts.append(bytes(gaps[len(self.sources)]))
        return parts


class DeviceCompiler:
    """Turns runs into torch copies; `source` is one tensor per tensor, or a slot."""

    def __init__(self, plan: Plan, destination: Memory) -> None:
        self._plan = plan
        self._targets = destination.tensors

    def compile(
        self,
        run: Run,
        memory: Memory | None,
        slot: torch.Tensor | None = None,
        chunk_start: int = 0,
    ) -> DeviceRun:
        """Plan one run from `memory`, or from a `slot` that carries the stream from `chunk_start`."""
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
        return DeviceRun(tuple(targets), tuple(sources), tuple(gaps))


CompiledRun = HostRun | DeviceRun


class RunCompiler:
    """Plans runs into one destination, from host or GPU memory alike.

    The source is `memory`, or else a slot given with each run.
    """

    def __init__(self, plan: Plan, destination: Memory, memory: Memory | None = None) -> None:
        self._memory = memory
        self._source = RunSource(memory) if memory else None
        self._on_host = destination.on_host() and (memory is None or memory.on_host())
        self._host = HostCompiler(plan, destination)
        self._device = DeviceCompiler(plan, destination)

    def compile(
        self, run: Run, slot: torch.Tensor | None = None, chunk_start: int = 0
    ) -> CompiledRun:
        """Plan one run; `slot` carries the stream from `chunk_start` on."""
        if self._on_host and (slot is None or slot.device.type == "cpu"):
            address = slot.data_ptr() if slot is not None else 0
            source = self._source or RunSource(None, address, chunk_start)
            return self._host.compile(run, source)
        return self._device.compile(run, self._memory, slot, chunk_start)


def host_view(address: int, nbytes: int) -> memoryview:
    """View host memory as bytes; the caller keeps it alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def zero(address: int, nbytes: int) -> None:
    """Clear host memory."""
    ctypes.memset(address, 0, nbytes)


def _append(copies: list[Copy], copy: Copy, *, padded: bool) -> None:
    """Add a copy, joined to the one before where both ends follow on."""
    if copies:
        last = copies[-1]
        gap = copy.target - last.target - last.nbytes
        follows = gap == copy.source - last.source - last.nbytes
        if follows and (gap == 0 or (padded and 0 < gap < ALIGNMENT)):
            copies[-1] = Copy(last.target, last.source, last.nbytes + gap + copy.nbytes)
            return
    copies.append(copy)
