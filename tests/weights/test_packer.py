"""Both ways of packing write the same buckets and the same fingerprints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from hypothesis import given

from tests.weights.streams import every_dtype, manifests, random_tensors, sizes, stream_bytes
from weightsync.specs import Manifest, TensorSpec
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.copying.fingerprint import xxh3
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.sources.packer import Packed, Packer

BUCKETS = 3
DIRT = 0xAB


class Buckets:
    """Buckets that are dirty before each use, and copied when a chunk is said to be complete."""

    def __init__(self, layout: StreamLayout, nbytes: int) -> None:
        self.layout = layout
        self.buckets = [torch.full((nbytes,), DIRT, dtype=torch.uint8) for _ in range(BUCKETS)]
        self.packer = Packer(layout, self.buckets)
        self.acquired: list[int] = []

    def acquire(self, chunk: int) -> int:
        self.acquired.append(chunk)
        self.buckets[chunk % BUCKETS].fill_(DIRT)
        return chunk % BUCKETS

    def collect(self, packed: Iterable[Packed]) -> tuple[bytes, list[int]]:
        stream, table = bytearray(), []
        for position, (j, fingerprints) in enumerate(packed):
            assert position == j == self.acquired[-1]
            chunk = self.layout.chunks[j]
            stream += bytes(self.buckets[j % BUCKETS][: chunk.stop - chunk.start].tolist())
            table += fingerprints
        assert self.acquired == list(range(len(self.layout.chunks)))
        self.acquired = []
        return bytes(stream), table


def named(manifest: Manifest, tensors: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    return zip((spec.name for spec in manifest.specs), tensors, strict=True)


def check(layout: StreamLayout, bucket: int) -> None:
    buckets = Buckets(layout, bucket)
    for seed in (1, 2):
        tensors = random_tensors(layout.manifest, seed)
        wanted = stream_bytes(layout, tensors)
        table = [xxh3(memoryview(wanted[unit.start : unit.stop])) for unit in layout.units]
        flowing = buckets.collect(
            buckets.packer.pack(named(layout.manifest, tensors), buckets.acquire, verify=True)
        )
        stable = buckets.collect(buckets.packer.pack_stable(tensors, buckets.acquire, verify=True))
        assert flowing == stable == (wanted, table)


@pytest.mark.parametrize("bucket", [64, 256, 4096, 1 << 20])
def test_every_dtype(bucket: int) -> None:
    check(StreamLayout(every_dtype(), bucket_nbytes=bucket, unit_nbytes=192), bucket)


@given(manifests(), sizes(12), sizes(12))
def test_any_model(manifest: Manifest, bucket: int, unit_nbytes: int) -> None:
    check(StreamLayout(manifest, bucket_nbytes=bucket, unit_nbytes=unit_nbytes), bucket)


def test_replayed_copies_see_new_values_and_new_places() -> None:
    layout = StreamLayout(every_dtype(), bucket_nbytes=256)
    buckets = Buckets(layout, 256)
    tensors = random_tensors(layout.manifest, 1)
    buckets.collect(buckets.packer.pack_stable(tensors, buckets.acquire, verify=False))
    tensors[1].fill_(3)
    tensors[2] = random_tensors(layout.manifest, 5)[2]
    stream, table = buckets.collect(
        buckets.packer.pack_stable(tensors, buckets.acquire, verify=False)
    )
    assert stream == stream_bytes(layout, tensors)
    assert table == []


@pytest.mark.parametrize("bucket", [64, 4096])
@pytest.mark.parametrize("stable", [True, False])
def test_casts_and_odd_strides(bucket: int, stable: bool) -> None:
    manifest = Manifest(
        (
            TensorSpec("cast", "bfloat16", (9, 7)),
            TensorSpec("turned", "float32", (7, 9)),
            TensorSpec("strided", "int32", (50,)),
            TensorSpec("expanded", "float16", (4, 30)),
            TensorSpec("both", "float8_e5m2", (10, 10)),
            TensorSpec("of bytes", "bfloat16", (11, 11)),
            TensorSpec("to bytes", "uint8", (130,)),
            TensorSpec("wider", "float64", (13, 5)),
        )
    )
    tensors = [
        torch.randn(9, 7, requires_grad=True),
        torch.randn(9, 7).t(),
        torch.arange(100, dtype=torch.int32)[::2],
        torch.randn(1, 30).half().expand(4, 30),
        torch.randn(10, 10).t(),
        torch.arange(121, dtype=torch.uint8).view(11, 11),
        torch.arange(130, dtype=torch.bfloat16),
        torch.randn(13, 5),
    ]
    layout = StreamLayout(manifest, bucket_nbytes=bucket)
    sent = [
        t.detach().to(TORCH_DTYPES[spec.dtype]).contiguous()
        for t, spec in zip(tensors, manifest.specs, strict=True)
    ]
    buckets = Buckets(layout, bucket)
    packer = buckets.packer
    packed = (
        packer.pack_stable(tensors, buckets.acquire, verify=True)
        if stable
        else packer.pack(named(manifest, tensors), buckets.acquire, verify=True)
    )
    assert buckets.collect(packed)[0] == stream_bytes(layout, sent)


def test_a_view_that_is_negated_when_it_is_read() -> None:
    layout = StreamLayout(Manifest((TensorSpec("w", "float32", (9,)),)))
    buckets = Buckets(layout, layout.nbytes)
    view = torch._neg_view(torch.arange(1.0, 10.0))
    assert view.is_neg()
    wanted = stream_bytes(layout, [torch.arange(-1.0, -10.0, -1.0)])
    packed = buckets.packer.pack_stable([view], buckets.acquire, verify=False)
    assert torch.equal(*(torch.tensor(list(raw)) for raw in (buckets.collect(packed)[0], wanted)))
