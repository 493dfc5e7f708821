"""A vLLM server as receivers: rounds, pauses and what a sender sees, with receivers that are real.

What stands in for vLLM's processes here keeps to what was seen of the real one; `make test-vllm`
is against that one itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import psutil
import pytest
import requests
import torch

import weightsync as ws
from tests.children import CONTEXT
from tests.e2e.processes import wait_until
from tests.integrations.vllm_workers import Endpoints, Waiting, Workers
from weightsync.errors import (
    ConnectError,
    ProtocolError,
    RemoteError,
    TransportTimeout,
    WeightSyncError,
)
from weightsync.integrations.vllm import pauses as vllm_pauses
from weightsync.integrations.vllm import rpc
from weightsync.integrations.vllm.server import VllmServer, worker_transports
from weightsync.shm.segment import remove_leftovers
from weightsync.wire.messages import EmptyUpdate, StartTerms, StatusRequest, UpdateRequest


class Restarted:
    """What a URL leads to: a server, and another one after it. Has the verbs of `now`."""

    def __init__(self, now: Workers) -> None:
        self.now = now
        self._first = now

    @property
    def sent_messages(self) -> int:
        then = len(self.now.log) if self.now is not self._first else 0
        return len(self._first.log) + then

    def __getattr__(self, name: str) -> Any:
        return getattr(self.now, name)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines look soon whether the sender that paused them lives."""
    monkeypatch.setattr(vllm_pauses, "CHECK_S", 0.1)


@pytest.fixture
def workers(request: pytest.FixtureRequest, shm_clean: None) -> Iterator[Workers]:
    """Two, or as many as the test's parameter says."""
    made = Workers(getattr(request, "param", 2))
    yield made
    made.end()


one_or_three = pytest.mark.parametrize("workers", [1, 3], indirect=True)


def source() -> torch.nn.Linear:
    model = torch.nn.Linear(40, 40)
    with torch.no_grad():
        model.weight.normal_()
    return model


@one_or_three
def test_an_update_pauses_resets_and_resumes_in_this_order(workers: Workers) -> None:
    model = source()
    with ws.connect(model, to=worker_transports(workers, timeout_s=5)) as sender:
        workers.log.clear()
        report = sender.send_weights(label="best")
        log = list(workers.log)
    assert log == [
        "rpc update_weights",
        "rpc",
        "pause keep",
        "rpc finish_weight_update",
        "reset",
        "version 1",
        "resume",
        "rpc",
    ]
    assert workers.log[-1] == "close"
    assert report.control_messages == len(log)
    assert all(torch.equal(held.weight, model.weight) for held in workers.models)
    assert [receiver.version for receiver in workers.receivers] == [1] * len(workers.models)


@one_or_three
def test_all_workers_of_a_server_are_told_in_one_round(workers: Workers) -> None:
    with ws.connect(source(), to=worker_transports(workers, timeout_s=5), packed=True) as sender:
        for _ in range(5):
            workers.seen.clear()
            sender.send_weights()
            assert workers.seen == [len(workers.models), 0, len(workers.models), 0]


@pytest.mark.usefixtures("shm_clean")
def test_workers_that_load_in_place_are_paused_before_the_bytes_come() -> None:
    workers = Workers(2, apply="in_place")
    try:
        with ws.connect(source(), to=worker_transports(workers, timeout_s=5)) as sender:
            workers.log.clear()
            sender.send_weights()
            assert workers.log[:3] == ["rpc", "pause keep", "rpc update_weights"]
            assert not workers.paused
    finally:
        workers.end()


