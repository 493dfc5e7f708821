"""Profiling scopes, as the environment asks for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

import weightsync as ws
from weightsync import profiling
from weightsync.errors import BackendUnavailableError, ConfigError
from weightsync.profiling import SETTING, scope_for

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


@pytest.fixture
def unread() -> Iterator[None]:
    """The setting is read at the first call, as in a new process."""
    profiling._chosen.cache_clear()
    yield
    profiling._chosen.cache_clear()


def seen_by_a_profiler() -> list[str]:
    with torch.profiler.profile() as profile, profiling.scope("decode step"):
        torch.ones(3).sum()
    return sorted(event.key for event in profile.key_averages() if "step" in event.key)


def test_the_profiler_sees_the_name(unread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "record_function")
    assert seen_by_a_profiler() == ["decode step"]


def test_nothing_happens_by_default(unread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    assert seen_by_a_profiler() == []


@pytest.mark.parametrize("setting", ["", "off", " OFF "])
def test_off_is_a_context_that_does_nothing(setting: str) -> None:
    assert isinstance(scope_for(setting)("step"), nullcontext)


def test_an_error_inside_passes_through() -> None:
    with pytest.raises(KeyError), scope_for("record_function")("step"):
        raise KeyError("inside")


def test_another_word_is_refused() -> None:
    message = "WEIGHTSYNC_PROFILE is 'all'; wanted off, record_function, nvtx or nothing"
    with pytest.raises(ConfigError, match=message):
        scope_for("all")


def test_the_steps_of_an_update_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    lock = threading.Lock()

    @contextmanager
    def note(name: str) -> Iterator[None]:
        with lock:
            names.append(name)
        yield

    receiver = ws.WeightReceiver(torch.nn.Linear(2, 2))
    with ws.connect(torch.nn.Linear(2, 2), to=receiver.handle, packed=True) as sender:
        sender.send_weights()
        monkeypatch.setattr(profiling, "_chosen", lambda: note)
        sender.send_weights()
        monkeypatch.undo()
    steps = ("begin", "transfer", "wait for a bucket", "end", "load", "prepare", "finish")
    assert sorted(names) == sorted(f"weightsync {step}" for step in steps)


@without_cuda
def test_nvtx_wants_a_gpu() -> None:
    with pytest.raises(BackendUnavailableError, match="torch finds no CUDA GPU"):
        scope_for("nvtx")


@pytest.mark.gpu
def test_nvtx_marks_a_range() -> None:
    with profiling.scope_for("nvtx")("step"):
        torch.cuda.synchronize()
