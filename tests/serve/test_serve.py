from __future__ import annotations

import importlib.util
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch

import weightsync as ws
from tests.cli.running import answer_of, weightsync
from tests.serve.servers import (
    END_S,
    START_S,
    command,
    environment,
    members,
    server,
    wait_until,
)
from tests.serve.servers import running as at_work
from tests.server.live import raw
from weightsync.serve.model import make_tiny_model
from weightsync.serve.status_page import FRESH_S
from weightsync.server.listening import listen, url_of


def generate(url: str, **fields: Any) -> requests.Response:
    body = {"prompts": ["hello"], "max_new_tokens": 8, "temperature": 0.0} | fields
    return requests.post(f"{url}/generate", json=body, timeout=240)


def replica(url: str) -> dict[str, Any]:
    """What the one replica says of itself, as of at most FRESH_S ago."""
    answer = requests.get(f"{url}/status.json", timeout=10)
    return dict(answer.json()["replicas"][0])


def await_mode(url: str, mode: str | None) -> None:
    wait_until(lambda: replica(url)["paused"] == mode, f"the engine is not told to {mode}")


# So many rows of random tokens that some are sure to be without an end token for a while.
LONG: dict[str, Any] = {"n": 64, "temperature": 1.0, "max_new_tokens": 2000}


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    with server() as made:
        yield made


@pytest.fixture
def running(started: tuple[str, str, subprocess.Popen[str]]) -> tuple[str, str]:
    return started[:2]


def test_of_a_model_of_text_only_the_workers_load_torch(
    started: tuple[str, str, subprocess.Popen[str]],
) -> None:
    """It would cost every other process two seconds of start-up and 200 MB."""
    process = started[2]
    whole = {"serve": psutil.Process(process.pid), **members(process)}
    loaded = {
        name
        for name, one in whole.items()
        if any("libtorch" in mapped.path for mapped in one.memory_maps())
    }
    assert {"engine core 0", "api server 0"} <= set(whole)
    assert loaded == {"worker 0.0"}


def post(running: tuple[str, str], call: str, **json: Any) -> requests.Response:
    url, token = running
    headers = {"Authorization": f"Bearer {token}"}
    return requests.post(f"{url}/{call}", json=json, headers=headers, timeout=240)


def test_metrics_count_what_was_generated(running: tuple[str, str]) -> None:
    url, _ = running

    def total() -> float:
        lines = requests.get(f"{url}/metrics", timeout=240).text.splitlines()
        (line,) = [one for one in lines if one.startswith("weightsync_tokens_total{")]
        return float(line.partition(" ")[2])

    before = total()
    made = generate(url).json()["completions"][0]["token_ids"]
    assert total() - before == len(made) > 0


@pytest.mark.usefixtures("shm_clean")
def test_it_generates_with_the_weights_it_was_sent(running: tuple[str, str]) -> None:
    url, token = running
    before = generate(url).json()["completions"][0]
    model = make_tiny_model(seed=99).model
    with ws.connect(model, to=url, token=token) as sender:
        for _ in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            report = sender.send_weights()
        after = generate(url).json()["completions"][0]
        checked = post(running, "weight_checker").json()
        # Back to the weights of the start, whose completions are long: the next tests need it.
        model.load_state_dict(make_tiny_model().model.state_dict())
        last = sender.send_weights()
    assert after["token_ids"] != before["token_ids"]
    assert {span["version"] for span in after["weight_versions"]} == {report.version}
    assert checked["version"] == report.version
    health = requests.get(f"{url}/health", timeout=10).json()
    assert health == {"status": "ok", "state": "READY", "version": last.version}
    assert generate(url).json()["completions"][0]["token_ids"] == before["token_ids"]


def test_keep_pauses_a_completion_and_resume_goes_on(running: tuple[str, str]) -> None:
    url, _ = running
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, url, **LONG | {"max_new_tokens": 600})
        wait_until(lambda: at_work(url)[0] > 0, "nothing began")
        assert post(running, "pause").json()["paused"] is True
        await_mode(url, "keep")
        made = replica(url)["tokens_total"]
        time.sleep(2 * FRESH_S)
        assert replica(url)["tokens_total"] == made
        done_early = answer.done()
        assert requests.get(f"{url}/is_paused", timeout=10).json() == {"is_paused": True}
        post(running, "resume")
        completions = answer.result(60).json()["completions"]
    assert not done_early
    assert {c["finish_reason"] for c in completions} <= {"length", "stop"}


def test_pauses_of_many_at_once_end_as_the_last_word_says(running: tuple[str, str]) -> None:
    url, _ = running
    with ThreadPoolExecutor(8) as pool:
        for last in ("pause", "resume"):
            words = ["pause", "resume"] * 4
            assert all(r.status_code == 200 for r in pool.map(lambda w: post(running, w), words))
            assert post(running, last).status_code == 200
            paused = requests.get(f"{url}/is_paused", timeout=10).json()["is_paused"]
            mode = "keep" if last == "pause" else None
            assert paused is (last == "pause")
            await_mode(url, mode)


def test_abort_returns_what_is_there(running: tuple[str, str]) -> None:
    url, _ = running
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, url, **LONG)
        wait_until(lambda: at_work(url)[0] > 0, "nothing began")
        assert post(running, "pause", mode="abort").status_code == 200
        completions = answer.result(60).json()["completions"]
        post(running, "resume")
    assert "abort" in {c["finish_reason"] for c in completions}
    assert "length" not in {c["finish_reason"] for c in completions}


