"""Runs between memories: every byte arrives, and what is fingerprinted is the stream."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.weights.streams import (
    every_dtype,
    flat_memory,
    manifests,
    random_tensors,
    scattered_memory,
    sizes,
    stream_bytes,
)
from weightsync.specs import Manifest
from weightsync.tensors import as_bytes
from weightsync.weights.copying.copy_plan import (
    Copy,
    HostCopies,
    HostCopyUnit,
    Memory,
    UnitCompiler,
    joined,
)
from weightsync.weights.copying.fingerprint import mix64, xxh3
from weightsync.weights.copying.layout import StreamLayout


def place(plan: StreamLayout, *, flat: bool, seed: int | None) -> Memory:
    if not flat:
        return scattered_memory(plan.manifest, seed)
    buffer, memory = flat_memory(plan)
    if seed is not None:
        content = stream_bytes(plan, random_tensors(plan.manifest, seed))
        buffer.copy_(torch.tensor(list(content), dtype=torch.uint8))
    return memory


def check(plan: StreamLayout, *, source_flat: bool, target_flat: bool) -> None:
    source = place(plan, flat=source_flat, seed=1)
    target = place(plan, flat=target_flat, seed=None)
    compiler = UnitCompiler(plan, target, source)
    wanted = stream_bytes(plan, random_tensors(plan.manifest, 1))
    for unit in plan.units:
        program = compiler.compile(unit)
        assert isinstance(program, HostCopyUnit)
        program.copy()
        assert program.fingerprint() == xxh3(memoryview(wanted[unit.start : unit.stop]))
    for have, want in zip(target.tensors, source.tensors, strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("source_flat", [True, False])
@pytest.mark.parametrize("target_flat", [True, False])
@pytest.mark.parametrize("unit_nbytes", [64, 512, 1 << 20])
def test_every_dtype(source_flat: bool, target_flat: bool, unit_nbytes: int) -> None:
    plan = StreamLayout(every_dtype(), unit_nbytes=unit_nbytes)
    check(plan, source_flat=source_flat, target_flat=target_flat)


@given(manifests(), sizes(10), sizes(10), st.booleans(), st.booleans())
def test_any_model(
    manifest: Manifest, bucket: int, unit_nbytes: int, source_flat: bool, target_flat: bool
) -> None:
    plan = StreamLayout(manifest, bucket_nbytes=bucket, unit_nbytes=unit_nbytes)
    check(plan, source_flat=source_flat, target_flat=target_flat)


@pytest.mark.parametrize("target_flat", [True, False])
def test_from_a_bucket_that_carries_one_chunk(target_flat: bool) -> None:
    plan = StreamLayout(every_dtype(), bucket_nbytes=1024, unit_nbytes=256)
    target = place(plan, flat=target_flat, seed=None)
    compiler = UnitCompiler(plan, target)
    tensors = random_tensors(plan.manifest, 3)
    content = torch.tensor(list(stream_bytes(plan, tensors)), dtype=torch.uint8)
    for chunk in plan.chunks:
        bucket = torch.full((1024,), 255, dtype=torch.uint8)
        bucket[: chunk.stop - chunk.start] = content[chunk.start : chunk.stop]
        for unit in plan.units[chunk.first_unit : chunk.last_unit]:
            compiler.compile(unit, bucket, chunk.start).copy()
    for have, want in zip(target.tensors, tensors, strict=True):
        assert torch.equal(have, as_bytes(want))


def test_scattered_targets_keep_what_lies_around_them() -> None:
    """Tensors of a module may be neighbours of memory that is not theirs, spaced as a stream is."""
    plan = StreamLayout(every_dtype())
    whole = torch.full((plan.nbytes,), 9, dtype=torch.uint8)
    target = Memory(Memory.of_stream(plan, whole).tensors, flat=False)
    _, source = flat_memory(plan)
    compiler = UnitCompiler(plan, target, source)
    for unit in plan.units:
        compiler.compile(unit).copy()
    gaps = list(plan.gaps(0, plan.nbytes))
    assert gaps
    for position, nbytes in gaps:
        assert set(whole[position : position + nbytes].tolist()) == {9}
        whole[position : position + nbytes] = 0
    assert not whole.any()


def test_neighbours_are_copied_together() -> None:
    plan = StreamLayout(every_dtype(), unit_nbytes=1 << 20)
    _, source = flat_memory(plan)
    _, target = flat_memory(plan)
    program = UnitCompiler(plan, target, source).compile(plan.units[0])
    assert isinstance(program, HostCopyUnit)
    assert len(program.copies) == 1
    scattered = UnitCompiler(plan, scattered_memory(plan.manifest), source).compile(plan.units[0])
    assert isinstance(scattered, HostCopyUnit)
    assert len(scattered.copies) == sum(1 for spec in plan.manifest.specs if spec.nbytes)


def test_a_changed_target_is_seen_when_it_is_read_back() -> None:
    plan = StreamLayout(every_dtype())
    source, target = place(plan, flat=False, seed=1), place(plan, flat=False, seed=None)
    program = UnitCompiler(plan, target, source).compile(plan.units[0])
    program.copy()
    before = program.fingerprint()
    target.tensors[2][5] ^= 1
    assert program.fingerprint() != before


@given(manifests(), sizes(10))
def test_torch_copies_what_memmove_copies(manifest: Manifest, unit_nbytes: int) -> None:
    """The code for GPUs, on host memory: same bytes, and the host's fingerprint of the source."""
    plan = StreamLayout(manifest, unit_nbytes=unit_nbytes)
    source, target = place(plan, flat=False, seed=1), place(plan, flat=False, seed=None)
    wanted = stream_bytes(plan, random_tensors(manifest, 1))
    for unit in plan.units:
        program = UnitCompiler(plan, target, source).compile_on_devices(unit)
        program.copy()
        part = wanted[unit.start : unit.stop]
        assert program.fingerprint() == xxh3(memoryview(part))
        assert mix64(joined(program.targets, program.gaps)) == mix64(
            torch.tensor(list(part), dtype=torch.uint8)
        )
    for have, want in zip(target.tensors, source.tensors, strict=True):
        assert torch.equal(have, want)


