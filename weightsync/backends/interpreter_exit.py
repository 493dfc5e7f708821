"""Ends private groups at interpreter exit, before CPython ends their threads.

A thread that comes back from torch's C++ afterwards is unwound through it by CPython, which is
`std::terminate`.
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
"""For all of them together: a peer that is stopped may hold a thread, and does not wake it soon."""


class EndsAtExit(Protocol):
    """One place in a private group, with threads of its own."""

    def end(self, timeout_s: float) -> None:
        """Leave the group; wait no longer than that for the threads to come back."""


_members: WeakSet[EndsAtExit] = WeakSet()
_lock = threading.Lock()


def end_at_exit(member: EndsAtExit) -> None:
    """Have `member.end` called when the interpreter exits, unless it is gone by then.

    Not in forked children, which have none of its threads.
    """
    with _lock:
        _members.add(member)


def _end_all() -> None:
    """End all members, also when one of them raises or Ctrl-C comes."""
    deadline = time.monotonic() + _END_S
    with _lock:
        members = list(_members)
    with ExitStack() as ends:
        for waiting, member in enumerate(members, 1):  # the last of them is ended first
            ends.callback(_end, member, deadline, waiting)


def _end(member: EndsAtExit, deadline: float, waiting: int) -> None:
    """Leave a share of the time to each of those that wait for their end."""
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
