"""What `/metrics` of a served model adds to that of its receivers, and what it does without it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
import requests
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

import weightsync as ws
from tests.serve.scripted_engine import ScriptedEngine
from tests.server.live import serving
from weightsync.errors import TransportTimeout
from weightsync.serve import engine_client
from weightsync.serve.messages import EngineStats
from weightsync.server.router import weight_router

REPLICAS = [
    EngineStats(running=2, waiting=1, requests_total=9, tokens_total=70, tokens_per_s=12.5),
    EngineStats(running=3, requests_total=4, tokens_total=30),
]


@dataclass
class Told(ScriptedEngine):
    """An engine that says how it is, or `failure`, or nothing ever."""

    failure: Exception | None = None
    silent: bool = False

    async def stats(self) -> list[EngineStats]:
        if self.silent:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure
        return REPLICAS


def samples(engine: Told) -> dict[str, list[float]]:
    """Return what a scrape reads, by name, replica by replica."""
    receiver = ws.WeightReceiver(nn.Linear(2, 2))
    app = FastAPI()
    more = engine_client.engine_metrics(engine)
    app.include_router(weight_router(receiver, token=None, more_metrics=more))
    try:
        with serving(app) as url:
            answer = requests.get(f"{url}/metrics", timeout=240)
    finally:
        receiver.close()
    assert answer.status_code == 200, answer.text
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.value)
    return found


def test_every_replica_is_shown() -> None:
    found = samples(Told())
    assert found["weightsync_version"] == [0]
    assert found["weightsync_requests_running"] == [2, 3]
    assert found["weightsync_requests_waiting"] == [1, 0]
    assert found["weightsync_requests_total"] == [9, 4]
    assert found["weightsync_tokens_total"] == [70, 30]
    assert found["weightsync_tokens_per_second"] == [12.5, 0]


@pytest.mark.parametrize("engine", [Told(failure=TransportTimeout("gone")), Told(silent=True)])
def test_the_weights_are_shown_without_the_engine(
    engine: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "METRICS_TIMEOUT_S", 0.1)
    found = samples(engine)
    assert found["weightsync_version"] == [0]
    assert "weightsync_tokens_total" not in found
