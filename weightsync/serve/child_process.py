"""Child processes that report when they are ready, and that end with their parent."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec

from weightsync.errors import ConfigError, WeightSyncError
from weightsync.shm.spawning import refuse_forked
from weightsync.wire.problem import decode_error, encode_error, encode_problem, to_problem

READY_NBYTES = 16 << 10
"""The most bytes of the message `ready`: two messages must fit into a pipe."""

_PROBLEM_CHARS = 4 << 10
_F_SETSIG = 10  # from linux/fcntl.h; the module fcntl does not name it
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """A process to start: it calls `target(ready, *args)`, with `env` added to the environment.

    `name` appears in errors: "worker 0.1". `target` is a function of a module. It calls `ready`
    once, with a payload for the parent, and serves until SIGTERM, which raises SystemExit in it.
    """

    name: str
    target: Callable[..., None]
    args: tuple[Any, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


_READY, _FAILED = b"+", b"-"
"""The first byte of a message: a payload follows, or the problem document of an error."""


class Ready:
    """The function that a target calls when it is ready."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._called = False

    def __call__(self, payload: bytes = b"") -> None:
        """Send `payload` to the parent, once. Raises ConfigError if it is too long."""
        if len(payload) > READY_NBYTES:
            raise ConfigError(
                f"ready() got {len(payload)} bytes; at most {READY_NBYTES} may be sent"
            )
        if self._called:
            raise ConfigError("ready() was called before; it is called once")
        self._called = True
        _send(self._pipe, _READY + payload)


class Child:
    """The parent's side of a process of a ChildSpec. `start` starts it.

    `payload` is the payload of its `ready`, None before. `error` is the error that it sent.
    """

    def __init__(self, spec: ChildSpec) -> None:
        """Prepare the process. Raises ConfigError in a process that was forked."""
        refuse_forked("a process")
        self.pipe, self._theirs = _SPAWN.Pipe(duplex=False)
        self.process: BaseProcess = _SPAWN.Process(
            target=_run, args=(spec.target, spec.args, self._theirs), name=spec.name
        )
        self.payload: bytes | None = None
        self.error: WeightSyncError | None = None
        self._env = dict(spec.env)

    @property
    def name(self) -> str:
        """The name of its spec."""
        return self.process.name

    @property
    def is_ready(self) -> bool:
        """Whether the process has called `ready`."""
        return self.payload is not None

    def start(self) -> None:
        """Start the process. Raises ConfigError if the target cannot be pickled.

        It inherits a blocked SIGINT: a terminal sends SIGINT to all processes, but only the parent
        handles it.
        """
        # Before the variables of this child are set. It may unblock SIGINT.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _environment(self._env):
                self.process.start()
        except (AttributeError, TypeError) as exc:
            raise ConfigError(
                f"{self.name} cannot be started: {exc}; targets are functions of a module, and "
                "their arguments can be pickled"
            ) from exc
        finally:
            self._theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def listen(self) -> None:
        """Read the messages that the child has sent."""
        while not self.pipe.closed and self.pipe.poll():
            try:
                message = self.pipe.recv_bytes()
            except (EOFError, OSError):
                self.pipe.close()
                return
            if message.startswith(_READY):
                self.payload = message[1:]
            else:
                self.error = decode_error(message[1:], peer=self.name)

    def close(self) -> None:
        """Close the pipe of a child that has ended, or was never started."""
        self.pipe.close()
        self._theirs.close()


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while a child is started, which copies the environment."""
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# The rest runs in the child.


def _run(target: Callable[..., None], args: tuple[Any, ...], pipe: Connection) -> None:
    logging.basicConfig()  # warnings go to stderr
    _end_with_parent()
    _show_name(multiprocessing.current_process().name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    try:
        target(Ready(pipe), *args)
    except Exception as exc:  # noqa: BLE001 - the edge: the parent raises it again
        _report(pipe, exc)
        raise SystemExit(1) from None


def _show_name(name: str) -> None:
    """Set the name that `ps` and `top` show."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name[:15])


def _leave(signum: int, _frame: object) -> None:
    # An exception, so that `with` and `finally` release shared memory. A second signal is ignored,
    # because it would interrupt them.
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(128 + signum)


def _report(pipe: Connection, exc: Exception) -> None:
    if not isinstance(exc, WeightSyncError):
        traceback.print_exception(exc)  # the parent gets the text only
    body = encode_error(exc)
    if len(body) > _PROBLEM_CHARS:
        problem = to_problem(exc)
        detail = problem.detail[:_PROBLEM_CHARS]
        body = encode_problem(msgspec.structs.replace(problem, detail=detail, attributes={}))
    _send(pipe, _FAILED + body)


def _send(pipe: Connection, message: bytes) -> None:
    with suppress(OSError):  # the parent has died, so this process will end too
        pipe.send_bytes(message)


def _end_with_parent() -> None:
    """End this process when its parent dies, whether it has died already or not."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # The kernel kills this process when the last writer of the sentinel, a pipe, is gone: the
    # thread below needs the GIL, which native code may keep.
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, _F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(parent.sentinel, fcntl.F_GETFL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    threading.Thread(
        target=_watch, args=(parent.sentinel,), name="weightsync parent watch", daemon=True
    ).start()


def _watch(sentinel: int) -> None:
    # The sentinel is a pipe, which a fork of the parent would keep open. A pidfd cannot be made of
    # a parent in another pid namespace.
    ends = [sentinel]
    with suppress(OSError):
        ends.append(os.pidfd_open(os.getppid()))
    wait(ends)
    os._exit(1)
