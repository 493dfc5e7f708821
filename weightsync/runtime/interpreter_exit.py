"""Ends threads inside torch before the interpreter exits.

A daemon thread that returns from an operator of torch, or from freeing a tensor, while the
interpreter exits aborts the process: "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol
from weakref import WeakSet

from weightsync.errors import TransferCancelled

_LOOK_S = 0.002
_END_S = 2.0
"""Seconds for all members together. A stopped peer may block a thread for longer than that."""


class EndsAtExit(Protocol):
    """An object whose threads use torch."""

    def end(self, timeout_s: float) -> None:
        """Have the threads end, and wait at most `timeout_s` for them. Idempotent."""


_members: WeakSet[EndsAtExit] = WeakSet()
_lock = threading.Lock()


def end_at_exit(member: EndsAtExit) -> None:
    """Register `member.end` to be called at interpreter exit, if the member still exists.

    It is not called in forked children, which have none of its threads.
    """
    with _lock:
        _members.add(member)


class TorchCalls:
    """The calls of one object that use torch; at exit, those of daemon threads end.

    Without a lock, which a forked child could find taken for ever.
    """

    def __init__(self) -> None:
        self._inside: set[object] = set()
        self._ends = False
        end_at_exit(self)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Run the block as a call. Raises as `check` does.

        An error that leaves it after `end` is kept: its frames would free tensors outside.
        """
        call = object()
        try:
            self._inside.add(call)  # before the check: `end` looks after it has set the flag
            self.check()
            yield
        except BaseException as exc:
            if self._ends:
                keep_frames(exc)
            raise
        finally:
            self._inside.discard(call)

    def check(self) -> None:
        """Raise TransferCancelled after `end`, except in the main thread. For waits of calls."""
        if self._ends and threading.current_thread() is not threading.main_thread():
            raise TransferCancelled("the interpreter exits")

    def end(self, timeout_s: float) -> None:
        """Have calls end, and wait at most `timeout_s` for them. Called by none of them."""
        self._ends = True
        deadline = time.monotonic() + timeout_s
        while self._inside and time.monotonic() < deadline:
            time.sleep(_LOOK_S)


def never_destroy(held: object) -> None:
    """Keep an object whose destructor would wait, for a collective in flight for instance."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))  # module globals are cleared at exit


def keep_frames(error: BaseException) -> None:
    """Keep an error and those that led to it for ever, with their frames and what these hold."""
    waiting: list[BaseException | None] = [error]
    kept = set[int]()
    while waiting:
        seen = waiting.pop()
        if seen is not None and id(seen) not in kept:
            kept.add(id(seen))
            never_destroy((seen, seen.__traceback__))
            waiting += [seen.__cause__, seen.__context__]


def _end_all() -> None:
    """End all members, even when one of them raises or Ctrl-C is pressed.

    All of them are told before one is waited for: a thread of one may wait for another, and each
    has all of the time.
    """
    deadline = time.monotonic() + _END_S
    with _lock:
        members = list(_members)
    with ExitStack() as waits, ExitStack() as ends:
        for member in members:
            waits.callback(_wait, member, deadline)
            ends.callback(member.end, 0.0)


def _wait(member: EndsAtExit, deadline: float) -> None:
    member.end(max(0.0, deadline - time.monotonic()))


def _forget_in_child() -> None:
    _members.clear()
    _lock.release()


atexit.register(_end_all)
os.register_at_fork(
    before=_lock.acquire,
    after_in_parent=_lock.release,
    after_in_child=_forget_in_child,
)
