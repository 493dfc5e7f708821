"""A chunk that is read again from the source, or where it lies, has the bytes of the stream."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import closing

import pytest
import torch
import xxhash
from hypothesis import given
from torch import nn

from tests.weights.streams import every_dtype, manifests, random_tensors, sizes, stream_bytes
from weightsync.backends.base import TransferOptions
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.backends.tcp.lent import LentChunks
from weightsync.backends.tcp.uplink import Uplink, reread
from weightsync.backends.tcp.window import ChunkWindow, Data, Pieces
from weightsync.errors import TransferError
from weightsync.specs import Manifest, TensorSpec
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.sources.base import ModuleSource, StateDictSource, WeightSource

pytestmark = pytest.mark.usefixtures("shm_clean")


def joined(pieces: Pieces) -> bytes:
    made = bytearray(len(pieces))
    for position, address, nbytes in pieces.places:
        made[position : position + nbytes] = ctypes.string_at(address, nbytes)
    return bytes(made)


def check(layout: StreamLayout) -> None:
    tensors = random_tensors(layout.manifest, 1)
    wanted = stream_bytes(layout, tensors)
    read = reread(layout, tensors)
    backwards = {j: bytes_of(read(j)) for j in reversed(range(len(layout.chunks)))}
    lent = LentChunks(layout, tensors)
    for j, chunk in enumerate(layout.chunks):
        assert backwards[j] == wanted[chunk.start : chunk.stop], j
        assert joined(lent.chunk(j)) == backwards[j][: len(lent.chunk(j))]
        assert not any(backwards[j][len(lent.chunk(j)) :])
        assert lent.fingerprints(j) == [
            xxhash.xxh3_64_intdigest(wanted[unit.start : unit.stop])
            for unit in layout.units[chunk.first_unit : chunk.last_unit]
        ]


@pytest.mark.parametrize("bucket", [64, 256, 4096, 1 << 20])
def test_every_dtype(bucket: int) -> None:
    check(StreamLayout(every_dtype(), bucket_nbytes=bucket, unit_nbytes=192))


@given(manifests(), sizes(12), sizes(12))
def test_any_model(manifest: Manifest, bucket: int, unit_nbytes: int) -> None:
    check(StreamLayout(manifest, bucket_nbytes=bucket, unit_nbytes=unit_nbytes))


def tensors() -> dict[str, torch.Tensor]:
    """Tensors that lie in memory in every way, some larger than a bucket."""
    torch.manual_seed(0)
    base = torch.randn(70, 90, dtype=torch.float64)
    return {
        "plain": torch.randn(33, 70),
        "transposed": base.t(),
        "strided": base[::3, 1::2],
        "expanded": torch.randn(1, 50).expand(40, 50),
        "conjugate": torch.randn(30, 30, dtype=torch.complex64).conj(),
        "negative": torch.randn(30, 30, dtype=torch.complex64).conj().imag,
        "brain": torch.randn(2001, dtype=torch.bfloat16),
        "fp8": torch.randn(501).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.5),
        "nothing": torch.zeros(0, 4),
        "large": torch.randn(3000),
        "bits": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        "steps": torch.arange(77, dtype=torch.int16),
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "float8_e4m3fn"])
def test_a_cast(dtype: str) -> None:
    given = [torch.randn(300, 7), torch.randn(50, 60).t(), torch.randn(64).bfloat16()]
    specs = [
        TensorSpec(name=f"t{i}", shape=tuple(tensor.shape), dtype=dtype)
        for i, tensor in enumerate(given)
    ]
    layout = StreamLayout(Manifest(tuple(specs)), bucket_nbytes=1024, unit_nbytes=192)
    wanted = stream_bytes(layout, [tensor.to(TORCH_DTYPES[dtype]) for tensor in given])
    read = reread(layout, given)
    for j, chunk in enumerate(layout.chunks):
        assert bytes_of(read(j)) == wanted[chunk.start : chunk.stop], j


@pytest.mark.parametrize("bucket_nbytes", [1024, 4096, 1 << 20])
def test_the_chunks_of_a_ring(bucket_nbytes: int) -> None:
    """Both ways for each chunk: as the window had it, and as the source gives it again."""
    module = nn.Module()
    for name, tensor in tensors().items():
        module.register_buffer(name, tensor)
    kept, again = both_ways(ModuleSource(module), bucket_nbytes)
    assert kept
    assert kept == again


def test_the_chunks_of_a_module() -> None:
    module = nn.Sequential(nn.Linear(50, 60), nn.Linear(60, 50).half())
    kept, again = both_ways(ModuleSource(module), 2048)
    assert kept == again


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("bucket_nbytes", [1024, 8192, 1 << 20])
def test_chunks_of_which_some_parts_are_packed(
    bucket_nbytes: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long runs are read where they lie, the rest in the memory for the chunk."""
    monkeypatch.setattr("weightsync.backends.tcp.lent.SHORTEST_RUN_NBYTES", 320)
    base = torch.randn(16, 40, 10)
    long = {"rows": base[::2], "parts": base[:, 5:15], "columns": torch.randn(16, 400)[:, 50:130]}
    given = {**tensors(), **long, "short": base[:, :, 1:9], "many": torch.randn(65, 90)[:, :80]}
    specs = [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in given.items()
    ]
    layout = StreamLayout(
        Manifest(tuple(specs)), bucket_nbytes=bucket_nbytes, unit_nbytes=bucket_nbytes // 4
    )
    lent = LentChunks(layout, list(given.values()), slots)
    in_runs = [spec.name for spec, runs in zip(specs, lent._runs, strict=True) if runs]
    plain = {n for n, t in given.items() if t.is_contiguous() and not t.is_conj()}
    assert set(in_runs) == plain | set(long)
    lying = {one.data_ptr(): one.data_ptr() + one.nbytes for one in lent.memory}
    for change in (0, 1):
        base.add_(change)
        lent.packed_nbytes = 0
        read = reread(layout, list(given.values()))
        for j, chunk in enumerate(layout.chunks):
            found, wanted = lent.chunk(j), bytes_of(read(j))
            assert joined(found) == wanted[: len(found)], j
            assert not any(wanted[len(found) :])
            assert lent.fingerprints(j) == [
                xxhash.xxh3_64_intdigest(wanted[u.start - chunk.start : u.stop - chunk.start])
                for u in layout.units[chunk.first_unit : chunk.last_unit]
            ]
            for _, address, nbytes in found.places:
                assert any(a <= address and address + nbytes <= b for a, b in lying.items())
        packed = sum(spec.nbytes for spec in specs if spec.name not in in_runs)
        assert lent.packed_nbytes == packed
    assert lent.lie_in(list(given.values()))
    given["short"] = base[:, :, :8]
    assert not lent.lie_in(list(given.values()))


