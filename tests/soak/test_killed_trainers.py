"""Trainers killed at any time of `send_weights()`: `weightsync serve` answers, and nobody helps."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Iterator

import pytest
import requests

import weightsync as ws
from tests.children import CONTEXT, load_beforehand
from tests.serve.servers import server
from tests.soak import victims
from weightsync.serve.model import make_tiny_model
from weightsync.shm.segment import remove_leftovers

load_beforehand("tests.soak.victims", "weightsync.serve.model")

KILLS = 200
ANSWER_S = 10.0
PROMPT = {"prompts": [[3, 7]], "max_new_tokens": 2, "temperature": 0.0}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=["staged", "in_place"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, str]]:
    with server("--apply", request.param) as (url, token, _):
        yield request.param, url, token
    remove_leftovers()


@pytest.mark.parametrize("path", victims.PATHS)
def test_the_server_answers_after_every_kill(served: tuple[str, str, str], path: str) -> None:
    apply, url, token = served
    chance = random.Random(14)
    waited, refused = [], 0
    for number in range(KILLS):
        _kill(url, token, path, number, chance)
        started = time.monotonic()
        answer = requests.post(f"{url}/generate", json=PROMPT, timeout=6 * ANSWER_S)
        waited.append(time.monotonic() - started)
        if apply == "in_place" and answer.status_code == 503:
            refused += 1
            assert "call send_weights() again" in answer.text
        else:
            assert answer.status_code == 200, answer.text
    print(
        f"\n{KILLS} kills, {apply}, {path}: refused {refused}; answers came after "
        f"{statistics.median(waited):.3f} s (median), {max(waited):.3f} s (maximum)"
    )
    assert max(waited) < ANSWER_S
    with ws.connect(make_tiny_model().model, to=url, token=token) as sender:
        sender.send_weights()
    assert requests.post(f"{url}/generate", json=PROMPT, timeout=ANSWER_S).status_code == 200
    assert not requests.get(f"{url}/is_paused", timeout=ANSWER_S).json()["is_paused"]


def _kill(url: str, token: str, path: str, seed: int, chance: random.Random) -> None:
    ours, theirs = CONTEXT.Pipe()
    trainer = CONTEXT.Process(
        target=victims.send_until_killed, args=(url, token, path, seed, theirs)
    )
    trainer.start()
    theirs.close()
    try:
        assert ours.poll(60), "the trainer did not come to its update"
        time.sleep(chance.uniform(0, 1.2 * ours.recv()))
        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.join(20)
        assert trainer.exitcode == -signal.SIGKILL
    finally:
        trainer.kill()
        trainer.join(10)
        ours.close()
