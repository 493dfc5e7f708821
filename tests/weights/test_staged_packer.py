"""Staged packing writes the bytes that plain packing writes, whenever copies really happen.

The device is the CPU here; its copies happen as late as their lane allows, so whoever forgets to
wait publishes what was in the bucket before, or fills a twin that has not been read yet.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.weights.late_lane import LateLane
from tests.weights.streams import every_dtype, manifests, random_tensors, sizes, stream_bytes
from weightsync.cuda.staging import StagedBuckets
from weightsync.errors import ManifestMismatchError
from weightsync.specs import Manifest, TensorSpec
from weightsync.weights.copying.fingerprint import xxh3
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.sources.packer import Packed, StagedPacker

DIRT = 0xAB
CPU = torch.device("cpu")


class World:
    """Dirty buckets, a staged packer over them, and a reader that takes what is handed out."""

    def __init__(self, layout: StreamLayout, bucket: int, num_buckets: int) -> None:
        self.layout = layout
        self.lane = LateLane()
        self.buckets = [torch.full((bucket,), DIRT, dtype=torch.uint8) for _ in range(num_buckets)]
        self.stage = StagedBuckets(self.buckets, CPU, self.lane)
        self.packer = StagedPacker(layout, self.buckets, self.stage)
        self.handed_out = 0

    def acquire(self, chunk: int) -> int:
        # What a writer of this ring would wait for must have been handed out, or it waits forever.
        assert chunk - len(self.buckets) < self.handed_out
        self.buckets[chunk % len(self.buckets)].fill_(DIRT)
        return chunk % len(self.buckets)

    def collect(self, packed: Iterator[Packed]) -> tuple[bytes, list[int]]:
        stream, table = bytearray(), []
        self.handed_out = 0
        before = self.lane.settled
        for j, fingerprints in packed:
            assert j == self.handed_out
            self.handed_out += 1
            if self.lane.copies:
                assert self.lane.settled - before == self.handed_out, "the host must have waited"
            chunk = self.layout.chunks[j]
            stream += bytes(
                self.buckets[j % len(self.buckets)][: chunk.stop - chunk.start].tolist()
            )
            table += fingerprints
        assert self.handed_out == len(self.layout.chunks)
        return bytes(stream), table


def named(manifest: Manifest, tensors: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    return zip((spec.name for spec in manifest.specs), tensors, strict=True)


def reusing(manifest: Manifest, tensors: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor in memory that is overwritten before the next one comes."""
    for name, tensor in named(manifest, tensors):
        lent = tensor.clone()
        yield name, lent
        lent.view(-1).view(torch.uint8).fill_(DIRT)


def check(layout: StreamLayout, bucket: int, num_buckets: int) -> None:
    world = World(layout, bucket, num_buckets)
    for seed in (1, 2):
        tensors = random_tensors(layout.manifest, seed)
        wanted = stream_bytes(layout, tensors)
        table = [xxh3(memoryview(wanted[unit.start : unit.stop])) for unit in layout.units]
        expected = wanted, table
        stable = world.packer.pack_stable(tensors, world.acquire, verify=True)
        assert world.collect(stable) == expected
        flowing = world.packer.pack(reusing(layout.manifest, tensors), world.acquire, verify=True)
        assert world.collect(flowing) == expected


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket", [64, 256, 4096, 1 << 20])
def test_every_dtype(bucket: int, num_buckets: int) -> None:
    check(StreamLayout(every_dtype(), bucket_nbytes=bucket, unit_nbytes=192), bucket, num_buckets)


@given(manifests(), sizes(12), sizes(12), st.integers(1, 5))
def test_any_model(manifest: Manifest, bucket: int, unit_nbytes: int, num_buckets: int) -> None:
    check(
        StreamLayout(manifest, bucket_nbytes=bucket, unit_nbytes=unit_nbytes), bucket, num_buckets
    )


def models(*shapes: int) -> Manifest:
    return Manifest(tuple(TensorSpec(f"w{i}", "uint8", (n,)) for i, n in enumerate(shapes)))


