"""Updates that begin while the trainer's kernels are far from done: what arrives is what they left.

tests/backends/test_sender_waits.py looks at the order of waits without a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weightsync as ws
from tests.gpu.receiver_process import EveryDtype, digests, receiver_process

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("shm_clean")]

SLOW_CYCLES = 200_000_000
"""About a tenth of a second."""
BUCKET_NBYTES = 512 << 10


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


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize("verify", [False, True])
def test_what_arrives_is_what_the_slow_kernels_left(packed: bool, verify: bool) -> None:
    model = EveryDtype("cuda")
    with (
        receiver_process("cuda") as receiver,
        ws.connect(
            model, to=receiver, packed=packed, verify=verify, bucket_nbytes=BUCKET_NBYTES
        ) as sender,
    ):
        for seed in (1, 2, 3):
            fill_late(model, seed)
            report = sender.send_weights()
            assert report.path == "cuda_ipc", report.skipped_paths
            assert receiver.digests() == digests(model)


def test_tensors_made_behind_slow_kernels() -> None:
    model = EveryDtype("cuda")
    source = Flowing(model)
    with (
        receiver_process("cuda") as receiver,
        ws.connect(source, to=receiver, verify=False, bucket_nbytes=BUCKET_NBYTES) as sender,
    ):
        for seed in (1, 2):
            fill_late(model, seed)
            assert sender.send_weights().path == "cuda_ipc"
            assert receiver.digests() == digests(model)
