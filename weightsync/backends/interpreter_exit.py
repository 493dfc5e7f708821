"""What has threads inside torch leaves its private group before the interpreter ends.

A thread that comes back from torch's C++ afterwards is unwound through it by CPython, which is
`std::terminate`.
"""

from __future__ import annotations

import atexit
import os
import time
from typing import Protocol
from weakref import WeakSet

_END_S = 2.0
"""For all of them together: a peer that is stopped may hold a thread, and does not wake it soon."""


class Leaving(Protocol):
    """One place in a private group, with threads of its own."""

    def end(self, timeout_s: float) -> None:
        """Leave the group; wait no longer than that for the threads to come back."""


_members: WeakSet[Leaving] = WeakSet()


def end_at_exit(member: Leaving) -> None:
    """Have `member.end` called when the interpreter exits, unless it is gone by then.

    Not in forked children, which have none of its threads.
    """
    _members.add(member)


def _end_all() -> None:
    deadline = time.monotonic() + _END_S
    for member in list(_members):
        member.end(max(0.0, deadline - time.monotonic()))


atexit.register(_end_all)
os.register_at_fork(after_in_child=_members.clear)
