"""What became of a receiver's updates: counts, the last reply, and the last committed ones."""

from __future__ import annotations

import time
from collections import Counter, deque

from msgspec import Struct

from weightsync.lifecycle import UpdateLifecycle
from weightsync.wire.messages import OpenUpdate, Status, StepReply, UpdateRecord

KEPT_UPDATES = 64


class WorkerReport(Struct, frozen=True, kw_only=True):
    """What a receiver tells of itself at one moment; `recent`: the oldest first."""

    status: Status
    updates_total: dict[str, int]
    last_reply: StepReply | None = None
    recent: list[UpdateRecord] = []
    open_update: OpenUpdate | None = None


class History:
    """Written by Updates under its locks; any thread may read."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.last_reply: StepReply | None = None
        self._recent: deque[UpdateRecord] = deque(maxlen=KEPT_UPDATES)
        self._opened = ("", 0.0, 0.0)

    @property
    def recent(self) -> list[UpdateRecord]:
        """The last committed updates, the oldest first."""
        return list(self._recent)

    def opened(self, update_id: str) -> None:
        """An update starts now."""
        self._opened = (update_id, time.time(), time.perf_counter())

    def committed(self, reply: StepReply, label: str | None) -> StepReply:
        """The update opened last is in use, as `reply` says, which is returned."""
        self.totals["committed"] += 1
        self.last_reply = reply
        self._recent.append(
            UpdateRecord(
                update_id=reply.update_id or "",
                version=reply.version,
                label=label,
                at=time.time(),
                duration_s=time.perf_counter() - self._opened[2],
                nbytes=reply.nbytes,
                stall_s=reply.stall_s,
                apply=reply.apply,
                verified=reply.verified,
                seconds=reply.seconds,
            )
        )
        return reply

    def given_up(self, *, torn: bool) -> None:
        """The update opened last came to nothing, or tore the weights."""
        self.totals["torn" if torn else "aborted"] += 1

    def open_update(self, lifecycle: UpdateLifecycle) -> OpenUpdate | None:
        """Return the update that a lifecycle is in, None where it is in none."""
        terms = lifecycle.terms
        update_id, since, _ = self._opened
        if terms is None or terms.update_id != update_id:
            return None
        return OpenUpdate(
            update_id=update_id,
            version=lifecycle.next_version,
            since=since,
            label=terms.label,
            partial=terms.partial,
        )
