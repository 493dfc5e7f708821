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
from weightsync.update.history import UpdateTable
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


class Slow:
    """Holds a call from `entered` until `go`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self) -> StepReply:
        self.entered.set()
        assert self.go.wait(WAIT_S)
        return self._calls()


def test_a_repeat_gets_the_first_answer() -> None:
    table, calls = UpdateTable(WAIT_S), Calls()
    first = table.once("u", "finish", calls, timeout_s=WAIT_S)
    assert table.once("u", "finish", calls, timeout_s=WAIT_S) is first
    assert calls.count == 1


def test_other_keys_are_other_calls() -> None:
    table, calls = UpdateTable(WAIT_S), Calls()
    for update_id, step in (("u", "finish"), ("u", "prepare"), ("v", "finish")):
        table.once(update_id, step, calls, timeout_s=WAIT_S)
    assert calls.count == 3


def test_a_failure_is_answered_again_too() -> None:
    table, calls = UpdateTable(WAIT_S), Calls(TransferError("lost"))
    for _ in range(2):
        with pytest.raises(TransferError, match="lost"):
            table.once("u", "k", calls, timeout_s=WAIT_S)
    assert calls.count == 1


@pytest.mark.parametrize("refusal", [UpdateConflictError("busy"), StaleVersionError()])
def test_a_refusal_of_the_moment_is_asked_anew(refusal: WeightSyncError) -> None:
    table, calls = UpdateTable(WAIT_S), Calls(refusal)
    with pytest.raises(type(refusal)):
        table.once("u", "k", calls, timeout_s=WAIT_S)
    calls.error = None
    assert table.once("u", "k", calls, timeout_s=WAIT_S).version == 2


@pytest.mark.parametrize("error", [None, TransferError("lost"), UpdateConflictError("busy")])
def test_a_retry_joins_the_call_in_flight(error: WeightSyncError | None) -> None:
    table, calls = UpdateTable(WAIT_S), Calls(error)
    slow = Slow(calls)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(table.once, "u", "k", slow, timeout_s=WAIT_S)
        assert slow.entered.wait(WAIT_S)
        with pytest.raises(TransportTimeout, match=r"still runs after 0.01 s"):
            table.once("u", "k", slow, timeout_s=0.01)
        second = pool.submit(table.once, "u", "k", slow, timeout_s=WAIT_S)
        slow.go.set()
        outcomes = [f.exception(WAIT_S) or f.result() for f in (first, second)]
    if not isinstance(error, UpdateConflictError):
        assert calls.count == 1
        assert repr(outcomes[0]) == repr(outcomes[1])


def test_old_answers_are_forgotten() -> None:
    table, calls = UpdateTable(WAIT_S), Calls()
    for i in range(2000):
        table.once(f"u{i}", "finish", calls, timeout_s=WAIT_S)
    assert len(table._updates) <= 256
    assert table.once("u1999", "finish", calls, timeout_s=WAIT_S).version == 2000


def test_old_answers_of_one_update_are_forgotten() -> None:
    table, calls = UpdateTable(WAIT_S), Calls()
    for i in range(2000):
        table.once("u", ("update", i), calls, timeout_s=WAIT_S)
    assert len(table._updates["u"].calls) <= 64
    assert table.once("u", ("update", 1999), calls, timeout_s=WAIT_S).version == 2000


def test_refusals_leave_nothing() -> None:
    table, calls = UpdateTable(WAIT_S), Calls(UpdateConflictError("busy"))
    for i in range(10):
        with pytest.raises(UpdateConflictError):
            table.once(f"u{i}", "start", calls, timeout_s=WAIT_S)
    assert not table._updates


def test_what_was_aborted_is_not_answered_but_its_running_call_is() -> None:
    table, calls = UpdateTable(WAIT_S), Calls()
    table.once("u", "start", calls, timeout_s=WAIT_S)

    def aborted_meanwhile() -> StepReply:
        table.forget("u")
        return calls()

    table.once("u", "load", aborted_meanwhile, timeout_s=WAIT_S)
    assert table.once("u", "load", calls, timeout_s=WAIT_S).version == 2
    assert table.once("u", "start", calls, timeout_s=WAIT_S).version == 3


def test_a_call_in_flight_is_joined_after_any_number_of_other_updates() -> None:
    table, calls = UpdateTable(WAIT_S), Calls()
    slow = Slow(calls)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(table.once, "u", "k", slow, timeout_s=WAIT_S)
        assert slow.entered.wait(WAIT_S)
        for number in range(600):
            table.aborted(f"other {number}")
            table.once("u", number, Calls(), timeout_s=WAIT_S)
        again = pool.submit(table.once, "u", "k", calls, timeout_s=WAIT_S)
        slow.go.set()
        assert again.result(WAIT_S) is first.result(WAIT_S)
    assert calls.count == 1
    assert len(table._updates) <= 256
    assert len(table._updates["u"].calls) <= 64
