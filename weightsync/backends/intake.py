"""One update as a receiving host wants it, between its engine and the thread of its link."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from weightsync.errors import WeightSyncError


@dataclass(slots=True, eq=False)
class RelayUpdate:
    """`sizes` of the update's chunks, the reader places, the sender's count.

    `done` is set when all of it was read here and sent on, or when `error` says why not.
    """

    epoch: int
    base: int
    readers: Sequence[int]
    sizes: Sequence[int]
    done: threading.Event = field(default_factory=threading.Event)
    error: WeightSyncError | None = None

    def fail(self, error: WeightSyncError) -> None:
        """The first failure counts."""
        self.error = self.error or error
        self.done.set()
