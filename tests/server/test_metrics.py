"""/metrics, as Prometheus' own parser reads it."""

from __future__ import annotations

from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

import weightsync as ws
from weightsync.serve.worker_client import RemoteWorker, WorkerClient
from weightsync.server import Workers
from weightsync.server.dispatcher import Receiver
from weightsync.server.metrics import render

NBYTES = 4 * (8 * 8 + 8)


def samples(receiver: Receiver) -> dict[tuple[str, str], float]:
    """Return values by name and the only label's value."""
    found = {}
    for family in text_string_to_metric_families(render(receiver.report()).decode()):
        assert family.name.startswith("weightsync_")
        assert family.documentation.endswith(".")
        for sample in family.samples:
            found[sample.name, "".join(sample.labels.values())] = sample.value
    return found


def test_an_update_is_seen() -> None:
    receiver = ws.WeightReceiver(nn.Linear(8, 8))
    before = samples(receiver)
    assert before["weightsync_version", ""] == 0
    assert before["weightsync_paused", ""] == 0
    assert not any("last_update" in name for name, _ in before)
    with ws.connect(nn.Linear(8, 8), to=receiver.handle) as sender:
        report = sender.send_weights(5)
    found = samples(receiver)
    assert found["weightsync_version", ""] == 5
    assert found["weightsync_updates_total", "committed"] == 1
    assert found["weightsync_last_update_bytes", ""] == NBYTES
    assert found["weightsync_last_update_stall_seconds", ""] == report.stall_s
    extra = report.receivers[0].peak_extra_nbytes
    assert found["weightsync_last_update_peak_extra_bytes", ""] == extra
    for phase, seconds in report.receivers[0].seconds.items():
        rate = None if phase == "wait" else NBYTES / seconds
        assert found["weightsync_last_update_seconds", phase] == seconds
        assert found.get(("weightsync_last_update_bytes_per_second", phase)) == rate


def test_a_pause_is_seen() -> None:
    receiver = ws.WeightReceiver(nn.Linear(8, 8))
    receiver.handle({"call": "pause", "body": {"mode": "keep"}})
    assert samples(receiver)["weightsync_paused", ""] == 1


class Asked:
    """Where an API server's way to its workers ends: counts calls to each."""

    def __init__(self, receiver: ws.WeightReceiver) -> None:
        self._receiver = receiver
        self.calls: list[tuple[int, str]] = []

    def call(self, worker: int, call: str, body: bytes, timeout_s: float) -> bytes:
        self.calls.append((worker, call))
        return self._receiver.handle_json(call, body)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_scrape_asks_each_worker_once(workers: int) -> None:
    asked = Asked(ws.WeightReceiver(nn.Linear(8, 8), version=4))
    stands_for = {
        f"workers/{k}": RemoteWorker(cast(WorkerClient, asked), k) for k in range(workers)
    }
    together = Workers(stands_for)
    try:
        assert samples(together)["weightsync_version", ""] == 4
        assert sorted(asked.calls) == [(k, "worker_report") for k in range(workers)]
    finally:
        together.close()
