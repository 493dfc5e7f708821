"""Whole updates through fused launches: what a GPU does, with tables carried out on the host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Literal

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.weights.fused_cases import HostKernel
from weightsync.backends import ring
from weightsync.backends.base import TransferOptions
from weightsync.backends.ipc.sender import IpcTrainerEngine, cuda_ring, cuda_rings
from weightsync.cuda.tiles import Tiles
from weightsync.weights.copying import fused
from weightsync.weights.copying.copy_plan import DeviceCopyUnit, Memory
from weightsync.weights.sinks.base import Apply
from weightsync.weights.sources.packer import Packer

pytestmark = pytest.mark.usefixtures("shm_clean")

MIB = 1 << 20
packings = pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])


class CountingKernel(HostKernel):
    """Counts launches, and loses the last store of each of the `losing` side, if one is.

    The trainer packs without reading back; the receiver reads back what it copies.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.losing: Literal["", "trainer", "receiver"] = ""
        self._left = 0

    def launch(
        self, tiles: Tiles, sums: torch.Tensor | None, *, copies: bool, reads_back: bool = True
    ) -> None:
        self.launches += 1
        if copies:  # the sender's own pass may run beside it, and stores nothing
            self._left = sum(len(table) for table in tiles.values())
        super().launch(tiles, sums, copies=copies, reads_back=reads_back)

    def store(self, target: int, content: bytes) -> None:
        self._left -= 1
        side = "receiver" if self._reads_back else "trainer"
        if not (self.losing == side and self._left == 0):
            super().store(target, content)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> CountingKernel:
    """Treat the host's memory as a GPU's."""
    kernel = CountingKernel()

    def kernel_of(units: Sequence[DeviceCopyUnit], *, among: int) -> CountingKernel | None:
        return kernel if units and len(units) == among else None

    plain = Packer.__init__

    def on_a_gpu(self: Packer, *args: object, **kwargs: object) -> None:
        plain(self, *args, **kwargs)  # type: ignore[arg-type]
        self._on_host = False

    monkeypatch.setattr(fused, "kernel_of", kernel_of)
    monkeypatch.setattr(Memory, "on_host", lambda _: False)
    monkeypatch.setattr(Packer, "__init__", on_a_gpu)
    return kernel


def model() -> nn.Module:
    module = nn.Module()
    sizes = (3, 257, 40_000, MIB + 1, 64, 300_000)
    module.weights = nn.ParameterList(
        nn.Parameter(torch.zeros(n, dtype=torch.bfloat16), requires_grad=False) for n in sizes
    )
    return module


