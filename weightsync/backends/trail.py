"""How far the readers of an update are, for whoever looks on; and when, where somebody asks."""

from __future__ import annotations

import time
from collections.abc import Iterable

from weightsync.shm.ring import Control
from weightsync.weights.layout import StreamLayout

Mark = tuple[str, int, float]
"""A chunk was `wanted`, `acquired` or `published`: its number, and `time.perf_counter()` then."""


class ReaderProgress:
    """Reads what the readers of one ring show of themselves; nobody waits for it.

    `marks`, where somebody puts a list there, takes what becomes of each chunk; by default nothing
    is kept. `plan` is the stream of the update at work, cut into chunks where it is packed.
    """

    def __init__(self, control: Control, plan: StreamLayout) -> None:
        self.marks: list[Mark] | None = None
        self.plan = plan
        self.packed = False
        self._control = control
        self._before: dict[int, int] = {}
        self._base = 0

    @property
    def slots(self) -> int:
        """Buckets of the ring."""
        return self._control.slots

    def begin_packed(self, plan: StreamLayout, base: int) -> None:
        """An update begins whose first chunk has the sequence number after `base`."""
        self.plan, self._base, self.packed = plan, base, True

    def begin_unpacked(self, plan: StreamLayout, readers: Iterable[int]) -> None:
        """An update begins that these read where it is."""
        self._before = {reader: self._control.loaded(reader) for reader in readers}
        self.plan, self.packed = plan, False

    def mark(self, what: str, chunk: int) -> None:
        """Note what became of a chunk. Called by the sender, once a chunk and not more often."""
        if self.marks is not None:
            self.marks.append((what, chunk, time.perf_counter()))

    def taken_nbytes(self, reader: int) -> int:
        """How far in the stream the reader at this place is. For any thread, during the update."""
        if not self.packed:
            now = self._control.loaded(reader)
            return now - self._before.get(reader, now)
        chunks = self.plan.chunks
        released = self._control.released(reader) - self._base
        return chunks[min(released, len(chunks)) - 1].stop if released > 0 and chunks else 0

    def furthest(self) -> int:
        """How far the first of the readers of an unpacked update is."""
        return max((self.taken_nbytes(reader) for reader in self._before), default=0)
