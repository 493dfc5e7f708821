"""The supervisor of a server's processes: starts them in order, watches them, and ends them."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Self

from weightsync.errors import ConfigError, TransportTimeout, WeightSyncError, shorten
from weightsync.queues.sockets import IPC_PATH_LIMIT
from weightsync.serve import process_ends, process_tree
from weightsync.serve.child_process import Child, ChildSpec, spawn_context
from weightsync.serve.process_ends import SHUTDOWN_S
from weightsync.shm.segment import cleanup_stale

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
import sys
from weightsync.serve.process_tree import remove_all
remove_all(*sys.argv[1:])
from weightsync.shm.segment import cleanup_stale
cleanup_stale()
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


def new_marker() -> str:
    """Return a unique name of an environment variable."""
    return f"WEIGHTSYNC_TREE_{secrets.token_hex(8)}"


@dataclass(kw_only=True)
class ProcessGroups:
    """Groups of children, in the order of their start, and the resources of the tree.

    Every process of the tree has the variable `marker` in its environment. It identifies processes
    whose parent has ended.
    """

    directory: Path
    marker: str
    reaper: OrphanReaper
    grace_s: float
    shutdown_s: float
    groups: dict[str, list[Child]] = field(default_factory=dict)
    closed: bool = False
    owner: int = field(default_factory=os.getpid)

    @property
    def children(self) -> list[Child]:
        """The children of all groups."""
        return [child for group in self.groups.values() for child in group]

    @property
    def processes(self) -> list[BaseProcess]:
        """The processes that were started."""
        return [child.process for child in self.children if child.process.pid is not None]

    def check_open(self) -> None:
        """Raise ConfigError if `end` was called."""
        if self.closed:
            raise ConfigError("this supervisor is closed; make another one")

    def watch(self, timeout_s: float | None, *, starting: bool = False) -> bool:
        """Wait until a child sends a message or ends, at most `timeout_s`.

        Returns whether a child has ended with exit code 0; with `starting`, that is a failure too.
        Raises the error of a child that failed before it was ready, ProcessLostError afterwards.
        """
        pipes = [child.pipe for child in self.children if not child.pipe.closed]
        ended, _ = process_ends.wait_any(self.processes, pipes, timeout_s=timeout_s)
        for child in self.children:
            child.listen()
        failed = self._failed(ended, starting=starting)
        if failed:
            raise process_ends.with_notes([_error_of(child) for child in failed])
        return bool(ended)

    def end(self) -> None:
        """End all processes and remove the directory; see Supervisor.close."""
        if os.getpid() != self.owner:
            return
        self.closed = True
        with process_ends.signals_ignored():
            for child in self.children:
                child.settle()
            known = process_tree.descendants(p.pid for p in self.processes if p.pid is not None)
            try:
                self._end_in_stages()
            finally:
                self._kill_left(known)
                for child in self.children:
                    child.close()
                shutil.rmtree(self.directory, ignore_errors=True)
                cleanup_stale()  # segments of killed processes
                self.reaper.close()

    def _failed(self, ended: list[BaseProcess], *, starting: bool) -> list[Child]:
        gone = [c for c in self.children if c.process in ended and (c.process.exitcode or starting)]
        # A process that a signal ended is probably the cause of the others' end.
        gone.sort(key=lambda child: (child.process.exitcode or 0) >= 0)
        return gone + [c for c in self.children if c.error is not None and c not in gone]

    def _end_in_stages(self) -> None:
        deadline = time.monotonic() + max(0.0, self.shutdown_s - _KILL_MARGIN_S)
        stages = list(reversed(self.groups.values()))
        for index, group in enumerate(stages):
            remaining = max(0.0, deadline - time.monotonic())
            process_ends.terminate(_processes(group))
            if index == len(stages) - 1:
                process_ends.wait_all(self.processes, remaining)
            else:
                share = self.grace_s if index == 0 else remaining / (len(stages) - index)
                process_ends.wait_all(_processes(group), min(share, remaining))

    def _kill_left(self, known: set[psutil.Process]) -> None:
        known = known | process_tree.marked(self.marker)
        process_ends.kill_trees(self.processes, known)
        process_tree.kill_all(
            lambda: process_tree.marked(self.marker), timeout_s=process_ends.KILL_S
        )


def _processes(group: Iterable[Child]) -> list[BaseProcess]:
    return [child.process for child in group]


def _error_of(child: Child) -> WeightSyncError:
    """Return the error of a child that failed: its own error if it never became ready."""
    if not child.is_ready:
        return child.error or process_ends.lost(child.process, "it was not ready yet")
    if child.error is None:
        return process_ends.lost(child.process)
    process_ends.wait_all([child.process], _EXIT_S)
    return process_ends.lost(child.process, str(child.error))


PREFIX = "weightsync-"
_LONGEST_NAME = 64
"""The most bytes of the names of this directory and of a socket in it."""


def make_runtime_directory(parent: Path | None = None) -> Path:
    """Make a directory of mode 0700 in `parent`. The caller removes it.

    The default is XDG_RUNTIME_DIR if that is a directory of this user whose path is short enough
    for sockets, otherwise the directory for temporary files. Raises OSError.
    """
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent or _runtime_parent()))


def _runtime_parent() -> Path | None:
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    if not named or len(os.fsencode(named)) > IPC_PATH_LIMIT - _LONGEST_NAME:
        return None
    path = Path(named)
    try:
        found = path.stat()
    except OSError:
        return None
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return path if ours and path.is_absolute() and os.access(path, os.W_OK | os.X_OK) else None


logger = logging.getLogger(__name__)

GRACE_S = 3.0
"""How long the last started group, the API servers, may take to end."""


class Supervisor:
    """A tree of processes in groups, which are started in order and ended in reverse order.

        with Supervisor() as tree:
            tree.start("workers", worker_specs, timeout_s=120)
            tree.start("engine cores", core_specs, timeout_s=60)
            tree.start("API servers", server_specs, timeout_s=60)
            tree.wait()

    `directory` is private to this tree, for its sockets; `close` removes it. The tree ends when
    this process dies for any reason. Children ignore SIGINT, which a terminal sends to all
    processes: this process handles Ctrl-C. Use it from one thread.
    """

    def __init__(
        self,
        *,
        context: BaseContext | None = None,
        grace_s: float = GRACE_S,
        shutdown_s: float = SHUTDOWN_S,
        parent_directory: Path | None = None,
    ) -> None:
        """Make the directory and start the OrphanReaper.

        `close` takes at most `shutdown_s`, of which the last started group gets `grace_s`. Raises
        ConfigError for start methods other than spawn.
        """
        if not 0 < grace_s <= shutdown_s:
            raise ConfigError(
                f"grace_s is {grace_s} and shutdown_s {shutdown_s}; the first is a part of the "
                "second, and both are more than 0"
            )
        self._context = spawn_context(context)
        marker = new_marker()
        directory = make_runtime_directory(parent_directory)
        self._state = ProcessGroups(
            directory=directory,
            marker=marker,
            reaper=OrphanReaper(marker, directory),
            grace_s=grace_s,
            shutdown_s=shutdown_s,
        )
        # A method of another object: a bound method of this one would keep it alive.
        self._finalizer = weakref.finalize(self, self._state.end)

    @property
    def directory(self) -> Path:
        """The directory for the sockets of this tree; mode 0700."""
        return self._state.directory

    @property
    def processes(self) -> list[BaseProcess]:
        """All processes that were started, in the order of their start."""
        return self._state.processes

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
        self._state.check_open()
        if group in self._state.groups:
            raise ConfigError(f"{group!r} are started already; a group is started once")
        names = [spec.name for spec in specs]
        if len(set(names)) < len(names):
            raise ConfigError(f"{group!r} are named {shorten(names)}; each name may be used once")
        children = self._state.groups[group] = []
        for spec in specs:
            env = {**spec.env, self._state.marker: "1"}
            child = Child(replace(spec, env=env), self._context)
            children.append(child)  # before the start, so that `end` knows it in any case
            child.start()

    def await_ready(self, group: str, *, timeout_s: float) -> list[bytes]:
        """Wait until a group is ready; return the payloads of `ready`. Raises as `start` does."""
        self._state.check_open()
        if group not in self._state.groups:
            raise ConfigError(f"no {group!r} were started")
        waited = self._state.groups[group]
        deadline = time.monotonic() + timeout_s
        while late := [child for child in waited if not child.is_ready]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise _timed_out(group, late, len(waited), timeout_s)
            self._state.watch(remaining, starting=True)
        return [child.payload for child in waited if child.payload is not None]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a process ends. Does not close the tree.

        Returns True if it ended with exit code 0, False after `timeout_s` and on Ctrl-C. Raises
        ProcessLostError if it ended otherwise, with the text of its own error.
        """
        self._state.check_open()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._state.watch(_left(deadline)):
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
        with process_ends.signals_ignored():
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _timed_out(group: str, late: list[Child], count: int, timeout_s: float) -> TransportTimeout:
    named = shorten(f"{child.name} (pid {child.process.pid}, still running)" for child in late)
    return TransportTimeout(
        f"{len(late)} of {count} {group} were not ready after {timeout_s:g} s: {named}; "
        "see their output, or give them more time"
    )
