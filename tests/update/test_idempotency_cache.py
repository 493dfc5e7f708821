"""Calls that are repeated get the answer of the call that they repeat."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from weightsync.errors import (
    StaleVersionError,
    TransferError,
    TransportTimeout,
    UpdateConflictError,
    WeightSyncError,
)
from weightsync.update.history import IdempotencyCache
from weightsync.wire.messages import StepReply

WAIT_S = 60.0


class Calls:
    """Counts how often it was really called."""

    def __init__(self, error: WeightSyncError | None = None) -> None:
        self.count = 0
        self.error = error

    def __call__(self) -> StepReply:
        self.count += 1
        if self.error is not None:
            raise self.error
        return StepReply(state="READY", version=self.count)


def test_a_repeat_gets_the_first_answer() -> None:
    replay, calls = IdempotencyCache(), Calls()
    first = replay.once(("u", "finish"), calls, timeout_s=WAIT_S)
    assert replay.once(("u", "finish"), calls, timeout_s=WAIT_S) is first
    assert calls.count == 1


def test_other_keys_are_other_calls() -> None:
    replay, calls = IdempotencyCache(), Calls()
    for key in (("u", "finish"), ("u", "prepare"), ("v", "finish")):
        replay.once(key, calls, timeout_s=WAIT_S)
    assert calls.count == 3


def test_a_failure_is_answered_again_too() -> None:
    replay, calls = IdempotencyCache(), Calls(TransferError("lost"))
    for _ in range(2):
        with pytest.raises(TransferError, match="lost"):
            replay.once("k", calls, timeout_s=WAIT_S)
    assert calls.count == 1


@pytest.mark.parametrize("refusal", [UpdateConflictError("busy"), StaleVersionError()])
def test_a_refusal_of_the_moment_is_asked_anew(refusal: WeightSyncError) -> None:
    replay, calls = IdempotencyCache(), Calls(refusal)
    with pytest.raises(type(refusal)):
        replay.once("k", calls, timeout_s=WAIT_S)
    calls.error = None
    assert replay.once("k", calls, timeout_s=WAIT_S).version == 2


@pytest.mark.parametrize("error", [None, TransferError("lost"), UpdateConflictError("busy")])
def test_a_retry_joins_the_call_in_flight(error: WeightSyncError | None) -> None:
    replay, calls = IdempotencyCache(), Calls(error)
    entered, go = threading.Event(), threading.Event()

    def slow() -> StepReply:
        entered.set()
        assert go.wait(WAIT_S)
        return calls()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(replay.once, "k", slow, timeout_s=WAIT_S)
        assert entered.wait(WAIT_S)
        with pytest.raises(TransportTimeout, match=r"still runs after 0.01 s"):
            replay.once("k", slow, timeout_s=0.01)
        second = pool.submit(replay.once, "k", slow, timeout_s=WAIT_S)
        go.set()
        outcomes = [f.exception(WAIT_S) or f.result() for f in (first, second)]
    if not isinstance(error, UpdateConflictError):
        assert calls.count == 1
        assert repr(outcomes[0]) == repr(outcomes[1])


def test_old_answers_are_forgotten() -> None:
    replay, calls = IdempotencyCache(), Calls()
    for i in range(2000):
        replay.once(i, calls, timeout_s=WAIT_S)
    assert len(replay._answers) <= 256
    assert replay.once(1999, calls, timeout_s=WAIT_S).version == 2000
