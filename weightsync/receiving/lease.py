"""An update that makes no progress is given up: a timer between the messages of one."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ProgressTimer:
    """Calls `expire(update_id)` unless it is renewed or stopped within `seconds`. Thread-safe."""

    def __init__(self, seconds: float, expire: Callable[[str], None]) -> None:
        self.seconds = seconds
        self._expire = expire
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def renew(self, update_id: str) -> None:
        """Start the time for `update_id` again."""
        with self._lock:
            self._cancel()
            self._timer = threading.Timer(self.seconds, self._expire, (update_id,))
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        """No update is waited for."""
        with self._lock:
            self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
