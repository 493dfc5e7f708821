"""The examples, run as a user runs them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.server.live import held_port

EXAMPLES = Path(__file__).parents[2] / "examples"
START_TIMEOUT_S = 60.0


def _answer(port: int) -> dict[str, object]:
    url = f"http://127.0.0.1:{port}/answer?x=0.5"
    with urllib.request.urlopen(url, timeout=5) as reply:
        loaded: dict[str, object] = json.load(reply)
        return loaded


def _wait_until_it_answers(port: int, server: subprocess.Popen[bytes]) -> dict[str, object]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            return _answer(port)
        except OSError:
            time.sleep(0.2)
    raise AssertionError("examples/receiver.py did not start")


@pytest.mark.usefixtures("shm_clean")
@pytest.mark.parametrize("trainer", ["trainer.py", "overlap.py"])
def test_trainer_and_receiver(trainer: str) -> None:
    with held_port() as port:
        check_trainer_and_receiver(trainer, port)


def check_trainer_and_receiver(trainer: str, port: int) -> None:
    environment = {
        **os.environ,
        "WEIGHTSYNC_TOKEN": "a-token-for-this-test",
        "OMP_NUM_THREADS": "1",
    }
    server = subprocess.Popen(
        [sys.executable, EXAMPLES / "receiver.py", str(port)], env=environment
    )
    try:
        before = _wait_until_it_answers(port, server)
        said = subprocess.run(
            [sys.executable, EXAMPLES / trainer, f"http://127.0.0.1:{port}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        ).stdout
        after = _answer(port)
    finally:
        server.terminate()
        server.wait(20)
    assert before["version"] == 0
    assert after["version"] == 5
    assert said.count("verified: held") == 5
    trained = ast.literal_eval(said.splitlines()[-1].removeprefix("answer "))
    assert after["answer"] == trained
    assert after["answer"] != before["answer"]
