"""The path of a GPU trainer through the host, end to end, with the GPU's edge put on the CPU.

The trainer's `connect`, the packing, the ring and a receiver's process are the real ones. Copies
to the ring happen when somebody waits for them, as a GPU's may.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

import pytest
import torch

import weightsync as ws
from tests.gpu.receiver_process import EveryDtype, digests, fill, receiver_process
from tests.weights.late_lane import LateLane
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.backends.ring import Buckets
from weightsync.cuda import pinning
from weightsync.cuda.staging import StagedBuckets
from weightsync.weights.sources.base import ModuleSource

pytestmark = pytest.mark.usefixtures("shm_clean")

BUCKET_NBYTES = 192 << 10


class Edge:
    """The GPU's: `stage` stages every ring for tensors on the CPU; `refuses` to pin."""

    def __init__(self, refuses: int = 0) -> None:
        self.lane = LateLane()
        self.refuses = refuses
        self.pinned = 0

    def stage(self, ring: Buckets, device: torch.device) -> StagedBuckets | None:
        return ring.stage(device, self.lane, self)

    def register(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned += not self.refuses
        return self.refuses

    def unregister(self, address: int) -> int:
        self.pinned -= 1
        return 0


class Flowing(ModuleSource):
    """Tensors made on the way, in memory that is used again when the next one is asked for."""

    ends_at: int | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(super().tensors()):
            if i == self.ends_at:
                raise KeyError("a shard has gone")
            lent = tensor.clone()
            yield name, lent
            lent.zero_()

    def stable_tensors(self) -> None:
        return None


@pytest.fixture
def edge(monkeypatch: pytest.MonkeyPatch) -> Edge:
    made = Edge()
    engine = partial(IpcTrainerEngine, stage=made.stage)
    monkeypatch.setattr("weightsync.backends.ipc.sender.IpcTrainerEngine", engine)
    return made


@pytest.mark.parametrize("flowing", [False, True], ids=["stable", "flowing"])
@pytest.mark.parametrize("num_buckets", [1, 2, 4])
def test_updates_arrive_bit_for_bit(edge: Edge, num_buckets: int, flowing: bool) -> None:
    model = EveryDtype("cpu")

    source = Flowing(model) if flowing else model
    connect = partial(ws.connect, source, bucket_nbytes=BUCKET_NBYTES, num_buckets=num_buckets)
    with receiver_process("cpu") as receiver:
        with connect(to=receiver, packed=True) as sender:
            assert edge.pinned == 1
            for version in (1, 2, 3):
                fill(model, seed=version)
                report = sender.send_weights()
                assert report.path == "shared_memory"
                assert report.verified == "held"
                assert receiver.digests() == digests(model)
                assert edge.lane.waiting == 0
            twins = min(num_buckets, 2) * BUCKET_NBYTES
            assert report.peak_extra_nbytes >= num_buckets * BUCKET_NBYTES + twins
        assert edge.pinned == 0
    assert edge.lane.copies > 0


def test_an_update_given_up_half_way_leaves_nothing(edge: Edge) -> None:
    model = EveryDtype("cpu")
    source = Flowing(model)
    with (
        receiver_process("cpu") as receiver,
        ws.connect(source, to=receiver, bucket_nbytes=BUCKET_NBYTES) as sender,
    ):
        sender.send_weights()
        held = receiver.digests()
        for seed in (1, 2):
            fill(model, seed)
            source.ends_at = 40
            with pytest.raises(KeyError, match="a shard has gone"):
                sender.send_weights()
            assert edge.lane.waiting == 0
            assert receiver.digests() == held
            source.ends_at = None
            sender.send_weights()
            held = receiver.digests()
            assert held == digests(model)


def test_a_driver_that_does_not_pin_is_one_warning(
    edge: Edge, caplog: pytest.LogCaptureFixture
) -> None:
    edge.refuses = 801
    pinning._warn.cache_clear()
    model = EveryDtype("cpu")
    with caplog.at_level(logging.WARNING), receiver_process("cpu") as receiver:
        for seed in (1, 2):
            fill(model, seed)
            with ws.connect(model, to=receiver, packed=True) as sender:
                sender.send_weights()
                assert receiver.digests() == digests(model)
    pinning._warn.cache_clear()
    (said,) = [r.getMessage() for r in caplog.records if r.name == pinning.__name__]
    assert "does not pin" in said
    assert "801" in said
    assert edge.pinned == 0
