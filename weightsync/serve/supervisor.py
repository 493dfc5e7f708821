"""The supervisor of a server's processes: starts them in order, watches them, and ends them."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Self

from weightsync.errors import TransportTimeout, WeightSyncError, shorten
from weightsync.serve import process_managers
from weightsync.serve.child_process import Child, ChildSpec
from weightsync.serve.process_managers import SHUTDOWN_S
from weightsync.shm.segment import cleanup_stale
from weightsync.shm.spawning import refuse_forked

if TYPE_CHECKING:
    import psutil

_END_S = 2.0
_NOTHING_TO_DO = b"closed"
_WAIT = f"""
import os, sys
if sys.stdin.buffer.read() != {_NOTHING_TO_DO!r}:  # until the supervisor closes it or dies
    os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""
_REMOVE = """
import sys, time
from weightsync.serve.process_managers import remove_all
remove_all(*sys.argv[1:])
from weightsync.shm.segment import cleanup_stale
# The kernel takes the memory of a killed process, its environment included, before it closes the
# process's files: a process that is not found any more may hold the locks of its segments.
for _ in range(20):
    cleanup_stale()
    time.sleep(0.25)
"""


class OrphanReaper:
    """A process that waits for the death of this one, and then removes what this one left.

    It kills the processes that have the variable `marker`, then removes `directory` and the
    segments of dead owners. While it waits it takes about 10 MB: it imports nothing until then.
    """

    def __init__(self, marker: str, directory: Path) -> None:
        """Start it. Raises OSError."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WAIT, _REMOVE, marker, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # for _REMOVE
            start_new_session=True,  # a terminal's Ctrl-C does not reach it
        )

    def close(self) -> None:
        """End the process: there is nothing to clean up. Idempotent."""
        stdin = self._process.stdin
        assert stdin is not None
        if not stdin.closed:
            with suppress(BrokenPipeError), stdin:
                stdin.write(_NOTHING_TO_DO)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_KILL_MARGIN_S = 0.5
_EXIT_S = 5.0
"""How long a process may take to end after it has sent its error."""
GRACE_S = 3.0
"""How long the last started group, the API servers, may take to end."""

logger = logging.getLogger(__name__)


class Supervisor:
    """A tree of processes in groups, which are started in order and ended in reverse order.

        with Supervisor() as tree:
            tree.start("workers", worker_specs, timeout_s=120)
            tree.start("engine cores", core_specs, timeout_s=60)
            tree.start("API servers", server_specs, timeout_s=60)
            tree.wait()

    `directory` is private to this tree, for its sockets; `close` removes it. The tree ends when
    this process dies for any reason. Children ignore SIGINT, which a terminal sends to all
    processes: this process handles Ctrl-C. Use it from one thread, in a `with` block: a process
    that exits without `close` waits for its children.
    """

    def __init__(self, *, grace_s: float = GRACE_S, shutdown_s: float = SHUTDOWN_S) -> None:
        """Make the directory and start the OrphanReaper.

        `close` takes at most `shutdown_s`, of which the last started group gets `grace_s`. Raises
        ConfigError in a process that was forked.
        """
        refuse_forked("a process")
        self.directory = Path(tempfile.mkdtemp(prefix="weightsync-"))
        # A variable in the environment of every process of the tree. It identifies processes whose
        # parent has ended.
        self._marker = f"WEIGHTSYNC_TREE_{secrets.token_hex(8)}"
        self._reaper = OrphanReaper(self._marker, self.directory)
        self._grace_s = grace_s
        self._shutdown_s = shutdown_s
        self._groups: dict[str, list[Child]] = {}
        self._closed = False

    @property
    def processes(self) -> list[BaseProcess]:
        """All processes that were started, in the order of their start."""
        return [child.process for child in self._children if child.process.pid is not None]

    @property
    def _children(self) -> list[Child]:
        return [child for group in self._groups.values() for child in group]

    def start(self, group: str, specs: Sequence[ChildSpec], *, timeout_s: float) -> list[bytes]:
        """Start a group, all children at once; return the payloads of their `ready`.

        Raises the error of a child that failed, with its name in front: the same class, or
        RemoteError for foreign errors. Raises ProcessLostError naming a process that died, of any
        group, and TransportTimeout naming those that were not ready in time. `close` ends all.
        """
        self.launch(group, specs)
        return self.await_ready(group, timeout_s=timeout_s)

    def launch(self, group: str, specs: Sequence[ChildSpec]) -> None:
        """Start a group without waiting; see `await_ready`. Raises as `start` does."""
        children = self._groups[group] = []
        for spec in specs:
            env = {**spec.env, self._marker: "1"}
            child = Child(replace(spec, env=env))
            children.append(child)  # before the start, so that `close` knows it in any case
            child.start()

    def await_ready(self, group: str, *, timeout_s: float) -> list[bytes]:
        """Wait until a group is ready; return the payloads of `ready`. Raises as `start` does."""
        waited = self._groups[group]
        deadline = time.monotonic() + timeout_s
        while late := [child for child in waited if not child.is_ready]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise _timed_out(group, late, len(waited), timeout_s)
            self._watch(remaining, starting=True)
        return [child.payload for child in waited if child.payload is not None]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a process ends. Does not close the tree.

        Returns True if it ended with exit code 0, False after `timeout_s` and on Ctrl-C. Raises
        ProcessLostError if it ended otherwise, with the text of its own error.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._watch(_left(deadline)):
                if _left(deadline) == 0:
                    return False
        except KeyboardInterrupt:
            logger.info("interrupted; the server ends")
            return False
        return True

    def close(self) -> None:
        """End all processes, the last started group first, and remove the directory.

        Each process gets SIGTERM and time to end. Then all processes that are left are killed, and
        all descendants of all processes. Ctrl-C is ignored meanwhile. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        with process_managers.signals_ignored():
            known = process_managers.descendants(p.pid for p in self.processes if p.pid is not None)
            try:
                self._end_in_stages()
            finally:
                process_managers.kill_trees(self.processes, known | self._marked())
                process_managers.kill_all(self._marked, timeout_s=process_managers.KILL_S)
                for child in self._children:
                    child.close()
                shutil.rmtree(self.directory, ignore_errors=True)
                cleanup_stale()  # segments of killed processes
                self._reaper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self, timeout_s: float | None, *, starting: bool = False) -> bool:
        """Wait until a child sends a message or ends, at most `timeout_s`.

        Returns whether a child has ended with exit code 0; with `starting`, that is a failure too.
        Raises the error of a child that failed before it was ready, ProcessLostError afterwards.
        """
        pipes = [child.pipe for child in self._children if not child.pipe.closed]
        ended, _ = process_managers.wait_any(self.processes, pipes, timeout_s=timeout_s)
        for child in self._children:
            child.listen()
        gone = [c for c in self._children if c.process in ended]
        failed = [c for c in gone if c.process.exitcode or starting]
        # A process that a signal ended is probably the cause of the others' end.
        failed.sort(key=lambda child: (child.process.exitcode or 0) >= 0)
        failed += [c for c in self._children if c.error is not None and c not in failed]
        if failed:
            raise process_managers.with_notes([_error_of(child) for child in failed])
        return bool(ended)

    def _end_in_stages(self) -> None:
        deadline = time.monotonic() + max(0.0, self._shutdown_s - _KILL_MARGIN_S)
        stages = [[c.process for c in group] for group in reversed(self._groups.values())]
        for index, processes in enumerate(stages):
            remaining = max(0.0, deadline - time.monotonic())
            process_managers.terminate(processes)
            if index == len(stages) - 1:
                process_managers.wait_all(self.processes, remaining)
            else:
                share = self._grace_s if index == 0 else remaining / (len(stages) - index)
                process_managers.wait_all(processes, min(share, remaining))

    def _marked(self) -> set[psutil.Process]:
        return process_managers.marked(self._marker)


def _error_of(child: Child) -> WeightSyncError:
    """Return the error of a child that failed: its own error if it never became ready."""
    if not child.is_ready:
        return child.error or process_managers.lost(child.process, "it was not ready yet")
    if child.error is None:
        return process_managers.lost(child.process)
    process_managers.wait_all([child.process], _EXIT_S)
    return process_managers.lost(child.process, str(child.error))


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _timed_out(group: str, late: list[Child], count: int, timeout_s: float) -> TransportTimeout:
    named = shorten(f"{child.name} (pid {child.process.pid}, still running)" for child in late)
    return TransportTimeout(
        f"{len(late)} of {count} {group} were not ready after {timeout_s:g} s: {named}; "
        "see their output, or give them more time"
    )
