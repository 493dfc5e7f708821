"""The contract of transports over real actors. Run by test_ray.py, in a sandbox."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.ray import relay as relay_of_actors
from tests.ray.relay import RelayServer
from tests.transports.contract import UPDATE, Connect, TransportContract
from tests.transports.scripted import ScriptedReceiver
from weightsync.errors import ConnectError, ProtocolError, RemoteError, TransportTimeout
from weightsync.ray import RayActorTransport
from weightsync.transports.base import Transport
from weightsync.wire.messages import AbortRequest, StatusRequest, UpdateRequest


@pytest.fixture(scope="module")
def relay(node: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayServer]:
    server = relay_of_actors.serve(tmp_path_factory.mktemp("relay") / "s")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def started(kind: Any, relay: RelayServer) -> Any:
    """Return an actor that answers: the tests' timeouts are for calls, and not for its start."""
    actor = kind.remote(Path(str(relay.server_address)))
    ray.get(actor.__ray_ready__.remote(), timeout=60)
    return actor


@pytest.fixture(scope="module")
def threaded(relay: RelayServer) -> Any:
    return started(relay_of_actors.RelayActor, relay)


@pytest.fixture(scope="module")
def with_event_loop(relay: RelayServer) -> Any:
    return started(relay_of_actors.AsyncRelayActor, relay)


def to(actor: Any, relay: RelayServer) -> Connect:
    def connect(receiver: ScriptedReceiver) -> Transport:
        relay.receiver = receiver
        return RayActorTransport(actor)

    return connect


class TestThreadedActor(TransportContract):
    @pytest.fixture
    def connect(self, threaded: Any, relay: RelayServer) -> Connect:
        return to(threaded, relay)


class TestAsyncActor(TransportContract):
    @pytest.fixture
    def connect(self, with_event_loop: Any, relay: RelayServer) -> Connect:
        return to(with_event_loop, relay)


def test_no_answer_in_time_is_a_timeout_and_the_transport_works_on(
    threaded: Any, relay: RelayServer
) -> None:
    receiver = ScriptedReceiver(hold=UpdateRequest)
    transport = to(threaded, relay)(receiver)
    with pytest.raises(TransportTimeout, match=r"Relay .* update_weights within 0\.5 s"):
        transport.call(UPDATE, timeout_s=0.5)
    transport.call(AbortRequest(update_id="u1"), timeout_s=30)
    receiver.let_go.set()
    assert transport.call(UPDATE, timeout_s=30) == receiver.answer(UPDATE)


def test_an_actor_killed_during_a_call_and_before_one(relay: RelayServer) -> None:
    actor = started(relay_of_actors.RelayActor, relay)
    receiver = ScriptedReceiver(hold=UpdateRequest)
    transport = to(actor, relay)(receiver)

    def kill() -> None:
        assert receiver.entered.wait(30)
        ray.kill(actor)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(ConnectError, match=r"Relay .* went away during update_weights"):
            transport.call(UPDATE, timeout_s=60)
    finally:
        receiver.let_go.set()
        killer.join()
    with pytest.raises(ConnectError, match=transport.target):
        transport.call(StatusRequest(), timeout_s=60)


class Odd:
    def answer_with(self, answer: object) -> None:
        self.answer = answer

    def weightsync_handle(self, message: object) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


OddActor: Any = ray.remote(num_cpus=0)(Odd)


def test_what_an_odd_actor_does_is_named(relay: RelayServer) -> None:
    actor = OddActor.remote()
    transport = RayActorTransport(actor, "the odd one")
    wanted: list[tuple[object, type[Exception]]] = [
        (ZeroDivisionError("by zero"), RemoteError),
        ({"state": "READY"}, ProtocolError),
        ({"reply": {"state": 1}}, ProtocolError),
        ({"problem": {"title": 3}}, ProtocolError),
    ]
    for answer, error in wanted:
        ray.get(actor.answer_with.remote(answer))
        with pytest.raises(error, match="weight_info"):
            transport.call(StatusRequest(), timeout_s=60)
