"""`status` and `verify` of servers of other engines: named by their URL, or found out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import Body, FastAPI
from torch import nn

import weightsync as ws
from tests.cli.running import answer_of, weightsync
from tests.server.live import serving
from weightsync.integrations.vllm import rpc

WORKERS = 2


@contextmanager
def vllm_like(backend: str = "weightsync") -> Iterator[str]:
    """A server of two workers, which answers as vLLM does."""
    receivers = [ws.WeightReceiver(nn.Linear(2, 2)) for _ in range(WORKERS)]

    def collective_rpc(body: dict[str, Any] = Body()) -> dict[str, Any]:  # noqa: B008 - FastAPI's
        told = rpc.decode_round(body["args"][0])
        answers = [
            rpc.answer_round(told, receiver, receiver.dispatch, rank=rank, world=WORKERS)
            for rank, receiver in enumerate(receivers)
        ]
        return {"results": answers}

    app = FastAPI()
    config = {"vllm_config": {"weight_transfer_config": {"backend": backend}}}
    gets: dict[str, object] = {
        "/version": {"version": "0.32.0"},
        "/get_world_size": {"world_size": WORKERS},
        "/server_info": config,
        "/weight_info": {"weight_version": "default"},
    }
    for path, told in gets.items():
        app.add_api_route(path, lambda told=told: told)
    app.add_api_route("/collective_rpc", collective_rpc, methods=["POST"])
    try:
        with serving(app) as url:
            yield url
    finally:
        for receiver in receivers:
            receiver.close()


@pytest.fixture(scope="module")
def vllm() -> Iterator[str]:
    """The URL of a server that answers as vLLM does."""
    with vllm_like() as url:
        yield url


@pytest.fixture(scope="module")
def sglang() -> Iterator[str]:
    """The URL of a server that answers as SGLang does."""
    app = FastAPI()
    model = {"model_path": "/models/a", "tokenizer_path": "/models/a", "is_generation": True}
    app.add_api_route("/model_info", lambda: {**model, "weight_version": "7"})
    app.add_api_route("/server_info", lambda: {"version": "0.5.21", "tokenizer_worker_num": 1})
    with serving(app) as url:
        yield url


@pytest.mark.parametrize("scheme", ["", "vllm+"])
def test_each_worker_of_a_vllm_server_has_a_status(vllm: str, scheme: str) -> None:
    result = weightsync("status", scheme + vllm)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    for rank in range(WORKERS):
        at = lines.index(f"{vllm}#worker-{rank}")
        assert lines[at + 1 : at + 3] == ["  state     READY", "  version   0"]
    first, second = answer_of(weightsync("status", scheme + vllm, "--json"))["servers"]
    assert (first["version"], second["server"]) == (0, {"engine": "vllm"})


def test_a_vllm_server_without_the_engine_says_how_to_start_it() -> None:
    with vllm_like("nccl") as url:
        result = weightsync("status", url)
    assert result.exit_code == 1
    assert f"{url}\n  answers with an error: " in result.stdout
    assert "weight transfer backend 'nccl'; start it with --weight-transfer" in result.stdout


@pytest.mark.parametrize("scheme", ["", "sglang+"])
def test_an_sglang_server_says_what_it_is(sglang: str, scheme: str) -> None:
    result = weightsync("status", scheme + sglang)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        sglang,
        "  engine    SGLang 0.5.21, /models/a",
        "  version   7",
    ]
    (server,) = answer_of(weightsync("status", scheme + sglang, "--json"))["servers"]
    assert server["server"]["weight_version"] == "7"
    assert (server["url"], server["reachable"]) == (sglang, True)


@pytest.mark.parametrize("scheme", ["", "vllm+", "sglang+"])
def test_verify_says_what_it_needs(vllm: str, sglang: str, scheme: str, checkpoint: Path) -> None:
    plain = {"vllm+": [vllm], "sglang+": [sglang]}.get(scheme, [vllm, sglang])
    for url in plain:
        error = answer_of(weightsync("verify", scheme + url, checkpoint, "--json"), 2)["error"]
        name = "vLLM" if url == vllm else "SGLang"
        assert error["message"].startswith(f"{url} is a server of {name}, which ")
        assert "verify needs a server of weightsync serve" in error["message"]


@pytest.mark.parametrize("scheme", ["vllm+", "sglang+"])
def test_one_that_is_down_is_unreachable(down: str, scheme: str) -> None:
    result = weightsync("status", scheme + down)
    assert result.exit_code == 3
    assert result.stdout.startswith(f"{down}\n  unreachable: ")
