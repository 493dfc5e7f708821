"""Keeps decode steps and weight swaps apart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from weightsync.errors import NotReadyError, TransferTimeout


@dataclass(slots=True, eq=False)
class _Stay:
    """One reader inside, with its nested blocks."""

    blocks: int = 1


class Gate:
    """Many readers, or one holder. Who holds it keeps new readers out and waits for those inside.

    `refuse` is asked by every reader before it enters and raises where the weights may not be used.
    The hold may be taken by one thread and given back by another.
    """

    def __init__(self, refuse: Callable[[], None]) -> None:
        self._refuse = refuse
        self._condition = threading.Condition()
        self._readers = 0
        self._held_since: float | None = None
        self._inside: ContextVar[_Stay | None] = ContextVar("weightsync_stay", default=None)

    @property
    def held(self) -> bool:
        """Whether readers are kept out now."""
        return self._held_since is not None

    @contextmanager
    def reading(self, timeout_s: float) -> Iterator[None]:
        """Be inside for one decode step. Raises NotReadyError when refused or kept out too long.

        May be nested in one thread or task: an inner block never waits for a holder that waits for
        the outer one. Blocks may end in any order and in any thread; the last one leaves.
        """
        stay = self._inside.get()
        if stay is None or not self._join(stay):
            self._enter(timeout_s)
            stay = _Stay()
            self._inside.set(stay)
        try:
            yield
        finally:
            self._leave(stay)

    def hold(self, timeout_s: float) -> None:
        """Keep readers out and wait until none is inside. On TransferTimeout all go on."""
        with self._condition:
            self._held_since = time.perf_counter()
            if not self._condition.wait_for(lambda: self._readers == 0, timeout_s):
                self._held_since = None
                self._condition.notify_all()
                raise TransferTimeout(
                    f"{self._readers} decode steps did not end within {timeout_s:g} s; is "
                    "reading() held around more than one step?"
                )

    def release(self) -> float:
        """Let readers in again; return the seconds for which they were kept out."""
        with self._condition:
            since, self._held_since = self._held_since, None
            self._condition.notify_all()
            return time.perf_counter() - since if since is not None else 0.0

    def _join(self, stay: _Stay) -> bool:
        """Count one more block of a stay that has not ended; a task inherits ended ones too."""
        with self._condition:
            if not stay.blocks:
                return False
            stay.blocks += 1
            return True

    def _enter(self, timeout_s: float) -> None:
        with self._condition:
            if not self._condition.wait_for(lambda: self._held_since is None, timeout_s):
                self._refuse()  # knows which update it is, where weights in use have changed
                raise NotReadyError(
                    f"an update has held generation for {timeout_s:g} s; see weight_info",
                    state="UPDATING",
                )
            self._refuse()
            self._readers += 1

    def _leave(self, stay: _Stay) -> None:
        with self._condition:
            stay.blocks -= 1
            if stay.blocks:
                return
            self._readers -= 1
            if not self._readers:
                self._condition.notify_all()
