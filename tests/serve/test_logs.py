"""What `weightsync serve` says of itself: its start, each update, and requests on demand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import requests
import torch

import weightsync as ws
from tests.serve.servers import forked_server, refused, server, wait_until
from weightsync.serve.model import make_tiny_model, worker_device

UPDATE = re.compile(r"version 1 \(step-1\): 0\.4 MB, staged, verified: held, stall ")


def test_the_start_and_each_update_are_lines(tmp_path: Path) -> None:
    model = make_tiny_model().model
    with (
        (tmp_path / "log").open("w+") as log,
        server("--access-log", stderr=log) as (url, token, process),
    ):
        with ws.connect(model, to=url, token=token) as sender:
            sender.send_weights(label="step-1")
        other = make_tiny_model(dtype=torch.bfloat16).model
        with pytest.raises(ws.ManifestMismatchError):
            ws.connect(other, to=url, token=token)
        assert requests.get(f"{url}/v1/models", timeout=10).ok

        def told() -> str:
            return (tmp_path / "log").read_text(encoding="utf-8")

        wait_until(lambda: "init_weight_transfer_engine failed" in told(), "no line of the failure")
        lines = told().splitlines()
        assert sum(":loading tiny in 1 worker" in line for line in lines) == 1
        assert sum("M parameters, float32 on cpu" in line for line in lines) == 1
        assert sum(bool(UPDATE.search(line)) for line in lines) == 1
        assert "GET /v1/models" not in told()
        process.terminate()
        assert process.stdout is not None
        assert 'GET /v1/models HTTP/1.1" 200' in process.stdout.read()


def test_nothing_is_said_from_warnings_on(tmp_path: Path) -> None:
    model = make_tiny_model().model
    with (
        (tmp_path / "log").open("w+") as log,
        forked_server("--log-level", "warning", stderr=log) as (url, token),
        ws.connect(model, to=url, token=token) as sender,
    ):
        sender.send_weights()
    assert (tmp_path / "log").read_text(encoding="utf-8") == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_line() -> None:
    code, said = refused("--device", "cuda", "--log-level", "warning")
    assert code == 1
    (line,) = said.splitlines()
    assert re.search(r"--device cuda: torch \S+ sees no GPU here|sees no GPU here; use", line)


def test_each_worker_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver alone is replaced: what it says of the host."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [worker_device("auto", index) for index in range(2)] == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]
    assert worker_device("cpu", 5) == torch.device("cpu")
    with pytest.raises(ws.ConfigError, match="this host has 2: --data-parallel"):
        worker_device("cuda", 2)
