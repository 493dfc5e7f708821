"""The device that an engine takes a source's tensors to be on, in a process that uses CUDA."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from weightsync.backends.base import TransferOptions
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.backends.ring import HOST_BUCKET_NBYTES, Buckets
from weightsync.ranks.sources import source_device
from weightsync.weights.sources.base import IterableSource, ModuleSource, WeightSource, as_source
from weightsync.weights.sources.safetensors_source import SafetensorsSource

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def cuda_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has a GPU, and has used it; no driver is called."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def pairs() -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.zeros(6)), ("b", torch.zeros(2))]


def with_one_on_a_gpu() -> list[tuple[str, torch.Tensor]]:
    """As `pairs`, of which one tensor says that it is on a GPU."""

    class OnGpu(torch.Tensor):
        device = GPU

    return [("w", torch.zeros(6)), ("b", torch.zeros(2).as_subclass(OnGpu))]


class Renamed(ws.WrappingSource):
    @property
    def manifest(self) -> Any:
        return self.source.manifest

    def convert(self, pairs: Any) -> Any:
        yield from pairs


def from_file(folder: Path) -> WeightSource:
    from safetensors.torch import save_file

    save_file(dict(pairs()), folder / "model.safetensors")
    return SafetensorsSource(folder / "model.safetensors")


SOURCES: dict[str, Callable[[Path], WeightSource]] = {
    "module": lambda _: as_source(nn.Linear(3, 2)),
    "cast": lambda _: ModuleSource(nn.Linear(3, 2), dtype=torch.bfloat16),
    "callable": lambda _: IterableSource(pairs),
    "state dict": lambda _: as_source(nn.Linear(3, 2).state_dict),
    "wrapped": lambda _: Renamed(pairs),
    "wrapped module": lambda _: Renamed(nn.Linear(3, 2)),
    "file": from_file,
}


@pytest.mark.parametrize("name", SOURCES)
def test_no_memory_of_a_gpu_is_taken_for_tensors_of_the_host(
    name: str, tmp_path: Path, shm_clean: None
) -> None:
    source = SOURCES[name](tmp_path)
    staged: list[torch.device] = []

    def stage(ring: Buckets, device: torch.device) -> None:
        staged.append(device)

    options = TransferOptions(device=source_device(source), packed=True)
    with closing(IpcTrainerEngine(source, options, stage=stage)) as engine:
        assert [device.type for device in staged] == ["cpu"]
        assert {bucket.device.type for bucket in engine.buckets} == {"cpu"}
        assert engine.buckets[0].numel() == HOST_BUCKET_NBYTES


def test_tensors_of_a_gpu_are_sent_from_there() -> None:
    assert source_device(IterableSource(with_one_on_a_gpu)) == GPU


def test_a_source_that_says_nothing_is_where_its_process_works() -> None:
    class Silent:
        manifest = IterableSource(pairs).manifest

        def tensors(self) -> Any:
            return iter(pairs())

        def stable_tensors(self) -> None:
            return None

    assert source_device(Silent()) == GPU
