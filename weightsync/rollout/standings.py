"""Whether a replica may make its next step: all its workers hold one version, and none swaps."""

from __future__ import annotations

import time
from collections.abc import Callable

from weightsync.errors import NotReadyError
from weightsync.rollout.worker_messages import Standing

SPLIT_S = 10.0
"""How long workers may hold different versions before waiting requests are told so."""


class Standings:
    """What the workers of a replica said last; pure, but for the clock it is given.

    A worker that is about to change its weights holds first and gives the hold back when the new
    ones are in use, so between two holds all workers are told apart by their versions alone.
    """

    def __init__(self, size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._standing = dict.fromkeys(range(size), Standing(version=0))
        self._holds: set[int] = set()
        self._clock = clock
        self._stopped_at: float | None = None
        self._split_at: float | None = None
        self.last_stall_s = 0.0
        """For how long the last change of weights kept steps from being made."""

    @property
    def versions(self) -> list[int]:
        """What the workers hold, one each."""
        return [standing.version for standing in self._standing.values()]

    @property
    def may_step(self) -> bool:
        """Whether a step may begin now."""
        whole = not self._holds and len(set(self.versions)) == 1
        return whole and not any(standing.why_not for standing in self._standing.values())

    def hold(self, worker: int) -> None:
        """A worker is about to change its weights."""
        self._holds.add(worker)
        self._look()

    def heard(self, worker: int, standing: Standing) -> None:
        """A worker says which weights it holds."""
        self._standing[worker] = standing
        if standing.released:
            self._holds.discard(worker)
        self._look()

    def refusal(self) -> NotReadyError | None:
        """Why requests should not wait: the weights may not be used, and nobody is at work on it.

        None where a step may begin, or soon will.
        """
        if self._holds or self.may_step:
            return None
        for worker, standing in self._standing.items():
            if standing.why_not:
                return NotReadyError(f"worker {worker}: {standing.why_not}", state=standing.state)
        if self._split_at is None or self._clock() - self._split_at < SPLIT_S:
            return None
        held = ", ".join(f"worker {w} {s.version}" for w, s in self._standing.items())
        return NotReadyError(
            f"the workers of this replica hold different versions ({held}): an update ended half "
            "way; a full update heals this: call send_weights() again",
            state="TORN",
        )

    def _look(self) -> None:
        now = self._clock()
        split = not self._holds and len(set(self.versions)) > 1
        self._split_at = (self._split_at or now) if split else None
        if self.may_step:
            if self._stopped_at is not None:
                self.last_stall_s = now - self._stopped_at
            self._stopped_at = None
        elif self._stopped_at is None:
            self._stopped_at = now
