"""Tensors of a GPU that reach their readers through pinned host buckets."""

from __future__ import annotations

import pytest
import torch

from weightsync.backends.ipc.memory import stage_on_gpu
from weightsync.backends.ring import Buckets
from weightsync.cuda.memory import OpenMemory
from weightsync.cuda.pinning import CudaDriver
from weightsync.cuda.staging import CopyWork, CpuGpuBuffer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("shm_clean")]

NBYTES = 4 << 20
BUCKETS = 4


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_a_ring_is_pinned_while_it_is_staged() -> None:
    ring = Buckets(BUCKETS, NBYTES, torch.device("cpu"))
    assert stage_on_gpu(ring, gpu()) is not None
    buckets = list(ring.tensors)
    assert all(bucket.is_pinned() for bucket in buckets)
    ring.close()
    assert not any(bucket.is_pinned() for bucket in buckets)


def test_chunks_cross_while_kernels_go_on() -> None:
    ring = Buckets(BUCKETS, NBYTES, torch.device("cpu"))
    stage = stage_on_gpu(ring, gpu())
    assert stage is not None
    crossings: list[CopyWork] = []
    for j in range(3 * BUCKETS):
        if j >= BUCKETS:
            crossings[j - BUCKETS].wait()
            assert bool((ring.tensors[j % BUCKETS] == j - BUCKETS + 1).all())
        stage.device_buffer(j % BUCKETS).fill_(j + 1)
        crossings.append(stage.copy_to_bucket(j % BUCKETS, NBYTES))
    ring.close()


def test_a_source_may_be_overwritten_when_it_was_sent_directly() -> None:
    ring = Buckets(BUCKETS, NBYTES, torch.device("cpu"))
    stage = stage_on_gpu(ring, gpu())
    assert stage is not None
    source = torch.empty(NBYTES, dtype=torch.uint8, device=gpu())
    crossings = []
    for j in range(BUCKETS):
        source.fill_(j + 1)
        crossings.append(stage.copy_directly_to_bucket(j, source))
    for j, crossing in enumerate(crossings):
        crossing.wait()
        assert bool((ring.tensors[j] == j + 1).all())
    ring.close()


def test_a_readers_mapping_serves_a_gpu_pinned_or_not() -> None:
    ring = Buckets(BUCKETS, NBYTES, torch.device("cpu"))
    ring.tensors[1].fill_(9)
    (handle,) = ring.handle().values()
    with OpenMemory(handle) as memory:
        memory.pin(CudaDriver(gpu()))
        copied = memory.part(NBYTES, NBYTES).to(gpu(), non_blocking=True)
        torch.cuda.synchronize()
        assert bool((copied == 9).all())
    # Refused or not, nothing of it is left for the next kernel to trip over.
    assert float(torch.ones(8, device=gpu()).sum()) == 8
    ring.close()


def test_memory_that_is_not_there_is_refused_and_leaves_cuda_usable() -> None:
    driver = CudaDriver(gpu())
    assert driver.register(4096, 4096, 0) != 0
    assert driver.unregister(4096) != 0
    assert float(torch.ones(8, device=gpu()).sum()) == 8


def test_pairs_around_a_bucket() -> None:
    ring = Buckets(1, NBYTES, torch.device("cpu"))
    stage = stage_on_gpu(ring, gpu())
    assert stage is not None
    pair = CpuGpuBuffer.around(ring.tensors[0], stage.device_buffer(0))
    pair.gpu.fill_(3)
    pair.copy_to_cpu(10)
    torch.cuda.synchronize()
    assert pair.cpu[:11].tolist() == [3] * 10 + [0]
    ring.close()
