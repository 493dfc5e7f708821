"""Starts, watches and ends all processes of a server: workers, engine cores, API servers."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self

from weightsync.errors import ConfigError, TransportTimeout, shorten
from weightsync.serve import process_ends
from weightsync.serve.child_process import Child, ChildSpec, spawn_context
from weightsync.serve.process_ends import SHUTDOWN_S
from weightsync.serve.runtime_directory import make_runtime_directory
from weightsync.serve.supervised_tree import ProcessGroups, new_marker
from weightsync.serve.warden import OrphanReaper

logger = logging.getLogger(__name__)

GRACE_S = 3.0
"""How long the first ones to be ended, the API servers, may finish what they are doing."""


class Supervisor:
    """A tree of processes in groups, which are started one after the other and ended in reverse.

        with Supervisor() as tree:
            tree.start("workers", worker_specs, timeout_s=120)
            tree.start("engine cores", core_specs, timeout_s=60)
            tree.start("API servers", server_specs, timeout_s=60)
            tree.wait()

    `directory` is private to this tree, for its sockets, and removed in the end. When this process
    dies, however that happens, the tree ends with it. Children ignore SIGINT, which a terminal
    sends to all: Ctrl-C is for this process. For one thread.
    """

    def __init__(
        self,
        *,
        context: BaseContext | None = None,
        grace_s: float = GRACE_S,
        shutdown_s: float = SHUTDOWN_S,
        parent_directory: Path | None = None,
    ) -> None:
        """Make the directory. Raises ConfigError for start methods other than spawn.

        `close` takes `shutdown_s` at most, of which the last group to be started gets `grace_s`.
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
            warden=OrphanReaper(marker, directory),
            grace_s=grace_s,
            shutdown_s=shutdown_s,
        )
        # Not this object's own method: a finalizer must not keep alive what it waits for.
        self._finalizer = weakref.finalize(self, self._state.end)

    @property
    def directory(self) -> Path:
        """Where the sockets of this tree belong; mode 0700."""
        return self._state.directory

    @property
    def processes(self) -> list[BaseProcess]:
        """All processes that were started, in that order."""
        return self._state.processes

    def start(self, group: str, specs: Sequence[ChildSpec], *, timeout_s: float) -> list[bytes]:
        """Start a group, all at once; return what each one said when it was ready.

        Raises what a child failed with, as the same class, its name in front (RemoteError for
        foreign errors); ProcessLostError naming a process that died, of this group or an earlier
        one; TransportTimeout naming those that were not ready in time. All are ended by `close`.
        """
        self.launch(group, specs)
        return self.await_ready(group, timeout_s=timeout_s)

    def launch(self, group: str, specs: Sequence[ChildSpec]) -> None:
        """Start a group and wait for nothing; `await_ready` does that. Raises as `start` does."""
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
            children.append(child)  # before it is started, so that nothing is ever forgotten
            child.start()

    def await_ready(self, group: str, *, timeout_s: float) -> list[bytes]:
        """Wait until all of a group are ready; return what they said. Raises as `start` does."""
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
        """Wait until a process ends; False when none did in `timeout_s`, or on Ctrl-C.

        True after an exit with code 0. Raises the ProcessLostError of one that ended otherwise,
        with what it said itself. The tree is still to be closed.
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
        """End all processes, the group that was started last first; remove the directory.

        Each gets SIGTERM and time to end; what is left then is killed, with all descendants of all.
        A second Ctrl-C is ignored meanwhile. Idempotent.
        """
        with process_ends.signals_ignored():
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _timed_out(group: str, late: list[Child], count: int, timeout_s: float) -> TransportTimeout:
    named = shorten(f"{child.name} (pid {child.process.pid}, still running)" for child in late)
    return TransportTimeout(
        f"{len(late)} of {count} {group} were not ready after {timeout_s:g} s: {named}; "
        "their own output says what they are at, or give them more time"
    )
