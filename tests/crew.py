"""The ranks of a trainer, each a process of its own with a Gloo group over loopback."""

from __future__ import annotations

import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.children import CONTEXT, load_beforehand
from weightsync.ranks import comm

load_beforehand("tests.crew", "torch.distributed.fsdp", "torch.distributed.tensor")

WAIT_S = 60.0
NAMING_TIMEOUT_S = 1.5
"""How long survivors wait for a word of each other, where a rank died: half of what users have."""
GROUP_TIMEOUT = timedelta(seconds=40)


class Died:
    """Stands for the result of a rank whose process has ended."""


class Crew:
    """Processes that run the same function, each with its rank; results come in rank order."""

    def __init__(self, size: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=size)
        port = listener.getsockname()[1]
        # Held by the parent, so that it lives longer than a rank that the test ends.
        self._store: TCPStore | None = TCPStore(
            "127.0.0.1",
            port,
            None,
            True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe()
            args = (theirs, rank, size, port)
            process = CONTEXT.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the result of `work(rank, *args)` on every rank, or Died; raise its error."""
        self.start(work, *args)
        return self.results(range(len(self._ends)))

    def start(self, work: Callable[..., Any], *args: Any) -> None:
        """Run `work(rank, *args)` on every rank; `results` has what comes of it."""
        for end in self._ends:
            end.send((work, args))

    def results(self, ranks: Iterable[int]) -> list[Any]:
        """Return the results of these ranks, or Died; raise their error."""
        outcomes = {rank: self._outcome(rank) for rank in ranks}
        failed = [f"rank {rank} raised:\n{r}" for rank, (done, r) in outcomes.items() if not done]
        assert not failed, "\n".join(failed)
        return [result for _, result in outcomes.values()]

    def alive(self) -> list[int]:
        """Return the ranks whose processes live."""
        return [rank for rank, process in enumerate(self._processes) if process.is_alive()]

    def wake(self, rank: int) -> None:
        """Continue a rank that stopped itself."""
        os.kill(self._processes[rank].pid, signal.SIGCONT)

    def lose(self, rank: int) -> None:
        """Continue without a rank that has died."""
        self._ends.pop(rank).close()
        self._processes.pop(rank).join(WAIT_S)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(WAIT_S)
        for end in self._ends:
            end.close()
        self._store = None

    def _outcome(self, rank: int) -> tuple[bool, Any]:
        end = self._ends[rank]
        if not end.poll(WAIT_S):
            return False, "nothing: it is stuck"
        try:
            done, result = end.recv()
        except EOFError:
            # Its pipe ends before the locks of its segments do.
            self._processes[rank].join(WAIT_S)
            return True, Died()
        return done, result


@contextmanager
def crew(size: int) -> Iterator[Crew]:
    made = Crew(size)
    try:
        yield made
    finally:
        made.close()


def _serve(end: Connection, rank: int, size: int, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    comm.NAMING_TIMEOUT_S = NAMING_TIMEOUT_S
    store = TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
    while True:
        try:
            work, args = end.recv()
        except EOFError:
            return
        try:
            end.send((True, work(rank, *args)))
        except BaseException:  # noqa: BLE001  # it is raised again by the test
            end.send((False, traceback.format_exc()))
