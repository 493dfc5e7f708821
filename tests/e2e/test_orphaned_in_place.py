"""Trainers killed while receivers in place hold their new weights, and are not told to use them."""

from __future__ import annotations

import time

import pytest

import weightsync as ws
from tests.e2e import models, processes, trainers
from tests.e2e.models import digests
from tests.e2e.processes import Host, Remote
from tests.e2e.test_fault_matrix import KILLED

LONG_S = 60.0


def at_version_one(host: Host) -> list[Remote]:
    receivers = [host.receiver("http", apply="in_place", model="plain") for _ in range(2)]
    with ws.connect(models.make("plain", seed=1), to=[r.url for r in receivers]) as sender:
        sender.send_weights()
    return receivers


def refuses(receiver: Remote) -> None:
    """It says so long before its reader would have given up, and keeps what it has prepared."""
    started = time.monotonic()
    with pytest.raises(ws.NotReadyError, match=r"call send_weights\(\) again"):
        receiver.reading(timeout_s=LONG_S)
    assert time.monotonic() - started < LONG_S / 2
    assert receiver.status()["state"] == "PREPARED"


def test_readers_are_refused_until_the_next_update(host: Host) -> None:
    receivers = at_version_one(host)
    urls = [receiver.url for receiver in receivers]
    assert processes.ended(trainers.in_a_fleet_after_prepared, urls) == KILLED
    for receiver in receivers:
        refuses(receiver)
    with ws.connect(models.make("plain", seed=3), to=urls) as sender:
        sender.send_weights(version=2)
    assert [receiver.reading() for receiver in receivers] == [2, 2]


def test_what_readers_are_refused_is_finished_by_a_successor(host: Host) -> None:
    receivers = at_version_one(host)
    urls = [receiver.url for receiver in receivers]
    assert processes.ended(trainers.in_a_fleet_between_finishes, urls) == KILLED
    waiting = [r for r in receivers if r.status()["state"] == "PREPARED"]
    assert len(waiting) == 1
    refuses(waiting[0])
    with ws.connect(models.make("plain", seed=3), to=urls):
        assert [receiver.reading() for receiver in receivers] == [2, 2]
        sent = digests(models.make("plain", seed=7))
        assert all(receiver.digests() == sent for receiver in receivers)
