"""A receiver's memory of its updates: bounded, exact, and of committed ones alone."""

from __future__ import annotations

import time

from weightsync.update.history import KEPT_UPDATES, History
from weightsync.update.lifecycle import Terms, UpdateLifecycle
from weightsync.wire.messages import StepReply


def reply(version: int) -> StepReply:
    return StepReply(
        state="READY",
        version=version,
        update_id=f"u{version}",
        apply="staged",
        verified="held",
        nbytes=10 * version,
        stall_s=0.5,
        seconds={"load": 0.25},
    )


def test_a_committed_update_is_recorded_as_it_was() -> None:
    history = History()
    before = time.time()
    history.opened("u3")
    time.sleep(0.01)
    assert history.committed(reply(3), "best") is history.last_reply
    (record,) = history.recent
    assert (record.update_id, record.version, record.label) == ("u3", 3, "best")
    assert (record.nbytes, record.stall_s, record.seconds) == (30, 0.5, {"load": 0.25})
    assert (record.apply, record.verified) == ("staged", "held")
    assert before <= record.at <= time.time()
    assert record.duration_s >= 0.01
    assert history.totals == {"committed": 1}


def test_only_the_last_updates_are_kept() -> None:
    history = History()
    for version in range(1, KEPT_UPDATES + 6):
        history.opened(f"u{version}")
        history.committed(reply(version), None)
    versions = [record.version for record in history.recent]
    assert versions == list(range(6, KEPT_UPDATES + 6))


def test_what_came_to_nothing_is_counted_and_not_recorded() -> None:
    history = History()
    history.opened("u1")
    history.given_up(torn=False)
    history.opened("u2")
    history.given_up(torn=True)
    assert history.totals == {"aborted": 1, "torn": 1}
    assert (history.recent, history.last_reply) == ([], None)


def test_the_open_update_is_that_of_the_lifecycle() -> None:
    history, lifecycle = History(), UpdateLifecycle(4)
    assert history.open_update(lifecycle) is None
    lifecycle.start(Terms(update_id="u9", version=9, label="nine", partial=False))
    assert history.open_update(lifecycle) is None  # opened by nobody whom the history knows
    history.opened("u9")
    opened = history.open_update(lifecycle)
    assert opened is not None
    assert (opened.update_id, opened.version, opened.label) == ("u9", 9, "nine")
    assert opened.since <= time.time()
    lifecycle.begin_abort("u9")
    lifecycle.end_abort()
    assert history.open_update(lifecycle) is None
