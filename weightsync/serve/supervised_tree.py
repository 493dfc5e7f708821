"""The processes of a supervisor: what they say, which of them failed, and how all are ended."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from weightsync.errors import ConfigError, WeightSyncError
from weightsync.serve import process_ends, process_tree
from weightsync.serve.child_process import Child
from weightsync.serve.process_tree import ProcessId
from weightsync.serve.warden import OrphanReaper
from weightsync.shm.segment import cleanup_stale

_KILL_MARGIN_S = 0.5
_EXIT_S = 5.0
"""How long a process that has said why it fails may take to end."""


def new_marker() -> str:
    """Return the name of an environment variable that nobody else has."""
    return f"WEIGHTSYNC_TREE_{secrets.token_hex(8)}"


@dataclass(kw_only=True)
class ProcessGroups:
    """Groups of children in the order in which they were started, and what is theirs.

    Every process of the tree has the variable `marker` in its environment, by which those are found
    whose parent is gone.
    """

    directory: Path
    marker: str
    warden: OrphanReaper
    grace_s: float
    shutdown_s: float
    groups: dict[str, list[Child]] = field(default_factory=dict)
    closed: bool = False
    owner: int = field(default_factory=os.getpid)

    @property
    def children(self) -> list[Child]:
        """All of them."""
        return [child for group in self.groups.values() for child in group]

    @property
    def processes(self) -> list[BaseProcess]:
        """Those that were started."""
        return [child.process for child in self.children if child.process.pid is not None]

    def check_open(self) -> None:
        """Raise ConfigError once `end` was called."""
        if self.closed:
            raise ConfigError("this supervisor is closed; make another one")

    def watch(self, timeout_s: float | None, *, starting: bool = False) -> bool:
        """Wait until a child says something or ends, or the time is over.

        Returns whether one has ended, with exit code 0, which is a failure too while `starting`.
        Raises what a child failed with that was not ready, ProcessLostError for one that was.
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
        """End everything, the last group first, and remove the directory; see Supervisor.close."""
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
                cleanup_stale()  # the segments of those that were killed
                self.warden.close()

    def _failed(self, ended: list[BaseProcess], *, starting: bool) -> list[Child]:
        gone = [c for c in self.children if c.process in ended and (c.process.exitcode or starting)]
        # One that a signal ended is rather the cause of the others' end than its victim.
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

    def _kill_left(self, known: set[ProcessId]) -> None:
        known = known | process_tree.marked(self.marker)
        process_ends.kill_trees(self.processes, known)
        process_tree.kill_all(
            lambda: process_tree.marked(self.marker), timeout_s=process_ends.KILL_S
        )


def _processes(group: Iterable[Child]) -> list[BaseProcess]:
    return [child.process for child in group]


def _error_of(child: Child) -> WeightSyncError:
    """What to raise for a child that failed: its own error if it never became ready."""
    if not child.is_ready:
        return child.error or process_ends.lost(child.process, "it was not ready yet")
    if child.error is None:
        return process_ends.lost(child.process)
    process_ends.wait_all([child.process], _EXIT_S)
    return process_ends.lost(child.process, str(child.error))
