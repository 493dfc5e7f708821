"""What a server of many processes does when one of them dies, clients leave, or weights tear."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch

import weightsync as ws
from tests.serve.servers import WAIT_S, members, running, server, wait_until
from weightsync.serve.model import make_tiny_model

LONG: dict[str, Any] = {"prompts": ["on and on"], "n": 16, "max_new_tokens": 2000}


@pytest.mark.usefixtures("shm_clean")
@pytest.mark.parametrize("victim", ["worker 0.0", "api server 1"])
def test_whoever_is_killed_ends_the_server_and_is_named(victim: str, tmp_path: Path) -> None:
    model = make_tiny_model().model
    with (
        (tmp_path / "stderr").open("w+") as stderr,
        server("--api-servers", "2", stderr=stderr) as (url, token, process),
        ThreadPoolExecutor(1) as pool,
    ):
        tree = members(process)
        assert victim in tree
        with ws.connect(model, to=url, token=token) as sender:
            sender.send_weights()
            answer = pool.submit(requests.post, f"{url}/generate", json=LONG, timeout=WAIT_S)
            wait_until(lambda: running(url)[0] > 0, "nothing began")
            tree[victim].kill()
            assert process.wait(WAIT_S) not in (0, None)
            with pytest.raises(ws.WeightSyncError):
                sender.send_weights()
        _, alive = psutil.wait_procs(list(tree.values()), timeout=WAIT_S)
        assert alive == []
        # Its client was answered or saw the connection end; it does not wait.
        with suppress(requests.ConnectionError):
            assert answer.result(WAIT_S).status_code in (200, 503)
        stderr.seek(0)
        told = stderr.read()
    assert f"weightsync: the process {victim} (pid {tree[victim].pid}) was ended by SIGKILL" in told
    assert "Traceback" not in told


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[str, str]]:
    """Two API servers, two replicas, at most 24 completions at work in each."""
    with server(
        "--api-servers", "2", "--data-parallel", "2", "--max-rows", "24", "--apply", "in_place"
    ) as (url, token, _):
        yield url, token


def test_two_hundred_requests_at_once_are_all_answered(two: tuple[str, str]) -> None:
    url, _ = two

    def ask(number: int) -> tuple[int, list[int]]:
        body = {"prompts": [[3 + number % 200, 7]], "max_new_tokens": 6, "temperature": 0.0}
        answer = requests.post(f"{url}/generate", json=body, timeout=WAIT_S)
        return answer.status_code, answer.json()["completions"][0]["token_ids"]

    with ThreadPoolExecutor(200) as pool:
        at_once = list(pool.map(ask, range(200)))
    assert {status for status, _ in at_once} == {200}
    # Alone or beside 199 others, a prompt has the same completion.
    assert [ask(number) for number in range(0, 200, 40)] == at_once[::40]


def _hang_up(url: str, body: dict[str, Any], *, stream: bool) -> None:
    """Send a request whole, wait until it is taken in, and close the connection."""
    host, port = url.removeprefix("http://").split(":")
    path = "/v1/completions" if stream else "/generate"
    text = requests.Request("POST", url, json=body).prepare().body
    assert isinstance(text, bytes)
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(text)}\r\n\r\n"
        connection.sendall(head.encode() + text)
        if stream:
            assert connection.recv(64).startswith(b"HTTP/1.1 200")
        else:
            wait_until(lambda: sum(running(url)) > 0, "the request was not taken in")


@pytest.mark.parametrize("stage", ["waiting", "decoding", "streaming", "paused"])
def test_whoever_hangs_up_leaves_nothing_behind(two: tuple[str, str], stage: str) -> None:
    url, token = two
    headers = {"Authorization": f"Bearer {token}"}
    wait_until(lambda: running(url) == (0, 0), "the test before left something")
    body = {**LONG, "n": 24}
    if stage == "streaming":
        body = {"prompt": "on and on", "n": 4, "max_tokens": 2000, "stream": True}
    if stage == "paused":
        requests.post(f"{url}/pause", headers=headers, timeout=WAIT_S).raise_for_status()
    holders = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        if stage == "waiting":  # both replicas are full
            full = []
            while running(url)[0] < 48:  # two may meet at one: API servers count their own jobs
                full.append(pool.submit(_hold, url, holders))
                _wait_for_work(url, 24 * len(full))
            body["n"] = 1
        _hang_up(url, body, stream=stage == "streaming")
        holders.set()
        if stage == "waiting":
            for holder in full:
                holder.result(WAIT_S)
    if stage == "paused":
        requests.post(f"{url}/resume", headers=headers, timeout=WAIT_S).raise_for_status()
    wait_until(lambda: running(url) == (0, 0), "a request goes on without its client")


def _wait_for_work(url: str, count: int) -> None:
    """Wait until so many completions run or wait, and a moment for those that can to begin."""
    wait_until(lambda: sum(running(url)) >= count, "the request was not taken in")
    time.sleep(0.3)


def _hold(url: str, until: threading.Event) -> None:
    """Keep a replica full until told otherwise, then hang up."""
    body = {"prompt": "a", "n": 24, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with requests.post(
        f"{url}/v1/completions",
        json=body,
        timeout=WAIT_S,
        stream=True,
    ) as answer:
        assert answer.status_code == 200
        until.wait(WAIT_S)


def test_bodies_over_the_limit_are_not_read(two: tuple[str, str]) -> None:
    url, token = two
    headers = {"Authorization": f"Bearer {token}"}
    for path, most in (("generate", 32 << 20), ("update_weights", 64 << 20)):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
            connection.sendall(
                f"POST /{path} HTTP/1.1\r\nHost: {host}\r\n"
                f"Authorization: {headers['Authorization']}\r\n"
                f"Content-Length: {most + 1}\r\n\r\n".encode()
            )
            assert connection.recv(64).startswith(b"HTTP/1.1 413")


def _break_off(sender: ws.WeightSender, pairs: list[tuple[str, torch.Tensor]]) -> None:
    with sender.update(partial=True) as update:
        update.send(pairs)
        raise ZeroDivisionError


@pytest.mark.usefixtures("shm_clean")
def test_torn_weights_are_refused_until_a_full_update(two: tuple[str, str]) -> None:
    url, token = two
    body = {"prompts": ["x"], "max_new_tokens": 2}
    model = make_tiny_model().model
    name, first = next(iter(model.named_parameters()))
    with ws.connect(model, to=url, token=token) as sender:
        version = sender.send_weights().version
        with pytest.raises(ZeroDivisionError):
            _break_off(sender, [(name, torch.zeros_like(first))])
        refused = requests.post(f"{url}/generate", json=body, timeout=WAIT_S)
        assert refused.status_code == 503
        assert "a full update heals this: call send_weights() again" in refused.json()["detail"]
        assert refused.headers["retry-after"]
        health = requests.get(f"{url}/health", timeout=WAIT_S)
        assert (health.status_code, health.json()["attributes"]["state"]) == (503, "TORN")
        healed = sender.send_weights()
        assert healed.version > version
        answer = requests.post(f"{url}/generate", json=body, timeout=WAIT_S)
    assert answer.status_code == 200
    spans = answer.json()["completions"][0]["weight_versions"]
    assert {span["version"] for span in spans} == {healed.version}
