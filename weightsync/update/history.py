"""A receiver's records of updates: history, aborted updates, and the idempotency cache."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from msgspec import Struct

from weightsync.errors import StaleVersionError, TransportTimeout, UpdateConflictError
from weightsync.update.lifecycle import UpdateLifecycle
from weightsync.wire.messages import OpenUpdate, Status, StepReply, UpdateRecord
from weightsync.wire.problem import from_problem, to_problem

KEPT_UPDATES = 64


class WorkerReport(Struct, frozen=True, kw_only=True):
    """A snapshot of a receiver's status and history; `recent` has the oldest update first."""

    status: Status
    updates_total: dict[str, int]
    last_reply: StepReply | None = None
    recent: list[UpdateRecord] = []
    open_update: OpenUpdate | None = None


class History:
    """Counts and records of updates. UpdateSession writes it under its locks; any thread reads."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.last_reply: StepReply | None = None
        self._recent: deque[UpdateRecord] = deque(maxlen=KEPT_UPDATES)
        self._opened = ("", 0.0, 0.0)

    @property
    def recent(self) -> list[UpdateRecord]:
        """The last KEPT_UPDATES committed updates, the oldest first."""
        return list(self._recent)

    def opened(self, update_id: str) -> None:
        """Record the start of an update, now."""
        self._opened = (update_id, time.time(), time.perf_counter())

    def committed(self, reply: StepReply, label: str | None) -> StepReply:
        """Record the commit of the update that was opened last, and return its `reply`."""
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
        """Record that the update opened last was aborted, or left the receiver TORN (`torn`)."""
        self.totals["torn" if torn else "aborted"] += 1

    def open_update(self, lifecycle: UpdateLifecycle) -> OpenUpdate | None:
        """Return the open update of a lifecycle, None where no update is open."""
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


_KEPT = 256


class AbortedUpdates:
    """Keeps for `keep_s` seconds the ids of updates that did not commit. Callers hold a lock."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._ended: OrderedDict[str, float] = OrderedDict()

    def note(self, update_id: str) -> None:
        """Record that an update was aborted or given up, whether it had started or not."""
        self._ended[update_id] = time.monotonic()
        self._ended.move_to_end(update_id)
        while len(self._ended) > _KEPT:
            self._ended.popitem(last=False)

    def check(self, update_id: str) -> None:
        """Raise UpdateConflictError for an update that was aborted already."""
        noted = self._ended.get(update_id)
        if noted is not None and time.monotonic() - noted < self._keep_s:
            raise UpdateConflictError(
                f"update {update_id} was aborted or given up before this start arrived; start "
                "another one, under another update_id",
                state="ABORTED",
                update_id=update_id,
            )


_REFUSALS = (UpdateConflictError, StaleVersionError)
"""Errors that depend on the receiver's current state, and are not cached."""


class IdempotencyCache:
    """The last replies, by `(update_id, step)`. A retry of a call in flight waits for its reply."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: OrderedDict[Hashable, Future[StepReply]] = OrderedDict()

    def once(self, key: Hashable, call: Callable[[], StepReply], *, timeout_s: float) -> StepReply:
        """Return the cached reply of `key`, or make the call. Raises the call's error.

        Raises TransportTimeout where an earlier call with this key still runs after `timeout_s`.
        """
        with self._lock:
            future = self._answers.get(key)
            first = future is None
            if future is None:
                future = self._answers[key] = Future()
        if not first:
            try:
                return future.result(timeout_s)
            except FutureTimeout:
                raise TransportTimeout(
                    f"the call that this one repeats still runs after {timeout_s:g} s"
                ) from None
        return self._make(key, future, call)

    def forget(self, update_id: str | None) -> None:
        """Remove the replies of an aborted update, which are not valid any more."""
        with self._lock:
            for key in [k for k, future in self._answers.items() if future.done()]:
                if isinstance(key, tuple) and key[0] == update_id:
                    del self._answers[key]

    def _make(
        self, key: Hashable, future: Future[StepReply], call: Callable[[], StepReply]
    ) -> StepReply:
        try:
            answer = call()
        except BaseException as exc:
            self._settle(key, keep=not isinstance(exc, _REFUSALS))
            # Without the traceback, whose frames would keep the update's tensors alive.
            future.set_exception(from_problem(to_problem(exc)))
            raise
        self._settle(key, keep=True)
        future.set_result(answer)
        return answer

    def _settle(self, key: Hashable, *, keep: bool) -> None:
        with self._lock:
            if not keep:
                self._answers.pop(key, None)
            while len(self._answers) > _KEPT:
                self._answers.popitem(last=False)
