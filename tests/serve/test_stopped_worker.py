"""An engine core that waits for a worker: what it serves meanwhile, and when it gives up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import zmq

import weightsync as ws
from weightsync.queues.codec import TensorEncoder
from weightsync.queues.message_queue import MessageQueue
from weightsync.serve import worker_group
from weightsync.serve.engine_core import EngineCore
from weightsync.serve.messages import (
    Cancel,
    CoreMessage,
    Done,
    EngineRequest,
    Event,
    Hello,
    ModelCard,
    SampledToken,
    StatsReply,
    StatsRequest,
    Step,
    StepResult,
    WorkerCall,
    WorkerMessage,
)
from weightsync.serve.worker_group import WorkerGroup, step_codec, worker_identity

WAIT_S = 60.0
CARD = ModelCard(name="a model", directory="", vocab_size=8, max_length=64, end_ids=[0])

_events: msgspec.msgpack.Decoder[list[Event]] = msgspec.msgpack.Decoder(list[Event])
_words: msgspec.msgpack.Decoder[CoreMessage] = msgspec.msgpack.Decoder(CoreMessage)


class Replica:
    """A core in a thread of its own, with one worker and one API server, which the test plays."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        gate, orders = self._socket(zmq.ROUTER, "gate"), self._socket(zmq.ROUTER, "orders")
        self.worker = self._socket(zmq.DEALER, "gate", worker_identity(0))
        self.api = self._socket(zmq.DEALER, "orders", b"api")
        self.results = MessageQueue(1, 1, codec=step_codec(), spin_s=0.0)
        self.say(Hello(call=1, card=CARD, results=self.results.export_handle()))
        self.crew = WorkerGroup.gather(gate, 1, timeout_s=WAIT_S)
        welcome = self.hear()
        assert isinstance(welcome, Done)
        assert welcome.steps is not None
        self.steps = MessageQueue.create_from_handle(welcome.steps, 0, codec=step_codec())
        self.core = EngineCore(orders, self.crew)
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def say(self, message: WorkerMessage) -> None:
        self.worker.send(msgspec.msgpack.encode(message))

    def hear(self, timeout_s: float = WAIT_S) -> CoreMessage | None:
        return (
            _words.decode(self.worker.recv()) if self.worker.poll(int(timeout_s * 1000)) else None
        )

    def order(self, request_id: str, order: Any) -> None:
        self.api.send_multipart([request_id.encode(), *TensorEncoder().encode(order)])

    def running(self) -> int:
        """Ask the core how many rows are at work."""
        self.order("", StatsRequest(call=1))
        while self.api.poll(int(WAIT_S * 1000)):
            for event in _events.decode(self.api.recv()):
                if isinstance(event, StatsReply):
                    return event.stats.running
        raise AssertionError("the core does not answer")

    def ended(self) -> Exception | None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.error

    def close(self) -> None:
        self.core.stop()
        self._thread.join(WAIT_S)
        for end in (self.crew, self.steps, self.results):
            end.close()
        self._context.destroy(linger=0)

    def _socket(self, kind: int, name: str, identity: bytes = b"") -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        if identity:
            socket.setsockopt(zmq.IDENTITY, identity)
        with suppress(zmq.ZMQError):
            (socket.connect if identity else socket.bind)(f"inproc://{name}")
        return socket

    def _run(self) -> None:
        try:
            self.core.run()
        except Exception as exc:  # noqa: BLE001 # the test looks at it
            self.error = exc


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica()
    try:
        yield made
    finally:
        made.close()


def begin_step(replica: Replica) -> Step:
    replica.order("one", EngineRequest(request_id="one", prompt=[1, 2], max_new_tokens=4))
    step: Step = replica.steps.dequeue(WAIT_S)
    return step


def test_what_does_not_need_the_step_to_be_over_is_served(replica: Replica) -> None:
    step = begin_step(replica)
    assert replica.running() == 1
    replica.order("one", Cancel(request_id="one"))
    replica.say(WorkerCall(call=7, action="hold"))
    assert replica.running() == 0
    assert replica.hear(0.3) is None  # a hold says that no step is at work
    chosen = [SampledToken(row=step.new[0].rows[0], token=3)]
    replica.results.enqueue(StepResult(number=step.number, version=0, sampled=chosen))
    done = replica.hear()
    assert isinstance(done, Done)
    assert done.call == 7


def test_a_worker_that_gives_no_sign_of_life_ends_the_core(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_group, "SILENCE_S", 0.5)
    begin_step(replica)
    error = replica.ended()
    assert isinstance(error, ws.TransferTimeout)
    assert "worker 0 did not make its step" in str(error)


def test_a_core_that_waits_for_a_worker_can_be_stopped(replica: Replica) -> None:
    begin_step(replica)
    replica.core.stop()
    assert replica.ended() is None
