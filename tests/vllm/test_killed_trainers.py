"""Trainers killed at any time of `send_weights()`: the server answers again, and nobody helps."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

import weightsync as ws
from tests.children import CONTEXT, load_beforehand
from tests.vllm import victims
from tests.vllm.served import Served, vllm_server
from tests.vllm.tiny import PROMPT, change, make_model
from weightsync.integrations.vllm.pauses import CHECK_S, LEASE_S
from weightsync.integrations.vllm.server import VllmHttpControl, VllmServer

load_beforehand("tests.vllm.victims")

KILLS = int(os.environ.get("WEIGHTSYNC_TEST_VLLM_KILLS", "12"))
ANSWER_S = 10.0
STEPS = {
    "staged": (
        *("collective_rpc 2", "pause", "collective_rpc 3"),
        *("reset_prefix_cache", "resume", "collective_rpc 4"),
    ),
    "in_place": ("pause", "collective_rpc 2", "collective_rpc 3", "resume", "collective_rpc 4"),
}
"""Calls of an update: a trainer is killed before each of them, beside those killed at random."""

pytestmark = pytest.mark.timeout(400 + 30 * KILLS)


class Killed:
    """A server whose trainers die, and the model that it was made of."""

    def __init__(self, served: Served, model: Any, folder: Path, apply: str) -> None:
        self.served = served
        self.model = model
        self.apply = apply
        self.waited: list[float] = []
        self.refused = 0
        self.paused = 0
        self._folder = folder
        self._random = random.Random(14)
        self._seed = 100

    def kill(self, fatal: str = "") -> None:
        """Have a trainer killed in its update."""
        self._seed += 10
        ours, theirs = CONTEXT.Pipe()
        args = (self.served.url, str(self._folder), self._seed, fatal, theirs)
        trainer = CONTEXT.Process(target=victims.send_until_killed, args=args)
        trainer.start()
        theirs.close()
        try:
            assert ours.poll(120), "the trainer did not come to its update"
            seconds = ours.recv()
            if not fatal:
                time.sleep(self._random.uniform(0, 1.2 * seconds))
                assert trainer.pid is not None
                os.kill(trainer.pid, signal.SIGKILL)
            trainer.join(60)
            assert trainer.exitcode == -signal.SIGKILL, f"it never came to {fatal}"
        finally:
            trainer.kill()
            trainer.join(10)
            ours.close()

    def ask(self) -> None:
        """Ask at once; a refusal is an answer where the trainer died with the weights in pieces."""
        self.paused += self.served.is_paused
        started = time.monotonic()
        answer = requests.post(
            f"{self.served.url}/v1/completions",
            json={"model": "tiny", "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True},
            timeout=6 * ANSWER_S,
        )
        self.waited.append(time.monotonic() - started)
        if self.apply == "in_place" and answer.status_code == 500:
            self.refused += 1
            assert self.served.is_paused
        else:
            assert answer.status_code == 200, answer.text
            assert not self.served.is_paused


@pytest.fixture(
    scope="module",
    params=[("staged", 1), ("in_place", 1), ("staged", 2)],
    ids=["staged", "in-place", "two-workers"],
)
def killed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Killed]:
    apply, workers = request.param
    folder = tmp_path_factory.mktemp("killed")
    model = make_model(folder, tied=workers == 1)
    with vllm_server(folder, folder / "server.log", workers=workers, apply=apply) as served:
        yield Killed(served, model, folder, apply)


def test_the_server_answers_after_every_kill(killed: Killed) -> None:
    for fatal in [*STEPS[killed.apply], *[""] * KILLS]:
        killed.kill(fatal)
        killed.ask()
    print(
        f"\n{len(killed.waited)} kills, {killed.apply}: the server was found paused after "
        f"{killed.paused}, refused {killed.refused}; answers came after "
        f"{statistics.median(killed.waited):.2f} s (median), {max(killed.waited):.2f} s (maximum)"
    )
    assert max(killed.waited) < ANSWER_S
    assert killed.paused  # or nothing was tried
    with ws.connect(killed.model, to=killed.served.url) as sender:
        change(killed.model, seed=7)
        sender.send_weights()
    killed.served.assert_computes(killed.model)
    assert not killed.served.is_paused


def test_a_pause_after_one_that_was_ended_by_hand_is_the_user_s(killed: Killed) -> None:
    served = killed.served
    sender = VllmServer(VllmHttpControl(served.url), timeout_s=30)
    try:
        sender._announce({0: ""}, timeout_s=30)  # the last that is heard of it
        for verb in ("pause?mode=keep", "resume", "pause?mode=keep"):
            served.post(verb).raise_for_status()
        time.sleep(LEASE_S + 4 * CHECK_S)
        assert served.is_paused
    finally:
        served.post("resume").raise_for_status()
        sender.control.close()


def test_a_pause_of_the_user_outlives_a_trainer(killed: Killed) -> None:
    killed.served.post("pause?mode=keep").raise_for_status()
    try:
        killed.kill("collective_rpc 3")
        time.sleep(4 * CHECK_S)
        assert killed.served.is_paused
    finally:
        killed.served.post("resume").raise_for_status()
    killed.ask()
