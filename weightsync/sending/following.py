"""An update whose tensors the caller sends, as ranks other than 0 live it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from weightsync.errors import WeightSyncError
from weightsync.report import SyncReport
from weightsync.sending.ensemble import RankGroup
from weightsync.weights.source import NamedTensors


class FollowerUpdate:
    """Takes part in what rank 0 sends. `send` is called as often as on rank 0.

    `last_report` is rank 0's, after the block.
    """

    def __init__(self, group: RankGroup) -> None:
        self.last_report: SyncReport | None = None
        self._group = group
        self._over = False
        self._follow()

    def send(self, named_tensors: NamedTensors) -> None:
        """Make these tensors, which rank 0 or this rank's own receivers are sent."""
        self._group.worker.pairs = named_tensors
        try:
            self._follow()
        finally:
            self._group.worker.pairs = None

    def finish(self) -> None:
        """The block ended well here; raises what rank 0's raises."""
        self._follow()

    def fail(self, error: BaseException) -> None:
        """The block ended with an error here: no rank's update commits."""
        if self._over:
            return
        self._group.worker.fault = error
        try:
            with suppress(WeightSyncError):
                self._follow()
        finally:
            self._group.worker.fault = None

    def _follow(self) -> None:
        try:
            done = self._group.serve()
        except BaseException:
            self._over = True
            raise
        self.last_report = done.report


@contextmanager
def following(group: RankGroup) -> Iterator[FollowerUpdate]:
    """Around the block of a rank that does not lead: rank 0 learns how it ended."""
    followed = FollowerUpdate(group)
    try:
        yield followed
    except BaseException as exc:
        followed.fail(exc)
        raise
    followed.finish()
