"""A message that cannot be read is dropped with a log line; whoever got it goes on."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq

from weightsync.queues.sockets import ipc_address
from weightsync.serve.engine_client import EngineCoreClient
from weightsync.serve.messages import EngineStats, ModelCard, StatsReply, WorkerMessage
from weightsync.serve.options import CoreAddress
from weightsync.serve.worker_client import WorkerClient
from weightsync.serve.worker_group import WorkerGroup, worker_identity

WAIT_S = 60.0
BAD = [b"", b"\xc1", b"no msgpack", msgspec.msgpack.encode({"a": 1}), b"\x91" * 5000]


@pytest.fixture(autouse=True)
def no_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that fails would end pytest itself: let it fail the test instead."""

    def end(code: int) -> None:
        raise AssertionError(f"the process would have ended with exit code {code}")

    monkeypatch.setattr("weightsync.serve.links.os._exit", end)


CARD = ModelCard(name="tiny", directory="tiny", vocab_size=8, max_length=8, end_ids=[0])


def answer_with_garbage_before(core: zmq.Socket[bytes]) -> None:
    """Be an engine core: say what cannot be read, and then what can."""
    assert core.poll(int(WAIT_S * 1000))
    owner = core.recv_multipart()[0]
    for frame in BAD:
        core.send_multipart([owner, frame])
    answers = [StatsReply(call=1, stats=EngineStats(tokens_total=7))]
    core.send_multipart([owner, msgspec.msgpack.encode(answers)])


def test_an_api_server_outlives_what_its_engine_core_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    address = ipc_address(tmp_path)

    async def ask() -> list[EngineStats]:
        client = EngineCoreClient(
            [CoreAddress(socket=address)], CARD, identity=b"api", tensor_ipc="direct_rpc"
        )
        await client.open()
        try:
            return await client.stats()
        finally:
            client.close()

    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as core,
        ThreadPoolExecutor(1) as pool,
    ):
        core.linger = 0
        core.bind(address)
        speaking = pool.submit(answer_with_garbage_before, core)
        assert asyncio.run(ask()) == [EngineStats(tokens_total=7)]
        speaking.result(WAIT_S)
    said = [r.getMessage() for r in caplog.records if "is dropped" in r.getMessage()]
    assert len(said) == len(BAD)
    assert all(line.startswith("a message of engine core 0 cannot be read") for line in said)


def test_calls_to_workers_outlive_what_workers_say(tmp_path: Path) -> None:
    address = ipc_address(tmp_path)

    async def ask() -> bytes:
        client = WorkerClient([address], identity=b"api")
        await client.open()
        try:
            return await asyncio.to_thread(client.call, 0, "weight_info", b"", WAIT_S)
        finally:
            client.close()

    with zmq.Context() as context, context.socket(zmq.ROUTER) as worker:
        worker.linger = 0
        worker.bind(address)

        def answer() -> None:
            assert worker.poll(int(WAIT_S * 1000))
            owner, number, *_ = worker.recv_multipart()
            for frames in ([b""], [number], [b"x"] * 7, [number, b"problem", b"{"]):
                worker.send_multipart([owner, *frames])
            worker.send_multipart([owner, number, b"reply", b"well"])

        speaking = threading.Thread(target=answer)
        speaking.start()
        assert asyncio.run(ask()) == b"well"
        speaking.join(WAIT_S)


def test_a_core_drops_notices_that_are_none(tmp_path: Path) -> None:
    address = ipc_address(tmp_path)
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as core,
        context.socket(zmq.DEALER) as worker,
    ):
        core.linger = worker.linger = 0
        core.bind(address)
        worker.identity = worker_identity(0)
        worker.connect(address)
        crew = WorkerGroup.__new__(WorkerGroup)  # its queues are not needed to listen
        crew.socket = core
        crew._message_at = {}
        for frames in ([b"\xc1"], [b"a", b"b"], [b""]):
            worker.send_multipart(frames)
        worker.send(msgspec.msgpack.encode({"kind": "call", "call": 3, "action": "resume"}))
        found: list[tuple[int, WorkerMessage]] = []
        while not found:
            assert core.poll(int(WAIT_S * 1000))
            found = list(crew.messages())
        assert [(rank, type(message).__name__) for rank, message in found] == [(0, "WorkerCall")]
