"""A receiver's memory of its updates: bounded, exact, and of committed ones alone."""

from __future__ import annotations

import time

import torch
from torch import nn

import weightsync as ws
from weightsync.update.history import KEPT_UPDATES, UpdateTable
from weightsync.wire.messages import StepReply

KEEP_S = 60.0


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
    history = UpdateTable(KEEP_S)
    before = time.time()
    history.committed(reply(3), "best", 0.125)
    assert history.last_reply == reply(3)
    (record,) = history.recent
    assert (record.update_id, record.version, record.label) == ("u3", 3, "best")
    assert (record.nbytes, record.stall_s, record.seconds) == (30, 0.5, {"load": 0.25})
    assert (record.apply, record.verified) == ("staged", "held")
    assert before <= record.at <= time.time()
    assert record.duration_s == 0.125
    assert history.totals == {"committed": 1}


def test_only_the_last_updates_are_kept() -> None:
    history = UpdateTable(KEEP_S)
    for version in range(1, KEPT_UPDATES + 6):
        history.committed(reply(version), None, 1.0)
    versions = [record.version for record in history.recent]
    assert versions == list(range(6, KEPT_UPDATES + 6))


def test_what_came_to_nothing_is_counted_and_not_recorded() -> None:
    history = UpdateTable(KEEP_S)
    history.given_up(torn=False)
    history.given_up(torn=True)
    assert history.totals == {"aborted": 1, "torn": 1}
    assert (history.recent, history.last_reply) == ([], None)


def test_the_open_update_is_known_until_it_ends() -> None:
    receiver = ws.WeightReceiver(nn.Linear(2, 2), version=4)
    before = time.time()
    with ws.connect(nn.Linear(2, 2), to=receiver.handle) as sender:
        assert not receiver.open_update
        with sender.update(9, label="nine") as update:
            opened = receiver.open_update
            assert opened is not None
            assert (opened.version, opened.label, opened.partial) == (9, "nine", False)
            assert before <= opened.since <= time.time()
            time.sleep(0.02)
            update.send([("weight", torch.ones(2, 2)), ("bias", torch.ones(2))])
        assert not receiver.open_update
        (record,) = receiver.recent_updates
        assert (record.update_id, record.version) == (opened.update_id, 9)
        assert 0.02 <= record.duration_s <= time.time() - before
        handle = receiver.handle
        handle({"call": "start_weight_update", "body": {"update_id": "u"}})
        assert receiver.status().update_id == "u"
        handle({"call": "abort_weight_update", "body": {"update_id": "u"}})
        assert not receiver.open_update
    receiver.close()
