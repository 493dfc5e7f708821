"""Which shared memory a test left open in its own process."""

from __future__ import annotations

from weightsync.shm.segment import Segment, live_segments


def opened_since(before: list[Segment]) -> list[Segment]:
    """Return what is open and was not `before`; what earlier tests dropped may be freed since."""
    return [segment for segment in live_segments() if segment not in before]
