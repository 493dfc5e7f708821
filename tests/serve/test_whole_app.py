"""Every route of the server's app, fed with what its own OpenAPI document allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core.result import Ok
from torch import nn

import weightsync as ws
from tests.serve.scripted_engine import TOKENIZER, ScriptedEngine
from tests.server.live import serving
from weightsync.serve.api_server import make_app
from weightsync.serve.text import TokenizerService

WAIT_S = 60


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, list[ws.WeightReceiver]]]:
    """Two workers behind one URL, each with weights of its own."""
    receivers = [ws.WeightReceiver(nn.Linear(3, 2)) for _ in range(2)]
    app = make_app(ScriptedEngine(), receivers, TokenizerService(TOKENIZER), token=None)
    with serving(app) as url:
        yield url, receivers
    for receiver in receivers:
        receiver.close()


def test_nothing_that_the_document_allows_makes_it_fail_or_changes_weights(
    served: tuple[str, list[ws.WeightReceiver]],
) -> None:
    url, receivers = served
    before = [receiver.sink.checksums() for receiver in receivers]
    document = requests.get(f"{url}/openapi.json", timeout=WAIT_S).json()
    schema = schemathesis.openapi.from_dict(document)
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    assert len(operations) > 40  # the root's, each worker's, and those that generate
    mutating = {path for path, item in document["paths"].items() if "post" in item}
    assert {"/update_weights", "/workers/1/update_weights", "/generate"} <= mutating
    for operation in operations:
        _try(operation, url)
    for receiver in receivers:
        receiver.handle({"call": "abort_weight_update", "body": {}})
    assert [receiver.sink.checksums() for receiver in receivers] == before
    assert all(receiver.version == 0 and receiver.may_generate for receiver in receivers)


def _try(operation: Any, url: str) -> None:
    @settings(
        max_examples=6,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def attempt(case: Any) -> None:
        response = case.call(base_url=url, timeout=WAIT_S)
        # 503 says that a receiver is in the middle of an update, which some calls begin.
        assert response.status_code < 500 or response.status_code == 503, response.text

    attempt()


def test_weights_that_differ_between_workers_are_seen_by_every_reader(
    served: tuple[str, list[ws.WeightReceiver]],
) -> None:
    url, receivers = served
    module = nn.Linear(3, 2)
    with ws.connect(module, to=f"{url}/workers/1") as sender:
        version = sender.send_weights().version
    assert receivers[1].version == version != receivers[0].version
    health = requests.get(f"{url}/health", timeout=WAIT_S)
    assert health.status_code == 503
    with ws.connect(module, to=url) as sender:
        report = sender.send_weights()
    assert [receiver.version for receiver in receivers] == [report.version] * 2
    assert requests.get(f"{url}/health", timeout=WAIT_S).json()["version"] == report.version
    held = [torch.equal(receiver.sink.module.weight, module.weight) for receiver in receivers]  # type: ignore[attr-defined]  # modules' sinks
    assert held == [True, True]
