"""NCCL, as torch's ProcessGroupNCCL makes it: the only file that knows it.

Nothing here has run on a GPU so far. The contract that `nccl_data` builds on is `Wire`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, Work

from weightsync.backends.bounded_call import BoundedCall
from weightsync.errors import TransferError
from weightsync.samehost.cuda_handle import local_gpu_keys

_FOREVER = timedelta(days=365)
_ABORT_S = 5.0
_LATE_S = 1.0
_SETTINGS = {
    # torch's watchdog ends the process for what goes wrong in a group, unless told not to. A server
    # must outlive its private group: the caller watches every transfer, and aborts.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Where a user wants waits to block, they would block in `Work.wait`, past our deadline.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
_environment = threading.Lock()


class Flight(Protocol):
    """A send or receive that was posted."""

    def landed(self) -> bool:
        """Whether it is done; never waits. Raises TransferError when it cannot be."""


class Wire(Protocol):
    """Exact-size transfers between memory of a device, in order for each other rank.

    Both ends of one have the same size: otherwise neither ends, or bytes are lost. A transfer
    whose other end is gone may stay at work for ever; only `abort` ends it.
    """

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return memory that can be sent from and received to, `uint8[nbytes]`."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy between host and device; done on return."""

    def send(self, tensor: torch.Tensor, rank: int) -> Flight:
        """Post a send. The first to a rank returns when both ends are connected."""

    def receive(self, tensor: torch.Tensor, rank: int) -> Flight:
        """Post a receive. The first from a rank returns when both ends are connected."""

    def abort(self) -> bool:
        """End everything at work, and the connections; return whether that is over.

        Until it is, memory of a transfer may still be read or written. Bounded; called again, it
        only says whether it is over by now.
        """


def why_not() -> str | None:
    """Return why NCCL cannot work in this process, None where nothing speaks against it."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    if not (dist.is_available() and dist.is_nccl_available()):
        return f"torch {torch.__version__} is built without NCCL"
    return None


def own_gpu(keys: Sequence[str]) -> torch.device | None:
    """Return the first GPU of these device keys, as this process sees it, if there is one."""
    ordinals = local_gpu_keys()
    found = [ordinals[key] for key in keys if key in ordinals]
    return torch.device("cuda", found[0]) if found else None


def connect(store: Store, rank: int, size: int, device: torch.device) -> Wire:
    """Return this rank's wire; ranks meet in `store`, at the first transfer between them."""
    return _NcclWire(store, rank, size, device)


class _NcclFlight:
    def __init__(self, work: Work, passed: torch.cuda.Event) -> None:
        self._work = work
        self._passed = passed
        self._ended_s: float | None = None

    def landed(self) -> bool:
        with _as_transfer_errors():
            if self._passed.query():  # type: ignore[no-untyped-call]  # torch's
                return True
            if not self._work.is_completed():
                return False
        # Over by an error, unless the mark behind it is a moment late.
        self._ended_s = self._ended_s or time.monotonic()
        if time.monotonic() - self._ended_s > _LATE_S:
            raise TransferError("NCCL reported an error of this connection")
        return False


class _NcclWire:
    """A communicator for each neighbour; nothing of it is ever on a stream of the caller's."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        nccl: Any = dist.ProcessGroupNCCL  # torch types half of what its own code uses of it
        options = nccl.Options()
        options._timeout = _FOREVER
        self._device = device
        self._copies = _stream(device)
        self._marks: dict[int, torch.cuda.Stream] = {}
        self._ending: BoundedCall[None] | None = None
        self._ended = False
        with _settings():
            self._group: Any = nccl(PrefixStore("nccl", store), rank, size, options)

    def memory(self, nbytes: int) -> torch.Tensor:
        with _as_transfer_errors(), torch.cuda.stream(self._copies):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        with _as_transfer_errors():
            with torch.cuda.stream(self._copies):
                target.copy_(source)
            self._copies.synchronize()

    def send(self, tensor: torch.Tensor, rank: int) -> Flight:
        return self._post(lambda group: group.send([tensor], rank, 0), rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> Flight:
        return self._post(lambda group: group.recv([tensor], rank, 0), rank)

    def abort(self) -> bool:
        group, self._group = self._group, None
        if group is not None:
            self._ending = BoundedCall(lambda: self._end(group))
            self._ending.wait(_ABORT_S)
        return self._ended

    def _end(self, group: Any) -> None:
        with suppress(RuntimeError):  # and then it has not ended, as far as anybody knows
            group.abort()
            self._ended = True

    def _post(self, call: Callable[[Any], Work], rank: int) -> Flight:
        group = self._group  # `abort` may take it at any moment
        if group is None:
            raise TransferError("the NCCL connections were closed")
        with _as_transfer_errors():
            if rank not in self._marks:
                self._marks[rank] = _stream(self._device)
            with torch.cuda.stream(self._marks[rank]):
                work = call(group)
                work.wait()  # of the stream, not of this thread
                passed = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
                passed.record()
        return _NcclFlight(work, passed)


@contextmanager
def _as_transfer_errors() -> Iterator[None]:
    """Every error of CUDA and of NCCL, an allocator's as well, is a RuntimeError of torch's."""
    try:
        yield
    except RuntimeError as exc:
        text = str(exc).partition("\n")[0][:300]
        raise TransferError(f"NCCL: {text}") from exc


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's


@contextmanager
def _settings() -> Iterator[None]:
    """What torch reads of the environment while a group is made, and at no other time."""
    with _environment:
        before = {name: os.environ.get(name) for name in _SETTINGS}
        os.environ.update(_SETTINGS)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
