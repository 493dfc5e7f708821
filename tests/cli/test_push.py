"""`weightsync push`: what it loads, what it says, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import weightsync as ws
from tests.cli.running import (
    HEAD,
    ROOT,
    TOKEN,
    answer_of,
    fingerprints,
    tiny_tensors,
    weightsync,
    write_checkpoint,
)
from tests.server.live import make_app, serving
from tests.shm.processes import environment
from weightsync.cli.checkpoint import open_checkpoint
from weightsync.errors import install_hint
from weightsync.transports.http import HttpTransport
from weightsync.wire.messages import CheckReply, CheckRequest, Status, StatusRequest

WAIT_S = 60

pytestmark = pytest.mark.usefixtures("segments_closed")


def held_by(url: str) -> dict[str, str]:
    reply = HttpTransport(url, TOKEN).call(CheckRequest(), timeout_s=30)
    assert isinstance(reply, CheckReply)
    return reply.checksums


def version_of(url: str) -> int:
    reply = HttpTransport(url, "").call(StatusRequest(), timeout_s=30)
    assert isinstance(reply, Status)
    return reply.version


def test_a_checkpoint_is_loaded_and_reported(url: str, tmp_path: Path) -> None:
    tensors = tiny_tensors(6)
    before = version_of(url)
    result = weightsync("push", write_checkpoint(tmp_path, tensors), "--to", url)
    assert result.exit_code == 0, result.output
    assert held_by(url) == fingerprints(tensors)
    first, second, *_ = result.stdout.splitlines()
    assert first.startswith(f"pushed version {before + 1}: 0.4 MB in {len(tensors)} tensors, ")
    assert second.startswith(f"  {url}: shared_memory, staged, verified: held, stall ")
    assert result.stderr == ""


def test_json_is_the_report_and_nothing_else(url: str, checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    version = version_of(url) + 5
    options = ("--json", "--label", "best", "--version", version, "--no-verify")
    result = weightsync("push", file, "--to", url, *options)
    report = answer_of(result)
    assert result.stderr == ""
    assert (report["version"], report["label"], report["verified"]) == (version, "best", "none")
    assert [receiver["target"] for receiver in report["receivers"]] == [url]
    assert held_by(url) == fingerprints(tiny_tensors(5))


def test_another_dtype_is_named_and_cast_when_asked(url: str, tmp_path: Path) -> None:
    tensors = tiny_tensors(7, torch.bfloat16)
    path = write_checkpoint(tmp_path, tensors)
    before = held_by(url)
    result = weightsync("push", path, "--to", url)
    assert result.exit_code == 1
    assert result.stderr.endswith("; add --dtype float32\n")
    assert "offered bfloat16[259, 64], wanted float32[259, 64]" in result.stderr
    assert result.stderr.count("\n") == 1
    assert held_by(url) == before
    assert weightsync("push", path, "--to", url, "--dtype", "float32").exit_code == 0
    assert held_by(url) == fingerprints({name: t.float() for name, t in tensors.items()})


def test_another_model_is_refused_with_all_names(url: str, tmp_path: Path) -> None:
    tensors = tiny_tensors(8)
    del tensors["model.norm.weight"]
    tensors["model.extra"] = torch.zeros(3)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    path = write_checkpoint(tmp_path, tensors)
    before = held_by(url)
    result = weightsync("push", path, "--to", url, "--json")
    error = answer_of(result, 1)["error"]
    assert error["type"] == "ManifestMismatchError"
    assert (error["missing"], error["unexpected"]) == (["model.norm.weight"], ["model.extra"])
    assert [line.partition(":")[0] for line in error["mismatched"]] == [
        "model.layers.0.mlp.up_proj.weight"
    ]
    assert "a checkpoint of another model" in result.stderr
    assert "nothing was changed" in result.stderr
    assert held_by(url) == before


def test_an_older_version_wants_rewind(url: str, checkpoint: Path) -> None:
    held = version_of(url)
    assert weightsync("push", checkpoint, "--to", url, "--version", held + 3).exit_code == 0
    refused = answer_of(weightsync("push", checkpoint, "--to", url, "--version", 1, "--json"), 1)
    assert refused["error"]["type"] == "StaleVersionError"
    assert version_of(url) == held + 3
    options = ("--version", held + 1, "--rewind")
    assert weightsync("push", checkpoint, "--to", url, *options).exit_code == 0
    assert version_of(url) == held + 1


@pytest.mark.parametrize("as_json", [False, True])
def test_who_cannot_be_reached_or_refuses_has_a_code_of_its_own(
    url: str, checkpoint: Path, down: str, as_json: bool
) -> None:
    options = ("--json",) if as_json else ()
    before = version_of(url)
    cases = (
        (weightsync("push", checkpoint, "--to", down, *options), 3, "ConnectError"),
        (weightsync("push", checkpoint, "--to", url, *options, token="no"), 4, "AuthError"),
        (weightsync("push", checkpoint, "--to", url, *options, token=None), 4, "AuthError"),
        (weightsync("push", "nowhere", "--to", url, *options), 2, "ConfigError"),
        (weightsync("push", checkpoint, "--to", "ftp://x", *options), 2, "ConfigError"),
        (weightsync("push", checkpoint, "--to", url, "--backend", "x", *options), 2, "ConfigError"),
    )
    for result, code, name in cases:
        assert result.exit_code == code, result.output
        assert result.stderr.startswith("weightsync: ")
        assert result.stderr.count("\n") == 1
        if as_json:
            answer = answer_of(result, code)
            assert (answer["exit_code"], answer["error"]["type"]) == (code, name)
        else:
            assert result.stdout == ""
    assert version_of(url) == before


def test_a_token_may_be_an_option(url: str, checkpoint: Path) -> None:
    result = weightsync("push", checkpoint, "--to", url, "--token", TOKEN, token=None)
    assert result.exit_code == 0, result.output


def test_wrong_options_are_usage_errors(url: str, checkpoint: Path) -> None:
    for options in ((), ("--to", url, "--dtype", "int8"), ("--to", url, "--timeout", "0")):
        assert weightsync("push", checkpoint, *options).exit_code == 2


def test_a_tied_head_that_is_not_in_the_files_is_an_alias(checkpoint: Path) -> None:
    assert open_checkpoint(checkpoint, None).manifest.aliases == {HEAD: "model.embed_tokens.weight"}


def test_a_push_that_is_ended_leaves_nothing(checkpoint: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        inside.set()
        go_on.wait(WAIT_S)

    receiver = ws.WeightReceiver(slow, apply="in_place")
    with serving(make_app(receiver, None)) as url:
        process = subprocess.Popen(
            [sys.executable, "-m", "weightsync", "push", str(checkpoint), "--to", url],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        try:
            assert inside.wait(WAIT_S)
            process.send_signal(signal.SIGINT)
            go_on.set()
            _, said = process.communicate(timeout=WAIT_S)
        finally:
            go_on.set()
            process.kill()
            process.wait(WAIT_S)
        assert (process.returncode, said) == (130, "")
        assert receiver.status().shared_memory == []
    receiver.close()


@pytest.mark.parametrize(
    ("hidden", "code", "said"),
    [
        ("", 2, "weightsync: nowhere does not exist; give a directory with"),
        ("rich", 1, f"push needs rich; {install_hint('safetensors,cli')}"),
    ],
)
def test_a_process_ends_with_one_line(hidden: str, code: int, said: str, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({hidden.split()!r}))\n"
        "sys.argv = ['weightsync', 'push', 'nowhere', '--to', 'http://127.0.0.1:1']\n"
        "from weightsync.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
