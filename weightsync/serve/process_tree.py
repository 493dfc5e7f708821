"""Process trees: the descendants of processes, the processes with a variable, and how to kill them.

A psutil.Process stands for one process, not for a pid: psutil compares start times before it
signals a process, because the kernel uses pids again.
"""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from weightsync.errors import BackendUnavailableError

try:
    import psutil
except ModuleNotFoundError as exc:
    raise BackendUnavailableError(
        f"process trees need the package {exc.name}; pip install 'weightsync[server]'"
    ) from exc

_POLL_S = 0.01
_REMOVE_S = 10.0


def _processes(attribute: str) -> Iterator[psutil.Process]:
    """Yield all processes, with one attribute in `info`: None if it cannot be read."""
    psutil.process_iter.cache_clear()  # a cached object may stand for an earlier process of its pid
    return psutil.process_iter([attribute])


def descendants(pids: Iterable[int]) -> set[psutil.Process]:
    """Return the children of `pids`, their children, and so on, without `pids` themselves.

    It reads the process table once, because a server may have hundreds of processes.
    """
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    for process in _processes("ppid"):
        children[process.info["ppid"]].append(process)
    found: set[psutil.Process] = set()
    unseen = list(pids)
    while unseen:
        below = children.pop(unseen.pop(), [])
        found.update(below)
        unseen.extend(process.pid for process in below)
    return found


def marked(variable: str) -> set[psutil.Process]:
    """Return the processes that were started with this environment variable set.

    Processes of other users are left out: their environment cannot be read.
    """
    return {one for one in _processes("environ") if variable in (one.info["environ"] or ())}


def kill_all(find: Callable[[], set[psutil.Process]], *, timeout_s: float) -> set[psutil.Process]:
    """Send SIGKILL to the processes that `find` returns, until it returns none.

    `find` is called again because a process may have started another one before it was killed.
    Returns the processes that are left after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while found := find():
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        if time.monotonic() >= deadline:
            return found
        time.sleep(_POLL_S)
    return set()


def remove_all(variable: str, directory: str) -> None:
    """Kill the processes with this variable and remove a directory. Called by an OrphanReaper."""
    kill_all(lambda: marked(variable), timeout_s=_REMOVE_S)
    shutil.rmtree(directory, ignore_errors=True)


def is_alive(process: psutil.Process) -> bool:
    """Whether the process still runs; a zombie does not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
