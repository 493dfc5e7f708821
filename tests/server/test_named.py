"""Receivers below a URL by name."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import weightsync as ws
from tests.server.live import TOKEN
from weightsync.server.named import NamedReceivers
from weightsync.server.workers import Workers, worker_path


@pytest.mark.parametrize(("token", "status"), [(None, 401), ("another", 403), (TOKEN, 200)])
def test_a_new_name_is_made_for_the_token_alone(token: str | None, status: int) -> None:
    made = list[str]()

    def make(name: str) -> Workers:
        made.append(name)
        return Workers({worker_path(0): ws.WeightReceiver(lambda _: None)})

    named = NamedReceivers(make, lambda _: None, token=TOKEN)
    app = FastAPI()
    app.mount("/adapters/{name}", named)
    client = TestClient(app)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    for _ in range(2):
        answer = client.get("/adapters/policy/weight_info", headers=headers)
        assert answer.status_code == status
    assert made == (["policy"] if token == TOKEN else [])
    if token == TOKEN:
        assert client.get("/adapters/policy/weight_info").status_code == 200
