"""Pinned host memory: shared memory registered with the CUDA driver, for direct copies to a GPU.

Shared memory is pageable. The driver copies pageable memory through a small buffer of its own, and
the caller waits. Registered memory behaves like memory that was allocated pinned.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

# cudaHostRegisterPortable and cudaHostRegisterReadOnly of cuda_runtime_api.h; torch has no names.
_PORTABLE = 0x01
_READ_ONLY = 0x08


class Driver(Protocol):
    """The calls of the CUDA driver that pin memory. Both return 0, or a cudaError_t."""

    def register(self, address: int, nbytes: int, flags: int) -> int:
        """Pin and map host memory."""

    def unregister(self, address: int) -> int:
        """Undo `register`."""


class CudaDriver:
    """The CUDA runtime that torch loaded, on `device`. Calls raise RuntimeError without CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int, flags: int) -> int:
        """Pin and map host memory; see `cudaHostRegister`."""
        with torch.cuda.device(self._device):
            code = int(_runtime().cudaHostRegister(address, nbytes, flags))
            if code:
                self._forget()
        return code

    def unregister(self, address: int) -> int:
        """Undo `register`; see `cudaHostUnregister`."""
        with torch.cuda.device(self._device):
            code = int(_runtime().cudaHostUnregister(address))
            if code:
                self._forget()
        return code

    def _forget(self) -> None:
        """Clear the runtime's last error, which the next kernel launch would report as its own."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device).add_(1)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's


class Pinned:
    """Host memory (`uint8[nbytes]`, contiguous) that is pinned until `close`.

    Where the driver refuses, there is one warning and the memory stays pageable; copies work either
    way. The caller calls `close` after the last copy and before it unmaps the memory. `read_only`
    is for memory mapped read-only.
    """

    def __init__(self, memory: torch.Tensor, driver: Driver, *, read_only: bool = False) -> None:
        self._driver = driver
        self._address: int | None = memory.data_ptr()
        flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        try:
            code = driver.register(memory.data_ptr(), memory.numel(), flags)
            reason = f"error {code}" if code else ""
        except RuntimeError as exc:
            reason = str(exc).partition("\n")[0]
        if reason:
            self._address = None
            _warn(reason, "read-only" if read_only else "writable")

    @property
    def held(self) -> bool:
        """Whether the memory is pinned now."""
        return self._address is not None

    def close(self) -> None:
        """Unpin the memory; a failure is a warning. Idempotent."""
        address, self._address = self._address, None
        if address is None:
            return
        try:
            code = self._driver.unregister(address)
        except RuntimeError as exc:
            logger.warning("shared memory at %#x stays pinned: %s", address, exc)
        else:
            if code:
                logger.warning("shared memory at %#x stays pinned: error %d", address, code)


@cache
def _warn(reason: str, access: str) -> None:
    logger.warning(
        "the CUDA driver does not pin %s shared memory (%s); copies between it and the GPU are "
        "slower. A container may lack the right to lock memory (ulimit -l)",
        access,
        reason,
    )
