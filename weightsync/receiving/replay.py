"""Makes calls idempotent: a retry gets the answer of the call that it repeats."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from weightsync.errors import StaleVersionError, TransportTimeout, UpdateConflictError
from weightsync.wire.messages import StepReply
from weightsync.wire.problem import from_problem, to_problem

_KEPT = 256
_REFUSALS = (UpdateConflictError, StaleVersionError)
"""Answers about the state of the moment: asked again, they may be different."""


class IdempotencyCache:
    """The last answers, by `(update_id, step)`. A retry of a call still in flight joins it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: OrderedDict[Hashable, Future[StepReply]] = OrderedDict()

    def once(self, key: Hashable, call: Callable[[], StepReply], *, timeout_s: float) -> StepReply:
        """Return the answer known for `key`, or make the call. Raises what the call raised."""
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
                    f"the call that this one repeats is still at work after {timeout_s:g} s"
                ) from None
        return self._make(key, future, call)

    def forget(self, update_id: str | None) -> None:
        """Drop the answers of an update that was aborted: they are not true any more."""
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
            # Without its traceback, whose frames would keep the update's tensors alive.
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
