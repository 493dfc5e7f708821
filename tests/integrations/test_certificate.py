"""What a certificate calls equal, and what it says of servers that answer something else."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from weightsync.errors import AuthError, ConfigError, ConnectError, ProtocolError, RemoteError
from weightsync.integrations.certificate import (
    Server,
    Snapshot,
    cold_server,
    differences,
    vllm_command,
)
from weightsync.integrations.vllm.checksums import held_checksums

CHECKSUMS = {"w": "0" * 16}
WHOLE = Snapshot(0, CHECKSUMS, [["a", "b"]], [[-1.0, -2.0]])


@pytest.mark.parametrize(
    ("tokens", "logprobs", "said"),
    [
        ([["a", "b"]], [[-1.0, -2.0]], ""),
        ([["a", "b"]], [[-1.0, -2.0005]], ""),
        ([["a", "b"]], [[-1.0, -2.5]], "token 1: 'b' (-2.5000) in the warm"),
        ([["a", "c"]], [[-1.0, -2.0]], "token 1: 'c' (-2.0000) in the warm"),
        ([["a"]], [[-1.0]], "token 1: nothing (nan) in the warm"),
        ([[]], [[]], "token 0: nothing (nan) in the warm"),
        ([["a", "b"]], [[-1.0, math.nan]], "token 1: 'b' (nan) in the warm"),
    ],
)
def test_the_first_token_that_differs_is_named(
    tokens: list[list[str]], logprobs: list[list[float]], said: str
) -> None:
    warm = Snapshot(1, CHECKSUMS, tokens, logprobs)
    found = differences(warm, WHOLE)
    assert [line.startswith(f"prompt 0, {said}") for line in found] == ([True] if said else [])
    assert len(differences(WHOLE, warm)) == len(found)


def test_servers_that_generate_nothing_are_not_equal() -> None:
    silent = Snapshot(0, CHECKSUMS, [[]], [[]])
    assert differences(silent, silent) == ["prompt 0: neither server generates a token"]


class Derived(nn.Module):
    """A layer with a derived tensor that is no buffer, and a cache of requests."""

    def __init__(self, derived: float, cached: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.absorbed = torch.full((4,), derived)
        self.kv_cache = torch.full((4,), cached)


def test_derived_tensors_that_are_no_buffers_are_compared() -> None:
    held = held_checksums(Derived(1.0, 0.0))
    assert set(held) == {"weight", "absorbed"}
    assert held_checksums(Derived(1.0, 5.0)) == held
    assert held_checksums(Derived(2.0, 0.0))["absorbed"] != held["absorbed"]


class Method:
    """What a layer's `quant_method` may keep."""

    def __init__(self) -> None:
        self.scales = {"w1": torch.ones(2)}


def test_derived_tensors_in_containers_and_in_the_quant_method_are_compared() -> None:
    def layer() -> Any:
        made: Any = nn.Linear(2, 2)
        made.parts = [torch.ones(2), (torch.ones(3), 7)]
        made.quant_method = Method()
        return made

    changed = layer()
    changed.quant_method.scales["w1"][1] = 2.0
    changed.parts[1][0][0] = 2.0
    held, other = held_checksums(layer()), held_checksums(changed)
    derived = {"parts.0", "parts.1.0", "quant_method.scales.w1"}
    assert set(held) == {"weight", "bias"} | derived
    assert {name for name in derived if held[name] != other[name]} == derived - {"parts.0"}


class Packed(nn.Module):
    """A layer as vLLM packs it on a CPU: only its product is there."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))
        self.input_size = weight.shape[1]
        self.cpu_linear = lambda x, _weight, _bias: x @ weight.t()


def test_a_packed_layer_that_is_not_finite_is_refused() -> None:
    weight = torch.arange(24.0).reshape(4, 6)
    assert held_checksums(Packed(weight)) == held_checksums(Packed(weight.clone()))
    weight[0, 0] = math.inf
    with pytest.raises(ConfigError, match="weight holds a value that is not finite"):
        held_checksums(Packed(weight))


@contextmanager
def answering(answers: dict[str, Any], code: int = 200) -> Iterator[str]:
    """A web server with JSON, or bytes, for some paths and `{}` for the others."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said = answers.get(self.path.lstrip("/"), {})
            body = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "listed", [{}, [], {"data": []}, {"data": [3]}, {"data": [{}]}, "text", {"data": {}}]
)
def test_answers_of_another_kind_are_one_error(listed: Any) -> None:
    with (
        answering({"v1/models": listed}) as url,
        pytest.raises(ProtocolError, match="/v1/models answers something else than an inference"),
    ):
        Server(url).model()


