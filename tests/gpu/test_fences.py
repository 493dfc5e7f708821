"""Both fences on a real GPU, with kernels queued that are far from done when a reader is told.

tests/backends/test_ready_fences.py shows the same without a GPU, up to the driver.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weightsync as ws
from tests.gpu.receiver_process import EveryDtype, digests, receiver_process
from weightsync.cuda.events import FENCE_VARIABLE, WriterFence

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("shm_clean")]

SLOW_CYCLES = 200_000_000
"""About a tenth of a second."""
BUCKET_NBYTES = 512 << 10
fences = pytest.mark.parametrize("fence", ["host", "event"])
packings = pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])


class Flowing(ws.ModuleSource):
    """Tensors made on the way, each behind a slow kernel of its own stream's."""

    def tensors(self) -> Any:
        for name, tensor in super().tensors():
            sleep(SLOW_CYCLES // 100)
            yield name, tensor.clone()

    def stable_tensors(self) -> None:
        return None


def sleep(cycles: int) -> None:
    slow: Any = torch.cuda._sleep
    slow(cycles)


def fill_late(model: EveryDtype, seed: int) -> None:
    """Overwrite every tensor on the GPU, behind a kernel that takes its time; wait for nothing."""
    generator = torch.Generator("cuda").manual_seed(seed)
    made = []
    for tensor in model.state_dict().values():
        top = 2 if tensor.dtype is torch.bool else 256
        nbytes = tensor.numel() * tensor.element_size()
        bits = torch.randint(top, (nbytes,), dtype=torch.uint8, generator=generator, device="cuda")
        made.append((tensor.detach().reshape(-1).view(torch.uint8), bits))
    torch.cuda.synchronize()
    sleep(SLOW_CYCLES)
    for flat, bits in made:
        flat.copy_(bits)


@fences
@packings
@pytest.mark.parametrize("verify", [False, True])
def test_what_arrives_is_what_the_slow_kernels_left(
    fence: str, packed: bool, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FENCE_VARIABLE, fence)
    model = EveryDtype("cuda")
    with (
        receiver_process("cuda") as receiver,
        ws.connect(
            model, to=receiver, packed=packed, verify=verify, bucket_nbytes=BUCKET_NBYTES
        ) as sender,
    ):
        for seed in (1, 2, 3):
            before = WriterFence.recorded
            fill_late(model, seed)
            report = sender.send_weights()
            assert report.path == "cuda_ipc", report.skipped_paths
            by_event = fence == "event" and not verify
            assert (WriterFence.recorded > before) is by_event
            assert receiver.digests() == digests(model)


@fences
def test_tensors_made_behind_slow_kernels(fence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FENCE_VARIABLE, fence)
    model = EveryDtype("cuda")
    source = Flowing(model)
    with (
        receiver_process("cuda") as receiver,
        ws.connect(source, to=receiver, verify=False, bucket_nbytes=BUCKET_NBYTES) as sender,
    ):
        for seed in (1, 2):
            before = WriterFence.recorded
            fill_late(model, seed)
            assert sender.send_weights().path == "cuda_ipc"
            assert (WriterFence.recorded > before) is (fence == "event")
            assert receiver.digests() == digests(model)


@packings
def test_two_readers_of_one_event(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FENCE_VARIABLE, "event")
    model = EveryDtype("cuda")
    with (
        receiver_process("cuda") as one,
        receiver_process("cuda") as other,
        ws.connect(
            model, to=[one, other], packed=packed, verify=False, bucket_nbytes=BUCKET_NBYTES
        ) as sender,
    ):
        before = WriterFence.recorded
        fill_late(model, seed=1)
        assert sender.send_weights().path == "cuda_ipc"
        assert WriterFence.recorded > before
        assert one.digests() == other.digests() == digests(model)
