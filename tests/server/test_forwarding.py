"""A request to a worker in another process is decoded there, and nowhere else."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from torch import nn

import weightsync as ws
from tests.server.live import make_app, serving
from weightsync.server.dispatcher import Receiver, RemoteReceiver
from weightsync.server.workers import Workers, workers_router
from weightsync.wire.messages import (
    LabelRequest,
    Reply,
    Request,
    StartRequest,
    Status,
    WorkerReport,
)
from weightsync.wire.problem import decode_error, encode_error


class InAnotherProcess(Receiver):
    """Passes on JSON; what was decoded before it came is counted."""

    def __init__(self, receiver: ws.WeightReceiver) -> None:
        self._receiver = receiver
        self.forwarded: list[tuple[str, bytes]] = []
        self.decoded: list[Request] = []

    def handle_json(self, call: str, body: bytes) -> bytes:
        self.forwarded.append((call, body))
        return b'{"forwarded":true}'

    def dispatch(self, request: Request) -> Reply:
        self.decoded.append(request)
        return self._receiver.dispatch(request)

    def status(self) -> Status:
        return self._receiver.status()

    def report(self) -> WorkerReport:
        return self._receiver.report()


def client(*workers: InAnotherProcess) -> TestClient:
    app = FastAPI()
    together = Workers({f"workers/{k}": worker for k, worker in enumerate(workers)})
    app.include_router(workers_router(together, token=None))
    return TestClient(app)


BODY = b'{"update_id": "u",   "reason": "as it was written"}'


def test_the_only_worker_is_sent_the_body_as_it_came() -> None:
    worker = InAnotherProcess(ws.WeightReceiver(nn.Linear(2, 2)))
    for path in ("/abort_weight_update", "/workers/0/abort_weight_update"):
        reply = client(worker).post(path, content=BODY)
        assert reply.json() == {"forwarded": True}
    assert worker.forwarded == [("abort_weight_update", BODY)] * 2
    assert worker.decoded == []


def test_what_all_of_several_workers_are_asked_is_decoded_once() -> None:
    workers = [InAnotherProcess(ws.WeightReceiver(nn.Linear(2, 2))) for _ in range(2)]
    posting = client(*workers)
    assert posting.post("/abort_weight_update", content=BODY).json()["state"] == "READY"
    assert workers[0].decoded == workers[1].decoded
    assert len(workers[0].decoded) == 1
    assert posting.post("/workers/1/resume", content=b"").json() == {"forwarded": True}
    assert workers[1].forwarded == [("resume", b"")]


class Remote(RemoteReceiver):
    """All that a server of several processes writes itself: the way to the other process."""

    def __init__(self, receiver: ws.WeightReceiver) -> None:
        self._receiver = receiver

    def handle_json(self, call: str, body: bytes) -> bytes:
        try:
            return self._receiver.handle_json(call, body)
        except ws.WeightSyncError as exc:
            raise decode_error(encode_error(exc), peer="worker 3") from None


def test_a_remote_receiver_replies_as_the_receiver_itself() -> None:
    receiver = ws.WeightReceiver(nn.Linear(2, 2), version=6)
    remote = Remote(receiver)
    assert remote.report() == receiver.report()
    assert remote.status() == receiver.status()
    reply = remote.dispatch(LabelRequest(new_version="step 6"))
    assert reply == receiver.status()
    assert receiver.label == "step 6"
    with pytest.raises(ws.StaleVersionError, match=r"^worker 3: ") as refused:
        remote.dispatch(StartRequest(update_id="u", version=6))
    assert (refused.value.held, refused.value.offered) == (6, 6)


def test_a_sender_updates_a_receiver_behind_a_remote_one() -> None:
    receiver = ws.WeightReceiver(nn.Linear(2, 2))
    source = nn.Linear(2, 2)
    with (
        serving(make_app(Remote(receiver), token=None)) as url,
        ws.connect(source, to=url) as sender,
    ):
        report = sender.send_weights()
    assert report.receivers[0].verified == "held"
    assert receiver.version == report.version == 1


def test_a_report_that_is_none_is_an_error_of_the_peer() -> None:
    class Wrong(RemoteReceiver):
        def handle_json(self, call: str, body: bytes) -> bytes:
            return b'{"status": 3}'

    with pytest.raises(ws.ProtocolError, match="the report of a receiver is not valid"):
        Wrong().status()
