"""What weights to another host are measured beside: one raw Gloo broadcast of the same bytes."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weightsync.cli.child import end_with
from weightsync.errors import RemoteError

_WAIT_S = 120.0
_LOOPBACK = "127.0.0.1"


@contextmanager
def raw_broadcast(nbytes: int) -> Iterator[Callable[[], float]]:
    """Yield a call that broadcasts `nbytes` as one flat tensor to another process.

    It returns the seconds that took, until the other side has everything.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory() as directory:
        meeting = str(Path(directory) / "store")
        arguments = (theirs, os.getpid(), meeting, nbytes)
        process = spawn.Process(target=_take_part, args=arguments, daemon=True)
        process.start()
        theirs.close()
        try:
            broadcast = _broadcaster(meeting, 0)
            flat = torch.ones(nbytes, dtype=torch.uint8)
            yield lambda: _timed(broadcast, flat, ours)
        finally:
            ours.close()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _timed(
    broadcast: Callable[[torch.Tensor], None], flat: torch.Tensor, other: Connection
) -> float:
    other.send_bytes(b"again")
    _hear(other)
    started = time.perf_counter()
    broadcast(flat)
    _hear(other)
    return time.perf_counter() - started


def _hear(other: Connection) -> None:
    if not other.poll(_WAIT_S):
        raise RemoteError("the other process of the raw broadcast does not answer")
    other.recv_bytes()


def _take_part(parent: Connection, parent_pid: int, meeting: str, nbytes: int) -> None:
    end_with(parent_pid)
    torch.set_num_threads(1)
    broadcast = _broadcaster(meeting, 1)
    flat = torch.zeros(nbytes, dtype=torch.uint8)
    with suppress(EOFError):
        while parent.recv_bytes():
            parent.send_bytes(b"ready")
            broadcast(flat)
            parent.send_bytes(b"done")


def _broadcaster(meeting: str, rank: int) -> Callable[[torch.Tensor], None]:
    c10d: Any = dist  # torch types half of what it exports
    gloo = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_LOOPBACK)]
    options._timeout = timedelta(seconds=_WAIT_S)
    group = gloo(c10d.FileStore(meeting, 2), rank, 2, options)

    def broadcast(flat: torch.Tensor) -> None:
        group.broadcast([flat], dist.BroadcastOptions()).wait()

    return broadcast
