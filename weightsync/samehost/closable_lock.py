"""A lock around the calls of an object that any thread may close."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from weightsync.errors import ConfigError, TransferCancelled


class ClosableLock:
    """One call at a time is inside (`with lock:`); `close`, from any thread, ends it and the rest.

    Calls that wait, that come later or that were waiting for the lock raise TransferCancelled: the
    one inside asks `is_set()` now and then, and `wake` interrupts its sleep. `release` runs once,
    when no call is inside. A signal handler may close what its own thread is inside of: then
    that call runs `release` at its end. Neither function may refer to the lock's owner, or the
    owner that is forgotten without `close` would live until the next garbage collection.
    """

    def __init__(self, what: str, *, wake: Callable[[], None], release: Callable[[], None]) -> None:
        self._what = what
        self._wake = wake
        self._release = release
        self._lock = threading.RLock()
        self._inside = self._closed = self._released = False

    def is_set(self) -> bool:
        """Say whether `close` was called."""
        return self._closed

    def error(self) -> TransferCancelled:
        """Return what calls raise once this is closed."""
        return TransferCancelled(f"this {self._what} was closed in this process; open another one")

    def acquire(self, timeout_s: float = -1) -> bool:
        """Go inside, or return False after `timeout_s`. Raises TransferCancelled once closed."""
        if not self._lock.acquire(timeout=timeout_s):
            if self._closed:
                raise self.error()
            return False
        if self._closed or self._inside:
            self._lock.release()
            if self._closed:
                raise self.error()
            raise ConfigError(f"this thread is inside another call of this {self._what}")
        self._inside = True
        return True

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Go outside; what `acquire` asks for afterwards."""
        self._inside = False
        self._lock.release()
        if self._closed:
            self._release_once()

    def close(self) -> None:
        """End the call that is inside, and release; returns when that is done. Idempotent."""
        self._closed = True
        self._wake()
        self._release_once()

    def _release_once(self) -> None:
        with self._lock:
            if not (self._inside or self._released):
                self._released = True
                self._release()
