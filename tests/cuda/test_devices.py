"""The order of calls to a driver that stands in for CUDA's; what torch says without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.cuda import devices

GPU = torch.device("cuda", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A process that has used GPU 1; what is set is noted."""
    noted: list[object] = []
    cuda: Any = torch.cuda

    def current_stream() -> SimpleNamespace:
        noted.append("asked")
        return SimpleNamespace(device=GPU)

    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "current_device", lambda: 1)
    monkeypatch.setattr(cuda, "current_stream", current_stream)
    monkeypatch.setattr(cuda, "set_device", lambda device: noted.append(("device", device)))
    monkeypatch.setattr(cuda, "set_stream", lambda found: noted.append(("stream", found)))
    return noted


@pytest.fixture
def unused(calls: list[object], monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The same process before it has used a GPU: a question about streams would begin that."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    return calls


def test_the_stream_is_asked_for_at_once_and_set_later_behind_its_gpu(calls: list[object]) -> None:
    carry = devices.carried_stream()
    assert calls == ["asked"]
    carry()
    assert calls[1:] == [("device", GPU), ("stream", SimpleNamespace(device=GPU))]


def test_a_process_that_has_used_no_gpu_is_left_so(unused: list[object]) -> None:
    devices.carried_stream()()
    assert unused == []
    assert devices.current() is None


@pytest.mark.usefixtures("calls")
def test_the_current_gpu_has_its_number() -> None:
    assert devices.current() == GPU


@pytest.mark.gpu
def test_memory_and_name_of_a_gpu() -> None:
    held = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    free, total = devices.memory(held.device)
    assert 0 < free <= total - held.nbytes
    assert devices.memory()[1] == total
    name, nbytes = devices.describe(held.device.index)
    assert name == torch.cuda.get_device_name(held.device)
    assert free < nbytes
    version = devices.driver_version()
    assert version is not None
    assert version >= (11, 0)
