"""Several receivers behind one URL, as somebody sees them who talks to the root."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import requests
import torch
from fastapi import FastAPI
from torch import nn

from tests.server.live import TOKEN, serving
from tests.test_receiver import Bare, model, values
from weightsync.errors import (
    ConfigError,
    ProtocolError,
    TransferError,
    UpdateConflictError,
)
from weightsync.receiver import WeightReceiver
from weightsync.server.workers import Workers, merge_statuses, merge_steps, workers_router
from weightsync.transports.http import HttpTransport
from weightsync.weights.copying.checksums import DISAGREE
from weightsync.wire.messages import (
    AbortRequest,
    CheckReply,
    CheckRequest,
    EmptyUpdate,
    FinishRequest,
    InitReply,
    InitRequest,
    LabelRequest,
    PauseRequest,
    PrepareRequest,
    RegisteredUpdate,
    Reply,
    Request,
    ResetCacheRequest,
    ResumeRequest,
    StartRequest,
    StateName,
    Status,
    StatusRequest,
    StepReply,
    UpdateRequest,
)
from weightsync.wire.offers import ProbeInfo, ProbeRequest, SegmentHandle

WAIT_S = 60.0


def workers_app(workers: Workers) -> FastAPI:
    app = FastAPI()
    app.include_router(workers_router(workers, token=TOKEN))
    return app


class Server:
    """Real receivers, served by a real server."""

    def __init__(self, stack: ExitStack, count: int, **options: Any) -> None:
        self.said: list[str] = []
        self.models = [model() for _ in range(count)]
        self.receivers = [
            WeightReceiver(
                served,
                on_pause=self.said.append,
                on_resume=lambda: self.said.append("resume"),
                on_clear_cache=lambda: self.said.append("clear"),
                **options,
            )
            for served in self.models
        ]
        for receiver in self.receivers:
            stack.callback(receiver.close)
        self.workers = Workers({f"workers/{k}": r for k, r in enumerate(self.receivers)})
        stack.callback(self.workers.close)
        self.url = stack.enter_context(serving(workers_app(self.workers)))
        self.root = HttpTransport(self.url, TOKEN)
        stack.callback(self.root.close)
        self.bare = Bare(stack)

    def ask(self, request: Request) -> Any:
        return self.root.call(request, timeout_s=WAIT_S)

    def status(self) -> Status:
        status: Status = self.ask(StatusRequest())
        return status

    def info(self, value: float) -> Any:
        sent = model(value)
        return self.bare.info(dict(sent.state_dict()))

    @property
    def held(self) -> list[tuple[int, set[float]]]:
        return [(r.version, values(m)) for r, m in zip(self.receivers, self.models, strict=True)]


@pytest.fixture
def stack(shm_clean: None) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def server(stack: ExitStack) -> Server:
    return Server(stack, 3)


def refuse(receiver: WeightReceiver, kind: type, error: Exception) -> None:
    """Have a receiver refuse messages of this kind."""
    dispatch = receiver.dispatch

    def refusing(request: Request) -> Reply:
        if isinstance(request, kind):
            raise error
        return dispatch(request)

    receiver.dispatch = refusing  # type: ignore[method-assign]  # a fault


def test_the_root_answers_for_all(server: Server) -> None:
    status = server.status()
    assert status.workers == ["workers/0", "workers/1", "workers/2"]
    assert (status.state, status.version, status.may_generate) == ("READY", 0, True)
    assert status.instance == server.status().instance
    assert status.instance not in {r.instance for r in server.receivers}
    reply = server.ask(InitRequest())
    assert isinstance(reply, InitReply)
    assert reply.status.workers == status.workers
    get = requests.get(f"{server.url}/get_world_size", timeout=WAIT_S)
    assert get.json() == {"world_size": 3}
    one = requests.get(f"{server.url}/workers/1/get_world_size", timeout=WAIT_S)
    assert one.json() == {"world_size": 1}
    metrics = requests.get(f"{server.url}/metrics", timeout=WAIT_S).text
    assert "weightsync_workers 3.0" in metrics


def test_each_worker_has_routes_of_its_own_that_want_the_token(server: Server) -> None:
    for k, receiver in enumerate(server.receivers):
        url = f"{server.url}/workers/{k}"
        own = HttpTransport(url, TOKEN)
        status = own.call(StatusRequest(), timeout_s=WAIT_S)
        own.close()
        assert isinstance(status, Status)
        assert (status.instance, status.workers) == (receiver.instance, [])
        denied = requests.post(f"{url}/pause", timeout=WAIT_S)
        assert denied.status_code == 401


def test_a_sender_has_to_init_each_worker(server: Server) -> None:
    probe = ProbeInfo(
        handle={"x": SegmentHandle(name="weightsync-x", nbytes=8)}, nbytes=8, digest=""
    )
    with pytest.raises(ProtocolError, match=r"3 workers stand behind this URL.*workers/2 below it"):
        server.ask(InitRequest(probe=ProbeRequest(backend="ipc", payload=probe)))
    info = RegisteredUpdate(sender="s", epoch=1, registered=True)
    with pytest.raises(ProtocolError, match="refers to what init registered"):
        server.ask(UpdateRequest(update_info=info))


def test_a_whole_model_in_one_message_reaches_all(server: Server) -> None:
    reply = server.ask(UpdateRequest(update_info=server.info(1)))
    assert isinstance(reply, StepReply)
    assert (reply.state, reply.version, reply.verified) == ("READY", 1, "held")
    assert server.held == [(1, {1.0})] * 3
    report = server.workers.report()
    assert report.updates_total == {"committed": 1}
    assert report.last_reply is not None
    assert report.last_reply.version == 1


@pytest.mark.parametrize("kind", [UpdateRequest, PrepareRequest])
def test_nobody_takes_a_model_that_one_refuses(server: Server, kind: type) -> None:
    refuse(server.receivers[1], kind, TransferError("no room"))
    whole = kind is UpdateRequest
    requests_: list[Request] = [UpdateRequest(update_info=server.info(1))]
    if not whole:
        requests_ = [StartRequest(), *requests_, PrepareRequest(), FinishRequest()]

    def send() -> None:
        for request in requests_:
            server.ask(request)

    with pytest.raises(TransferError, match=r"workers/1: no room") as raised:
        send()
    assert "finished" not in str(raised.value)
    assert [version for version, _ in server.held] == [0] * 3
    del server.receivers[1].dispatch
    server.ask(AbortRequest())
    assert server.status().state == "READY"
    server.ask(UpdateRequest(update_info=server.info(2)))
    assert server.held == [(1, {2.0})] * 3


def test_an_anonymous_session_goes_to_all(server: Server) -> None:
    assert server.ask(StartRequest()).state == "UPDATING"
    assert server.ask(UpdateRequest(update_info=server.info(1))).state == "UPDATING"
    assert server.status().state == "UPDATING"
    assert server.held == [(0, {0.0})] * 3
    assert server.ask(FinishRequest(weight_version="best")).version == 1
    assert server.held == [(1, {1.0})] * 3
    assert server.status().label == "best"


def test_a_start_that_one_refuses_leaves_nobody_with_an_open_update(server: Server) -> None:
    server.receivers[2].dispatch(StartRequest(update_id="other"))
    with pytest.raises(UpdateConflictError, match=r"workers/2: .*other"):
        server.ask(StartRequest(update_id="mine"))
    assert [r.status().update_id for r in server.receivers] == [None, None, "other"]


def test_an_anonymous_session_is_one_update_and_its_id_may_be_used(server: Server) -> None:
    opened = server.ask(StartRequest())
    ids = {receiver.status().update_id for receiver in server.receivers}
    assert ids == {opened.update_id}
    server.ask(UpdateRequest(update_info=server.info(2)))
    server.ask(AbortRequest(update_id=opened.update_id))
    assert [receiver.status().update_id for receiver in server.receivers] == [None] * 3


def test_a_rewind_to_the_first_version_is_not_taken_for_none(server: Server) -> None:
    server.ask(UpdateRequest(update_info=server.info(1)))
    server.receivers[0].dispatch(UpdateRequest(update_info=server.info(2)))
    server.ask(StartRequest(update_id="u", version=0, rewind=True))
    server.ask(UpdateRequest(update_id="u", update_info=server.info(3), prepare=True))
    server.ask(FinishRequest(update_id="u"))
    assert server.held == [(0, {3.0})] * 3
    assert server.status().may_generate


def test_a_finish_that_some_refuse_says_who_went_on(server: Server) -> None:
    server.ask(UpdateRequest(update_info=server.info(1)))
    server.ask(StartRequest(update_id="u"))
    server.ask(UpdateRequest(update_id="u", update_info=server.info(2), prepare=True))
    for k in (0, 2):
        refuse(server.receivers[k], FinishRequest, TransferError("no swap"))
    with pytest.raises(TransferError) as raised:
        server.ask(FinishRequest(update_id="u"))
    said = str(raised.value)
    assert "workers/0: no swap; workers/2: no swap; workers/1 finished it" in said
    status = server.status()
    assert (status.may_generate, status.version) == (False, 1)
    assert "workers hold different weights (workers/0 1 of update " in status.detail
    health = requests.get(f"{server.url}/health", timeout=WAIT_S)
    assert health.status_code == 503
    assert "different weights" in health.text
    for k in (0, 2):
        del server.receivers[k].dispatch
        server.receivers[k].dispatch(AbortRequest(update_id="u"))
    server.ask(UpdateRequest(update_info=server.info(3)))
    assert server.held == [(3, {3.0})] * 3
    assert server.status().may_generate


def test_an_error_names_all_that_failed(server: Server) -> None:
    refuse(server.receivers[0], LabelRequest, ConfigError("first"))
    refuse(server.receivers[2], LabelRequest, OSError("third"))
    with pytest.raises(ConfigError) as raised:
        server.workers.dispatch(LabelRequest(new_version="x"))
    assert str(raised.value) == "workers/0: first; workers/2: third"
    assert not hasattr(raised.value, "__notes__")
    refuse(server.receivers[0], LabelRequest, OSError("of another kind"))
    with pytest.raises(OSError, match="of another kind") as foreign:
        server.workers.dispatch(LabelRequest(new_version="x"))
    assert foreign.value.__notes__ == [
        "workers/0: OSError: of another kind",
        "workers/2: OSError: third",
    ]


def test_one_word_to_all(server: Server) -> None:
    assert server.ask(PauseRequest(mode="wait")).paused
    assert all(r.paused for r in server.receivers)
    server.ask(ResetCacheRequest())
    assert not server.ask(ResumeRequest()).paused
    assert server.said == ["wait"] * 3 + ["clear"] * 3 + ["resume"] * 3
    assert server.ask(LabelRequest(new_version="a")).label == "a"
    assert [r.label for r in server.receivers] == ["a"] * 3


def test_a_torn_worker_is_named_and_keeps_the_server_from_generating(stack: ExitStack) -> None:
    server = Server(stack, 2, apply="in_place")
    one = server.receivers[1]
    one.dispatch(StartRequest(update_id="u"))
    one.dispatch(UpdateRequest(update_id="u", update_info=server.info(1)))
    one.dispatch(AbortRequest(update_id="u"))
    status = server.status()
    assert (status.state, status.may_generate, status.update_id) == ("TORN", False, "u")
    assert status.detail.startswith("workers/1: the weights are TORN")


def test_checks_ask_all_and_name_what_is_not_alike(server: Server) -> None:
    held = server.receivers[0].dispatch(CheckRequest())
    assert isinstance(held, CheckReply)
    reply = server.ask(CheckRequest())
    assert (reply.checksums, reply.different) == (held.checksums, [])
    assert server.ask(CheckRequest(action="compare", checksums=held.checksums)).equal is True
    with torch.no_grad():
        server.models[2].get_parameter("0.bias")[1] = -0.0
    reply = server.ask(CheckRequest())
    assert (reply.checksums["0.bias"], reply.different) == (DISAGREE, ["0.bias"])
    compared = server.ask(CheckRequest(action="compare", checksums=held.checksums))
    assert (compared.equal, compared.different) == (False, ["0.bias"])
    with pytest.raises(ProtocolError, match="compare needs checksums"):
        server.ask(CheckRequest(action="compare"))


def test_one_worker_is_passed_through(stack: ExitStack) -> None:
    server = Server(stack, 1)
    assert server.status() == server.receivers[0].status()
    server.ask(UpdateRequest(update_info=server.info(1)))
    assert server.held == [(1, {1.0})]
    assert requests.get(f"{server.url}/workers/0/health", timeout=WAIT_S).status_code == 200
    with pytest.raises(ProtocolError, match="7 missing"):
        server.ask(UpdateRequest(update_info=EmptyUpdate()))


def test_workers_make_whole_replicas() -> None:
    receivers = {f"workers/{k}": WeightReceiver(nn.Linear(1, 1)) for k in range(3)}
    for workers, ranks in ((receivers, 2), ({}, 1), (receivers, 0)):
        with pytest.raises(ConfigError, match="make no whole replicas"):
            Workers(workers, tensor_parallel=ranks)


def test_the_least_ready_state_is_the_servers() -> None:
    statuses = {}
    order: list[StateName] = [
        "READY",
        "PREPARED",
        "UPDATING",
        "CATCHING_UP",
        "ABORTING",
        "TORN",
    ]
    for k, state in enumerate(order):
        statuses[f"workers/{k}"] = Status(
            instance=str(k),
            protocol=1,
            state=state,
            version=4,
            may_generate=state != "TORN",
            apply="staged",
            verification="held",
        )
        assert merge_statuses(statuses).state == state
    assert not merge_statuses(statuses).may_generate


def test_the_slowest_worker_is_seen_among_those_that_wait_for_it() -> None:
    def reply(**seconds: float) -> StepReply:
        return StepReply(state="READY", version=1, apply="staged", seconds=seconds)

    slow, fast = reply(load=0.625, wait=0.125, swap=0.25), reply(load=0.5, wait=0.5)
    assert merge_steps([slow, fast]).seconds == {"load": 0.625, "wait": 0.125, "swap": 0.25}
    older = reply(load=0.25)
    assert merge_steps([older, fast]).seconds == {"load": 0.5, "wait": 0.25}
    assert merge_steps([older, older]).seconds == {"load": 0.25}


def test_the_bytes_of_all_workers_from_each_rank() -> None:
    def reply(**sources: int) -> StepReply:
        read = {int(rank.removeprefix("rank_")): nbytes for rank, nbytes in sources.items()}
        return StepReply(state="READY", version=1, apply="staged", sources=read)

    merged = merge_steps([reply(rank_1=5, rank_0=2), reply(), reply(rank_1=1, rank_2=4)])
    assert merged.sources == {0: 2, 1: 6, 2: 4}
