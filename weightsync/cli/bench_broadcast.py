"""A raw Gloo broadcast to another process, beside which `bench` puts updates over tcp."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weightsync.cli.child import Child, take_stdout

_TIMEOUT_S = 120.0
_LOOPBACK = "127.0.0.1"


@contextmanager
def raw_broadcast(nbytes: int) -> Iterator[Callable[[], float]]:
    """Yield a call that broadcasts `nbytes` as one flat tensor to another process.

    It returns the seconds until the other process has all bytes.
    """
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        name = "other process of the raw broadcast"
        with Child(name, "weightsync.cli.bench_broadcast", store, str(nbytes)) as other:
            broadcast = _connect(store, rank=0)
            flat = torch.ones(nbytes, dtype=torch.uint8)

            def measure() -> float:
                other.send()
                other.receive(_TIMEOUT_S)
                started = time.perf_counter()
                broadcast(flat)
                other.receive(_TIMEOUT_S)
                return time.perf_counter() - started

            yield measure


def _connect(store: str, *, rank: int) -> Callable[[torch.Tensor], None]:
    c10d: Any = dist  # torch types half of what it exports
    gloo = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_LOOPBACK)]
    options._timeout = timedelta(seconds=_TIMEOUT_S)
    group = gloo(c10d.FileStore(store, 2), rank, 2, options)

    def broadcast(flat: torch.Tensor) -> None:
        group.broadcast([flat], dist.BroadcastOptions()).wait()

    return broadcast


def main() -> None:
    """Receive one broadcast for each line on stdin."""
    send = take_stdout()
    store, nbytes = sys.argv[1:]
    torch.set_num_threads(1)
    broadcast = _connect(store, rank=1)
    flat = torch.zeros(int(nbytes), dtype=torch.uint8)
    for _ in sys.stdin.buffer:
        send(b"ready")
        broadcast(flat)
        send(b"done")


if __name__ == "__main__":
    main()