class TestHostCopies:
    """Small copies are one call of torch from the second run on: the bytes are those of memmove."""

    SIZES = (1, 64, 4096, 4096, 40_000, 4096, 32 << 10, 7, 4096)
    GAP_BEFORE = (3, 5)  # these do not follow the one before

    def made(self) -> tuple[list[torch.Tensor], torch.Tensor, HostCopies, list[int]]:
        sources = [torch.empty(n, dtype=torch.uint8) for n in self.SIZES]
        places, at = [], 0
        for i, n in enumerate(self.SIZES):
            at += 64 * (i in self.GAP_BEFORE)
            places.append(at)
            at += n
        target = torch.zeros(at, dtype=torch.uint8)
        copies = [
            Copy(target.data_ptr() + place, source.data_ptr(), source.numel())
            for place, source in zip(places, sources, strict=True)
        ]
        return sources, target, HostCopies(copies), places

    def expected(self, sources: list[torch.Tensor], places: list[int], nbytes: int) -> torch.Tensor:
        found = torch.zeros(nbytes, dtype=torch.uint8)
        for place, source in zip(places, sources, strict=True):
            found[place : place + source.numel()] = source
        return found

    @pytest.mark.parametrize("where", ["plain", "inference", "autocast", "watched"])
    def test_every_run_copies_what_is_there_now(self, where: str) -> None:
        sources, target, copies, places = self.made()
        calls: list[object] = []

        class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch says no types
            """Sees every call, and returns what is no result of it."""

            def __torch_dispatch__(self, func: object, *_: object, **__: object) -> object:
                calls.append(func)
                return None

        for turn in range(5):
            for source in sources:
                source.random_(0, 256)
            target.zero_()
            modes: dict[str, Any] = {
                "plain": nullcontext,
                "inference": torch.inference_mode,
                "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
                "watched": Mode if turn > 1 else nullcontext,
            }
            with modes[where]():
                assert copies.run() == []
            assert torch.equal(target, self.expected(sources, places, target.numel()))
        assert calls == []
        assert copies._joined is not None
        assert len(copies._joined[0]) > 1
