"""Ends threads inside torch before the interpreter exits.

A daemon thread that returns from an operator of torch while the interpreter exits aborts the
process: "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from contextlib import ExitStack
from typing import Protocol
from weakref import WeakSet

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


def _end_all() -> None:
    """End all members, even when one of them raises or Ctrl-C is pressed.

    All of them are told before one is waited for: a thread of one may wait for another.
    """
    deadline = time.monotonic() + _END_S
    with _lock:
        members = list(_members)
    with ExitStack() as waits, ExitStack() as ends:
        for waiting, member in enumerate(members, 1):  # the last of them is ended first
            waits.callback(_wait, member, deadline, waiting)
            ends.callback(member.end, 0.0)


def _wait(member: EndsAtExit, deadline: float, waiting: int) -> None:
    """Wait for one member; each of the `waiting` members has an equal share of the time left."""
    member.end(max(0.0, deadline - time.monotonic()) / waiting)


def _forget_in_child() -> None:
    _members.clear()
    _lock.release()


atexit.register(_end_all)
os.register_at_fork(
    before=_lock.acquire,
    after_in_parent=_lock.release,
    after_in_child=_forget_in_child,
)
