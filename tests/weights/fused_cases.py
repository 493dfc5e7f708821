"""Cases for any fused kernel: lists of tensors, and the expected results."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weightsync.cuda.tiles import Kernel, Tiles
from weightsync.specs import Manifest, TensorSpec
from weightsync.weights.copying.checksums import WORD
from weightsync.weights.copying.copy_plan import (
    CompiledUnit,
    DeviceCopyUnit,
    Memory,
    UnitCompiler,
    joined,
)
from weightsync.weights.copying.fingerprint import mix64, mixed_rows
from weightsync.weights.copying.fused import (
    Batch,
    FusedUnit,
    chunk_batches,
    fuse,
    hashers,
)
from weightsync.weights.copying.layout import StreamLayout

GUARD = 32
"""Bytes around every tensor, which must not change."""
UNTOUCHED = 0xA5


@dataclass(frozen=True)
class Case:
    """Sizes of tensors, how far each end lies from 16 bytes, and how the stream is cut."""

    sizes: tuple[int, ...]
    shifts: tuple[tuple[int, int], ...]
    unit_nbytes: int
    bucket_nbytes: int


class HostKernel:
    """Executes the tables of tiles byte by byte on the host."""

    def launch(
        self, tiles: Tiles, sums: torch.Tensor | None, *, copies: bool, reads_back: bool = True
    ) -> None:
        self._reads_back = reads_back
        for alignment, table in tiles.items():
            for row in table.tolist():
                source, target, read, stored, words, first, index, _ = row
                aligned = [end % alignment for end in (source, target)]
                assert not any(aligned + [n % min(alignment, WORD) for n in (read, stored)])
                self._do(source, target if copies else 0, read, stored, words, first, index, sums)

    def store(self, target: int, content: bytes) -> None:
        ctypes.memmove(target, content, len(content))

    def _do(
        self,
        source: int,
        target: int,
        read: int,
        stored: int,
        words: int,
        first: int,
        index: int,
        sums: torch.Tensor | None,
    ) -> None:
        held = ctypes.string_at(source, read) if read else b""
        if target:
            held = held.ljust(stored, b"\0")
            self.store(target, held)
            if self._reads_back:
                held = ctypes.string_at(target, len(held))
        if sums is not None and words:
            content = torch.frombuffer(
                bytearray(held.ljust(words * WORD, b"\0")), dtype=torch.uint8
            )
            total = mixed_rows(content.view(1, -1), first, 0)
            sums[index] += total - (total >> 63 << 64)


def check_case(case: Case, kernel: Kernel | None, device: str) -> None:
    """Copy, read and pack the tensors of `case`; compare with torch. `None`: the device's own."""
    names = (f"t{i}" for i in range(len(case.sizes)))
    specs = tuple(
        TensorSpec(n, "uint8", (size,)) for n, size in zip(names, case.sizes, strict=True)
    )
    plan = StreamLayout(
        Manifest(specs), unit_nbytes=case.unit_nbytes, bucket_nbytes=case.bucket_nbytes
    )
    sources = [
        _place(n, shift, device) for n, (shift, _) in zip(case.sizes, case.shifts, strict=True)
    ]
    targets = [
        _place(n, shift, device) for n, (_, shift) in zip(case.sizes, case.shifts, strict=True)
    ]
    for around, at in sources:
        around[at] = torch.randint(256, (at.stop - at.start,), dtype=torch.uint8).to(device)
    if not plan.units:
        return
    flats = [around[at] for around, at in sources]
    compiler = UnitCompiler(plan, Memory([around[at] for around, at in targets]), Memory(flats))
    units = [compiler.compile_on_devices(unit) for unit in plan.units]
    wanted = [mix64(joined(unit.sources, unit.gaps)) for unit in units]
    _check_copies(units, wanted, kernel)
    for (around, at), flat in zip(targets, flats, strict=True):
        assert torch.equal(around[at], flat)
        assert bool(
            (around[: at.start] == UNTOUCHED).all() and (around[at.stop :] == UNTOUCHED).all()
        )
    own = UnitCompiler(plan, Memory(flats), Memory(flats))
    read: list[CompiledUnit] = [own.compile_on_devices(unit) for unit in plan.units]
    for _ in range(2):
        assert [hasher() for hasher in hashers(read, kernel=kernel)] == wanted
    _check_packing(plan, flats, wanted, kernel)


def _check_copies(
    units: Sequence[DeviceCopyUnit], wanted: list[int], kernel: Kernel | None
) -> None:
    programs = fuse(units, verify=True, kernel=kernel)
    assert all(isinstance(program, FusedUnit) for program in programs)
    for _ in range(2):
        for target in (target for unit in units for target in unit.targets):
            target.zero_()
        for program in programs:
            program.copy()
        assert [program.fingerprint() for program in programs] == wanted
    for target in (target for unit in units for target in unit.targets):
        target.zero_()
    (first, *_) = fuse(units, verify=False, kernel=kernel)
    assert isinstance(first, FusedUnit)
    first.copy()
    first.wait()


def _check_packing(
    plan: StreamLayout, flats: list[torch.Tensor], wanted: list[int], kernel: Kernel | None
) -> None:
    assert plan.bucket_nbytes is not None
    room = torch.full((2, plan.bucket_nbytes), UNTOUCHED, dtype=torch.uint8, device=flats[0].device)
    buckets = list(room.unbind())
    batches = chunk_batches(plan, flats, buckets, verify=True, kernel=kernel)
    assert batches is not None
    stream = torch.zeros(plan.nbytes, dtype=torch.uint8, device=room.device)
    for flat, offset in zip(flats, plan.offsets, strict=True):
        stream[offset : offset + flat.numel()] = flat
    for j, (batch, chunk) in enumerate(zip(batches, plan.chunks, strict=True)):
        batch.launch()
        assert batch.fingerprints() == wanted[chunk.first_unit : chunk.last_unit]
        bucket = buckets[j % 2]
        assert torch.equal(bucket[: chunk.stop - chunk.start], stream[chunk.start : chunk.stop])
        assert bool((bucket[chunk.stop - chunk.start :] == UNTOUCHED).all())
        bucket.fill_(UNTOUCHED)


def fused_mix64(flat: torch.Tensor, kernel: Kernel) -> int:
    """Fingerprint one tensor while it is copied."""
    target = torch.empty_like(flat)
    batch = Batch([DeviceCopyUnit((target,), (flat,), ())], kernel)
    batch.launch()
    (found,) = batch.fingerprints()
    assert torch.equal(target, flat)
    return found


def host_mix64(flat: torch.Tensor) -> int:
    """The tables' own fingerprint."""
    return fused_mix64(flat, HostKernel())


def _place(nbytes: int, shift: int, device: str) -> tuple[torch.Tensor, slice]:
    """Return memory with room around, and where in it the tensor lies, off 16 bytes by `shift`."""
    around = torch.full((nbytes + 2 * GUARD + 16,), UNTOUCHED, dtype=torch.uint8, device=device)
    begin = GUARD - around.data_ptr() % 16 + shift
    return around, slice(begin, begin + nbytes)
