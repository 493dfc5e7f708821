"""Memory that a driver pins, or does not; the driver alone is a stand-in."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.weights.late_lane import LateLane
from weightsync.backends.ipc.memory import stage_on_gpu
from weightsync.backends.ring import Buckets
from weightsync.cuda import pinning
from weightsync.cuda.memory import OpenMemory
from weightsync.cuda.pinning import CudaDriver, Pinned
from weightsync.cuda.staging import StagedBuckets
from weightsync.wire.offers import SegmentHandle

CPU = torch.device("cpu")
NBYTES = 1 << 16
PORTABLE, READ_ONLY = 1, 8


def mapped(address: int) -> bool:
    starts = (
        line.split("-", 1)[0] for line in Path("/proc/self/maps").read_text("utf-8").splitlines()
    )
    return address in {int(start, 16) for start in starts}


class Driver:
    """Registers what it is given, unless `refuses`; looks whether memory is there."""

    def __init__(self, refuses: int = 0) -> None:
        self.refuses = refuses
        self.held: dict[int, tuple[int, int]] = {}
        self.seen: list[tuple[int, int]] = []

    def register(self, address: int, nbytes: int, flags: int) -> int:
        if not self.refuses:
            assert mapped(address)
            self.held[address] = nbytes, flags
            self.seen.append((nbytes, flags))
        return self.refuses

    def unregister(self, address: int) -> int:
        assert mapped(address), "memory must be given back before it is unmapped"
        del self.held[address]
        return 0


@pytest.fixture(autouse=True)
def _not_warned_yet() -> Iterator[None]:
    pinning._warn.cache_clear()
    yield
    pinning._warn.cache_clear()


def staged_ring(driver: Driver, lane: LateLane) -> tuple[Buckets, StagedBuckets]:
    ring = Buckets(4, NBYTES, CPU)
    stage = ring.stage(CPU, lane, driver)
    assert stage is not None
    return ring, stage


def test_a_ring_is_pinned_whole_and_given_back_before_it_is_unmapped() -> None:
    driver, lane = Driver(), LateLane()
    ring, stage = staged_ring(driver, lane)
    assert driver.held == {ring.tensors[0].data_ptr(): (4 * NBYTES, PORTABLE)}
    assert stage.nbytes == 2 * NBYTES
    stage.device_buffer(1).fill_(7)
    stage.copy_to_bucket(1, NBYTES)
    bucket = ring.tensors[1].clone()
    assert int(bucket.sum()) == 0
    ring.close()
    assert lane.waiting == 0, "a copy into memory that is gone"
    assert driver.held == {}
    ring.close()


def test_a_reader_pins_its_mapping_read_only() -> None:
    driver = Driver()
    ring, _ = staged_ring(Driver(), LateLane())
    (handle,) = ring.handle().values()
    assert isinstance(handle, SegmentHandle)
    memory = OpenMemory(handle)
    for _ in range(2):
        memory.pin(driver)
    assert driver.seen == [(4 * NBYTES, PORTABLE | READ_ONLY)]
    memory.close()
    assert driver.held == {}
    ring.close()


@pytest.mark.parametrize("driver", [Driver(refuses=2), CudaDriver(torch.device("cuda", 0))])
def test_memory_that_cannot_be_pinned_is_one_warning(
    driver: pinning.Driver, caplog: pytest.LogCaptureFixture
) -> None:
    if isinstance(driver, CudaDriver) and torch.cuda.is_available():
        pytest.skip("the driver is there")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            pinned = Pinned(torch.zeros(64, dtype=torch.uint8), driver)
            assert not pinned.held
            pinned.close()
    (record,) = caplog.records
    assert "does not pin writable shared memory" in record.getMessage()


def test_a_driver_that_keeps_memory_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Keeps(Driver):
        def unregister(self, address: int) -> int:
            return 1

    ring = Buckets(1, NBYTES, CPU)
    ring.stage(CPU, LateLane(), Keeps())
    with caplog.at_level(logging.WARNING):
        ring.close()
    assert "stays pinned: error 1" in caplog.text


def test_no_room_on_the_device_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 KiB")

    monkeypatch.setattr(torch, "empty_like", full)
    driver = Driver()
    ring = Buckets(2, NBYTES, CPU)
    assert ring.stage(CPU, LateLane(), driver) is None
    assert "no memory to stage (CUDA out of memory" in caplog.text
    ring.close()
    assert driver.seen == []


def test_tensors_on_the_host_are_not_staged() -> None:
    ring = Buckets(2, NBYTES, CPU)
    assert stage_on_gpu(ring, CPU) is None
    ring.close()
