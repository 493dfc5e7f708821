"""Namespaces of their own for a few processes, made and entered from this process.

A thread may enter other namespaces, and the processes that it starts are then inside. So a plain
`Popen` in a short-lived thread needs no wrapper program, and its pid is the process's own. The
namespaces are anonymous. A holder, the first process of a new pid namespace, keeps them until its
standard input ends: when this process closes it or dies. With the holder the kernel ends every
process of that pid namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, TypeVar

_FS = 0x00000200
_MOUNT = 0x00020000
_UTS = 0x04000000
_IPC = 0x08000000
_PID = 0x20000000
_NET = 0x40000000
_PLACE = _NET | _MOUNT | _UTS | _IPC

TOOL_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
SETUP_S = 60.0
TOOL_S = 60.0
END_S = 60.0

T = TypeVar("T")
Arg = str | os.PathLike[str]
Stream = int | IO[str] | IO[bytes] | None

# The holder inherits orphans; ignoring SIGCHLD makes the kernel reap them.
_READY = "ready\n"
_HOLD = "trap '' CHLD\necho ready\nexec cat >/dev/null 2>&1\n"
_PREPARE = "set -e\nmount --make-rprivate /\nmount -t proc proc /proc\nip link set lo up\n"

_libc = ctypes.CDLL(None, use_errno=True)


class HostsError(Exception):
    """The system refused a step of the set-up of hosts; the message is the system's."""


class Isolation:
    """Namespaces (network, mounts, host name, IPC, pids) that end with `close` or this process.

    `setup` is a shell script that runs inside once /proc and the loopback interface are there.
    Raises HostsError when the system refuses.
    """

    def __init__(self, name: str, setup: str = "") -> None:
        self.name = name
        self._started: list[subprocess.Popen[str]] = []
        self._holder = _elsewhere(
            lambda: _check(_libc.unshare(_FS | _PLACE | _PID), "unshare"),
            lambda: _start_holder(_PREPARE + setup + _HOLD),
        )
        try:
            said = _read_setup(self._holder)
            if not said.endswith(_READY):
                raise HostsError(f"making {name}: {said.strip() or 'no answer in time'}")
            self._pidfd = os.pidfd_open(self._holder.pid)
        except BaseException:
            self._end_holder()
            raise

    @property
    def pid(self) -> int:
        """The pid of the process that holds the namespaces."""
        return self._holder.pid

    def call(self, function: Callable[[], T]) -> T:
        """Return `function()`, run inside by a thread of this process.

        Sockets and files that it opens belong to the namespaces and may be used by any thread.
        """
        return _elsewhere(lambda: self._enter(_PLACE), function)

    def popen(
        self,
        argv: Sequence[Arg],
        *,
        env: Mapping[str, str] | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        start_new_session: bool = False,
    ) -> subprocess.Popen[str]:
        """Start a process inside; like `subprocess.Popen`, in text mode. `close` kills it."""

        def start() -> subprocess.Popen[str]:
            process = subprocess.Popen(
                list(argv),
                env=env,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=start_new_session,
            )
            # Recorded first, so that `close` also ends the process of an interrupted caller.
            self._started.append(process)
            return process

        return _elsewhere(lambda: self._enter(_PLACE | _PID), start)

    def tool(self, argv: Sequence[Arg], commands: Sequence[str]) -> None:
        """Run `ip` or `tc` on this network, its batch of commands on standard input.

        It sees the pids of this process, not those of the holder. Raises HostsError.
        """
        done = _elsewhere(
            lambda: self._enter(_NET),
            lambda: subprocess.run(
                list(argv),
                input="".join(f"{command}\n" for command in commands),
                env={**os.environ, "PATH": TOOL_PATH},
                capture_output=True,
                text=True,
                timeout=TOOL_S,
                check=False,
            ),
        )
        if done.returncode:
            said = (done.stderr + done.stdout).strip()
            raise HostsError(f"{argv[0]} on {self.name}: {said}; tried: {'; '.join(commands)}")

    def close(self) -> None:
        """Kill every process inside and wait for them; the namespaces go with the last one."""
        os.close(self._pidfd)
        self._end_holder()

    def _enter(self, kinds: int) -> None:
        here = Path.cwd()
        if kinds & _MOUNT:
            # The kernel moves no thread to other mounts that shares its directory with others.
            _check(_libc.unshare(_FS), "unshare")
        _check(_libc.setns(self._pidfd, kinds), "setns")
        if kinds & _MOUNT:
            with contextlib.suppress(OSError):
                os.chdir(here)

    def _end_holder(self) -> None:
        self._holder.kill()
        # The holder ends after all others, and these are children of this process, which reaps
        # them.
        for process in self._started:
            _finish(process)
        _finish(self._holder)


def _check(result: int, call: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise HostsError(f"{call}: {os.strerror(code)} (errno {code})")


def _elsewhere(enter: Callable[[], None], function: Callable[[], T]) -> T:
    """Return the result of `function`, run in a new thread after `enter`."""
    outcome: Future[T] = Future()

    def body() -> None:
        try:
            enter()
            outcome.set_result(function())
        except BaseException as exc:  # noqa: BLE001 - raised again by the waiting thread
            outcome.set_exception(exc)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        return outcome.result()
    finally:
        thread.join(END_S)


def _start_holder(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["sh", "-c", script],
        env={**os.environ, "PATH": TOOL_PATH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Ctrl-C is for this process, which then ends the holder in its own time.
        start_new_session=True,
    )


def _read_setup(holder: subprocess.Popen[str]) -> str:
    """Return the output of the set-up, up to its failure or the start of the holder."""
    watchdog = threading.Timer(SETUP_S, holder.kill)
    watchdog.start()
    try:
        assert holder.stdout is not None
        return holder.stdout.read()
    finally:
        watchdog.cancel()


def _finish(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.wait(END_S)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
