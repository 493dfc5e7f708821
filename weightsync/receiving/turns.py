"""The steps of one receiver take turns; one that belongs to an update is known by it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.errors import UpdateConflictError
from weightsync.lifecycle import UpdateLifecycle


class StepLock:
    """One step at a time. A step waits `wait_s` for its turn. Thread-safe."""

    def __init__(self, lifecycle: UpdateLifecycle, wait_s: float) -> None:
        self._lifecycle = lifecycle
        self._wait_s = wait_s
        self._work = threading.Lock()
        self._serving = ""

    @property
    def busy(self) -> bool:
        """Whether a step is at work now."""
        return self._work.locked()

    def serves(self, update_id: str) -> bool:
        """Whether the step at work is one of this update, and not an init or a look around."""
        return self._serving == update_id

    @contextmanager
    def taken(self, step: str, update_id: str = "") -> Iterator[None]:
        """Be at work. Raises UpdateConflictError when the turn does not come in time."""
        with self.waited_for() as ours:
            if not ours:
                raise UpdateConflictError(
                    f"{step}: the receiver has been busy for {self._wait_s:g} s with update "
                    f"{self._lifecycle.update_id}",
                    state=self._lifecycle.state.value,
                    update_id=self._lifecycle.update_id,
                )
            self._serving = update_id
            try:
                yield
            finally:
                self._serving = ""

    @contextmanager
    def waited_for(self) -> Iterator[bool]:
        """Yield whether the turn came in time."""
        yield from self._held(self._work.acquire(timeout=self._wait_s))

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Yield whether nobody was at work; never waits."""
        yield from self._held(self._work.acquire(blocking=False))

    def _held(self, ours: bool) -> Iterator[bool]:
        try:
            yield ours
        finally:
            if ours:
                self._work.release()
