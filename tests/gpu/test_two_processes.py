"""The scenarios on a GPU; on the CPU too, where the same code takes the shared-memory path."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.gpu import scenarios
from tests.gpu.scenarios import Apply

pytestmark = pytest.mark.usefixtures("shm_clean")

WAIT_S = 100.0
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
packings = pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])


@devices
@packings
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_several_updates_arrive_bit_for_bit(device: str, packed: bool, apply: Apply) -> None:
    scenarios.several_updates(device, packed=packed, apply=apply)


@pytest.mark.gpu
@packings
def test_updates_without_verification(packed: bool) -> None:
    scenarios.several_updates("cuda", packed=packed, apply="staged", verify=False)


@pytest.mark.gpu
@packings
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_the_branch_for_another_gpu_on_one(packed: bool, apply: Apply) -> None:
    """Written without a GPU; test_peers.py has the rest by a stand-in for the driver."""
    scenarios.another_gpu(packed=packed, apply=apply)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@packings
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_two_gpus(packed: bool, apply: Apply) -> None:
    """Written without a GPU, and not run on two."""
    scenarios.several_updates("cuda", packed=packed, apply=apply, other="cuda:1")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_bit_of_a_commit_that_copies(device: str, dtype: torch.dtype) -> None:
    """torch's fused copies on a GPU change NaNs: the copies of a commit may not."""
    trainer, server = (nn.Linear(257, 64, device=device, dtype=dtype) for _ in range(2))
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).to(device)
    with torch.no_grad():
        trainer.weight.view(-1).view(torch.int16)[: 257 * 64] = every[-257 * 64 :]
    receiver = ws.WeightReceiver(ws.ModuleSink(server, swap="copy"))
    with ws.connect(trainer, to=receiver) as sender:
        sender.send_weights()
    assert torch.equal(trainer.weight.view(torch.uint8), server.weight.view(torch.uint8))


@devices
def test_tensors_that_moved_are_sent(device: str) -> None:
    scenarios.memory_moved(device)


@devices
@packings
def test_fifty_updates_take_nothing_more(device: str, packed: bool) -> None:
    scenarios.no_growth(device, packed=packed)


@pytest.mark.gpu
def test_closing_gives_the_memory_back() -> None:
    scenarios.memory_comes_back("cuda")


@devices
def test_a_receiver_on_the_cpu_is_reached_through_the_host(device: str) -> None:
    scenarios.receiver_without_the_gpu(device)


@devices
@pytest.mark.parametrize("packed", [None, True])
def test_a_refused_probe_costs_only_the_path(device: str, packed: bool | None) -> None:
    scenarios.refused_probe(device, packed=packed)


def in_a_fresh_process(device: str) -> tuple[str, dict[str, str]]:
    """Run the trainer where torch's allocator has not read its settings yet."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as trainer:
        return trainer.submit(scenarios.whatever_path, device).result(WAIT_S)


VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@pytest.mark.parametrize(
    ("device", "variable", "setting"),
    [
        ("cpu", VARIABLES[0], "True"),
        *(
            pytest.param("cuda", variable, setting, marks=pytest.mark.gpu)
            for variable in VARIABLES
            for setting in ("True", "False")
        ),
    ],
)
def test_expandable_segments(
    device: str, variable: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, f"expandable_segments:{setting}")
    path, skipped = in_a_fresh_process(device)
    if setting == "False" or device == "cpu":
        assert path == scenarios.fast_path(device), skipped
    elif path != "cuda_ipc":
        assert path == "shared_memory"
        assert "expandable" in skipped["cuda_ipc"]
