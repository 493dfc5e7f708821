"""In place of NCCL's driver edge, on a machine without GPUs: exact-size transfers by Gloo.

It keeps what makes NCCL hard. Every pair of ranks has connections of its own, on which transfers
run in order, without the caller; two ends of unequal size are an error, which NCCL would not even
tell; and nobody hears of a rank that is gone: what it had to do waits until `abort`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

import weightsync as ws
from weightsync.backends import nccl_wire
from weightsync.backends.nccl_wire import Flight, Wire

_FOREVER = timedelta(days=1)
_A_MOMENT = timedelta(milliseconds=1)
_JOIN_S = 10.0
_CONNECT_S = 30.0
_SIZE, _BYTES, _NOTHING = range(3)
_GARBAGE = 0xEE

carried: list[int] = []
"""The sizes of what this process has received by such wires, and sent."""


class _Flight:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: str | None = None

    def landed(self) -> bool:
        if self.error is not None:
            raise ws.TransferError(self.error)
        return self.done.is_set()


class _Lane:
    """One direction between two ranks; its thread does one transfer after another."""

    def __init__(self, connect: Callable[[], Any], peer: int) -> None:
        self._connect = connect
        self._peer = peer
        self._group: Any = None
        self._posted: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._connected = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="exact-wire", daemon=True)
        self._thread.start()

    def post(self, tensor: torch.Tensor, *, sends: bool) -> Flight:
        flight = _Flight()
        move = self._send if sends else self._receive
        self._posted.put(lambda: move(tensor, flight))
        if not self._connected.wait(_CONNECT_S + _JOIN_S):
            flight.error = f"nobody is at the other end, rank {self._peer}"
        return flight

    def end(self) -> None:
        self._ended.set()
        self._posted.put(None)
        if self._group is not None:
            with suppress(RuntimeError):  # a wait that runs out breaks the connection
                self._group.recv([torch.zeros(1)], self._peer, _NOTHING).wait(_A_MOMENT)
            self._thread.join(_JOIN_S)
        self._connected.set()

    def _run(self) -> None:
        try:
            self._group = self._connect()
            self._connected.set()
            while (move := self._posted.get()) is not None and not self._ended.is_set():
                move()
        except RuntimeError:
            self._ended.wait()  # as NCCL's kernels do for a rank that is gone
        finally:
            self._connected.set()
            self._group = None

    def _send(self, tensor: torch.Tensor, flight: _Flight) -> None:
        size = torch.tensor([tensor.numel()])
        self._group.send([size], self._peer, _SIZE).wait(_FOREVER)
        self._group.send([tensor], self._peer, _BYTES).wait(_FOREVER)
        carried.append(tensor.numel())
        flight.done.set()

    def _receive(self, tensor: torch.Tensor, flight: _Flight) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        self._group.recv([size], self._peer, _SIZE).wait(_FOREVER)
        if int(size) != tensor.numel():
            flight.error = f"{int(size)} bytes were sent to who waits for {tensor.numel()}"
            return
        self._group.recv([tensor], self._peer, _BYTES).wait(_FOREVER)
        carried.append(tensor.numel())
        flight.done.set()


class ExactWire:
    """See Wire."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        self._store = store
        self._rank = rank
        self._lanes: dict[tuple[int, int], _Lane] = {}
        self._ended = False

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), _GARBAGE, dtype=torch.uint8)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.numel() == target.numel()
        target.copy_(source)

    def send(self, tensor: torch.Tensor, rank: int) -> Flight:
        return self._lane(self._rank, rank).post(tensor, sends=True)

    def receive(self, tensor: torch.Tensor, rank: int) -> Flight:
        return self._lane(rank, self._rank).post(tensor, sends=False)

    def abort(self) -> bool:
        self._ended = True
        for lane in self._lanes.values():
            lane.end()
        self._lanes.clear()
        return True

    def _lane(self, source: int, target: int) -> _Lane:
        if self._ended:
            raise ws.TransferError("the stand-in was aborted")
        if (source, target) not in self._lanes:
            place = int(self._rank == target)
            store = PrefixStore(f"exact/{source}-{target}", self._store)
            self._lanes[source, target] = _Lane(lambda: _pair(store, place), 1 - place)
        return self._lanes[source, target]


def _pair(store: Store, place: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=_CONNECT_S)
    options._threads = 1
    return gloo(store, place, 2, options)


def connect(store: Store, rank: int, size: int, device: torch.device) -> Wire:
    return ExactWire(store, rank, size, device)


def _on_the_cpu(keys: Sequence[str]) -> torch.device:
    return torch.device("cpu")


_EDGE: dict[str, object] = {"why_not": lambda: None, "own_gpu": _on_the_cpu, "connect": connect}


@contextmanager
def in_place_of_nccl(**edge: object) -> Iterator[None]:
    """Replace the driver edge in this process; `edge` replaces parts of the stand-in."""
    carried.clear()
    before = {name: getattr(nccl_wire, name) for name in _EDGE}
    try:
        for name, part in {**_EDGE, **edge}.items():
            setattr(nccl_wire, name, part)
        yield
    finally:
        for name, part in before.items():
            setattr(nccl_wire, name, part)