def test_bad_requests_are_problem_documents(running: tuple[str, str]) -> None:
    url, _ = running
    for body in (
        b"",
        b"[" * 100_000,
        b'{"prompts":[]}',
        b'{"prompts":["\xff"]}',
        b"{}",
        b"9" * 9999,
    ):
        answer = requests.post(f"{url}/generate", data=body, timeout=10)
        assert answer.status_code == 400, body[:20]
        assert answer.headers["content-type"] == "application/problem+json"
    assert generate(url, max_new_tokens=60_000).status_code == 400


def test_it_says_what_it_serves(running: tuple[str, str]) -> None:
    url, _ = running
    info = requests.get(f"{url}/server_info", timeout=10).json()
    assert info["model"]["name"] == "tiny"
    assert info["model"]["architecture"] == "LlamaForCausalLM"
    assert (info["api_servers"], info["data_parallel"], info["tensor_parallel"]) == (1, 1, 1)
    assert (info["apply"], info["tensor_ipc"]) == ("auto", "torch_shm")
    assert answer_of(weightsync("status", url, "--json"))["servers"][0]["server"] == info


def test_what_the_documentation_shows_works(
    running: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    url, token = running
    page, (program, *_) = serving_page()
    before = requests.get(f"{url}/weight_info", timeout=10).json()["version"]
    exec(program, {"url": url, "token": token})  # our own page
    assert capsys.readouterr().out == f"{before + 1} ['shared_memory']\n"
    table = page.partition("## Routes")[2].partition("Temperature")[0]
    named = set(re.findall(r"`(?:GET |POST )?(/[\w/.]*)[^`]*`", table))
    paths = requests.get(f"{url}/openapi.json", timeout=10).json()["paths"]
    assert {"/generate", "/v1/chat/completions", "/status.json", "/resume"} <= named
    named -= {"/adapters/NAME/", "/adapters/NAME/unload", "/draft/"}
    assert requests.post(f"{url}/adapters/NAME/unload", timeout=10).status_code == 401
    for path in named - set(paths):
        assert requests.get(f"{url}{path}", timeout=10).status_code == 200, path


def test_a_server_without_a_draft_says_so(running: tuple[str, str]) -> None:
    url, token = running
    policy = make_tiny_model().model
    with pytest.raises(ws.ConfigError, match="no draft model; start it with --draft-model"):
        ws.connect_set({"": policy, "draft": policy}, to=url, token=token)


def serving_page() -> tuple[str, list[str]]:
    """Return docs/serving.md and its blocks of Python."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    return page, re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_the_tools_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    _, (*_, program, view) = serving_page()
    exec(view, {})  # our own page
    file = tmp_path / "servers.py"
    file.write_text(program, encoding="utf-8")
    with subprocess.Popen([sys.executable, file], stdout=subprocess.PIPE, text=True) as servers:
        try:
            assert servers.stdout is not None
            port = int(servers.stdout.readline())
            answers = set()
            for _ in range(2):
                with socket.create_connection(("127.0.0.1", port), timeout=END_S) as client:
                    answers.add(client.makefile().read())
            assert answers == {"server 0 of 2", "server 1 of 2"}
            assert servers.wait(END_S) == 0
        finally:
            servers.kill()


def test_changing_needs_the_token(running: tuple[str, str]) -> None:
    url, _ = running
    for path in ("update_weights", "pause", "abort_weight_update", "no_such_route"):
        assert requests.post(f"{url}/{path}", timeout=10).status_code == 401
    assert requests.get(f"{url}/openapi.json", timeout=10).json()["paths"]["/generate"]["post"]


def test_headers_have_an_end(running: tuple[str, str]) -> None:
    """With httptools installed, which takes as many as come."""
    assert importlib.util.find_spec("httptools")
    with raw(running[0]) as connection:
        endless = b"GET /health HTTP/1.1\r\n" + b"x: %s\r\n" % (b"a" * 16_000) * 2_000
        with pytest.raises(ConnectionError):
            connection.sendall(endless)
    assert requests.get(f"{running[0]}/health", timeout=240).ok


@pytest.mark.usefixtures("shm_clean")
def test_a_signal_ends_it_in_the_middle_of_work() -> None:
    """A server that wants no token, as it may on loopback."""
    model = make_tiny_model().model
    with server("--no-auth", want_token=False) as (url, _, process):
        assert requests.post(f"{url}/resume", timeout=10).status_code == 200
        with ThreadPoolExecutor(1) as pool, ws.connect(model, to=url) as sender:
            sender.send_weights()
            answer = pool.submit(generate, url, **LONG)
            wait_until(lambda: at_work(url)[0] > 0, "nothing began")
            process.send_signal(signal.SIGTERM)
            assert process.wait(END_S) == 0
            completions = answer.result(END_S).json()["completions"]
            assert "abort" in {c["finish_reason"] for c in completions}
        assert process.stdout is not None
        assert process.stdout.read() == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--no-auth", "--host", "0.0.0.0"), "--no-auth on 0.0.0.0"),
        (("--token", "two words"), "printable ASCII"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(options: tuple[str, ...], text: str) -> None:
    done = subprocess.run(
        command(*options),
        capture_output=True,
        text=True,
        timeout=START_S,
        env=environment(),
        check=False,
    )
    assert done.returncode == 2
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_port_that_is_taken() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = url_of(listener).rpartition(":")[2]
        with pytest.raises(ws.ConfigError, match=f"port {port}"):
            listen("127.0.0.1", int(port))


def test_answers_do_not_wait_for_acknowledgements() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP  # or asyncio leaves Nagle's algorithm on
