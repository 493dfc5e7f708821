"""Sets on a vLLM server: base and adapters commit in one round, in each worker both or none."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

import weightsync as ws
from tests.children import CONTEXT
from tests.integrations.vllm_workers import Endpoints, Workers
from weightsync.integrations.vllm import rpc
from weightsync.integrations.vllm import server as vllm_server
from weightsync.transports.factory import TransportFactory
from weightsync.wire.messages import FinishRequest, StatusRequest

PATH = "adapters/policy"


class SetOfWorkers:
    """A server of two workers, of which each has a receiver below that of its model."""

    def __init__(self, url: str, workers: Workers) -> None:
        self.url = f"vllm+{url}"
        self.workers = workers
        self.parts = [torch.nn.Linear(8, 8) for _ in workers.models]
        workers.below[PATH] = [
            ws.WeightReceiver(part, beside=base)
            for part, base in zip(self.parts, workers.receivers, strict=True)
        ]
        self.base, self.part = torch.nn.Linear(40, 40), torch.nn.Linear(8, 8)

    def connect(self, to: Any = None) -> ws.SetSender:
        return ws.connect_set({"": self.base, PATH: self.part}, to=to or self.url, timeout_s=5)

    def train(self) -> None:
        for model in (self.base, self.part):
            torch.nn.init.normal_(model.weight)

    def versions(self) -> list[tuple[int, int]]:
        """Those of the model and of the part, in each worker."""
        both = zip(self.workers.receivers, self.workers.below[PATH], strict=True)
        return [(base.version, part.version) for base, part in both]

    def holds(self) -> list[tuple[bool, bool]]:
        """Whether each worker has the trainer's weights of the model, and of the part."""
        return [
            (torch.equal(base.weight, self.base.weight), torch.equal(part.weight, self.part.weight))
            for base, part in zip(self.workers.models, self.parts, strict=True)
        ]


@pytest.fixture
def served(shm_clean: None) -> Iterator[SetOfWorkers]:
    workers = Workers(2)
    endpoints = Endpoints(workers)
    yield SetOfWorkers(endpoints.url, workers)
    endpoints.close()
    workers.end()