def test_each_failure_of_a_request_has_its_error() -> None:
    with answering({"v1/models": b"<html>"}) as url, pytest.raises(ProtocolError):
        Server(url).model()
    with answering({}, code=401) as url, pytest.raises(AuthError, match="give its token"):
        Server(url).model()
    with answering({}, code=404) as url, pytest.raises(RemoteError, match="404"):
        Server(url).model()
    with pytest.raises(ConnectError):
        Server("http://127.0.0.1:1").model()


CONFIG = {
    "model_config": {
        "dtype": "torch.bfloat16",
        "max_model_len": 128,
        "quantization": "fp8",
        "hf_overrides": {"a": 1},
        "enforce_eager": False,
        "trust_remote_code": True,
    },
    "parallel_config": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
    },
    "cache_config": {"cache_dtype": "fp8_e4m3", "gpu_memory_utilization": 0.4},
    "load_config": {"load_format": "auto"},
}
INFO = "server_info?config_format=json"


def test_a_cold_vllm_has_the_options_of_the_warm_one() -> None:
    with answering({INFO: {"vllm_config": CONFIG}}) as url:
        command = vllm_command(Server(url))
    for option in (
        "--dtype bfloat16",
        "--quantization fp8",
        """--hf-overrides '{"a": 1}'""",
        "--kv-cache-dtype fp8_e4m3",
        "--gpu-memory-utilization 0.4",
        "--tensor-parallel-size 2",
        "--trust-remote-code",
    ):
        assert option in command
    assert "--enforce-eager" not in command


def test_options_that_are_not_repeated_are_named() -> None:
    config = {**CONFIG, "speculative_config": {"method": "ngram"}}
    with (
        answering({INFO: {"vllm_config": config}}) as url,
        pytest.raises(ConfigError, match="runs with speculative_config: give --cold"),
    ):
        vllm_command(Server(url))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "--cold has no {checkpoint}"),
        ("serve {checkpoint}", "--cold has no {port}"),
        ("serve {port}", "--cold has no {checkpoint}"),
        ("serve '{checkpoint} {port}", "--cold cannot be read: No closing quotation"),
        ("/nowhere/serve {checkpoint} {port}", "cannot be started"),
    ],
)
def test_a_command_that_starts_no_server(command: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message), cold_server(command, "B", None):
        pass


SERVER = """
import http.server, json, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[2]))
        body = json.dumps({"token": os.environ.get("WEIGHTSYNC_TOKEN", "")}).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): ...
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "server.py"
    path.write_text(SERVER, encoding="utf-8")
    return path


def test_a_cold_server_gets_the_token(script: Path) -> None:
    command = f"{sys.executable} {script} {{port}} 200 {{checkpoint}}"
    with cold_server(command, "B", "secret") as server:
        assert server.token == "secret"
        assert server.request("anything") == {"token": "secret"}


def test_a_cold_server_that_has_no_health_is_an_error_at_once(script: Path) -> None:
    command = f"{sys.executable} {script} {{port}} 404 {{checkpoint}}"
    with pytest.raises(RemoteError, match="404"), cold_server(command, "B", None):
        pass


def test_a_cold_server_ends_with_a_killed_process(script: Path) -> None:
    command = f"{sys.executable} {script} {{port}} 200 {{checkpoint}}"
    body = f"""
from weightsync.integrations.certificate import cold_server
with cold_server({command!r}, "B", None):
    print("up", flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", body], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        (cold,) = psutil.Process(process.pid).children()
        os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while cold.is_running() and cold.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the cold server lives"
        time.sleep(0.05)
