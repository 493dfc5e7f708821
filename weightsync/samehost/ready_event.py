"""Interprocess events on a GPU: the only file that makes, opens or asks them.

Whoever writes memory that others read records one behind the last copy into it, on its own stream;
readers only open it, and ask it on the host before they copy. So no stream waits for another
process, dead or alive. Nothing here makes a CUDA context by being imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from weightsync.errors import HandleError, TransferError
from weightsync.samehost import cuda_handle

EVENT_NBYTES = 64
"""Of a cudaIpcEventHandle_t."""


class OwnEvent(Protocol):
    """The writer's event; others can use it for as long as this lives."""

    def record(self) -> None:
        """Put it behind what the caller's stream has been given so far, in place of its last.

        Raises TransferError where the driver cannot.
        """

    def handle(self) -> bytes:
        """Return what another process opens, any number of them: `EVENT_NBYTES` bytes.

        Raises HandleError where the driver cannot.
        """


class OpenEvent(Protocol):
    """The same event in a reader's process."""

    def passed(self) -> bool:
        """Whether all before the last record is done. Never waits.

        Called after the writer has said, in host memory, that it recorded. Raises TransferError
        where the driver cannot tell.
        """


class Edge(Protocol):
    """What is asked of the driver."""

    def key(self, device: torch.device) -> str:
        """Return the device key that goes with the handles."""

    def make(self, device: torch.device) -> OwnEvent:
        """Make an event on `device`. Raises HandleError where the driver cannot."""

    def open(self, key: str, handle: bytes) -> OpenEvent:
        """Open a handle, checked before. Raises HandleError where the driver cannot."""


class CudaEdge:
    """CUDA's own, through torch."""

    def key(self, device: torch.device) -> str:
        """Return the GPU's key."""
        return cuda_handle.gpu_key(device)

    def make(self, device: torch.device) -> OwnEvent:
        """Make an event that exists on this GPU from here on; see the contract."""
        with _driver_errors("making an interprocess event"):
            return _CudaOwn(device)

    def open(self, key: str, handle: bytes) -> OpenEvent:
        """Open on this process's ordinal of the same GPU; see the contract."""
        ordinal = cuda_handle.local_gpu_keys().get(key)
        if ordinal is None:
            raise HandleError(f"the ready events are of GPU {key[:128]}, which is not seen here")
        with _driver_errors("opening an interprocess event"):
            return _CudaOpen(torch.device("cuda", ordinal), handle)


CUDA = CudaEdge()


def check_handles(key: str, handles: list[bytes], *, memory_key: str) -> None:
    """Raise HandleError unless these could be the events of memory on the GPU `memory_key`."""
    if key != memory_key:
        raise HandleError(
            f"the ready events are of GPU {key[:128]}, the memory that they are for is on "
            f"{memory_key[:128]}; a sender makes both on one GPU, so the init_info is damaged"
        )
    wrong = next((handle for handle in handles if len(handle) != EVENT_NBYTES), None)
    if wrong is not None:
        raise HandleError(
            f"malformed ready event: an event handle has {EVENT_NBYTES} bytes, this has "
            f"{len(wrong)}; both sides need torch 2.11 to 2.13"
        )


class _CudaOwn:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        # Timing cannot be shared. torch makes the event when it is first recorded or exported, and
        # then on the current device, so it is recorded here once: nothing waits for that.
        self._event = event(interprocess=True)
        self._record()

    def record(self) -> None:
        with _driver_errors("recording an interprocess event", TransferError):
            self._record()

    def _record(self) -> None:
        with torch.cuda.device(self._device):
            self._event.record(torch.cuda.current_stream(self._device))

    def handle(self) -> bytes:
        ipc_handle: Callable[[], bytes] = self._event.ipc_handle
        with _driver_errors("exporting an interprocess event"), torch.cuda.device(self._device):
            return ipc_handle()


class _CudaOpen:
    def __init__(self, device: torch.device, handle: bytes) -> None:
        from_handle: Any = torch.cuda.Event.from_ipc_handle
        with torch.cuda.device(device):
            self._event: torch.cuda.Event = from_handle(device, handle)

    def passed(self) -> bool:
        query: Callable[[], bool] = self._event.query
        with _driver_errors("asking an interprocess event", TransferError):
            return query()


@contextmanager
def _driver_errors(what: str, error: type[TransferError] = HandleError) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AssertionError, TypeError, ValueError) as exc:
        first_line = str(exc).partition("\n")[0]
        raise error(f"{what} failed: {first_line}") from exc
