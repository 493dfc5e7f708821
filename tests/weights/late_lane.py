"""Substitute for a device's copy stream: copies that run when they are waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class LateLane:
    """Copies in order, each as late as allowed.

    A stream that waits for a copy is the caller itself here, since the CPU has no streams.
    """

    def __init__(self) -> None:
        self._queue: deque[_LateTicket] = deque()
        self.copies = 0
        self.held = 0
        self.settled = 0

    @property
    def waiting(self) -> int:
        """Copies that have not run yet."""
        return len(self._queue)

    def run(self, copy: Callable[[], object]) -> _LateTicket:
        self.copies += 1
        ticket = _LateTicket(self, copy)
        self._queue.append(ticket)
        return ticket

    def catch_up(self, ticket: _LateTicket) -> None:
        """Run all copies up to this one."""
        while ticket in self._queue:
            self._queue.popleft().copy()

    def close(self) -> None:
        while self._queue:
            self._queue.popleft().copy()


class _LateTicket:
    def __init__(self, lane: LateLane, copy: Callable[[], object]) -> None:
        self._lane = lane
        self.copy = copy

    def wait_on_stream(self) -> None:
        self._lane.held += self in self._lane._queue
        self._lane.catch_up(self)

    def wait(self) -> None:
        self._lane.settled += 1
        self._lane.catch_up(self)
