"""A receiver's table of updates: replies for retries, aborted updates, and the last commits."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from weightsync.errors import StaleVersionError, TransportTimeout, UpdateConflictError
from weightsync.wire.messages import FleetRecord, StepReply, UpdateRecord
from weightsync.wire.problem import Problem, from_problem, to_problem

KEPT_UPDATES = 64
"""Number of committed updates in the history."""
_KEPT = 256
"""Number of updates whose replies or abort are kept."""
_KEPT_STEPS = 64
"""Number of replies that are kept for one update."""
K = TypeVar("K")
V = TypeVar("V")
_REFUSALS = (UpdateConflictError, StaleVersionError, TransportTimeout)
"""Errors that depend on the receiver's current state, and are not kept for retries."""


@dataclass(slots=True)
class _Call:
    """The reply or the error of one step; neither while the step runs.

    The error is kept as a problem document: a traceback would keep the update's tensors alive.
    """

    reply: StepReply | None = None
    problem: Problem | None = None

    @property
    def done(self) -> bool:
        return self.reply is not None or self.problem is not None


@dataclass(slots=True)
class _Update:
    """The record of one update: its calls by step, and the time of its abort."""

    calls: OrderedDict[Hashable, _Call] = field(default_factory=OrderedDict)
    aborted_at: float | None = None

    @property
    def runs(self) -> bool:
        """Whether one of its calls is in flight."""
        return any(not call.done for call in self.calls.values())


class UpdateTable:
    """Replies and aborts by update id, counters, and records of the last commits. Thread-safe.

    An aborted update may not start again for `keep_s` seconds. `lock` guards the table.
    """

    def __init__(self, keep_s: float, lock: threading.RLock | None = None) -> None:
        self._changed = threading.Condition(lock)
        self._keep_s = keep_s
        self._updates: OrderedDict[str, _Update] = OrderedDict()
        self._recent: deque[UpdateRecord] = deque(maxlen=KEPT_UPDATES)
        self.totals: Counter[str] = Counter()
        self.last_reply: StepReply | None = None
        self.fleet: FleetRecord | None = None

    def once(
        self, update_id: str, step: Hashable, call: Callable[[], StepReply], *, timeout_s: float
    ) -> StepReply:
        """Return the kept reply of a step, or make the call. Raises the call's error.

        A retry of a call in flight waits for that call's reply. Raises TransportTimeout where it
        still runs after `timeout_s`.
        """
        mine, keep = _Call(), True
        try:
            known = self._join(update_id, step, mine, timeout_s)
            if known is not mine:
                return _outcome(known)
            mine.reply = call()
        except BaseException as exc:
            # An interrupt says nothing about the step, which may have been complete.
            keep = isinstance(exc, Exception) and not isinstance(exc, _REFUSALS)
            mine.problem = to_problem(exc)
            raise
        finally:
            self._ended(update_id, step, mine, keep=keep)
        return mine.reply

    def _join(self, update_id: str, step: Hashable, mine: _Call, timeout_s: float) -> _Call:
        """Return the call that was made of a step, when it has ended; `mine` where it is the first.

        Raises TransportTimeout.
        """
        with self._changed:
            known = self._update(update_id).calls.setdefault(step, mine)
            if known is not mine and not self._changed.wait_for(lambda: known.done, timeout_s):
                raise TransportTimeout(
                    f"the call that this one repeats still runs after {timeout_s:g} s"
                )
        return known

    def _ended(self, update_id: str, step: Hashable, call: _Call, *, keep: bool) -> None:
        with self._changed:
            update = self._updates.get(update_id)
            if update is not None:
                if not keep and update.calls.get(step) is call:
                    del update.calls[step]
                _evict(update.calls, _KEPT_STEPS, lambda call: not call.done)
                self._drop_empty(update_id, update)
            self._changed.notify_all()

    def forget(self, update_id: str) -> None:
        """Remove the replies of an aborted update, which are not valid any more."""
        with self._changed:
            update = self._updates.get(update_id)
            if update is not None:
                for step in [step for step, call in update.calls.items() if call.done]:
                    del update.calls[step]
                self._drop_empty(update_id, update)

    def aborted(self, update_id: str) -> None:
        """Record that an update was aborted or given up, whether it had started or not."""
        with self._changed:
            self._update(update_id).aborted_at = time.monotonic()
            self._updates.move_to_end(update_id)

    def check_not_aborted(self, update_id: str) -> None:
        """Raise UpdateConflictError for an update that was aborted already."""
        with self._changed:
            update = self._updates.get(update_id)
            aborted_at = update.aborted_at if update is not None else None
        if aborted_at is not None and time.monotonic() - aborted_at < self._keep_s:
            raise UpdateConflictError(
                f"update {update_id} was aborted or given up before this start arrived; start "
                "another one, under another update_id",
                state="ABORTED",
                update_id=update_id,
            )

    def committed(
        self,
        reply: StepReply,
        label: str | None,
        duration_s: float,
        fleet: FleetRecord | None = None,
    ) -> None:
        """Record the commit of an update with its `reply`."""
        with self._changed:
            self.fleet = fleet
            self.totals["committed"] += 1
            self.last_reply = reply
            self._recent.append(
                UpdateRecord(
                    update_id=reply.update_id or "",
                    version=reply.version,
                    label=label,
                    at=time.time(),
                    duration_s=duration_s,
                    nbytes=reply.nbytes,
                    stall_s=reply.stall_s,
                    apply=reply.apply,
                    verified=reply.verified,
                    seconds=reply.seconds,
                    delta=reply.delta,
                    sources=reply.sources,
                )
            )

    def given_up(self, *, torn: bool) -> None:
        """Count an update that was aborted, or that left the receiver TORN (`torn`)."""
        with self._changed:
            self.totals["torn" if torn else "aborted"] += 1

    @property
    def recent(self) -> list[UpdateRecord]:
        """The last KEPT_UPDATES committed updates, the oldest first."""
        with self._changed:
            recent = list(self._recent)
        return recent  # noqa: RET504  # an interrupt at a `return` inside would leave the lock taken

    def _update(self, update_id: str) -> _Update:
        update = self._updates.get(update_id)
        if update is None:
            update = self._updates[update_id] = _Update()
            _evict(self._updates, _KEPT, lambda known: known.runs)
        return update

    def _drop_empty(self, update_id: str, update: _Update) -> None:
        if not update.calls and update.aborted_at is None:
            self._updates.pop(update_id, None)


def _evict(entries: OrderedDict[K, V], kept: int, runs: Callable[[V], bool]) -> None:
    """Remove the oldest entries beyond `kept`, but none that runs: a retry has to join it."""
    while len(entries) > kept:
        newest = next(reversed(entries))
        idle = (key for key, entry in entries.items() if key != newest and not runs(entry))
        oldest = next(idle, None)
        if oldest is None:
            return
        del entries[oldest]


def _outcome(call: _Call) -> StepReply:
    if call.problem is not None:
        raise from_problem(call.problem)
    assert call.reply is not None
    return call.reply
