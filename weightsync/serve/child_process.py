"""Child processes that report when they are ready, and that end with their parent."""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import logging
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec

from weightsync.errors import ConfigError, ProtocolError, WeightSyncError
from weightsync.shm.spawning import refuse_forked, require_spawn
from weightsync.wire.problem import Problem, encode_problem, from_problem, to_problem

READY_NBYTES = 16 << 10
"""The most bytes of the message `ready`: two messages must fit into a pipe."""

_PROBLEM_CHARS = 4 << 10
_START_S = 30.0
_PR_SET_PDEATHSIG = 1


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


class _Ready(msgspec.Struct, frozen=True, tag="ready"):
    payload: bytes


class _Failed(msgspec.Struct, frozen=True, tag="failed"):
    problem: Problem


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Ready | _Failed)


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
        _send(self._pipe, _Ready(payload))


class Child:
    """The parent's side of a process of a ChildSpec. `start` starts it.

    `payload` is the payload of its `ready`, None before. `error` is the error that it sent.
    """

    def __init__(self, spec: ChildSpec, context: BaseContext | None = None) -> None:
        """Prepare the process. Raises ConfigError as `spawn_context` does."""
        made = spawn_context(context)
        self.pipe, self._theirs = made.Pipe(duplex=False)
        process = getattr(made, "Process")  # noqa: B009 - contexts bind it where mypy cannot see
        self.process: BaseProcess = process(
            target=_run, args=(spec.target, spec.args, self._theirs), name=spec.name
        )
        self.payload: bytes | None = None
        self.error: WeightSyncError | None = None
        self._env = dict(spec.env)
        self._started: Future[None] = Future()
        self._ordered = False

    @property
    def name(self) -> str:
        """The name of its spec."""
        return self.process.name

    @property
    def is_ready(self) -> bool:
        """Whether the process has called `ready`."""
        return self.payload is not None

    def start(self) -> None:
        """Start the process. Raises ConfigError if the target cannot be pickled."""
        starter = _starter()
        self._ordered = True
        starter.submit(self)
        self._started.result(_START_S)

    def settle(self) -> None:
        """Wait for the outcome of a `start` that was interrupted."""
        if self._ordered:
            concurrent.futures.wait([self._started], _START_S)

    def listen(self) -> None:
        """Read the messages that the child has sent."""
        while not self.pipe.closed and self.pipe.poll():
            try:
                self._take(self.pipe.recv_bytes())
            except (EOFError, OSError):
                self.pipe.close()

    def close(self) -> None:
        """Close the pipe of a child that has ended, or was never started."""
        self.pipe.close()
        self._theirs.close()

    def start_here(self) -> None:
        """Start the process from this thread, with which it would end. Called by the starter."""
        resource_tracker.ensure_running()  # before the variables of this child are set
        # After `ensure_running`, which may unblock SIGINT.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
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

    def _take(self, data: bytes) -> None:
        try:
            message = _DECODER.decode(data)
        except msgspec.DecodeError as exc:
            self.error = ProtocolError(f"{self.name} sent a message that cannot be read: {exc}")
            return
        if isinstance(message, _Ready):
            self.payload = message.payload
        else:
            self.error = from_problem(message.problem, peer=self.name)


def spawn_context(context: BaseContext | None = None) -> BaseContext:
    """Return `context`, or multiprocessing's context for spawn if it is None.

    Raises ConfigError for other start methods, and in a process that was forked.
    """
    refuse_forked("a process")
    if context is None:
        return multiprocessing.get_context("spawn")
    require_spawn(context)
    if (method := context.get_start_method()) != "spawn":
        raise ConfigError(
            f'the start method is "{method}", whose children have another parent, with which they '
            'would end; use multiprocessing.get_context("spawn")'
        )
    return context


class _Starter:
    """A thread that starts all children and never ends.

    The parent-death signal is sent when the thread that started a child ends, so that thread must
    live as long as the process. It blocks SIGINT, which its children inherit: a terminal sends
    SIGINT to all of them, but only the supervisor handles it.
    """

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Child] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="weightsync starter", daemon=True).start()

    def submit(self, child: Child) -> None:
        self._orders.put(child)

    def _run(self) -> None:
        while True:
            child = self._orders.get()
            try:
                child.start_here()
            except BaseException as exc:  # noqa: BLE001 - raised again by Child.start
                child._started.set_exception(exc)
            else:
                child._started.set_result(None)
            del child


@functools.cache
def _starter() -> _Starter:
    return _Starter()


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
    problem = to_problem(exc)
    if len(encode_problem(problem)) > _PROBLEM_CHARS:
        detail = problem.detail[:_PROBLEM_CHARS]
        problem = msgspec.structs.replace(problem, detail=detail, attributes={})
    _send(pipe, _Failed(problem))


def _send(pipe: Connection, message: _Ready | _Failed) -> None:
    with suppress(OSError):  # the parent has died, so this process will end too
        pipe.send_bytes(_ENCODER.encode(message))


def _end_with_parent() -> None:
    """Make the kernel kill this process when its parent dies, and watch the parent as well.

    The watch covers a parent that died before the call of prctl, in any pid namespace.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(
        target=_watch, args=(parent.sentinel,), name="weightsync parent watch", daemon=True
    ).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
