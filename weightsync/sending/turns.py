"""One update at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.errors import ConfigError


class UpdateLock:
    """Who sends now: the ring of a sender has one writer."""

    def __init__(self) -> None:
        self._taken = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Around a call. Raises ConfigError when one is at work."""
        if not self._taken.acquire(blocking=False):
            raise ConfigError(
                "this sender is at work already, in another thread or in an update() block around "
                "this call; use it from one thread, one update after another"
            )
        try:
            yield
        finally:
            self._taken.release()
