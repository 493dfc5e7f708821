"""Which processes descend from which, read from /proc, and the end of all of them.

A process is told by its pid and its start time, since pids are used again. A warden runs this file
by itself, so it imports the standard library alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_LOOK_AGAIN_S = 0.01
_REMOVE_S = 10.0
_GONE = "ZX"


@dataclass(frozen=True)
class ProcessId:
    """One process, for as long as the machine runs: nobody else gets this pid and start time."""

    pid: int
    started: int


@dataclass(frozen=True)
class _Stat:
    id: ProcessId
    parent: int
    state: str


def descendants(pids: Iterable[int]) -> set[ProcessId]:
    """Return the living children of `pids`, theirs, and so on, without `pids` themselves."""
    children: dict[int, list[_Stat]] = {}
    for stat in _living():
        children.setdefault(stat.parent, []).append(stat)
    found: set[ProcessId] = set()
    ahead = list(pids)
    while ahead:
        below = children.pop(ahead.pop(), [])
        found.update(stat.id for stat in below)
        ahead.extend(stat.id.pid for stat in below)
    return found


def marked(variable: str) -> set[ProcessId]:
    """Return the living processes that were started with this environment variable set.

    Those of other users, which cannot be read, are left out.
    """
    wanted = f"{variable}=".encode()
    return {stat.id for stat in _living() if _has_variable(stat.id.pid, wanted)}


def kill_all(find: Callable[[], set[ProcessId]], *, timeout_s: float) -> set[ProcessId]:
    """SIGKILL what `find` finds until it finds nothing; return what outlived `timeout_s`.

    It is asked again because a process may have started another before it was killed.
    """
    deadline = time.monotonic() + timeout_s
    while found := find():
        for process in found:
            kill(process)
        if time.monotonic() >= deadline:
            return found
        time.sleep(_LOOK_AGAIN_S)
    return set()


def remove_all(variable: str, directory: str) -> None:
    """Kill the processes with this variable, and remove a directory. Called by a warden."""
    kill_all(lambda: marked(variable), timeout_s=_REMOVE_S)
    shutil.rmtree(directory, ignore_errors=True)


def kill(process: ProcessId) -> None:
    """SIGKILL one process, if it is still there and may be killed."""
    if is_alive(process):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)


def is_alive(process: ProcessId) -> bool:
    """Whether it is still running; a zombie is not."""
    stat = _stat(process.pid)
    return stat is not None and stat.id == process and stat.state not in _GONE


def _living() -> Iterator[_Stat]:
    for entry in os.listdir(_PROC):  # noqa: PTH208 - a third of iterdir's time
        if entry.isdecimal():
            stat = _stat(int(entry))
            if stat is not None and stat.state not in _GONE:
                yield stat


def _stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The command, in parentheses, may contain anything, parentheses too.
    fields = text[text.rindex(b")") + 2 :].split()
    return _Stat(ProcessId(pid, int(fields[19])), int(fields[1]), fields[0].decode())


def _has_variable(pid: int, wanted: bytes) -> bool:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return environment.startswith(wanted) or b"\0" + wanted in environment
