"""The stop signal of a call on a sender: it cancels the call, and shows when its source is free."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from weightsync.errors import TransferCancelled


class StopSignal(threading.Event):
    """Set to cancel a call. Counts what the call does with the source, on this rank.

    `unread` has a result once the call is cancelled and nothing of it uses the source; it does not
    use the source again. The call itself may go on: an update that receivers commit already cannot
    be cancelled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unread: Future[None] = Future()
        self.unread.set_running_or_notify_cancel()  # who waits for it cannot cancel it
        self._uses = 0
        self._counting = threading.Lock()

    def set(self) -> None:
        """Cancel the call. Idempotent."""
        with self._counting:
            super().set()
            self._settle()

    def check(self) -> None:
        """Raise TransferCancelled when the call is cancelled."""
        if self.is_set():
            raise TransferCancelled("the update was cancelled by its caller")

    def begin_use(self, *, check: bool = True) -> None:
        """Count a use of the source, which `end_use` ends.

        With `check` it raises TransferCancelled when the call is cancelled. Without, the caller
        checks that before it touches the source.
        """
        with self._counting:
            if check:
                self.check()
            self._uses += 1

    def end_use(self) -> None:
        """Count the end of a use of the source."""
        with self._counting:
            self._uses -= 1
            self._settle()

    def _settle(self) -> None:
        if self.is_set() and not self._uses and not self.unread.done():
            self.unread.set_result(None)
