"""A word from a rank that failed to ranks that wait for a receiver, and not for each other."""

from __future__ import annotations

import time
from contextlib import suppress

from weightsync.errors import TransferError
from weightsync.sending.ranks import RankComm

_INTERVAL_S = 0.2


class CancelledError(TransferError):
    """A step was called off, and the ranks found no reason together: look at their answers."""


class Cancellation(Exception):  # no error of its own: the ranks agree on the real one
    """Another rank failed in this step; meet the others to learn why."""


class CancelFlag:
    """One flag per step in the trainer's store, looked at now and then.

    A store that is gone says nothing: the ranks' group notices that its holder died.
    """

    def __init__(self, ranks: RankComm) -> None:
        self._ranks = ranks
        self._store = ranks.store
        self._turn = 0
        self._looked = 0.0

    def next_turn(self) -> None:
        """Another step begins, on every rank."""
        self._turn += 1
        self._looked = time.monotonic()

    def call(self) -> None:
        """Say that this rank leaves the step."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(self._key, "1")

    def look(self) -> None:
        """Raise CalledOff when a rank has left the step, or is gone."""
        now = time.monotonic()
        if self._store is None or now - self._looked < _INTERVAL_S:
            return
        self._looked = now
        called = self._ranks.is_losing()
        with suppress(RuntimeError):
            called = called or self._store.check([self._key])
        if called:
            raise Cancellation

    @property
    def _key(self) -> str:
        return f"called-off/{self._turn}"
