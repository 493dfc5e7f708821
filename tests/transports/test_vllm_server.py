"""A vLLM server as receivers: rounds, pauses and what a sender sees, with receivers that are real.

What stands in for vLLM's processes here keeps to what was seen of the real one; `make test-vllm`
is against that one itself.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import pytest
import torch

import weightsync as ws
from weightsync.errors import (
    ConnectError,
    ProtocolError,
    RemoteError,
    WeightSyncError,
)
from weightsync.receiving.landings import ApplyChoice
from weightsync.transports import vllm_door
from weightsync.transports.vllm_server import worker_transports
from weightsync.wire import codec, problem


class Workers:
    """The verbs of a server of several workers, each a real receiver, and a log of what came."""

    target = "server"

    def __init__(self, count: int, *, apply: ApplyChoice = "staged", late: int = 0) -> None:
        self.models = [torch.nn.Linear(40, 40) for _ in range(count)]
        self.receivers = [ws.WeightReceiver(model, apply=apply) for model in self.models]
        self.held = [False] * count
        self.paused = False
        self.log: list[str] = []
        self.version = ""
        self.pauses = True
        self.fails: dict[str, Exception] = {}
        self.broken: dict[str, Exception] = {}
        self.seen: list[int] = []
        self.visible = count
        self._late = late
        self._results: list[dict[str, Any]] = []
        self._busy = threading.Lock()
        self._pool = ThreadPoolExecutor(count)

    @property
    def sent(self) -> tuple[int, int]:
        return len(self.log), 0

    def rpc(self, text: str, *, timeout_s: float) -> object:
        told = vllm_door.decode_round(text)
        calls = sorted({call.call for call in told.calls.values()})
        self._note(f"rpc {' '.join(calls)}".rstrip())
        with self._busy:  # one call at a time, as in an engine's loop
            self.seen.append(len(told.calls))
            futures = [self._pool.submit(self._answer, told, i) for i in range(len(self.models))]
            results = [future.result() for future in futures]
        if self._late:  # what a call that raised left behind
            results[-1], self._results = (self._results or results)[-1], results
        return results[: self.visible]

    def is_paused(self, *, timeout_s: float) -> bool:
        return self.paused

    def pause(self, mode: str, *, timeout_s: float) -> None:
        self._note(f"pause {mode}")
        self.paused = self.pauses

    def resume(self, *, timeout_s: float) -> None:
        self._note("resume")
        self.paused = False

    def reset_prefix_cache(self, *, timeout_s: float) -> None:
        self._note("reset")

    def set_version(self, version: str, *, timeout_s: float) -> None:
        self._note(f"version {version}")
        self.version = version

    def close(self) -> None:
        self._note("close")

    def end(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self._pool.shutdown()

    def _note(self, what: str) -> None:
        self.log.append(what)
        last = what.rsplit(maxsplit=1)[-1]
        if last in self.broken:
            raise copy.copy(self.broken[last])
        if last in self.fails:
            raise self.fails.pop(last)

    def _answer(self, told: vllm_door.Round, rank: int) -> dict[str, Any]:
        receiver = self.receivers[rank]
        if told.holds is not None:
            self.held[rank] = told.holds
        call, reply, wrong = vllm_door.addressed(told, rank), None, None
        if call is not None:
            try:
                request = codec.decode_request(call.call, call.body.encode())
                reply = codec.encode(receiver.dispatch(request)).decode()
            except Exception as exc:  # noqa: BLE001  # as the engine does
                wrong = problem.encode_problem(problem.to_problem(exc)).decode()
        status = receiver.status()
        return vllm_door.encode_answer(
            vllm_door.WorkerAnswer(
                nonce=told.nonce,
                rank=rank,
                world=len(self.models),
                state=status.state,
                version=status.version,
                apply=status.apply,
                may_generate=status.may_generate,
                held=self.held[rank],
                reply=reply,
                problem=wrong,
            )
        )


@pytest.fixture(params=[1, 3])
def workers(request: pytest.FixtureRequest, shm_clean: None) -> Iterator[Workers]:
    made = Workers(request.param)
    yield made
    made.end()


def source() -> torch.nn.Linear:
    model = torch.nn.Linear(40, 40)
    with torch.no_grad():
        model.weight.normal_()
    return model


def test_an_update_pauses_resets_and_resumes_in_this_order(workers: Workers) -> None:
    model = source()
    with ws.connect(model, to=worker_transports(workers, timeout_s=5)) as sender:
        workers.log.clear()
        report = sender.send_weights(label="best")
        log = list(workers.log)
    assert log == [
        "rpc update_weights",
        "pause keep",
        "rpc finish_weight_update",
        "reset",
        "version 1",
        "resume",
        "rpc",
    ]
    assert workers.held == [False] * len(workers.models)
    assert workers.log[-1] == "close"
    assert report.control_messages == len(log)
    assert all(torch.equal(held.weight, model.weight) for held in workers.models)
    assert [receiver.version for receiver in workers.receivers] == [1] * len(workers.models)


def test_all_workers_of_a_server_are_told_in_one_round(workers: Workers) -> None:
    with ws.connect(source(), to=worker_transports(workers, timeout_s=5), packed=True) as sender:
        for _ in range(5):
            workers.seen.clear()
            sender.send_weights()
            assert workers.seen == [len(workers.models), len(workers.models), 0]


@pytest.mark.usefixtures("shm_clean")
def test_workers_that_load_in_place_are_paused_before_the_bytes_come() -> None:
    workers = Workers(2, apply="in_place")
    try:
        with ws.connect(source(), to=worker_transports(workers, timeout_s=5)) as sender:
            workers.log.clear()
            sender.send_weights()
            assert workers.log[:2] == ["pause keep", "rpc update_weights"]
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
            assert workers.held == [True, True]
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
    workers = Workers(2, apply="in_place")
    try:
        workers.held = [True, True]  # as a sender left it that died paused
        with ws.connect(source(), to=worker_transports(workers, timeout_s=5)) as sender:
            workers.log.clear()
            sender.send_weights()
        assert workers.log[:2] == ["pause keep", "rpc update_weights"]
    finally:
        workers.end()


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
