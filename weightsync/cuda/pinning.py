"""Host memory that a GPU's driver knows and locks, so that copies to and from it need no detour.

Shared memory is pageable: copied as it is, it crosses through a small buffer of the driver's, and
the caller waits. Registered with the driver it is as good as memory that was allocated pinned.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

# From cuda_runtime_api.h; torch does not name them.
_PORTABLE = 0x01
_READ_ONLY = 0x08


class Driver(Protocol):
    """The CUDA driver's edge. Both return 0, or an error's number."""

    def register(self, address: int, nbytes: int, flags: int) -> int: ...

    def unregister(self, address: int) -> int: ...


class CudaDriver:
    """The CUDA runtime that torch has loaded, on `device`. Raises RuntimeError without CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int, flags: int) -> int:
        """Lock and map; see `cudaHostRegister`."""
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
        """Take the error out of the runtime, which would blame the next kernel for it."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device).add_(1)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's


class Pinned:
    """`memory` (contiguous, on the host), registered until `close`; where that fails it is not.

    Called before copies between it and a GPU; they work either way. `close` comes before the
    memory is unmapped and after the last copy. `read_only` for memory mapped so.
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
        """Give it back to the system. Idempotent."""
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
        "the CUDA driver does not pin %s shared memory (%s); copies between it and the GPU go on, "
        "more slowly. A container may lack the right to lock memory (ulimit -l)",
        access,
        reason,
    )
