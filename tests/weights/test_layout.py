"""Cutting a model: nothing twice, nothing left out, nothing larger than it may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.weights.streams import manifests, sizes
from weightsync.errors import ConfigError
from weightsync.specs import Manifest, TensorSpec
from weightsync.weights.copying.layout import ALIGNMENT, StreamLayout, aligned, units_per_chunk

BUCKETS = st.none() | sizes(20)


@given(manifests(), BUCKETS, sizes(20))
def test_every_byte_is_in_one_chunk_one_run_and_one_piece(
    manifest: Manifest, bucket: int | None, unit_nbytes: int
) -> None:
    plan = StreamLayout(manifest, bucket_nbytes=bucket, unit_nbytes=unit_nbytes)
    at = 0
    carried = [bytearray(spec.nbytes) for spec in manifest.specs]
    for chunk in plan.chunks:
        assert chunk.start == at
        assert bucket is None or chunk.stop - chunk.start <= bucket
        for unit in plan.units[chunk.first_unit : chunk.last_unit]:
            assert unit.start == at
            assert 0 < unit.stop - unit.start <= unit_nbytes
            at = unit.stop
            for part in plan.slices(unit.start, unit.stop):
                assert unit.start <= part.start
                assert part.start + part.nbytes <= unit.stop
                assert part.start == plan.offsets[part.index] + part.begin
                for i in range(part.begin, part.begin + part.nbytes):
                    carried[part.index][i] += 1
        assert chunk.stop == at
    assert at == plan.nbytes
    assert all(count == 1 for counts in carried for count in counts)
    assert [chunk.first_unit for chunk in plan.chunks[1:]] == [
        c.last_unit for c in plan.chunks[:-1]
    ]


@given(manifests(), sizes(20), sizes(20))
def test_a_tensor_that_fits_a_bucket_is_not_cut(
    manifest: Manifest, bucket: int, unit_nbytes: int
) -> None:
    plan = StreamLayout(manifest, bucket_nbytes=bucket, unit_nbytes=unit_nbytes)
    for chunk in plan.chunks:
        for part in plan.slices(chunk.start, chunk.stop):
            spec = manifest.specs[part.index]
            assert part.nbytes == spec.nbytes or aligned(spec.nbytes) > bucket


@given(manifests(), sizes(30), sizes(20))
def test_the_room_for_fingerprints_is_enough(
    manifest: Manifest, bucket: int, unit_nbytes: int
) -> None:
    plan = StreamLayout(manifest, bucket_nbytes=bucket, unit_nbytes=unit_nbytes)
    most = max((chunk.last_unit - chunk.first_unit for chunk in plan.chunks), default=0)
    assert most <= units_per_chunk(bucket, unit_nbytes)


def test_more_runs_than_bytes_alone_would_need() -> None:
    """Tensors of a little more than half a run each take a run of their own."""
    specs = tuple(TensorSpec(f"t{i}", "uint8", (192,)) for i in range(40))
    plan = StreamLayout(Manifest(specs), bucket_nbytes=1920, unit_nbytes=256)
    most = max(chunk.last_unit - chunk.first_unit for chunk in plan.chunks)
    assert -(-1920 // 256) < most == 10 <= units_per_chunk(1920, 256)


@given(manifests(), st.data())
def test_gaps_are_exactly_what_pieces_leave(manifest: Manifest, data: st.DataObject) -> None:
    plan = StreamLayout(manifest)
    start = data.draw(st.integers(0, plan.nbytes))
    stop = data.draw(st.integers(start, plan.nbytes))
    parts = [(p.start, p.nbytes) for p in plan.slices(start, stop)] + list(plan.gaps(start, stop))
    at = start
    for begin, nbytes in sorted(parts):
        assert begin == at
        assert nbytes > 0
        at += nbytes
    assert at == stop


@given(manifests())
def test_tensors_lie_aligned_and_in_order(manifest: Manifest) -> None:
    plan = StreamLayout(manifest)
    assert all(offset % ALIGNMENT == 0 for offset in plan.offsets)
    assert plan.offsets == sorted(plan.offsets)
    assert plan.nbytes == sum(aligned(spec.nbytes) for spec in manifest.specs)
    names = [name for unit in plan.units for name in plan.names(unit)]
    assert list(dict.fromkeys(names)) == [s.name for s in manifest.specs if s.nbytes]


def test_a_tensor_larger_than_a_bucket_comes_in_full_buckets() -> None:
    manifest = Manifest((TensorSpec("a", "uint8", (64,)), TensorSpec("b", "uint8", (300,))))
    plan = StreamLayout(manifest, bucket_nbytes=128, unit_nbytes=128)
    assert [(c.start, c.stop) for c in plan.chunks] == [(0, 128), (128, 256), (256, 384)]
    slices = [p for c in plan.chunks for p in plan.slices(c.start, c.stop)]
    assert [(p.index, p.begin, p.nbytes) for p in slices] == [
        (0, 0, 64),
        (1, 0, 64),
        (1, 64, 128),
        (1, 192, 108),
    ]


@pytest.mark.parametrize("size", [0, -64, 63, 100])
def test_odd_sizes_are_refused(size: int) -> None:
    manifest = Manifest((TensorSpec("a", "uint8", (64,)),))
    with pytest.raises(ConfigError, match=f"bucket_nbytes must be .* not {size}"):
        StreamLayout(manifest, bucket_nbytes=size)
    with pytest.raises(ConfigError, match="unit_nbytes must be"):
        StreamLayout(manifest, unit_nbytes=size)


def test_nothing_makes_no_chunks() -> None:
    empty = Manifest((TensorSpec("e", "float32", (0,)),))
    for plan in (
        StreamLayout(empty),
        StreamLayout(empty, bucket_nbytes=64),
        StreamLayout(Manifest(())),
    ):
        assert (plan.nbytes, plan.chunks, plan.units) == (0, [], [])
