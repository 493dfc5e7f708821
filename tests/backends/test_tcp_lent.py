"""Chunks that hosts read where the source's tensors lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import ClassVar

import pytest
import torch
from torch import nn

import weightsync as ws
from weightsync.backends.base import TransferOptions
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.backends.tcp.carrier import InStream
from weightsync.backends.tcp.lent import LentChunks, why_packed
from weightsync.backends.tcp.trainer import TcpTrainerEngine
from weightsync.backends.tcp.uplink import Uplink
from weightsync.backends.tcp.window import ChunkWindow
from weightsync.specs import Manifest, TensorSpec
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.sources.base import ModuleSource

pytestmark = pytest.mark.usefixtures("shm_clean")


def square(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 4, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        (torch.float32, torch.t),
        (torch.float32, torch.Tensor.bfloat16),
        (torch.complex64, torch.conj),
        (torch.float32, torch._neg_view),
        (torch.float32, torch.Tensor.flatten),
    ],
)
def test_tensors_whose_bytes_lie_otherwise_are_packed(
    dtype: torch.dtype, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    sent = square(dtype)
    layout = StreamLayout(Manifest((TensorSpec("w", str(dtype).removeprefix("torch."), (4, 4)),)))
    assert not why_packed(layout, [sent])
    assert why_packed(layout, [change(sent)]).startswith("w is stored otherwise")
    lent = LentChunks(layout, [sent])
    assert lent.lie_in([sent])
    assert not lent.lie_in([change(sent)])
    assert not lent.lie_in([sent.clone()])


def test_tensors_of_several_devices_are_packed() -> None:
    layout = StreamLayout(Manifest(tuple(TensorSpec(n, "float32", (4, 4)) for n in "ab")))
    assert "devices" in why_packed(layout, [square(), square().to("meta")])


def test_chunks_on_a_gpu_are_lent_without_verification_only() -> None:
    """Fingerprints of a GPU differ from those of the hosts that read."""
    source = ModuleSource(nn.Linear(4, 4))
    options = TransferOptions(packed=True, bucket_nbytes=4096, num_buckets=4)
    with closing(IpcTrainerEngine(source, options)) as ring:
        engine = TcpTrainerEngine(source, ring, options)
        lent = engine._lent = LentChunks(ring.packed_layout, source.stable_tensors() or [])
        assert engine._lent_chunks(source, verify=True) is lent
        lent.is_on_gpu = True
        assert engine._lent_chunks(source, verify=True) is None
        assert engine._lent_chunks(source, verify=False) is lent


def test_memory_is_given_back_when_parameters_move() -> None:
    class Carrier(InStream):
        lent: ClassVar[list[int]] = []

        def lend(self, tensors: Sequence[torch.Tensor]) -> bool:
            self.lent.append(len(tensors))
            return True

    model = nn.Linear(4, 4)
    source = ModuleSource(model)
    options = TransferOptions(packed=True, bucket_nbytes=4096, num_buckets=4)
    with closing(IpcTrainerEngine(source, options)) as ring:
        engine = TcpTrainerEngine(source, ring, options)
        for _ in range(2):
            engine._carrier = Carrier()
            engine._lent = LentChunks(ring.packed_layout, source.stable_tensors() or [])
            model.weight.data = torch.randn(4, 4)
            assert engine._lent_chunks(source, verify=True) is None
            assert engine._lent is None
        assert Carrier.lent == [0, 0]
        engine._lent = LentChunks(ring.packed_layout, source.stable_tensors() or [])
        engine.close()
        assert engine._lent is None


def test_nothing_is_packed_for_hosts_that_read_the_tensors() -> None:
    source = ModuleSource(nn.Linear(64, 64))
    options = TransferOptions(packed=True, bucket_nbytes=4096, num_buckets=4)
    with closing(IpcTrainerEngine(source, options)) as engine:
        lent = LentChunks(engine.packed_layout, source.stable_tensors() or [])
        window = ChunkWindow(2, 60.0)
        engine.begin([reader := engine.add_relay()], verify=True)
        uplink = Uplink(engine.stream(reader), window, [], source, lent)
        engine.transfer(lambda: None)
        uplink.finish(lambda: None)
        chunks = range(len(engine.packed_layout.chunks))
        assert uplink.table == [value for j in chunks for value in lent.fingerprints(j)]
        assert engine.progress().taken_nbytes(reader) == engine.packed_layout.nbytes
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
