"""What stands behind a URL, and how a vLLM server's refusals read; its answers as were seen."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
import torch

import weightsync as ws
from tests.integrations.vllm_workers import Served
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ProtocolError,
    RemoteError,
    TransferError,
    TransportTimeout,
)
from weightsync.integrations.vllm.actors import vllm_targets
from weightsync.integrations.vllm.server import VllmHttpControl, plain_url


def source() -> torch.nn.Linear:
    return torch.nn.Linear(6, 5)


class Http(Served):
    """A server that answers as a vLLM would; `answers` are status and body by path."""

    def __init__(self, answers: dict[str, tuple[int, Any]]) -> None:
        self.paths: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self._answer()

            def _answer(self) -> None:
                outer.paths.append(f"{self.command} {self.path}")
                status, told = answers.get(self.path.split("?")[0], (404, {"detail": "Not Found"}))
                body = json.dumps(told).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                if status == 500:  # vLLM closes then, and its headers do not say so
                    self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(Handler)


VERSION = {"/version": (200, {"version": "0.32.0"})}


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (VERSION, "VLLM_SERVER_DEV_MODE=1"),
        (
            {
                **VERSION,
                "/get_world_size": (200, {"world_size": 2}),
                "/server_info": (
                    200,
                    {"vllm_config": {"weight_transfer_config": {"backend": "nccl"}}},
                ),
            },
            "backend 'nccl'; start it with --weight-transfer-config",
        ),
        (
            {
                **VERSION,
                "/get_world_size": (200, {"world_size": 2}),
                "/server_info": (200, {"vllm_config": {"weight_transfer_config": None}}),
            },
            "without an engine; start it with --weight-transfer-config",
        ),
    ],
)
def test_a_vllm_that_cannot_be_updated_is_told_how_to_start(
    answers: dict[str, tuple[int, Any]], told: str
) -> None:
    http = Http(answers)
    try:
        with pytest.raises(BackendUnavailableError, match=told):
            ws.connect(source(), to=http.url)
        assert not any("collective_rpc" in path for path in http.paths)
    finally:
        http.close()


NO_DOOR = [
    "Call to collective_rpc method failed: Method 'weightsync' is not implemented.",
    "Call to collective_rpc method failed: 'CPUWorker' object has no attribute 'weightsync'",
]


@pytest.mark.parametrize("reason", NO_DOOR)
def test_a_worker_without_our_engine_is_told_how_to_start(reason: str) -> None:
    http = Http(
        {
            **VERSION,
            "/get_world_size": (200, {"world_size": 1}),
            "/collective_rpc": (500, {"error": {"message": reason}}),
        }
    )
    try:
        with pytest.raises(
            BackendUnavailableError, match="no engine of weightsync; start it with --weight-trans"
        ):
            ws.connect(source(), to=f"vllm+{http.url}")
    finally:
        http.close()


@pytest.mark.parametrize("reason", NO_DOOR)
def test_an_engine_that_is_not_ours_is_told_how_to_make_one(reason: str) -> None:
    class LLM:
        def collective_rpc(self, method: str, args: tuple[str, ...]) -> None:
            raise AttributeError(reason)

    with pytest.raises(BackendUnavailableError, match=r"weight_transfer_config=\{.backend.: "):
        vllm_targets(LLM())


def test_a_call_after_an_error_goes_over_a_fresh_connection() -> None:
    http = Http({"/resume": (500, {"error": "no"}), "/is_paused": (200, {"is_paused": True})})
    control = VllmHttpControl(http.url)
    try:
        for _ in range(3):
            with pytest.raises(RemoteError, match="resume answered 500: no"):
                control.resume(timeout_s=5)
            assert control.is_paused(timeout_s=5)
    finally:
        control.close()
        http.close()


def test_a_cache_that_was_not_reset_is_an_error() -> None:
    """VLLM answers 200 then, while blocks of it are in use."""
    http = Http({"/reset_prefix_cache": (200, {"success": False})})
    control = VllmHttpControl(http.url)
    try:
        with pytest.raises(RemoteError, match="reset_prefix_cache forgot nothing"):
            control.reset_prefix_cache(timeout_s=5)
    finally:
        control.close()
        http.close()


def test_other_servers_are_not_taken_for_a_vllm() -> None:
    http = Http({"/version": (200, {"name": "another"})})
    try:
        with pytest.raises((ProtocolError, RemoteError, TransferError, TransportTimeout)):
            ws.connect(source(), to=http.url)
        asked = ["weight_info", "version", "model_info", "get_model_info", "weight_info"]
        assert http.paths == [f"GET /{path}" for path in asked]
    finally:
        http.close()


def test_what_is_no_vllm_url_is_refused() -> None:
    assert plain_url("vllm+https://host:1") == "https://host:1"
    assert plain_url("http://host:1") is None
    with pytest.raises(ConfigError, match=r"vllm\+http://host:port"):
        plain_url("vllm+ftp://host")
