"""`weightsync serve` asleep: vLLM's routes, requests meanwhile, loops, and the example."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch

import weightsync as ws
from tests.serve.servers import forked_server, members, server
from weightsync.serve.model import load_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "colocated.py"


class Client:
    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token
        self.headers = {"Authorization": f"Bearer {token}"}

    def post(self, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=body, headers=self.headers, timeout=60)

    def get(self, path: str) -> Any:
        return requests.get(f"{self.url}{path}", timeout=60)

    def is_sleeping(self) -> bool:
        answer: dict[str, bool] = self.get("/is_sleeping").json()
        assert answer.keys() == {"is_sleeping"}
        return answer["is_sleeping"]

    def complete(self, **more: Any) -> requests.Response:
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
        return self.post("/v1/completions", body | more)


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    with forked_server("--tensor-parallel", str(request.param)) as (url, token):
        yield Client(url, token)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    found: torch.nn.Module = load_model("tiny").model
    return found


def change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)


def test_the_levels_of_vllm(client: Client, model: torch.nn.Module) -> None:
    with ws.connect(model, to=client.url, token=client.token) as sender:
        for level in (1, 2):
            version = sender.send_weights().version
            answer = client.post(f"/sleep?level={level}")
            assert (answer.status_code, answer.json()) == (
                200,
                {"status": "sleeping", "level": level},
            )
            assert client.is_sleeping()
            status = client.get("/weight_info").json()
            assert status["asleep"] == ["weights", "kv_cache"]
            assert status.get("discarded", False) == (level == 2)
            assert client.get("/health").status_code == 503
            refused = client.complete()
            assert refused.status_code == 503
            assert f"sleeps (level {level})" in refused.json()["error"]["message"]
            with pytest.raises(ws.UpdateConflictError, match=r"send_weights\(wake=True\)"):
                sender.send_weights()
            assert client.post("/wake_up?tags=kv_cache").status_code == 409
            answer = client.post("/wake_up?tags=weights")
            assert answer.json() == {"status": "sleeping", "tags": ["weights"]}
            assert client.complete().status_code == 503
            answer = client.post("/wake_up")
            assert answer.json() == {"status": "awake", "tags": None}
            assert not client.is_sleeping()
            if level == 1:
                spans = client.complete().json()["choices"][0]["weight_versions"]
                assert [span["version"] for span in spans] == [version]
            else:
                gone = client.complete()
                assert gone.status_code == 503
                assert "were discarded" in gone.json()["error"]["message"]
                assert not client.get("/weight_info").json().get("fetchable", False)
        sender.send_weights()
        assert client.complete().status_code == 200


def test_wake_and_update(client: Client, model: torch.nn.Module) -> None:
    with ws.connect(model, to=client.url, token=client.token) as sender:
        for level in (1, 2, 2, 1):
            assert client.post(f"/sleep?level={level}").status_code == 200
            change(model)
            report = sender.send_weights(wake=True)
            assert report.verified == "held"
            answer = client.complete().json()
            assert answer["choices"][0]["weight_versions"][0]["version"] == report.version
            assert not client.is_sleeping()


def test_requests_in_flight_end_with_what_they_have(client: Client) -> None:
    long = {"max_tokens": 2000, "ignore_eos": True, "stream": True}
    with requests.post(
        f"{client.url}/v1/completions",
        json={"model": "tiny", "prompt": [1, 2], "temperature": 0} | long,
        headers=client.headers,
        stream=True,
        timeout=60,
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert client.post("/sleep?level=1").status_code == 200
        assert b'"finish_reason":"abort"' in b"".join(lines)
    client.post("/wake_up")
    assert client.complete().status_code == 200


def test_level_0_is_a_pause(client: Client) -> None:
    assert client.post("/sleep?level=0").json() == {"status": "sleeping", "level": 0}
    assert client.is_sleeping()
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert client.post("/wake_up?tags=scheduling").json()["status"] == "awake"
    assert client.complete().status_code == 200


def test_no_worker_keeps_the_pause_of_anothers_sleep(client: Client) -> None:
    """Of two workers, the later once took the earlier one's pause for the users', and left it."""
    for _ in range(30):
        assert client.post("/sleep?level=1").status_code == 200
        assert client.get("/is_paused").json() == {"is_paused": False}
        assert client.complete().status_code == 503  # a request of a paused engine waits instead
        for tags in ("weights", "kv_cache"):
            assert client.post(f"/wake_up?tags={tags}").status_code == 200
        assert not client.is_sleeping()


def test_a_sleep_in_a_pause_leaves_the_pause(client: Client) -> None:
    assert client.post("/pause").status_code == 200
    assert client.post("/sleep?level=1").status_code == 200
    for tags in ("weights", "kv_cache"):
        assert client.post(f"/wake_up?tags={tags}").status_code == 200
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert client.post("/resume").status_code == 200
    assert client.complete().status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/sleep?level=3", "/sleep?level=deep", "/sleep?level=1&mode=keep", "/wake_up?tags=gpu"],
)
def test_bad_input_is_one_line_and_changes_nothing(client: Client, path: str) -> None:
    answer = client.post(path)
    assert answer.status_code == 400
    assert "\n" not in answer.json()["detail"]
    assert not client.is_sleeping()


def test_both_need_the_token(client: Client) -> None:
    for path in ("/sleep?level=2", "/wake_up"):
        assert requests.post(f"{client.url}{path}", timeout=60).status_code == 401
    assert not client.is_sleeping()


@pytest.mark.parametrize("level", ["1", "2"])
def test_the_example(level: str) -> None:
    with forked_server() as (url, token):
        said = subprocess.run(
            [sys.executable, EXAMPLE, url, level],
            env={**os.environ, "WEIGHTSYNC_TOKEN": token, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        ).stdout.splitlines()
    assert [line.partition(": ")[0] for line in said] == ["step 1", "step 2", "step 3"]
    assert [line.rpartition(" ")[2] for line in said] == ["[2]", "[3]", "[4]"]


def test_memory_does_not_grow_in_50_loops(model: torch.nn.Module) -> None:
    with server() as (url, token, process), ws.connect(model, to=url, token=token) as sender:
        client = Client(url, token)
        sender.send_weights()
        workers = [p for name, p in members(process).items() if "worker" in name]
        assert workers
        sizes = []
        for step in range(50):
            assert client.post(f"/sleep?level={1 + step % 2}").status_code == 200
            change(model)
            sender.send_weights(wake=True)
            assert client.complete(prompt=[1, 2, step]).status_code == 200
            sizes.append(sum(psutil.Process(p.pid).memory_info().rss for p in workers))
        assert max(sizes[25:]) < 1.01 * max(sizes[:25])
