"""How the sender's fingerprints and a reader's copies of the same memory share the cache."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAD_NBYTES = 1 << 20
"""Measured: at 4 MiB verification costs twice as much, with no limit three to four times."""
STANDSTILL_S = 0.005
_NAP_S = 20e-6


class ReadAhead:
    """Lets the sender be only so far ahead of the reader that is furthest.

    What one has just read from memory the other finds in the cache that their cores share, so the
    two passes cost little more than one. A reader that shows nothing for a while holds nobody up:
    the rest of the update is read without waiting.

    Args:
        taken: how many bytes of the stream the furthest reader has read.
    """

    def __init__(self, taken: Callable[[], int]) -> None:
        self._look = taken
        self._taken = 0
        self._given_up = False

    def wait(self, start: int) -> None:
        """Return when the byte `start` of the stream may be read."""
        if self._given_up or start <= self._taken + LEAD_NBYTES:
            return
        since = time.monotonic()
        while start > (taken := self._look()) + LEAD_NBYTES:
            now = time.monotonic()
            if taken > self._taken:
                self._taken, since = taken, now
            elif now - since > STANDSTILL_S:
                self._given_up = True
                return
            time.sleep(_NAP_S)
        self._taken = taken
