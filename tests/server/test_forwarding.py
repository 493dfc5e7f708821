"""A request to a worker in another process is decoded there, and nowhere else."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.testclient import TestClient
from torch import nn

import weightsync as ws
from weightsync.server.workers import Workers, workers_router
from weightsync.wire.messages import Reply, Request, Status, WorkerReport


class InAnotherProcess:
    """Passes on JSON; what was decoded before it came is counted."""

    def __init__(self, receiver: ws.WeightReceiver) -> None:
        self._receiver = receiver
        self.forwarded: list[tuple[str, bytes]] = []
        self.decoded: list[Request] = []

    def forward(self, call: str, body: bytes) -> bytes:
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
