"""What every transport counts: the messages it sent, and their bytes."""

from __future__ import annotations

import threading


class CountingTransport:
    """The name of a target and the counters of a Transport, safe from any thread."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._counting = threading.Lock()
        self._sent_nbytes = 0
        self._sent_messages = 0

    @property
    def target(self) -> str:
        """How messages to a user name the receiver."""
        return self._target

    @property
    def sent_nbytes(self) -> int:
        """Bytes of all request bodies so far, as JSON, retries included."""
        return self._sent_nbytes

    @property
    def sent_messages(self) -> int:
        """Requests sent so far, retries included."""
        return self._sent_messages

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self._sent_nbytes += nbytes
            self._sent_messages += 1
