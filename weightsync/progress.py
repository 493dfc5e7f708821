"""Progress of an update, as given to the callback of `connect(progress=…)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["transfer", "finish", "done", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of one update at one moment.

    `phase` is `transfer` while bytes move, `finish` when every receiver has them, and at the end
    `done` or `failed`. `done_nbytes` of `total_nbytes` have reached the slowest receiver.
    `receivers` has the bytes of each receiver by target. A receiver that another rank or host
    feeds may jump from 0 to all bytes when it replies. `version` is None until the first message
    contains it. `seconds` is the time since the start of the update.
    """

    phase: Phase
    version: int | None
    done_nbytes: int
    total_nbytes: int
    seconds: float
    receivers: Mapping[str, int] = field(default_factory=dict)

    @property
    def gbps(self) -> float:
        """Gigabytes (1e9 bytes) per second since the start of the update."""
        return self.done_nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Remaining time at this rate, in seconds; None while no bytes have arrived."""
        if not self.done_nbytes:
            return None
        return (self.total_nbytes - self.done_nbytes) * self.seconds / self.done_nbytes


OnProgress = Callable[[Progress], object]