@pytest.mark.parametrize("stable", [True, False])
def test_many_tensors_cross_in_one_copy_and_a_large_one_without_a_twin(stable: bool) -> None:
    layout = StreamLayout(models(*[64] * 16, 1024, 600, 40), bucket_nbytes=512)
    world = World(layout, 512, 4)
    tensors = random_tensors(layout.manifest, 1)
    if stable:
        packed = world.packer.pack_stable(tensors, world.acquire, verify=False)
    else:
        packed = world.packer.pack(named(layout.manifest, tensors), world.acquire, verify=False)
    assert world.collect(packed)[0] == stream_bytes(layout, tensors)
    # 2 x 8 small ones, 2 halves of a large one, 512 of the next, its end with the last.
    assert world.lane.copies == len(layout.chunks) == 6
    assert world.lane.held == 3, "three pieces lie where their tensor is"
    assert world.stage.nbytes == 2 * 512


def test_casts_and_odd_strides_are_made_on_the_device() -> None:
    layout = StreamLayout(
        Manifest(
            (
                TensorSpec("a", "bfloat16", (6, 4)),
                TensorSpec("b", "float32", (3, 5)),
                TensorSpec("c", "bfloat16", (9, 15)),
                TensorSpec("d", "bfloat16", (9, 15)),
            )
        ),
        bucket_nbytes=128,
    )
    world = World(layout, 128, 3)
    a, b, c, d = (
        torch.randn(6, 4),
        torch.randn(5, 3).t(),
        torch.randn(9, 15),
        torch.randn(15, 9).t(),
    )
    wanted = stream_bytes(layout, [a.bfloat16(), b, c.bfloat16(), d.bfloat16().contiguous()])
    named = [("a", a), ("b", b), ("c", c), ("d", d)]
    for packed in (
        world.packer.pack_stable([a, b, c, d], world.acquire, verify=True),
        world.packer.pack(iter(named), world.acquire, verify=True),
    ):
        assert world.collect(packed)[0] == wanted


def test_one_that_stops_early_waits_for_its_copies() -> None:
    layout = StreamLayout(models(*[64] * 10), bucket_nbytes=128)
    world = World(layout, 128, 4)
    packed = world.packer.pack_stable(
        random_tensors(layout.manifest, 1), world.acquire, verify=False
    )
    assert next(packed)[0] == 0
    assert world.lane.waiting == 1
    packed.close()
    assert world.lane.waiting == 0


def test_an_error_between_chunks_leaves_no_copy_behind() -> None:
    layout = StreamLayout(models(*[64] * 10), bucket_nbytes=128)
    world = World(layout, 128, 4)

    def acquire(chunk: int) -> int:
        if chunk == 2:
            raise TimeoutError("the readers have gone")
        return chunk

    packed = world.packer.pack_stable(random_tensors(layout.manifest, 1), acquire, verify=False)
    with pytest.raises(TimeoutError, match="the readers have gone"):
        list(packed)
    assert world.lane.waiting == 0
    tensors = random_tensors(layout.manifest, 2)
    again = world.packer.pack_stable(tensors, world.acquire, verify=False)
    assert world.collect(again)[0] == stream_bytes(layout, tensors)


def test_tensors_on_another_device_go_as_they_did() -> None:
    layout = StreamLayout(models(300, 300), bucket_nbytes=512)
    world = World(layout, 512, 3)
    world.stage.device = torch.device("meta")
    tensors = random_tensors(layout.manifest, 1)
    for packed in (
        world.packer.pack_stable(tensors, world.acquire, verify=True),
        world.packer.pack(named(layout.manifest, tensors), world.acquire, verify=True),
    ):
        assert world.collect(packed)[0] == stream_bytes(layout, tensors)
    assert world.lane.copies == 0


def test_no_tensors_at_all() -> None:
    world = World(StreamLayout(Manifest(()), bucket_nbytes=512), 512, 3)
    assert world.collect(world.packer.pack_stable([], world.acquire, verify=True)) == (b"", [])
    assert world.collect(world.packer.pack(iter([]), world.acquire, verify=True)) == (b"", [])


def test_offloaded_tensors_are_named() -> None:
    layout = StreamLayout(models(300, 300), bucket_nbytes=512)
    world = World(layout, 512, 3)
    tensors = [random_tensors(layout.manifest, 1)[0], torch.empty(0, dtype=torch.uint8)]
    with pytest.raises(ManifestMismatchError, match="w1"):
        list(world.packer.pack_stable(tensors, world.acquire, verify=True))