class Rounds:
    """The finishes that came to the workers: which parts each round had, and what it left."""

    def __init__(self, served: SetOfWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: list[set[str]] = []
        self.versions: list[list[tuple[int, int]]] = []
        handle = served.workers.rpc

        def note(text: str, *, timeout_s: float) -> object:
            round_ = rpc.decode_round(text)
            calls = {round_.below: round_.calls, **round_.parts}
            found = {
                path
                for path, each in calls.items()
                if any(call.call == "finish_weight_update" for call in each.values())
            }
            answers = handle(text, timeout_s=timeout_s)
            if found:
                self.parts.append(found)
                self.versions.append(served.versions())
            return answers

        monkeypatch.setattr(served.workers, "rpc", note)


@pytest.fixture
def rounds(served: SetOfWorkers, monkeypatch: pytest.MonkeyPatch) -> Rounds:
    return Rounds(served, monkeypatch)


def test_both_parts_commit_in_one_round_while_generation_is_paused(
    served: SetOfWorkers, rounds: Rounds
) -> None:
    with served.connect() as sender:
        for _ in range(3):
            served.train()
            served.workers.log.clear()
            reports = sender.send_weights()
            log = served.workers.log
            finish = log.index("rpc finish_weight_update")
            assert log.index("pause keep") < finish < log.index("resume")
            assert {report.version for report in reports} == {sender.version}
            assert served.versions() == [(sender.version, sender.version)] * 2
            assert served.holds() == [(True, True)] * 2
    assert rounds.parts == [{"", PATH}] * 3
    assert not served.workers.paused


def test_both_parts_are_sent_by_transports_to_the_workers(served: SetOfWorkers) -> None:
    transports = TransportFactory(None, timeout_s=5).every(served.url)
    assert len(transports) == 2
    with served.connect(transports) as sender:
        for _ in range(2):
            served.train()
            sender.send_weights()
            assert served.holds() == [(True, True)] * 2
    with pytest.raises(ws.ConnectError, match="closed"):
        transports[0].call(StatusRequest(), timeout_s=5)


def test_two_parts_without_the_model_need_no_pause(served: SetOfWorkers, rounds: Rounds) -> None:
    workers, other = served.workers, torch.nn.Linear(8, 8)
    workers.below["adapters/other"] = [
        ws.WeightReceiver(torch.nn.Linear(8, 8), beside=base) for base in workers.receivers
    ]
    sources = {PATH: served.part, "adapters/other": other}
    with ws.connect_set(sources, to=served.url, timeout_s=5) as sender:
        served.train()
        sender.send_weights()
    assert rounds.parts == [{PATH, "adapters/other"}]
    assert [part for _, part in served.holds()] == [True, True]
    assert served.versions() == [(0, 1), (0, 1)]
    assert "pause keep" not in workers.log


def test_a_worker_that_cannot_commit_commits_none_and_gets_both_again(
    served: SetOfWorkers, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has committed both; nothing is generated before the models agree."""
    monkeypatch.setattr(vllm_server, "_GATHER_UPDATE_S", 1.0)  # that worker is sent to alone
    resumed: list[set[int]] = []
    with served.connect() as sender:
        served.train()
        sender.send_weights()
        sink: Any = served.workers.receivers[1].sink

        def fail(_: Any) -> None:
            del sink.commit_all
            raise RuntimeError("no more memory")

        sink.commit_all = fail
        served.workers.heard["resume"] = lambda: resumed.append({b for b, _ in served.versions()})
        served.train()
        sender.send_weights()
        assert rounds.versions[1] == [(2, 2), (1, 1)]
        assert resumed == [{2}]
        assert served.versions() == [(2, 2)] * 2
        assert served.holds() == [(True, True)] * 2
    assert not served.workers.paused


def test_a_finish_that_comes_without_the_others_commits_nothing(
    served: SetOfWorkers, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "_GATHER_UPDATE_S", 0.3)
    call = vllm_server.VllmServer.call
    lost: list[int] = []

    def without_one(
        self: vllm_server.VllmServer, rank: int, request: Any, *, timeout_s: float
    ) -> Any:
        if isinstance(request, FinishRequest) and self.below and len(lost) < 2:
            lost.append(rank)
            raise ws.ConfigError("this one is lost")
        return call(self, rank, request, timeout_s=timeout_s)

    with served.connect() as sender:
        served.train()
        sender.send_weights()
        monkeypatch.setattr(vllm_server.VllmServer, "call", without_one)
        served.train()
        sender.send_weights()  # which sends the set again
        assert served.holds() == [(True, True)] * 2
    assert sorted(lost) == [0, 1]
    assert rounds.versions[1] == [(1, 1)] * 2
    assert all(base == part for each in rounds.versions for base, part in each)
    assert rounds.parts[1] == {""}
    assert rounds.parts[-1] == {"", PATH}
    assert not served.workers.paused


@pytest.fixture
def both(served: SetOfWorkers) -> Iterator[list[SetOfWorkers]]:
    """Two servers, of whose set a trainer died: the first has committed it, and the second not."""
    workers = Workers(2)
    endpoints = Endpoints(workers)
    servers = [served, SetOfWorkers(endpoints.url, workers)]
    victim = CONTEXT.Process(target=die_between, args=([s.url for s in servers],), daemon=True)
    victim.start()
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    assert [s.versions() for s in servers] == [[(2, 2)] * 2, [(1, 1)] * 2]
    deadline = time.monotonic() + 60
    while any(s.workers.paused for s in servers) and time.monotonic() < deadline:
        time.sleep(0.05)  # each engine ends the pause of the dead
    for s in servers:
        s.workers.log.clear()
    yield servers
    endpoints.close()
    workers.end()


def die_between(urls: list[str]) -> None:
    """Send a set to two servers, and die when the first of them has committed its next update."""
    sent = {"": torch.nn.Linear(40, 40), PATH: torch.nn.Linear(8, 8)}
    committed = threading.Event()
    with ws.connect_set(sent, to=urls, timeout_s=30) as sender:
        sender.send_weights()
        rpc = vllm_server.VllmHttpControl.rpc

        def dying(self: vllm_server.VllmHttpControl, text: str, *, timeout_s: float) -> object:
            finishes = "finish_weight_update" in text
            if finishes and urls[1].endswith(self.target.rpartition(":")[2]):
                committed.wait(30)
                os.kill(os.getpid(), signal.SIGKILL)
            answers = rpc(self, text, timeout_s=timeout_s)
            if finishes:
                committed.set()
            return answers

        cast(Any, vllm_server.VllmHttpControl).rpc = dying
        sender.send_weights()


def connect_part(servers: list[SetOfWorkers]) -> ws.WeightSender:
    to = [t for s in servers for t in TransportFactory(None, timeout_s=5, below=PATH).every(s.url)]
    return ws.connect(servers[0].part, to=to, timeout_s=5)


def test_a_sender_of_the_adapter_finishes_a_dead_set_as_an_update_of_the_model(
    both: list[SetOfWorkers],
) -> None:
    """With generation paused, caches reset and the version set; then everything is of one set."""
    first, second = both
    connect_part(both).close()
    assert second.versions() == [(2, 2)] * 2
    for mine, other in zip(second.workers.models, first.workers.models, strict=True):
        assert torch.equal(mine.weight, other.weight)
    log = second.workers.log
    steps = ["pause keep", "rpc finish_weight_update", "reset", "version 2", "resume"]
    assert [step for step in log if step in steps] == steps
    assert (second.workers.version, second.workers.paused) == ("2", False)
    assert not {"pause keep", "rpc finish_weight_update", "reset"}.intersection(first.workers.log)
    for model in (first.base, first.part):
        torch.nn.init.normal_(model.weight)
    to = [server.url for server in both]
    with ws.connect_set({"": first.base, PATH: first.part}, to=to, timeout_s=5) as sender:
        sender.send_weights()
    assert first.versions() == second.versions() == [(3, 3)] * 2


def test_a_worker_commits_no_model_with_the_finish_of_an_adapter_alone(
    both: list[SetOfWorkers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer may have died after a sender asked whether it lives."""
    second = both[1]
    update = second.workers.receivers[0].open_update
    assert update is not None
    monkeypatch.setattr(vllm_server.VllmServer, "left_by_the_dead", lambda *_: [])
    transport = TransportFactory(None, timeout_s=5, below=PATH).every(second.url)[0]
    with pytest.raises(ws.UpdateConflictError, match="waits for its own finish, which commits bo"):
        transport.call(FinishRequest(update_id=update.update_id), timeout_s=5)
    transport.close()
    assert second.versions() == [(1, 1)] * 2
    second_base = ws.connect(second.base, to=[s.url for s in both], timeout_s=5)
    assert second.versions() == [(2, 2)] * 2
    second_base.close()


def test_receivers_that_are_not_beside_the_model_are_refused(served: SetOfWorkers) -> None:
    served.workers.below[PATH] = [ws.WeightReceiver(part) for part in served.parts]
    with pytest.raises(ws.ConfigError, match="are not receivers of one set"):
        served.connect()