def fill(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        words = parameter.data.view(torch.int16)
        words.copy_(torch.randint(-(1 << 15), 1 << 15, words.shape, generator=generator))


def alike(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


@packings
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_updates_arrive(kernel: CountingKernel, packed: bool, apply: Apply) -> None:
    ours, theirs = model(), model()
    receiver = ws.WeightReceiver(theirs, apply=apply)
    with ws.connect(ours, to=receiver.handle, packed=packed) as sender:
        for seed in (1, 2, 3):
            before = kernel.launches
            fill(ours, seed)
            assert sender.send_weights().verified == "held"
            assert alike(ours, theirs)
            # A chunk is packed and loaded by one launch each; unpacked, both sides read once.
            assert kernel.launches - before == 2 * (2 if packed else 1)
    receiver.close()


def test_updates_without_verification(kernel: CountingKernel) -> None:
    ours, theirs = model(), model()
    receiver = ws.WeightReceiver(theirs)
    with ws.connect(ours, to=receiver.handle, packed=False) as sender:
        for verify_seed in (1, 2):
            fill(ours, verify_seed)
            sender.send_weights()
            assert alike(ours, theirs)
    with ws.connect(ours, to=receiver.handle, packed=False, verify=False) as sender:
        fill(ours, 3)
        before = kernel.launches
        assert sender.send_weights().verified == "none"
        assert kernel.launches - before == 1
        assert alike(ours, theirs)
    receiver.close()


@pytest.mark.parametrize(
    ("packed", "losing"), [(False, "receiver"), (True, "receiver"), (True, "trainer")]
)
def test_a_lost_store_is_named_and_nothing_changes(
    kernel: CountingKernel, packed: bool, losing: Literal["trainer", "receiver"]
) -> None:
    ours, theirs = model(), model()
    receiver = ws.WeightReceiver(theirs)
    with ws.connect(ours, to=receiver.handle, packed=packed) as sender:
        fill(ours, 1)
        sender.send_weights()
        held = [parameter.data.clone() for parameter in theirs.parameters()]
        fill(ours, 2)
        kernel.losing = losing
        with pytest.raises(ws.VerificationError):
            sender.send_weights()
        kernel.losing = ""
        for parameter, before in zip(theirs.parameters(), held, strict=True):
            assert torch.equal(parameter.data.view(torch.int16), before.view(torch.int16))
        sender.send_weights()
        assert alike(ours, theirs)
    receiver.close()


GIB = 1 << 30


@pytest.mark.parametrize(
    ("nbytes", "by_launches", "ring"),
    [
        (16 * GIB, True, (GIB // 2, 2)),
        (16 * GIB, False, (GIB // 2, 2)),
        (GIB, True, (GIB, 1)),  # all of it in one turn, without a spare bucket
        (GIB, False, (GIB // 2, 2)),
        (100 * MIB + 1, True, (100 * MIB + 64, 1)),
        (100 * MIB, False, (50 * MIB, 2)),
        (MIB, True, (32 * MIB, 1)),
        (0, False, (32 * MIB, 2)),
    ],
)
def test_a_ring_on_a_gpu_has_few_large_buckets(
    nbytes: int, by_launches: bool, ring: tuple[int, int]
) -> None:
    assert cuda_ring(nbytes, by_launches=by_launches) == ring


def test_a_gpu_without_room_gets_a_smaller_ring() -> None:
    large = [(GIB // 2, 2), (GIB // 4, 2), (GIB // 8, 2), (64 * MIB, 2), (32 * MIB, 2)]
    assert cuda_rings(16 * GIB, by_launches=True) == large
    assert cuda_rings(GIB, by_launches=True) == [(GIB, 1), *large[1:]]
    assert cuda_rings(MIB, by_launches=False) == [(32 * MIB, 2)]
    assert cuda_rings(16 * GIB, by_launches=True, bucket_nbytes=MIB) == [(MIB, 2)]


@pytest.mark.parametrize("room", [128 * MIB, 63 * MIB])
def test_an_update_through_a_smaller_ring(
    kernel: CountingKernel, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no room for two units either, the engine is not made."""
    genuine = ring.Buckets.__init__

    def full(self: ring.Buckets, number: int, nbytes: int, device: torch.device) -> None:
        if number * nbytes > room:
            raise torch.OutOfMemoryError("planted")
        genuine(self, number, nbytes, device)

    monkeypatch.setattr(ring.Buckets, "__init__", full)
    source = ws.StateDictSource({"w": torch.ones(200 * MIB, dtype=torch.uint8)})
    options = TransferOptions(packed=True)
    if room < 64 * MIB:
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            IpcTrainerEngine(source, options, "cuda_ipc")
        return
    with closing(IpcTrainerEngine(source, options, "cuda_ipc")) as engine:
        assert (engine.shape.bucket_nbytes, engine.shape.num_buckets) == (64 * MIB, 2)
        assert len(engine.shape.layout(source.manifest).chunks) == 4


@pytest.mark.parametrize("number", [1, 2, 3, 5, 1024, 1 << 30])
def test_a_ring_on_a_gpu_takes_what_is_allowed(number: int) -> None:
    bucket, count = cuda_ring(16 * GIB, by_launches=True, num_buckets=number)
    assert count == number
    assert bucket % 64 == 0
    assert bucket == 64 or bucket * number <= GIB
    assert (bucket + 64) * number > GIB
    given = cuda_ring(16 * GIB, by_launches=True, bucket_nbytes=100, num_buckets=number)
    assert given == (128, number)
    assert cuda_ring(MIB, by_launches=True, bucket_nbytes=64) == (64, 2)
