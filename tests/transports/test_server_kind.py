"""What stands behind a URL: our own routes are asked first, whatever else the app answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import fastapi
import pytest
import torch

import weightsync as ws
from tests.integrations.test_vllm_http import VERSION, Http
from tests.server.live import held_port, serving
from weightsync.errors import BackendUnavailableError, ConnectError
from weightsync.integrations.servers import ServerTransports
from weightsync.transports.http import HttpTransport

FOREIGN_ROUTES = {
    "/version": {"version": "1.4.2"},
    "/get_world_size": {"world_size": 2},
    "/model_info": {"model_path": "m", "tokenizer_path": "m", "is_generation": True},
    "/server_info": {"vllm_config": {}},
}


@pytest.fixture
def app() -> Iterator[tuple[fastapi.FastAPI, ws.WeightReceiver]]:
    """An app of a user's, whose own routes are those of other engines by chance."""
    receiver = ws.WeightReceiver(torch.nn.Linear(6, 5))
    made = fastapi.FastAPI()
    for path, answer in FOREIGN_ROUTES.items():
        made.add_api_route(path, lambda answer=answer: answer)
    made.include_router(ws.server.weight_router(receiver, token=None))
    yield made, receiver
    receiver.close()


def test_an_app_with_routes_of_other_engines_and_ours_is_ours(
    app: tuple[fastapi.FastAPI, ws.WeightReceiver],
) -> None:
    sent = torch.nn.Linear(6, 5)
    with serving(app[0]) as url, ws.connect(sent, to=url) as sender:
        assert sender.send_weights().version == 1
    assert app[1].version == 1


def test_a_receiver_whose_status_is_an_error_is_ours_still(
    app: tuple[fastapi.FastAPI, ws.WeightReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ws.NotReadyError("a worker is down")

    monkeypatch.setattr(app[1], "status", fail)
    with serving(app[0]) as url:
        (transport,) = ServerTransports(None, verify_tls=True).transports(url)
        assert type(transport) is HttpTransport
        transport.close()


def test_a_vllm_that_has_weight_info_is_vllm() -> None:
    http = Http({**VERSION, "/weight_info": (200, {"weight_version": "default"})})
    try:
        with pytest.raises(BackendUnavailableError, match="VLLM_SERVER_DEV_MODE=1"):
            ws.connect(torch.nn.Linear(6, 5), to=http.url)
        assert http.paths[:3] == ["GET /weight_info", "GET /version", "GET /get_world_size"]
    finally:
        http.close()


def test_a_server_that_still_loads_is_waited_for_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    receiver = ws.WeightReceiver(torch.nn.Linear(6, 5))
    app = fastapi.FastAPI()
    app.include_router(ws.server.weight_router(receiver, token=None))
    opened = ExitStack()
    port = opened.enter_context(held_port())
    url = f"http://127.0.0.1:{port}"
    began = time.monotonic()

    def load() -> None:
        time.sleep(1.0)
        opened.enter_context(serving(app, port=port))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        with (
            caplog.at_level(logging.WARNING, "weightsync"),
            ws.connect(torch.nn.Linear(6, 5), to=url, wait_s=60) as sender,
        ):
            assert time.monotonic() - began >= 1.0
            assert sender.send_weights().version == 1
    finally:
        thread.join()
        opened.close()
        receiver.close()
    waited = [r.message for r in caplog.records if "waiting up to 60 s for a server" in r.message]
    assert len(waited) == 1
    assert url in waited[0]


@pytest.mark.parametrize("scheme", ["", "vllm+"])
def test_a_server_that_never_answers_is_an_error_after_the_time(scheme: str) -> None:
    http = Http({})
    http.close()
    began = time.monotonic()
    with pytest.raises(ConnectError, match="is the server running"):
        ws.connect(torch.nn.Linear(6, 5), to=scheme + http.url, wait_s=0.5)
    assert 0.5 <= time.monotonic() - began < 30


def test_a_proxy_without_its_server_is_waited_for() -> None:
    answers: dict[str, tuple[int, Any]] = {"/weight_info": (503, {})}
    http = Http(answers)
    threading.Timer(0.7, answers.clear).start()
    try:
        with pytest.raises(ws.WeightSyncError):
            ws.connect(torch.nn.Linear(6, 5), to=http.url, wait_s=60)
        assert http.paths.count("GET /weight_info") >= 3
    finally:
        http.close()


def test_a_server_that_cannot_be_reached_is_said_to_be_so() -> None:
    http = Http({})
    http.close()
    with pytest.raises(ConnectError, match="is the server running"):
        ws.connect(torch.nn.Linear(6, 5), to=http.url)