def bytes_of(data: Data) -> bytes:
    assert isinstance(data, memoryview)
    return bytes(data)


def both_ways(source: WeightSource, bucket_nbytes: int) -> tuple[Mapping[int, bytes], ...]:
    """Send an update, and return the chunks that were offered, and those read again.

    Without the zeros at their end, which are not sent.
    """
    options = TransferOptions(packed=True, bucket_nbytes=bucket_nbytes, num_buckets=3)
    kept: dict[int, bytes] = {}

    class Keeping(ChunkWindow):
        def offer(self, chunk: int, data: Data, fingerprints: Sequence[int]) -> None:
            kept[chunk] = bytes_of(data)
            super().offer(chunk, data, fingerprints)

    with closing(IpcTrainerEngine(source, options)) as engine:
        window = Keeping(1, 1.0)
        engine.begin([reader := engine.add_relay()], verify=True)
        uplink = Uplink(engine.stream(reader), window, [], source)
        engine.transfer(lambda: None)
        uplink.finish(lambda: None)
        read = window._again
        assert read is not None
        again = {chunk: bytes_of(read(chunk)).rstrip(b"\0") for chunk in kept}
        uplink.stop()
        engine.end()
    return kept, again


def test_a_source_that_makes_its_tensors_is_read_once() -> None:
    source = StateDictSource(tensors())
    with closing(IpcTrainerEngine(source, TransferOptions(packed=True))) as engine:
        window = ChunkWindow(1, 1.0)
        engine.begin([reader := engine.add_relay()], verify=True)
        uplink = Uplink(engine.stream(reader), window, [], source)
        assert window._again is None
        uplink.stop()
        engine.end()


def test_an_update_that_ends_lets_go_of_the_ring() -> None:
    """Of the one that is given up, too: nothing views memory that is about to be freed."""
    source = StateDictSource({"w": torch.randn(9000)})
    options = TransferOptions(packed=True, bucket_nbytes=1024, num_buckets=4)
    with closing(IpcTrainerEngine(source, options)) as engine:
        window = ChunkWindow(2, 60.0)
        engine.begin([reader := engine.add_relay()], verify=True)
        uplink = Uplink(engine.stream(reader), window, [[1]], source)

        def check() -> None:
            if len(window._data) == 2:
                raise TransferError("enough")

        with pytest.raises(TransferError, match="enough"):
            engine.transfer(check)
        uplink.stop()
        assert not uplink._thread.is_alive()
        assert not window._data
        with pytest.raises(TransferError, match="aborted by its sender"):
            uplink.check()
        engine.end()
