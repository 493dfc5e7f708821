"""Tracks running optimizer steps: fused optimizers write parameters without a version change."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch.optim import optimizer as hooks

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_lock = threading.RLock()  # reentrant: the garbage collector may call in while it is held
_ended = threading.Condition(_lock)
_POLL_S = 0.05
"""Polling interval, because torch does not report steps that end by an exception."""
_waiting = 0
_installed = False
_windows: set[StepWindow] = set()
_running: dict[tuple[int, int], tuple[torch.optim.Optimizer, CodeType]] = {}
"""The optimizers inside `step()` and the code object of that call, by thread id and object id."""


class StepWindow:
    """Collects the optimizers that run a step, or part of one, until `close`.

    A running step of the calling thread does not count, because that step itself calls the send.
    """

    def __init__(self) -> None:
        self._optimizers: list[torch.optim.Optimizer] = []
        with _lock:
            self._optimizers += _running_elsewhere()
            _windows.add(self)

    def close(self) -> list[torch.optim.Optimizer]:
        """Stop collecting and return the optimizers. Idempotent."""
        with _lock:
            _windows.discard(self)
        return self._optimizers

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer, once. Called when its step begins."""
        if not any(known is optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)


def install() -> None:
    """Register hooks for every optimizer step of this process. Idempotent."""
    global _installed  # noqa: PLW0603  # torch's hooks are process-wide too
    with _lock:
        if not _installed:
            hooks.register_optimizer_step_pre_hook(_begin_step)
            hooks.register_optimizer_step_post_hook(_end_step)
            _installed = True


@contextmanager
def held_back(wait_s: float = 0.0, *, own: bool = False) -> Iterator[bool]:
    """Block new optimizer steps; yield True if no step is running.

    Waits at most `wait_s` for the end of other threads' steps. `own` counts a step of this thread,
    too.
    """
    global _waiting  # noqa: PLW0603  # process-wide, as the lock
    with _lock:
        if wait_s:
            _waiting += 1
            try:
                until = time.monotonic() + wait_s
                while _running_elsewhere() and time.monotonic() < until:
                    _ended.wait(_POLL_S)
            finally:
                _waiting -= 1
                _ended.notify_all()
        yield not (_running_elsewhere() or (own and _own_step_runs()))


def stored_at(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the addresses of the storages that a step writes parameters to."""
    return {
        storage_address(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of the storage of a tensor, or of a DTensor's shard; 0 if none."""
    if type(tensor) not in _PLAIN:
        tensor = getattr(tensor, "_local_tensor", tensor)
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _running_elsewhere() -> list[torch.optim.Optimizer]:
    """Return the optimizers that step in other threads; drop steps that ended by an exception."""
    if not _running:
        return []
    frames = _current_frames()
    for (thread, number), (_, code) in list(_running.items()):
        frame = frames.get(thread)
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        if frame is None:
            del _running[thread, number]
    own = threading.get_ident()
    return [optimizer for (thread, _), (optimizer, _) in list(_running.items()) if thread != own]


def _current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of every thread.

    Before CPython 3.12, `sys._current_frames` allocates frame objects under an interpreter lock. A
    garbage collection that starts there and frees a tensor releases the GIL. Another thread that
    then waits for the same lock causes a deadlock (python/cpython#106883). So the garbage collector
    is disabled meanwhile.
    """
    if sys.version_info >= (3, 12) or not gc.isenabled():
        return sys._current_frames()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        gc.enable()


def _own_step_runs() -> bool:
    return any(thread == threading.get_ident() for thread, _ in list(_running))


def _begin_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    code = sys._getframe(1).f_code
    with _lock:
        while _waiting and not _own_step_runs():
            _ended.wait(_POLL_S)
        _running[threading.get_ident(), id(optimizer)] = optimizer, code
        for window in list(_windows):
            window.add(optimizer)


def _end_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with _lock:
        _running.pop((threading.get_ident(), id(optimizer)), None)
        _ended.notify_all()
