"""Shared memory that a test left open in its own process."""

from __future__ import annotations

from weightsync.shm.segment import Segment, live_segments


def opened_since(before: list[Segment]) -> list[Segment]:
    """Return the segments that were opened since `before`."""
    return [segment for segment in live_segments() if segment not in before]
