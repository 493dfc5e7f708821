"""`weightsync status`: what it shows of servers that are ready, torn, busy or gone."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest
import torch
from fastapi import FastAPI, Response
from torch import nn

import weightsync as ws
from tests.cli.running import TOKEN, answer_of, tiny_tensors, weightsync
from tests.server.live import make_app, serving
from tests.shm.processes import environment, line_of
from weightsync.cli.status import (
    ServerStatus,
    are_in_step,
    fetch_last_updates,
    overall,
    parse_metrics,
    paths_of,
)
from weightsync.integrations.sglang.server import SglangFacts
from weightsync.server import Workers, worker_path, workers_router
from weightsync.server.workers import merge_statuses
from weightsync.transports.http import HttpTransport
from weightsync.wire.messages import Status

WAIT_S = 60


def test_a_server_shows_what_it_holds(url: str, checkpoint: Path) -> None:
    options = ("--label", "best", "--json")
    pushed = answer_of(weightsync("push", checkpoint, "--to", url, *options))
    result = weightsync("status", url)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[:3] == [url, "  state     READY", f"  version   {pushed['version']} (best)"]
    assert any(line.startswith("  last      0.4 MB, load ") for line in lines)
    assert lines[-1] == "  memory    empty: no sender is connected"
    (server,) = answer_of(weightsync("status", url, "--json"))["servers"]
    assert (server["state"], server["version"]) == ("READY", pushed["version"])
    assert (server["path"], server["shared_memory"], server["paused"]) == ("none", [], False)
    assert server["updates"]["nbytes"] == pushed["nbytes"]
    assert server["updates"]["ended"]["committed"] >= 1


def test_shared_memory_shows_who_is_connected(url: str) -> None:
    with ws.connect(tiny_tensors(5), to=url, token=TOKEN):
        (server,) = answer_of(weightsync("status", url, "--json"))["servers"]
        said = weightsync("status", url).stdout
    assert server["path"] == "shared_memory"
    assert list(server["senders"].values()) == ["shared_memory"]
    assert {entry["kind"] for entry in server["shared_memory"]} >= {"control", "ring"}
    assert "path      shared_memory; HOST-" in said
    assert "memory    1 control, 1 ring; " in said


def test_who_cannot_be_reached_does_not_hide_the_others(url: str, down: str) -> None:
    result = weightsync("status", down, url)
    assert result.exit_code == 3
    assert f"{down}\n  unreachable: " in result.stdout
    assert f"{url}\n  state     READY" in result.stdout
    assert "\nunknown whether in step: " in result.stdout
    answer = answer_of(weightsync("status", down, url, "--json"), 3)
    first, second = answer["servers"]
    assert answer["in_step"] is None
    assert (first["reachable"], first["error"]["type"]) == (False, "ConnectError")
    assert (second["reachable"], second["url"]) == (True, url)


@pytest.mark.parametrize(
    ("body", "status", "said", "code"),
    [
        (b"<ht>", 200, "answers, but not as a weightsync server: ", 1),
        (b"<ht>", 404, "answers with an error: ", 1),
        (b"", 401, "refuses the token: ", 4),
    ],
)
def test_who_answers_something_else_is_not_called_unreachable(
    body: bytes, status: int, said: str, code: int
) -> None:
    app = FastAPI()
    app.add_api_route("/weight_info", lambda: Response(body, status))
    with serving(app) as url:
        result = weightsync("status", url)
        (server,) = answer_of(weightsync("status", url, "--json"), code)["servers"]
    assert result.exit_code == code
    assert result.stdout.startswith(f"{url}\n  {said}{url}")
    assert server["reachable"] is True
    assert server["error"]["message"]


def failing(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
    raise RuntimeError("the hook fails")


def test_a_torn_server_is_a_failure() -> None:
    receiver = ws.WeightReceiver(failing, apply="in_place")
    with serving(make_app(receiver, None)) as url:
        try:
            model = nn.Linear(2, 2)
            with (
                ws.connect(model, to=url) as sender,
                pytest.raises(ws.WeightSyncError),
            ):
                sender.send_weights()
            result = weightsync("status", url)
            assert result.exit_code == 1
            assert "  state     TORN: may not generate" in result.stdout
            (server,) = answer_of(weightsync("status", url, "--json"), 1)["servers"]
            assert server["may_generate"] is False
            assert server["updates"]["ended"] == {"torn": 1}
        finally:
            receiver.close()


def test_watching_goes_on_until_it_is_interrupted(url: str) -> None:
    command = [sys.executable, "-m", "weightsync", "status", url, "--watch", "--interval", "0.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        looks = 0
        while looks < 3:
            line = line_of(process)
            assert line, "the command ended"
            looks += line == url
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait(WAIT_S)


def test_wrong_arguments_are_usage_errors(url: str) -> None:
    refused = weightsync("status", url, "--watch", "--json")
    assert answer_of(refused, 2)["error"]["message"].startswith("--watch does not end")
    assert weightsync("status").exit_code == 2
    assert weightsync("status", "not-a-url").exit_code == 2
    assert weightsync("status", url, "--timeout", "0").exit_code == 2


def test_a_server_without_metrics_is_no_error(url: str, down: str) -> None:
    for address in (down, f"{url}/nowhere"):
        with closing(HttpTransport(address, "")) as transport:
            updates = fetch_last_updates(transport, 5)
        assert (updates.ended, updates.nbytes) == ({}, None)


def test_lines_of_other_metrics_are_left_alone() -> None:
    updates = parse_metrics(
        "# HELP weightsync_updates_total Updates\n"
        'weightsync_updates_total{result="aborted"} 2.0\n'
        'weightsync_last_update_seconds{phase="load"} 1.5e-03\n'
        "weightsync_last_update_bytes 1024.0\n"
        'weightsync_last_update_bytes_from_rank{rank="10"} 1000.0\n'
        'weightsync_last_update_bytes_from_rank{rank="2"} 24.0\n'
        'weightsync_last_update_bytes_from_rank{rank="x"} 7.0\n'
        "python_info 1.0\n"
        "weightsync_version broken\n"
    )
    assert updates.ended == {"aborted": 2}
    assert updates.seconds == {"load": 0.0015}
    assert (updates.nbytes, updates.stall_s) == (1024, None)
    assert updates.from_ranks == {10: 1000, 2: 24}


def held(**senders: str) -> Status:
    return Status(
        instance="i",
        protocol=1,
        state="READY",
        version=1,
        may_generate=True,
        apply="staged",
        verification="held",
        senders=senders,
    )


def test_a_path_and_a_code_for_many() -> None:
    assert paths_of(held(a="shared_memory", b="tcp")) == "shared_memory, tcp"
    both = merge_statuses({"0": held(a="shared_memory"), "1": held(a="tcp", b="x")})
    assert both.senders == {"a": "shared_memory, tcp", "b": "x"}
    assert [overall(codes) for codes in ([0, 0], [0, 1], [1, 3, 4], [0, 4])] == [0, 1, 3, 4]


def test_servers_of_one_fleet_are_in_step_and_others_are_not() -> None:
    with ExitStack() as stack:
        receivers = [ws.WeightReceiver(nn.Linear(4, 4)) for _ in range(2)]
        urls = []
        for receiver in receivers:
            stack.callback(receiver.close)
            urls.append(stack.enter_context(serving(make_app(receiver, None))))
        assert compared(urls) == ("unknown whether in step: 2 at version 0", None)
        with ws.connect(nn.Linear(4, 4), to=urls) as sender:
            sender.send_weights()
        assert compared(urls) == ("all in step: 2 at version 1", True)
        assert "in_step" not in answer_of(weightsync("status", urls[0], "--json"))
        with ws.connect(nn.Linear(4, 4), to=urls[0]) as sender:
            sender.send_weights(version=1, rewind=True)
        assert compared(urls) == ("not in step: 2 at version 1", False)


def compared(urls: list[str]) -> tuple[str, bool | None]:
    """Return the last line of the text, and what the JSON has instead."""
    said = weightsync("status", *urls).stdout.splitlines()[-1]
    return said, msgspec.json.decode(weightsync("status", *urls, "--json").stdout)["in_step"]


def test_what_cannot_be_compared_is_not_in_step() -> None:
    same = {"version": 2, "weights_id": "w"}
    ready = ServerStatus(url="a", status=msgspec.structs.replace(held(), **same))
    torn = ServerStatus(url="b", status=msgspec.structs.replace(held(), **same, may_generate=False))
    down = ServerStatus(url="c", error=ws.ConnectError("down"))
    sglang = ServerStatus(
        url="d", facts=SglangFacts(version=(0, 5), model_path="m", weight_version="2")
    )
    assert are_in_step([ready, ready]) is True
    assert are_in_step([down, down]) is None
    assert are_in_step([ready, torn]) is False
    assert are_in_step([sglang, sglang]) is None
    assert are_in_step([ready, sglang]) is None
    assert are_in_step([torn, sglang]) is False
    newer = ServerStatus(url="e", status=msgspec.structs.replace(held(), version=3))
    assert are_in_step([ready, newer, down]) is False


def test_a_server_of_several_workers_has_a_line_for_each() -> None:
    receivers = [ws.WeightReceiver(nn.Linear(4, 4), apply="in_place") for _ in range(2)]
    workers = Workers({worker_path(k): receiver for k, receiver in enumerate(receivers)})
    app = FastAPI()
    app.include_router(workers_router(workers, token=TOKEN))
    try:
        with serving(app) as url:
            with ws.connect(nn.Linear(4, 4), to=url, token=TOKEN) as sender:
                sender.send_weights()
            result = weightsync("status", url)
            assert result.exit_code == 0, result.output
            lines = result.stdout.splitlines()
            assert lines[2].startswith("  version   1")
            for k, line in enumerate(lines[-2:]):
                assert line.startswith(f"  workers/{k}  version 1, READY; 1 updates, HOST-")
            with ws.connect(nn.Linear(4, 4), to=f"{url}/workers/1", token=TOKEN) as sender:
                sender.send_weights()
            (server,) = answer_of(weightsync("status", url, "--json"), 1)["servers"]
            assert (server["version"], server["may_generate"]) == (1, False)
            each = server["each_worker"]
            assert [(one["version"], one["may_generate"]) for one in each] == [(1, True), (2, True)]
            assert "the workers hold different weights" in weightsync("status", url).stdout
    finally:
        workers.close()
        for receiver in receivers:
            receiver.close()
