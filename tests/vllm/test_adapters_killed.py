"""Trainers and workers killed at each step of an adapter's update: no wrong token, ever."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import requests

import weightsync as ws
from tests.children import CONTEXT, load_beforehand
from tests.vllm import victims
from tests.vllm.adapted import LONG, Told, adapt, assert_serves, assert_told, base_of, train
from tests.vllm.served import Served, vllm_server
from tests.vllm.tiny import expected, make_model
from weightsync.integrations.vllm.server import VllmHttpControl
from weightsync.transports.factory import TransportFactory
from weightsync.wire.messages import FinishRequest, Status, StatusRequest, StepReply

load_beforehand("tests.vllm.victims")

KILLS = int(os.environ.get("WEIGHTSYNC_TEST_VLLM_KILLS", "8"))
OPTIONS = {"--enable-lora": "", "--max-loras": "2", "--max-lora-rank": "8"}
ANSWER_S = 10.0
ENDS_S = 90.0
CALL_S = 15.0

pytestmark = pytest.mark.timeout(400 + 30 * KILLS)


class Held:
    """A server, and the versions of its adapter that were sent, by number."""

    def __init__(self, served: Served, model: Any, folder: Path) -> None:
        self.served = served
        self.model = model
        self.folder = folder
        self.base = base_of(model)
        self.told: dict[int, Told] = {}

    def of_seed(self, seed: int) -> Told:
        """What PEFT generates with the adapter of a seed."""
        train(self.model, seed)
        return expected(self.model)

    def versions(self) -> list[int]:
        """The versions that the server says it holds."""
        names = [model["id"] for model in self.served.get("v1/models")["data"]]
        return [int(n.partition("@")[2]) for n in names if n.startswith("policy@")]

    def assert_whole(self) -> int:
        """Assert that each version that is held is one that was sent; return the newest."""
        started = time.monotonic()
        held = self.versions()
        newest = max(held)
        assert_serves(self.served, "policy", self.told[newest])
        assert time.monotonic() - started < ANSWER_S
        for version in held:
            assert_serves(self.served, f"policy@{version}", self.told[version])
        assert_serves(self.served, "tiny", self.base)
        assert not self.served.is_paused
        return newest

    def send(self, seed: int) -> int:
        """Send the adapter of a seed."""
        wanted = self.of_seed(seed)
        with ws.connect(ws.AdapterSource(self.model, name="policy"), to=self.served.url) as sender:
            version = sender.send_weights().version
        self.told[version] = wanted
        return version


@pytest.fixture(scope="module", params=[1, 2], ids=["one-worker", "two-workers"])
def held(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Held]:
    folder = tmp_path_factory.mktemp("killed")
    base = make_model(folder, tied=False)
    log = folder / "server.log"
    with vllm_server(folder, log, workers=request.param, options=OPTIONS) as served:
        yield Held(served, adapt(base), folder)


@pytest.mark.parametrize("fatal", ["collective_rpc 1", "collective_rpc 2"])
def test_a_trainer_that_dies_before_a_step(held: Held, fatal: str) -> None:
    """Before an update is staged, and when it is staged and not in use."""
    before = held.send(1)
    victim = CONTEXT.Process(
        target=victims.send_adapter_until_killed,
        args=(held.served.url, str(held.folder), 10, fatal),
        daemon=True,
    )
    victim.start()
    victim.join(120)
    assert victim.exitcode == -signal.SIGKILL
    held.told[before + 1] = held.of_seed(10)
    assert held.assert_whole() == before + 1
    assert held.send(2) > before + 1
    held.assert_whole()


def test_trainers_that_die_at_any_time(held: Held) -> None:
    chance, sent = random.Random(14), []
    for number in range(KILLS):
        held.send(20 + number)
        seed = 1000 * (number + 1)
        ours, theirs = CONTEXT.Pipe()
        victim = CONTEXT.Process(
            target=victims.send_adapters_until_killed,
            args=(held.served.url, str(held.folder), seed, theirs),
            daemon=True,
        )
        victim.start()
        theirs.close()
        try:
            assert ours.poll(120), "the trainer did not connect"
            began = ours.recv()
            time.sleep(chance.uniform(0.02, 0.5))
        finally:
            victim.kill()
            victim.join(30)
            ours.close()
        newest = max(held.versions())
        sent.append(newest - began)
        # One more may be in use soon: its finish was on its way when the trainer died.
        for i in range(1, newest - began + 2):
            held.told[began + i] = held.of_seed(seed + i)
        assert held.assert_whole() in (newest, newest + 1)
    print(f"\n{KILLS} kills, after {sent} versions each")
    assert sum(sent) > 0  # or nothing was tried


SET_STEPS = {
    "collective_rpc 3": 0,  # both parts are staged, and no pause is announced
    "collective_rpc 4": 0,  # generation is paused, and no part has its finish
    "reset_prefix_cache": 1,  # both are committed, and generation is paused
}
"""The call before which the trainer of a set dies, and whether its update is in use then."""


@pytest.mark.parametrize("fatal", SET_STEPS)
def test_a_trainer_of_a_set_that_dies_leaves_both_old_or_both_new(held: Held, fatal: str) -> None:
    served, model = held.served, held.model
    victim = CONTEXT.Process(
        target=victims.send_set_until_killed,
        args=(served.url, str(held.folder), 300, fatal),
        daemon=True,
    )
    victim.start()
    victim.join(120)
    assert victim.exitcode == -signal.SIGKILL
    victims.train_set(model, 300 + SET_STEPS[fatal])
    assert_serves(served, "tiny", base_of(model))  # waits until generation goes on by itself
    assert_serves(served, "policy", expected(model))
    assert not served.is_paused
    for seed in (310, 311):
        victims.train_set(model, seed)
        with victims.connect_set(model, served.url) as sender:
            sender.send_weights()
        assert_serves(served, "tiny", base_of(model))
        assert_serves(served, "policy", expected(model))


def test_a_sender_of_the_adapter_finishes_a_dead_set_as_an_update_of_the_model(held: Held) -> None:
    """As it does where another server of the set has committed it."""
    served, model = held.served, held.model
    victim = CONTEXT.Process(
        target=victims.send_set_until_killed,
        args=(served.url, str(held.folder), 320, "collective_rpc 3"),
        daemon=True,
    )
    victim.start()
    victim.join(120)
    assert victim.exitcode == -signal.SIGKILL
    victims.train_set(model, 320)
    for _ in range(2):  # the second time from the cache
        assert_serves(served, "tiny", base_of(model, LONG), LONG)
    transports = TransportFactory(None, below="adapters/policy").every(served.url)
    statuses = [transport.call(StatusRequest(), timeout_s=30) for transport in transports]
    (update_id,) = {status.update_id for status in statuses if isinstance(status, Status)}
    finish = FinishRequest(update_id=update_id)
    with ThreadPoolExecutor(len(transports)) as pool:
        calls = [pool.submit(t.call, finish, timeout_s=60) for t in transports]
        replies = [call.result() for call in calls]
    for transport in transports:
        transport.close()
    (version,) = {reply.version for reply in replies if isinstance(reply, StepReply)}
    victims.train_set(model, 321)
    assert not served.is_paused
    assert served.get("weight_info") == {"weight_version": str(version)}
    assert_serves(served, "tiny", base_of(model, LONG), LONG)
    assert_serves(served, "policy", expected(model))
    held.base = base_of(model)


def workers_of(served: Served) -> list[psutil.Process]:
    """The processes in which the model is: of one worker it is that of the engine."""
    below = psutil.Process(served.process.pid).children(recursive=True)
    named = {kind: [p for p in below if kind in " ".join(p.cmdline())] for kind in KINDS}
    return next(found for found in named.values() if found)


KINDS = ("VLLM::Worker", "VLLM::EngineCore")
STEPS: dict[str, tuple[int, float]] = {
    "before the stage": (1, -1.0),
    "in the stage": (1, 0.004),
    "between stage and swap": (2, -1.0),
    "in the swap": (2, 0.001),
}
"""The message at which a worker is killed, and how many seconds after it was sent; -1: before."""


def kill_at(step: str, kill: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a worker killed at a step of the next update."""
    at, after = STEPS[step]
    request, pool, count = VllmHttpControl.request, ThreadPoolExecutor(1), [0]

    def later() -> None:
        time.sleep(after)
        kill()

    def counted(control: VllmHttpControl, verb: str, *args: Any, **kwargs: Any) -> Any:
        if verb == "collective_rpc":
            count[0] += 1
            if count[0] == at:
                pool.submit(later) if after > 0 else kill()
        return request(control, verb, *args, **kwargs)

    monkeypatch.setattr(VllmHttpControl, "request", counted)


