"""Groups of processes: waiting for them, ending them with their descendants, and their errors.

A psutil.Process stands for one process, not for a pid: psutil compares start times before it
signals a process, because the kernel uses pids again.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, runtime_checkable

import msgspec

from weightsync.errors import (
    ConfigError,
    MissingExtraError,
    ProcessLostError,
    WeightSyncError,
    install_hint,
)
from weightsync.serve.child_process import Child, ChildSpec

try:
    import psutil
except ModuleNotFoundError as exc:
    raise MissingExtraError(
        f"process trees need the package {exc.name}; {install_hint('server')}"
    ) from exc

SHUTDOWN_S = 5.0
KILL_S = 2.0
"""How long the kernel may take to remove a killed process; it frees its memory first."""


def shutdown(processes: Sequence[BaseProcess], timeout_s: float = SHUTDOWN_S) -> None:
    """End child processes of this process: SIGTERM to all, then `timeout_s` for all together.

    Processes that are left then, and all descendants of all processes, get SIGKILL. Idempotent.
    """
    trees = _trees(processes)
    terminate(processes)
    wait_all(processes, timeout_s)
    # `kill_trees` looks for descendants again, because new ones may have started. `trees` has the
    # descendants of processes that ended meanwhile: they have another parent now.
    kill_trees(processes, trees)


def kill_process_tree(pid: int) -> None:
    """Send SIGKILL to a process and all its descendants; nothing for a pid that is in no use."""
    try:
        root = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    known = {root, *descendants([pid])}

    def left() -> set[psutil.Process]:
        known.update(descendants([pid]) if is_alive(root) else ())
        return {one for one in known if is_alive(one)}

    kill_all(left, timeout_s=KILL_S)


def terminate(processes: Iterable[BaseProcess]) -> None:
    """Send SIGTERM to the running ones of these processes."""
    for process in running(processes):
        process.terminate()


def kill_trees(processes: Sequence[BaseProcess], also: Iterable[psutil.Process] = ()) -> None:
    """Send SIGKILL to running processes, to all their descendants, and to those of `also`."""
    known = {*also, *_trees(processes)}

    def left() -> set[psutil.Process]:
        known.update(_trees(processes))
        return {one for one in known if is_alive(one)}

    for process in running(processes):
        process.kill()
    kill_all(left, timeout_s=KILL_S)
    wait_all(processes, KILL_S)


_KILL_POLL_S = 0.01
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
        time.sleep(_KILL_POLL_S)
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


def wait_all(processes: Iterable[BaseProcess], timeout_s: float) -> bool:
    """Wait until all processes have ended, at most `timeout_s`; return whether they have."""
    deadline = time.monotonic() + timeout_s
    while left := running(processes):
        if (remaining := deadline - time.monotonic()) <= 0:
            return False
        wait_any(left, timeout_s=remaining)
    return True


def wait_any(
    processes: Iterable[BaseProcess],
    connections: Sequence[Connection] = (),
    *,
    timeout_s: float | None,
) -> tuple[list[BaseProcess], list[Connection]]:
    """Wait until a process has ended or a connection can be read; return those that have.

    Both lists are empty after `timeout_s`. The processes must have been started. Raises ConfigError
    if there is nothing to wait for and no timeout.
    """
    started = list(processes)
    if not started and not connections and timeout_s is None:
        raise ConfigError("there is nothing to wait for: no process was started")
    ended = [process for process in started if process.exitcode is not None]
    with _end_descriptors([] if ended else started) as ends:
        ready = wait([*ends, *connections], 0 if ended else timeout_s)
    ended += [process for fd, process in ends.items() if fd in ready]
    for process in ended:
        process.join(KILL_S)  # a fork server reports exit codes a moment later
    return ended, [connection for connection in connections if connection in ready]


def running(processes: Iterable[BaseProcess]) -> list[BaseProcess]:
    """Return the processes that were started and have not ended."""
    return [process for process in processes if process.pid is not None and process.is_alive()]


def raise_for(ended: Iterable[BaseProcess]) -> None:
    """Raise a ProcessLostError if one of the processes ended with another exit code than 0.

    Of several, a process that a signal ended comes first: it is probably the cause of the others'
    end. The others are notes of its error.
    """
    failed = sorted(
        (process for process in ended if process.exitcode),
        key=lambda process: (process.exitcode or 0) > 0,
    )
    if failed:
        raise with_notes([lost(process) for process in failed])


def with_notes(errors: Sequence[WeightSyncError]) -> WeightSyncError:
    """Return the first error, with the others as its notes."""
    first, *others = errors
    for other in others:
        first.add_note(f"and {other}")
    return first


def lost(process: BaseProcess, reason: str = "") -> ProcessLostError:
    """Return the error of a process that ended; `reason` is the text of its own error."""
    return ProcessLostError(
        f"the process {process.name} (pid {process.pid}) {how_ended(process.exitcode)}"
        + (f": {reason}" if reason else ""),
        process=process.name,
        pid=process.pid or 0,
        exitcode=process.exitcode,
    )


def how_ended(exitcode: int | None) -> str:
    """Return the meaning of an exit code of multiprocessing, as text."""
    if exitcode is None:
        return "is still running"
    if exitcode < 0:
        return f"was ended by {_signal_name(-exitcode)} (exit code {exitcode})"
    by_signal = f", which says {_signal_name(exitcode - 128)}" if exitcode > 128 else ""
    return f"ended with exit code {exitcode}{by_signal}"


@contextmanager
def _end_descriptors(processes: Iterable[BaseProcess]) -> Iterator[dict[int, BaseProcess]]:
    """Yield descriptors that become readable when their processes end.

    They are pidfds where possible. A sentinel of multiprocessing is a pipe, which a forked
    grandchild keeps open after the process has ended.
    """
    with ExitStack() as stack:
        ends: dict[int, BaseProcess] = {}
        for process in processes:
            assert process.pid is not None
            try:
                fd = os.pidfd_open(process.pid)
            except OSError:
                fd = process.sentinel
            else:
                stack.callback(os.close, fd)
            ends[fd] = process
        yield ends


def _trees(processes: Iterable[BaseProcess]) -> set[psutil.Process]:
    return descendants(p.pid for p in running(processes) if p.pid is not None)


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM in the block, so that a second Ctrl-C does not stop a cleanup.

    It has an effect in the main thread only.
    """
    before: dict[int, Any] = {}  # what getsignal returns
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            old = signal.getsignal(number)
            if old is not None:  # None: a handler in C, which cannot be restored
                with suppress(ValueError):
                    signal.signal(number, signal.SIG_IGN)
                    before[number] = old
        yield
    finally:
        for restored, handler in before.items():
            signal.signal(restored, handler)


logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often a PolledManager is polled."""


class ProcessManager(Protocol):
    """An object that owns processes of this host."""

    @property
    def processes(self) -> Sequence[BaseProcess]:
        """The processes that were started."""

    def close(self) -> None:
        """End the processes. Idempotent."""


@runtime_checkable
class PolledManager(Protocol):
    """An object that owns processes whose state must be polled: RayEngines, for instance."""

    def poll(self) -> bool:
        """Return whether all have ended without error. Raises ProcessLostError for a failed one."""

    def close(self) -> None:
        """End the processes. Idempotent."""


def wait_for_completion_or_failure(
    api_server_manager: ProcessManager,
    engine_manager: ProcessManager | PolledManager | None = None,
    coordinator: ProcessManager | PolledManager | None = None,
) -> None:
    """Wait until the processes of all managers have ended, or one has failed; then close all.

    A manager of a single process may have it as `proc`, and `shutdown()` instead of `close()`, as
    vLLM's coordinator and engine manager do.

    Returns when all processes ended with exit code 0, and on Ctrl-C. Raises ProcessLostError, with
    name, pid and exit code, for the first process that ended otherwise.
    """
    given = [api_server_manager, engine_manager, coordinator]
    managers = [manager for manager in given if manager is not None]
    with ExitStack() as stack:
        for manager in reversed(managers):  # so that they are closed in the order given
            stack.callback(_close, manager)
        try:
            _wait(managers)
        except KeyboardInterrupt:
            logger.info("interrupted; the server ends")


def _close(manager: ProcessManager | PolledManager) -> None:
    end: Callable[[], object] | None = getattr(manager, "close", None)
    with signals_ignored():
        (end or manager.shutdown)()  # type: ignore[union-attr]  # one of both, as documented


def _wait(managers: Sequence[ProcessManager | PolledManager]) -> None:
    polled = [manager for manager in managers if isinstance(manager, PolledManager)]
    processes = [
        process
        for manager in managers
        if not isinstance(manager, PolledManager)
        for process in _processes_of(manager)
    ]
    while True:
        polled = [manager for manager in polled if not manager.poll()]
        if not (processes or polled):
            return
        ended, _ = wait_any(processes, timeout_s=POLL_S if polled else None)
        raise_for(ended)
        processes = [process for process in processes if process not in ended]


def _processes_of(manager: Any) -> Sequence[BaseProcess]:
    found: Sequence[BaseProcess] | None = getattr(manager, "processes", None)
    return [manager.proc] if found is None else found


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The index of an API server among `client_count`, and its own ZeroMQ addresses."""

    client_index: int
    client_count: int
    input_address: str
    output_address: str
    stats_update_address: str | None = None


class APIServerProcessManager:
    """API server processes, started at once. They end when the manager is closed or collected.

    Each process runs `target(ready, sock, config, *args)`: a function of a module, which calls
    `ready()` once and serves until SIGTERM. `sock` is one listening socket for all of them, and
    `config` is the ClientConfig of the process.
    """

    def __init__(
        self,
        target: Callable[..., None],
        sock: socket.socket,
        *,
        input_addresses: Sequence[str],
        output_addresses: Sequence[str],
        args: tuple[Any, ...] = (),
        stats_update_address: str | None = None,
    ) -> None:
        """Start one process per address, and return before they are ready.

        The caller keeps `sock` and may close it now. Raises ConfigError when addresses are missing.
        """
        count = len(input_addresses)
        if not count or len(output_addresses) != count:
            raise ConfigError(
                f"{count} input addresses and {len(output_addresses)} output addresses are given; "
                "each API server needs one of both, and there is at least one server"
            )
        self._children = []
        addresses = zip(input_addresses, output_addresses, strict=True)
        for index, (input_address, output_address) in enumerate(addresses):
            config = ClientConfig(
                client_index=index,
                client_count=count,
                input_address=input_address,
                output_address=output_address,
                stats_update_address=stats_update_address,
            )
            name = f"api server {index}"
            spec = ChildSpec(name=name, target=target, args=(sock, config, *args))
            self._children.append(Child(spec))
        self.processes: list[BaseProcess] = [child.process for child in self._children]
        self._finalizer = weakref.finalize(self, shutdown, self.processes)
        for child in self._children:
            child.start()

    def close(self) -> None:
        """End the processes: SIGTERM, 5 s in all, then SIGKILL to them and their descendants.

        Idempotent.
        """
        self._finalizer()
        for child in self._children:
            child.close()
