"""How far an update is: what `connect(progress=…)` tells its callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["transfer", "finish", "done", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an update is, at one moment.

    `phase` is `transfer` while bytes move, `finish` once every receiver has them, and at the end
    `done` or `failed`. `done_nbytes` of `total_nbytes` have reached the slowest receiver.
    `receivers` says how far each is, as far as it can be seen: one that another rank or another
    host feeds may count from 0 to all at once when it answers. `version` is None until the first
    message names it. `seconds` are those since the update began.
    """

    phase: Phase
    version: int | None
    done_nbytes: int
    total_nbytes: int
    seconds: float
    receivers: Mapping[str, int] = field(default_factory=dict)

    @property
    def gbps(self) -> float:
        """Gigabytes (1e9) a second, since the update began."""
        return self.done_nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """What is left at this rate; None while nothing has arrived."""
        if not self.done_nbytes:
            return None
        return (self.total_nbytes - self.done_nbytes) * self.seconds / self.done_nbytes


OnProgress = Callable[[Progress], object]
