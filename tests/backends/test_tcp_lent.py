"""Chunks that hosts read where the source's tensors lie."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
import xxhash
from hypothesis import given
from torch import nn

import weightsync as ws
from tests.weights.streams import every_dtype, manifests, random_tensors, sizes, stream_bytes
from weightsync.backends.base import TransferOptions
from weightsync.backends.ipc.sender import RELAY_READER, IpcTrainerEngine
from weightsync.backends.tcp.lent import LentChunks, are_plain
from weightsync.backends.tcp.uplink import Uplink
from weightsync.backends.tcp.window import ChunkWindow, Pieces
from weightsync.specs import Manifest, TensorSpec
from weightsync.weights.layout import StreamLayout
from weightsync.weights.source import ModuleSource

pytestmark = pytest.mark.usefixtures("shm_clean")


def read(pieces: Pieces) -> bytes:
    made = bytearray(len(pieces))
    for position, address, nbytes in pieces.places:
        made[position : position + nbytes] = ctypes.string_at(address, nbytes)
    return bytes(made)


def check(layout: StreamLayout) -> None:
    tensors = random_tensors(layout.manifest, 1)
    wanted = stream_bytes(layout, tensors)
    lent = LentChunks(layout, tensors)
    for j, chunk in enumerate(layout.chunks):
        pieces = lent.chunk(j)
        assert read(pieces) == wanted[chunk.start : chunk.start + len(pieces)]
        assert not any(wanted[chunk.start + len(pieces) : chunk.stop])
        units = layout.units[chunk.first_unit : chunk.last_unit]
        assert lent.fingerprints(j) == [
            xxhash.xxh3_64_intdigest(wanted[unit.start : unit.stop]) for unit in units
        ]


@pytest.mark.parametrize("bucket", [64, 256, 4096, 1 << 20])
def test_every_dtype(bucket: int) -> None:
    check(StreamLayout(every_dtype(), bucket_nbytes=bucket, unit_nbytes=192))


@given(manifests(), sizes(12), sizes(12))
def test_any_model(manifest: Manifest, bucket: int, unit_nbytes: int) -> None:
    check(StreamLayout(manifest, bucket_nbytes=bucket, unit_nbytes=unit_nbytes))


def test_tensors_whose_bytes_lie_otherwise_are_not_lent() -> None:
    square = torch.randn(4, 4)
    layout = StreamLayout(Manifest((TensorSpec("w", "float32", (4, 4)),)))
    assert are_plain(layout, [square])
    for other in (square.t(), square.bfloat16(), torch.randn(4, 4, dtype=torch.cfloat).conj().imag):
        assert not are_plain(layout, [other])


def test_nothing_is_packed_for_hosts_that_read_the_tensors() -> None:
    source = ModuleSource(nn.Linear(64, 64))
    options = TransferOptions(packed=True, bucket_nbytes=4096, num_buckets=4)
    with closing(IpcTrainerEngine(source, options)) as engine:
        lent = LentChunks(engine.chunked, source.stable_tensors() or [])
        window = ChunkWindow(2, 60.0)
        engine.begin([RELAY_READER], verify=True)
        uplink = Uplink(engine, RELAY_READER, window, [], source, lent)
        engine.transfer(lambda: None)
        uplink.finish(lambda: None)
        chunks = range(len(engine.chunked.chunks))
        assert uplink.table == [value for j in chunks for value in lent.fingerprints(j)]
        assert engine.reader_progress.taken_nbytes(RELAY_READER) == engine.chunked.nbytes
        assert engine.written_nbytes == 0
        assert not any(bucket.any() for bucket in engine.buckets)
        uplink.stop()
        engine.end()


def packed_nbytes(model: nn.Module, change: Callable[[], object]) -> list[int]:
    """Send a model by `nixl`, change it and send again; return the bytes that were packed."""
    pytest.importorskip("nixl", reason="the package nixl, which `make venv` installs")
    taken = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    found = []
    with ws.connect(model, to=ws.WeightReceiver(taken), backend="nixl") as sender:
        for before in (lambda: None, change):
            before()
            found.append(sender.send_weights().written_nbytes)
            for name, value in model.state_dict().items():
                assert torch.equal(value, taken.state_dict()[name]), name
    return found


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_LOG_LEVEL", "error")


@pytest.mark.usefixtures("over_tcp")
def test_parameters_are_read_where_they_are() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))

    def step() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)

    assert packed_nbytes(model, step) == [0, 0]


@pytest.mark.usefixtures("over_tcp")
def test_parameters_that_have_moved_are_packed() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))

    def move() -> None:
        first = model[0]
        assert isinstance(first, nn.Linear)
        first.weight.data = torch.randn(64, 64)

    first, second = packed_nbytes(model, move)
    assert (first, second > 64 * 64 * 4) == (0, True)