def failing(
    model: torch.nn.Linear, receivers: Sequence[ws.WeightReceiver] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Raise after the first tensor, once every one of `receivers` has begun to load it."""
    yield "weight", model.weight
    deadline = time.monotonic() + 20
    while any(receiver.may_generate for receiver in receivers) and time.monotonic() < deadline:
        time.sleep(0.005)
    raise RuntimeError("the trainer has lost its weights")


def test_a_staged_failure_leaves_the_server_generating(workers: Workers) -> None:
    model, healthy = source(), [True]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        return iter(list(model.named_parameters())) if healthy else failing(model)

    with ws.connect(tensors, to=worker_transports(workers, timeout_s=5), timeout_s=20) as sender:
        sender.send_weights()
        healthy.clear()
        with pytest.raises(RuntimeError, match="lost its weights"):
            sender.send_weights()
        assert not workers.paused
        assert {receiver.version for receiver in workers.receivers} == {1}
        healthy.append(True)
        assert sender.send_weights().version == 2


@pytest.mark.usefixtures("shm_clean")
def test_a_server_of_torn_workers_stays_paused_until_a_whole_update() -> None:
    workers, model, healthy = Workers(2, apply="in_place"), source(), [True]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        return (
            iter(list(model.named_parameters())) if healthy else failing(model, workers.receivers)
        )

    try:
        with ws.connect(
            tensors, to=worker_transports(workers, timeout_s=5), bucket_nbytes=1024, timeout_s=20
        ) as sender:
            sender.send_weights()
            healthy.clear()
            with pytest.raises(RuntimeError, match="lost its weights"):
                sender.send_weights()
            assert workers.paused
            healthy.append(True)
        with ws.connect(tensors, to=worker_transports(workers, timeout_s=5)) as successor:
            successor.send_weights()  # knows from the workers whose pause it found
            assert not workers.paused
    finally:
        workers.end()


VERBS = ["finish_weight_update", "reset", "1"]
STEPS = ["rpc finish_weight_update", "reset", "resume"]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", [ConnectError, RemoteError])
def test_whatever_fails_around_finish_the_server_is_resumed(
    workers: Workers, verb: str, kind: type[WeightSyncError]
) -> None:
    with ws.connect(source(), to=worker_transports(workers, timeout_s=5)) as sender:
        workers.fails[verb] = kind(f"{verb} broke")
        # What got no answer is asked again; RemoteError is an answer.
        raised = pytest.raises(RemoteError, match=f"{verb} broke")
        with raised if kind is RemoteError else nullcontext():
            sender.send_weights()
        assert not workers.paused
        assert [step for step in workers.log if step in STEPS][-2:] == ["reset", "resume"]
        workers.log.clear()
        sender.send_weights()
        assert [step for step in workers.log if step in STEPS][-3:] == STEPS
        assert len({receiver.version for receiver in workers.receivers}) == 1


def test_a_finish_that_is_refused_for_good_is_given_up_for_the_next(workers: Workers) -> None:
    model = source()
    with ws.connect(model, to=worker_transports(workers, timeout_s=5)) as sender:
        workers.broken["finish_weight_update"] = RemoteError("no such path")
        for _ in range(2):
            with pytest.raises(RemoteError, match="no such path"):
                sender.send_weights()
            assert {receiver.version for receiver in workers.receivers} == {0}
        told = [step for step in workers.log if step.startswith(("rpc f", "rpc a", "rpc u"))]
        again = ["rpc finish_weight_update", "rpc abort_weight_update", "rpc update_weights"]
        # Of the first update, before the second; each worker is told of the abort by itself.
        assert [step for step, _ in groupby(told[2:])][:3] == again
        workers.broken.clear()
        sender.send_weights()
    assert all(torch.equal(held.weight, model.weight) for held in workers.models)
    assert len({receiver.version for receiver in workers.receivers}) == 1


@pytest.mark.parametrize("kind", [ConnectError, RemoteError])
def test_new_weights_never_meet_caches_of_old_ones(
    workers: Workers, kind: type[WeightSyncError]
) -> None:
    model = source()
    with ws.connect(model, to=worker_transports(workers, timeout_s=5), timeout_s=5) as sender:
        workers.broken["reset"] = kind("the cache is stuck")
        with pytest.raises(kind, match=r"stuck; server may hold new weights, .*it stays paused"):
            sender.send_weights()
        assert {receiver.version for receiver in workers.receivers} == {1}
        assert workers.paused
        assert "resume" not in workers.log
    workers.log.clear()
    with ws.connect(model, to=worker_transports(workers, timeout_s=5), timeout_s=5) as successor:
        with pytest.raises(kind, match="stuck"):
            successor.send_weights()
        assert "resume" not in workers.log
        workers.broken.clear()
        successor.send_weights()
        assert [step for step in workers.log if step in STEPS][-3:] == STEPS


def test_an_engine_that_cannot_be_paused_is_told_not_to_generate(workers: Workers) -> None:
    workers.pauses = False
    with ws.connect(source(), to=worker_transports(workers, timeout_s=5), timeout_s=5) as sender:
        workers.broken["reset"] = RemoteError("the cache is stuck")
        with pytest.raises(RemoteError, match="cannot be paused: have it generate nothing"):
            sender.send_weights()


@pytest.mark.usefixtures("shm_clean")
def test_a_pause_that_somebody_ended_by_hand_is_made_again() -> None:
    workers, model, healthy = Workers(2, apply="in_place"), source(), [True]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        return (
            iter(list(model.named_parameters())) if healthy else failing(model, workers.receivers)
        )

    try:
        to = worker_transports(workers, timeout_s=5)
        with ws.connect(tensors, to=to, bucket_nbytes=1024, timeout_s=20) as sender:
            healthy.clear()
            with pytest.raises(RuntimeError, match="lost its weights"):
                sender.send_weights()
        assert workers.paused
        workers.resume(timeout_s=5)
        with ws.connect(model, to=worker_transports(workers, timeout_s=5)) as sender:
            workers.log.clear()
            sender.send_weights()
        assert workers.log[:3] == ["rpc", "pause keep", "rpc update_weights"]
        assert not workers.paused
    finally:
        workers.end()


def send_until_killed(url: str, half: bool) -> None:
    """A trainer's process. `half`: it kills itself when a part of its weights has been loaded."""
    model, dies = source(), [False]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", model.weight.detach()  # more than the ring holds
        if dies[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        yield "bias", model.bias.detach()

    with ws.connect(tensors, to=url, timeout_s=20, bucket_nbytes=1024, num_buckets=2) as sender:
        dies[0] = half
        sender.send_weights()
    raise AssertionError("it should be dead by now")


def meet_a_user(url: str, verb: str) -> None:
    """A trainer's process. Its user calls `verb` between its weights' arrival and their use.

    It kills itself after a user's pause; after a resume it goes on.
    """
    model = source()
    with ws.connect(model, to=url, timeout_s=20) as sender, sender.update() as update:
        update.send(model.named_parameters())
        requests.post(f"{url}/{verb}", timeout=20).raise_for_status()
        if verb != "resume":
            os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it should be dead by now")


@dataclass
class Doomed:
    """A server over HTTP, and trainers that are killed when it hears a certain call of theirs."""

    workers: Workers
    endpoints: Endpoints
    lingers_s: float = 0.0
    """Time from the death to the arrival of the call."""
    linger: Callable[[float], None] = time.sleep

    @property
    def url(self) -> str:
        return self.endpoints.url

    def kill_at(
        self, verb: str, target: Callable[..., None] = send_until_killed, *args: object
    ) -> None:
        """Kill a trainer when its call `verb` is heard; without one it kills itself half way."""
        trainer = CONTEXT.Process(target=target, args=(self.url, *(args or (not verb,))))

        def kill() -> None:
            pid = trainer.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            # Not join(), which this thread may not call beside the test's.
            wait_until(lambda: not psutil.pid_exists(pid), "its end")
            self.linger(self.lingers_s)

        self.workers.heard[verb] = kill
        trainer.start()
        trainer.join(60)
        assert trainer.exitcode == -signal.SIGKILL, f"it never called {verb}"
        wait_until(lambda: not self.endpoints.busy, "the end of its last call")

    def ask(self) -> str:
        """Return what became of a request that comes now."""
        self.workers.waiting.append(Waiting("asked"))
        try:
            wait_until(lambda: not self.workers.paused or bool(self.workers.refused), "an answer")
            return "refused" if self.workers.refused else "answered"
        finally:
            self.workers.waiting.clear()
            self.workers.refused.clear()


@pytest.fixture(params=["staged", "in_place"])
def doomed(request: pytest.FixtureRequest, shm_clean: None) -> Iterator[Doomed]:
    workers = Workers(2, apply=request.param)
    endpoints = Endpoints(workers)
    yield Doomed(workers, endpoints)
    endpoints.close()
    workers.end()
    remove_leftovers()


@pytest.mark.parametrize("doomed", ["staged"], indirect=True)
def test_a_killed_trainer_s_pause_ends_without_it(doomed: Doomed) -> None:
    for verb, resets in {"keep": 1, "reset": 2}.items():
        doomed.workers.log.clear()
        doomed.kill_at(verb)
        assert doomed.ask() == "answered"
        assert doomed.workers.log.count("reset") == resets  # caches of older weights are forgotten
    model = source()
    with ws.connect(model, to=doomed.url) as sender:
        sender.send_weights()
    assert not doomed.workers.paused
    assert all(torch.equal(held.weight, model.weight) for held in doomed.workers.models)


@pytest.mark.parametrize("doomed", ["staged"], indirect=True)
def test_a_pause_that_arrives_after_its_trainer_s_death_ends_too(doomed: Doomed) -> None:
    doomed.lingers_s = 3 * vllm_pauses.CHECK_S
    doomed.kill_at("keep")
    assert "pause keep" in doomed.workers.log
    assert doomed.ask() == "answered"


@pytest.mark.parametrize("doomed", ["staged"], indirect=True)
def test_a_pause_that_waits_for_a_busy_engine_ends_too(
    doomed: Doomed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is busy for longer than a dead trainer's pause is waited for."""
    monkeypatch.setattr(vllm_pauses, "LEASE_S", 3.0)
    workers = doomed.workers
    wait = time.sleep

    def linger(seconds: float) -> None:
        workers.input_queue.put(("call", (Future(), lambda: wait(5.0))))
        wait(seconds)

    doomed.lingers_s = 2 * vllm_pauses.CHECK_S  # a check is queued before the pause
    monkeypatch.setattr(doomed, "linger", linger)
    doomed.kill_at("keep")
    assert "pause keep" in workers.log
    assert doomed.ask() == "answered"


@pytest.mark.parametrize("doomed", ["staged"], indirect=True)
def test_a_user_pauses_long_after_a_trainer_died_before_its_pause(
    doomed: Doomed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_pauses, "LEASE_S", 1.0)
    doomed.workers.pauses = False  # the trainer's pause never comes
    doomed.kill_at("keep")
    time.sleep(1.0 + 4 * vllm_pauses.CHECK_S)
    doomed.workers.pauses = True
    doomed.workers.pause("keep", timeout_s=60)
    time.sleep(4 * vllm_pauses.CHECK_S)
    assert doomed.workers.paused


@pytest.mark.parametrize("doomed", ["in_place"], indirect=True)
def test_a_server_whose_trainer_was_killed_half_way_refuses_until_it_is_whole(
    doomed: Doomed,
) -> None:
    doomed.kill_at("")
    assert doomed.ask() == "refused"
    model = source()
    with ws.connect(model, to=doomed.url) as sender:
        sender.send_weights()
    assert not doomed.workers.paused
    assert all(torch.equal(held.weight, model.weight) for held in doomed.workers.models)


@pytest.mark.parametrize("doomed", ["staged"], indirect=True)
def test_a_pause_of_a_user_outlives_a_killed_trainer(doomed: Doomed) -> None:
    doomed.workers.pause("keep", timeout_s=5)
    doomed.kill_at("finish_weight_update")
    with ws.connect(source(), to=doomed.url) as sender:
        sender.send_weights()
    assert doomed.workers.paused
    assert "resume" not in doomed.workers.log


@pytest.mark.parametrize("doomed", ["staged"], indirect=True)
def test_a_pause_after_that_of_a_user_ends_with_a_killed_trainer(doomed: Doomed) -> None:
    doomed.workers.pause("keep", timeout_s=5)
    doomed.kill_at("finish_weight_update", meet_a_user, "resume")
    assert doomed.ask() == "answered"


@pytest.mark.parametrize("doomed", ["staged"], indirect=True)
def test_a_pause_that_a_user_makes_during_an_update_is_kept(doomed: Doomed) -> None:
    doomed.kill_at("", meet_a_user, "pause?mode=keep")
    time.sleep(4 * vllm_pauses.CHECK_S)
    assert doomed.workers.paused
    with ws.connect(source(), to=doomed.url) as sender:
        sender.send_weights()
    assert doomed.workers.paused


def test_a_status_that_is_asked_before_a_pause_does_not_hide_it(workers: Workers) -> None:
    transports = worker_transports(workers, timeout_s=5)
    with ws.connect(source(), to=transports) as sender:
        asking = threading.Thread(
            target=transports[0].call, args=(StatusRequest(),), kwargs={"timeout_s": 5}
        )

        def ask() -> None:
            asking.start()
            asking.join(0.3)

        workers.heard["keep"] = ask
        sender.send_weights()
        asking.join(10)
        assert not workers.paused


@pytest.mark.usefixtures("shm_clean")
def test_only_its_owner_s_word_prolongs_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_pauses, "LEASE_S", 1.5)
    workers = Workers(1)
    try:
        owner, other = (VllmServer(workers, timeout_s=5) for _ in range(2))
        owner._announce({0: ""}, timeout_s=5)
        workers.pause("keep", timeout_s=5)

        def resumed(by: VllmServer) -> bool:
            by.call(0, StatusRequest(), timeout_s=5)
            return not workers.paused

        for _ in range(25):
            assert not resumed(owner)
            time.sleep(0.1)
        wait_until(lambda: resumed(other), "the end of the lease")
    finally:
        workers.end()


@pytest.mark.usefixtures("shm_clean")
def test_requests_of_an_update_that_come_apart_are_one_round() -> None:
    """Apart, one worker would wait for chunks that the other has not read, until the timeout."""
    workers = Workers(2)
    try:
        server = VllmServer(workers, timeout_s=5)
        workers.seen.clear()
        request = UpdateRequest(update_info=EmptyUpdate(), update_id="u", start=StartTerms())

        def call(rank: int) -> rpc.WorkerAnswer:
            time.sleep(1.5 * rank)
            return server.call(rank, request, timeout_s=5)

        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(call, range(2)))
        assert [answer.rank for answer in answers] == [0, 1]
        assert workers.seen == [2]
    finally:
        workers.end()


def test_what_no_worker_could_read_is_raised_as_it_is() -> None:
    told = rpc.Round(nonce="n")
    answer = rpc.encode_refusal(ProtocolError("this is no round"))
    with pytest.raises(ProtocolError, match="this is no round"):
        rpc.decode_answers(told, [answer, answer], peer="server")


@pytest.mark.parametrize(
    "text",
    [
        '{"nonce": "n", "resumes": true}',
        '{"nonce": "n", "calls": {"0": {"call": "weight_info", "body": "{}", "after": "pause"}}}',
    ],
)
def test_an_engine_ignores_nothing_that_a_newer_sender_says(text: str) -> None:
    with pytest.raises(ProtocolError, match="unknown field"):
        rpc.decode_round(text)


def lose(
    patch: pytest.MonkeyPatch,
    workers: Workers,
    verb: str,
    *,
    heard: bool = False,
    holds: Sequence[bool | None] = (None,),
    then: Callable[[], object] = lambda: None,
) -> None:
    """Lose the next calls of `verb`, or only their answers where they are `heard`.

    Of rounds those are lost that say, one after the other, that a pause comes (True), that it is
    over (False), or neither. `then` is called right before each.
    """
    verb_of, left = getattr(workers, verb), list(holds)

    def call(*args: str, timeout_s: float) -> object:
        said = rpc.decode_round(args[0]).holds if verb == "rpc" else None
        if not left or left[0] != (None if said is None else bool(said)):
            return verb_of(*args, timeout_s=timeout_s)
        left.pop(0)
        then()
        if heard:
            verb_of(*args, timeout_s=timeout_s)
        raise ConnectError("reset by peer")

    patch.setattr(workers, verb, call)


@pytest.mark.parametrize("end", ["update", "close"])
@pytest.mark.parametrize("heard", [False, True])
def test_a_pause_of_a_user_is_kept_when_the_end_of_ours_got_no_answer(
    workers: Workers, end: str, heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ws.connect(source(), to=worker_transports(workers, timeout_s=5), timeout_s=5) as sender:
        sender.send_weights()
        lose(monkeypatch, workers, "rpc", heard=heard, holds=[False])
        sender.send_weights()
        assert not workers.paused
        workers.pause("keep", timeout_s=5)
        if end == "update":
            sender.send_weights()
            assert workers.paused
    time.sleep(3 * vllm_pauses.CHECK_S)
    assert workers.paused


@pytest.mark.parametrize("end", ["update", "close"])
def test_a_pause_of_a_user_is_kept_after_ours_that_was_ended_by_hand(
    workers: Workers, end: str
) -> None:
    with ws.connect(source(), to=worker_transports(workers, timeout_s=5), timeout_s=5) as sender:
        workers.broken["reset"] = RemoteError("the cache is stuck")
        with pytest.raises(RemoteError, match="it stays paused"):
            sender.send_weights()
        workers.broken.clear()
        workers.resume(timeout_s=5)
        workers.pause("keep", timeout_s=5)
        if end == "update":
            workers.log.clear()
            sender.send_weights()
            assert "reset" in workers.log
            assert workers.paused
    time.sleep(3 * vllm_pauses.CHECK_S)
    assert workers.paused


@pytest.mark.parametrize(
    ("verb", "heard", "holds"),
    [
        ("rpc", False, [False, True, None]),  # the end of a pause; the next one, and the question
        ("rpc", True, [False, True, None]),
        ("pause", False, [None]),
        ("resume", True, [None]),
    ],
)
def test_no_worker_is_told_to_finish_while_its_server_generates(
    workers: Workers,
    verb: str,
    heard: bool,
    holds: Sequence[bool | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paused: list[bool] = []
    note = workers._note

    def watch(what: str) -> None:
        if what == "rpc finish_weight_update":
            paused.append(workers.paused)
        note(what)

    monkeypatch.setattr(workers, "_note", watch)
    with ws.connect(source(), to=worker_transports(workers, timeout_s=5), timeout_s=5) as sender:
        sender.send_weights()
        lose(monkeypatch, workers, verb, heard=heard, holds=holds)
        for _ in range(2):
            sender.send_weights()
        assert not workers.paused
    assert len(paused) >= 3
    assert all(paused)


def test_a_pause_of_a_dead_sender_ends_after_a_reset_though_no_answer_tells_of_it(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ws.connect(source(), to=worker_transports(workers, timeout_s=5), timeout_s=5) as sender:
        workers.broken["reset"] = RemoteError("the cache is stuck")
        with pytest.raises(RemoteError, match="it stays paused"):
            sender.send_weights()

    def heal() -> None:
        workers.broken.clear()
        workers.log.clear()

    with ws.connect(source(), to=worker_transports(workers, timeout_s=5), timeout_s=5) as sender:
        lose(monkeypatch, workers, "rpc", heard=True, holds=[True], then=heal)
        sender.send_weights()
    assert next(step for step in workers.log if step in STEPS[1:]) == "reset"
    assert not workers.paused


def test_a_pause_of_somebody_else_is_kept(workers: Workers) -> None:
    workers.paused = True
    with ws.connect(source(), to=worker_transports(workers, timeout_s=5)) as sender:
        workers.log.clear()
        sender.send_weights()
    assert workers.paused
    assert "pause keep" not in workers.log
    assert "resume" not in workers.log


@pytest.mark.usefixtures("shm_clean")
def test_answers_of_an_earlier_call_are_found_out() -> None:
    workers = Workers(2, late=1)
    try:
        transports = worker_transports(workers, timeout_s=5)
        with pytest.raises(ProtocolError, match="restart the server"):
            ws.connect(source(), to=transports)
    finally:
        workers.end()


@pytest.mark.usefixtures("shm_clean")
def test_replicas_that_cannot_be_seen_are_refused() -> None:
    workers = Workers(3)
    workers.visible = 2
    try:
        with pytest.raises(ProtocolError, match="one server per replica"):
            worker_transports(workers, timeout_s=5)
    finally:
        workers.end()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
@pytest.mark.usefixtures("shm_clean")
def test_a_server_that_was_restarted_with_other_workers_is_met_again(
    before: int, after: int
) -> None:
    first, then = Workers(before), Workers(after)
    control, model = Restarted(first), source()
    try:
        with ws.connect(model, to=worker_transports(control, timeout_s=5), timeout_s=5) as sender:
            sender.send_weights()
            control.now = then
            for _ in range(2):
                report = sender.send_weights()
                assert len(report.receivers) == after
            assert all(torch.equal(held.weight, model.weight) for held in then.models)
            assert not then.paused
            sent = sum(len(workers.log) for workers in (first, then))
            assert sender._coordinator.fleet.sent_counts[1] == sent  # type: ignore[union-attr]
        assert then.log.count("close") == 1
    finally:
        first.end()
        then.end()


@pytest.mark.usefixtures("shm_clean")
def test_workers_that_are_stopped_are_an_error_in_time_and_sent_to_again() -> None:
    workers = Workers(2)
    endpoints = Endpoints(workers)
    try:
        with ws.connect(source(), to=endpoints.url, timeout_s=2) as sender:
            sender.send_weights()
            workers.awake.clear()
            started = time.monotonic()
            with pytest.raises(TransportTimeout, match="within 2 s"):
                sender.send_weights()
            assert time.monotonic() - started < 10  # 38 s once
            workers.awake.set()
            sender.send_weights()
            assert not workers.paused
    finally:
        workers.awake.set()
        endpoints.close()
        workers.end()


class TestSleep:
    """Engine and workers are stand-ins: tests/vllm/test_sleep.py has real ones."""

    def test_wake_update_wake_serve(self, workers: Workers) -> None:
        with ws.connect(source(), to=worker_transports(workers, timeout_s=5)) as sender:
            sender.send_weights()
            for level in (1, 2):
                workers.sleep(level)
                with pytest.raises(ws.UpdateConflictError, match="sleeps"):
                    sender.send_weights()
                workers.log.clear()
                report = sender.send_weights(wake=True)
                steps = [step for step in workers.log if step.startswith(("wake", "rpc "))]
                finish = steps.index("rpc finish_weight_update")
                assert steps.index("wake weights") < steps.index("rpc update_weights") < finish
                assert finish < steps.index("wake all")
                assert not workers.paused
                assert not workers.is_sleeping
                assert {r.version for r in workers.receivers} == {report.version}

    def test_awake_without_weights_it_stays_paused_until_an_update(self, workers: Workers) -> None:
        with ws.connect(source(), to=worker_transports(workers, timeout_s=5)) as sender:
            sender.send_weights()
            workers.sleep(2)
            workers.wake_up()
            assert workers.paused
            sender.send_weights()
            assert not workers.paused

    def test_a_user_may_resume_what_other_code_has_loaded(self, workers: Workers) -> None:
        workers.sleep(2)
        workers.wake_up()
        assert workers.paused
        workers.resume_scheduler()
        assert not workers.paused

    def test_after_level_1_it_resumes(self, workers: Workers) -> None:
        workers.sleep(1)
        workers.wake_up(["weights"])
        assert workers.paused
        workers.wake_up()
        assert not workers.paused

    def test_engines_without_ours_are_left_alone(self, workers: Workers) -> None:
        workers.vllm_config.weight_transfer_config = None
        workers.sleep(2)
        workers.wake_up()
        assert not workers.paused
