"""Whether a replica may make its next step: all its workers hold one version, and none swaps."""

from __future__ import annotations

import time
from collections.abc import Callable

from weightsync.errors import NotReadyError
from weightsync.serve.worker_messages import WorkerState

SPLIT_S = 10.0
"""How long workers may hold different weights before waiting requests are told so."""
HELD_S = 900.0
"""How long a worker may hold before waiting requests are told so; longer than any lease."""


class ReplicaReadiness:
    """What the workers of a replica said last; pure, but for the clock it is given.

    A worker that is about to change its weights holds first and gives the hold back when the new
    ones are in use. Between two holds workers are told apart by what they hold: the version, and
    the id of the weights, since a rewind may bring others of the same version.
    """

    def __init__(self, size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._standing = dict.fromkeys(range(size), WorkerState(version=0))
        self._holds: dict[int, float] = {}
        self._clock = clock
        self._stopped_at: float | None = None
        self._stopped_with = self._weights
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
        whole = not self._holds and len(self._weights) == 1
        return whole and not any(standing.why_not for standing in self._standing.values())

    @property
    def _weights(self) -> set[tuple[int, str]]:
        return {(standing.version, standing.weights_id) for standing in self._standing.values()}

    def hold(self, worker: int) -> None:
        """A worker is about to change its weights."""
        self._holds.setdefault(worker, self._clock())
        self._look()

    def heard(self, worker: int, standing: WorkerState) -> None:
        """A worker says which weights it holds."""
        self._standing[worker] = standing
        if standing.released:
            self._holds.pop(worker, None)
        self._look()

    def refusal(self) -> NotReadyError | None:
        """Why requests should not wait: the weights may not be used, and nobody is at work on it.

        None where a step may begin, or soon will.
        """
        if self.may_step:
            return None
        if self._holds:
            return self._held_too_long()
        for worker, standing in self._standing.items():
            if standing.why_not:
                return NotReadyError(f"worker {worker}: {standing.why_not}", state=standing.state)
        if self._split_at is None or self._clock() - self._split_at < SPLIT_S:
            return None
        held = ", ".join(
            f"worker {w} {s.version} of update {s.weights_id or 'none'}"
            for w, s in self._standing.items()
        )
        return NotReadyError(
            f"the workers of this replica hold different weights ({held}): an update ended half "
            "way; a full update heals this: call send_weights() again",
            state="TORN",
        )

    def _held_too_long(self) -> NotReadyError | None:
        worker, since = min(self._holds.items(), key=lambda hold: hold[1])
        held_s = self._clock() - since
        if held_s < HELD_S:
            return None
        return NotReadyError(
            f"worker {worker} has held generation for {held_s:.0f} s; see its weight_info",
            state="UPDATING",
        )

    def _look(self) -> None:
        now = self._clock()
        split = not self._holds and len(self._weights) > 1
        self._split_at = (self._split_at or now) if split else None
        if self.may_step:
            if self._stopped_at is not None and self._weights != self._stopped_with:
                self.last_stall_s = now - self._stopped_at
            self._stopped_at, self._stopped_with = None, self._weights
        elif self._stopped_at is None:
            self._stopped_at = now
