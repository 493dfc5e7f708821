"""The CUDA devices of this process: GPUs and their memory, current device and stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def is_available() -> bool:
    """Return whether torch finds a CUDA GPU."""
    return torch.cuda.is_available()


def count() -> int:
    """Return the number of GPUs that this process sees."""
    return torch.cuda.device_count()


def default() -> torch.device:
    """Return the current GPU, whichever it will be, or the CPU where torch finds no GPU."""
    return torch.device("cuda" if is_available() else "cpu")


def in_use() -> bool:
    """Return whether this process has initialised CUDA; does not do so itself."""
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized
    return is_initialized()


def current() -> torch.device | None:
    """Return the current GPU of the calling thread, None in a process that has used no GPU."""
    if is_available() and in_use():
        return torch.device("cuda", torch.cuda.current_device())
    return None


def use(device: torch.device) -> None:
    """Make a GPU the calling thread's current one."""
    torch.cuda.set_device(device)


def carried_stream() -> Callable[[], None]:
    """Return a call that makes this thread's current GPU and stream those of another thread.

    The other thread calls it. It does nothing in a process that has used no GPU.
    """
    stream = torch.cuda.current_stream() if in_use() else None

    def carry() -> None:
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)

    return carry


def memory(device: torch.device | None = None) -> tuple[int, int]:
    """Return the free bytes and all bytes of a GPU's memory, by default the current one's."""
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def can_access_peer(ordinal: int, peer: int) -> bool:
    """Return whether the driver lets one GPU read and write another one's memory; no context."""
    return bool(torch.cuda.can_device_access_peer(ordinal, peer))


def empty_cache() -> None:
    """Give the memory that torch keeps for later back to the GPUs, where any is in use."""
    if in_use():
        torch.cuda.empty_cache()


def describe(ordinal: int) -> tuple[str, int]:
    """Return the name of a GPU and the bytes of its memory, without a context on it."""
    found = torch.cuda.get_device_properties(ordinal)
    return found.name, found.total_memory


def driver_version() -> tuple[int, int] | None:
    """Return the newest CUDA that the driver supports; None where there is no driver."""
    try:
        get_version = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion
    except (OSError, AttributeError):
        return None
    version = ctypes.c_int()
    if get_version(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """Show what runs inside as a range `name` of Nsight Systems."""
    nvtx: Any = torch.cuda.nvtx  # untyped in torch
    nvtx.range_push(name)
    try:
        yield
    finally:
        nvtx.range_pop()