@pytest.mark.parametrize(
    ("step", "workers"),
    [
        ("between stage and swap", 1),
        *((step, 2) for step in STEPS),
    ],
)
def test_a_worker_that_is_killed(
    step: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM ends when a worker does. Until then each answer is of a whole version that was sent."""
    base = make_model(tmp_path, tied=False)
    model = adapt(base)
    source = ws.AdapterSource(model, name="policy")
    answers: list[tuple[list[int], list[float]]] = []
    wanted: list[Told] = []
    with vllm_server(tmp_path, tmp_path / "one.log", workers=workers, options=OPTIONS) as served:
        sender = ws.connect(source, to=served.url, timeout_s=CALL_S)
        for seed in (1, 2):
            train(model, seed)
            sender.send_weights()
            wanted.append(expected(model))
        train(model, 3)
        wanted.append(expected(model))
        over = False

        def ask() -> None:
            while not over:
                try:
                    answer = served.request("policy")
                except requests.RequestException:
                    return
                if answer.status_code != 200:
                    return
                choice = answer.json()["choices"][0]
                answers.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))

        with ThreadPoolExecutor(2) as pool:
            asking = [pool.submit(ask) for _ in range(2)]
            try:
                deadline = time.monotonic() + 30
                while len(answers) < 4 and time.monotonic() < deadline:
                    time.sleep(0.05)
                victim = workers_of(served)[-1]
                kill_at(step, victim.kill, monkeypatch)
                began = time.monotonic()
                with pytest.raises(ws.WeightSyncError) as raised:
                    sender.send_weights()
                said = time.monotonic() - began
                monkeypatch.undo()
                served.process.wait(ENDS_S)  # vLLM ends by itself, when no call waits any more
                ended = time.monotonic() - began
                print(f"\n{step}: {raised.value!r} after {said:.0f} s, the end after {ended:.0f} s")
            finally:
                over = True
            for each in asking:
                each.result()
        assert not victim.is_running()
    assert len(answers) >= 4
    for found in answers:  # the version in use, or the one whose swap had begun
        (told,) = [told for told in wanted[1:] if told[0] == found[0]]
        assert_told(found, told)
    if step != "in the swap":
        assert all(found[0] == wanted[1][0] for found in answers)
    sender.close()


def test_a_server_that_is_started_again_gets_the_adapter_from_the_same_sender(
    tmp_path: Path,
) -> None:
    base = make_model(tmp_path, tied=False)
    model = adapt(base)
    with vllm_server(tmp_path, tmp_path / "one.log", options=OPTIONS) as served:
        port = urlsplit(served.url).port
        sender = ws.connect(ws.AdapterSource(model, name="policy"), to=served.url, timeout_s=CALL_S)
        sender.send_weights()
        served.process.kill()
        served.process.wait(30)
    with (
        sender,
        vllm_server(tmp_path, tmp_path / "two.log", options=OPTIONS, port=port) as again,
    ):
        assert again.request("policy").status_code == 404
        train(model, 5)
        sender.send_weights()
        assert_serves(again, "policy", expected(model))
        assert_serves(again, "tiny", base_of(model))
