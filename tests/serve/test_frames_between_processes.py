"""The links of API servers and workers: unreadable messages, ends of calls, ends of links."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, cast

import msgspec
import pytest
import zmq
import zmq.asyncio

import weightsync as ws
from weightsync.queues.codec import TensorDecoder
from weightsync.queues.sockets import ipc_address
from weightsync.serve import worker as worker_process
from weightsync.serve.engine_client import EngineCoreClient
from weightsync.serve.links import EXIT_CODE, DealerLinks
from weightsync.serve.messages import (
    Cancel,
    ClientMessage,
    EngineOutput,
    EngineRequest,
    EngineStats,
    Event,
    Failed,
    FinishReason,
    ModelCard,
    StatsReply,
    WorkerCall,
    WorkerMessage,
    WorkerState,
)
from weightsync.serve.options import CoreAddress
from weightsync.serve.worker import WorkerLink
from weightsync.serve.worker_client import WorkerClient
from weightsync.serve.worker_group import WorkerGroup, worker_identity
from weightsync.wire.problem import encode_problem, to_problem

WAIT_S = 60.0
SOON_S = 0.05
BAD = [b"", b"\xc1", b"no msgpack", msgspec.msgpack.encode({"a": 1}), b"\x91" * 5000]


@pytest.fixture(autouse=True)
def exit_codes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The exit codes with which a failed task would have ended pytest itself; none is allowed."""
    codes: list[int] = []
    monkeypatch.setattr("weightsync.serve.links.os._exit", codes.append)
    yield codes
    assert not codes


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


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        ((b"reply", b"well"), contextlib.nullcontext()),
        ((b"problem", b"{"), pytest.raises(ws.ProtocolError, match="that cannot be read")),
    ],
)
def test_calls_to_workers_outlive_what_workers_say(
    tmp_path: Path, reply: tuple[bytes, bytes], outcome: contextlib.AbstractContextManager[object]
) -> None:
    """What is no reply to a call is dropped; an error that cannot be read ends that call."""
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
            for frames in ([b""], [number], [b"x"] * 7, [number, *reply]):
                worker.send_multipart([owner, *frames])

        speaking = threading.Thread(target=answer)
        speaking.start()
        with outcome:
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


class Cores:
    """Engine cores that the test plays, in one event loop with their API server's client."""

    def __init__(self, directory: Path, count: int = 1) -> None:
        self._context = zmq.asyncio.Context()
        self._sockets = [self._context.socket(zmq.ROUTER) for _ in range(count)]
        addresses = [ipc_address(directory) for _ in self._sockets]
        for socket, address in zip(self._sockets, addresses, strict=True):
            socket.bind(address)
        self.client = EngineCoreClient(
            [CoreAddress(socket=address) for address in addresses], CARD, identity=b"api"
        )

    async def heard(self, core: int = 0) -> ClientMessage:
        """Return the next message of the client to a core."""
        frames = await asyncio.wait_for(self._sockets[core].recv_multipart(), WAIT_S)
        decoder: TensorDecoder[ClientMessage] = TensorDecoder(cast(Any, ClientMessage))
        return decoder.decode(frames[2:])

    async def say(self, *events: Event, core: int = 0) -> None:
        await self._sockets[core].send_multipart([b"api", msgspec.msgpack.encode(events)])

    async def started(self, *request_ids: str) -> AsyncGenerator[EngineOutput, None]:
        """Return the outputs of requests that one core has taken and gave one token each."""
        outputs = self.client.generate([request(request_id) for request_id in request_ids])
        first = asyncio.ensure_future(anext(outputs))
        for request_id in request_ids:
            assert await self.heard() == request(request_id)
        await self.say(EngineOutput(request_id=request_ids[0], index=0, token=3))
        assert (await first).token == 3
        return outputs

    async def __aenter__(self) -> Self:
        await self.client.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.close()
        self._context.destroy(linger=0)


def request(request_id: str) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt=[1], max_new_tokens=5)


class TestRequests:
    def test_one_that_is_no_longer_read_is_cancelled_once(self, tmp_path: Path) -> None:
        async def go() -> None:
            async with Cores(tmp_path) as cores:
                outputs = await cores.started("one")
                await outputs.aclose()
                assert await cores.heard() == Cancel(request_id="one")
                cores.client.cancel("one", 0)  # it has ended: no core is told
                await cores.started("two")

        asyncio.run(go())

    def test_one_that_fails_cancels_the_others_of_its_call(self, tmp_path: Path) -> None:
        async def go() -> None:
            async with Cores(tmp_path) as cores:
                outputs = await cores.started("bad", "good", "better")
                problem = encode_problem(to_problem(ws.ConfigError("the prompt is too long")))
                await cores.say(Failed(request_id="bad", problem=problem))
                with pytest.raises(ws.ConfigError, match="the prompt is too long"):
                    await anext(outputs)
                assert await cores.heard() == Cancel(request_id="good")
                assert await cores.heard() == Cancel(request_id="better")

        asyncio.run(go())

    def test_a_core_whose_requests_have_ended_is_less_busy(self, tmp_path: Path) -> None:
        async def go() -> None:
            async with Cores(tmp_path, count=2) as cores:
                running = []
                for request_id, core in (("stays", 1), ("ends", 0), ("next", 0)):
                    outputs = cores.client.generate([request(request_id)])
                    first = asyncio.ensure_future(anext(outputs))
                    assert await cores.heard(core) == request(request_id)
                    ended: FinishReason | None = "length" if request_id == "ends" else None
                    event = EngineOutput(request_id=request_id, index=0, finish_reason=ended)
                    await cores.say(event, core=core)
                    assert await first == event
                    if ended:
                        assert [output async for output in outputs] == []
                    running.append(outputs)
                for outputs in running:
                    await outputs.aclose()

        asyncio.run(go())


class TestCallsToWorkers:
    def test_those_in_progress_end_with_the_client_and_later_ones_fail_at_once(
        self, tmp_path: Path
    ) -> None:
        async def go() -> None:
            address = ipc_address(tmp_path)
            with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as worker:
                worker.linger = 0
                worker.bind(address)
                client = WorkerClient([address], identity=b"api")
                await client.open()

                async def call(timeout_s: float) -> bytes:
                    return await asyncio.to_thread(client.call, 0, "weight_info", b"", timeout_s)

                calls = [asyncio.create_task(call(WAIT_S)) for _ in range(2)]
                for _ in calls:
                    await asyncio.wait_for(worker.recv_multipart(), WAIT_S)
                client.close()
                for begun in calls:
                    with pytest.raises(ws.ConnectError, match="the server is shutting down"):
                        await begun
                with pytest.raises(ws.ConnectError, match="worker 0 cannot be called"):
                    await call(SOON_S)

        asyncio.run(go())

    def test_one_that_has_ended_is_forgotten(self, tmp_path: Path) -> None:
        """Otherwise an API server would keep every reply that it has ever got."""

        async def go() -> None:
            client = WorkerClient([ipc_address(tmp_path)], identity=b"api")
            await client.open()
            with pytest.raises(ws.TransportTimeout, match="worker 0 did not answer weight_info"):
                await asyncio.to_thread(client.call, 0, "weight_info", b"", SOON_S)
            assert not client._calls
            client.close()

        asyncio.run(go())


class TestLinks:
    def test_a_listening_task_that_fails_ends_the_process(
        self, tmp_path: Path, exit_codes: list[int]
    ) -> None:
        """Otherwise its callers would wait for replies for ever."""

        async def go() -> None:
            taken = asyncio.Event()

            def take(_sender: int, _frames: list[bytes]) -> None:
                taken.set()
                raise KeyError("a defect")

            with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as peer:
                peer.linger = 0
                address = ipc_address(tmp_path)
                peer.bind(address)
                links = DealerLinks([address], take, identity=b"api", peer="worker")
                await links.send(0, [b"hello"])
                await asyncio.wait_for(peer.recv_multipart(), WAIT_S)
                await peer.send_multipart([b"api", b"a message"])
                await asyncio.wait_for(taken.wait(), WAIT_S)
                await asyncio.sleep(SOON_S)  # until the task has ended
                links.close()

        asyncio.run(go())
        assert exit_codes == [EXIT_CODE]
        exit_codes.clear()

    @pytest.mark.parametrize("begun", [False, True], ids=["at once", "later"])
    def test_messages_around_a_close_are_dropped(self, tmp_path: Path, begun: bool) -> None:
        """A server that shuts down fails in no task, also if it has hardly begun."""

        async def go() -> list[object]:
            failures: list[object] = []
            asyncio.get_running_loop().set_exception_handler(
                lambda _loop, context: failures.append(context)
            )
            links = DealerLinks(
                [ipc_address(tmp_path)], lambda *_: None, identity=b"api", peer="worker"
            )
            if begun:
                await asyncio.sleep(SOON_S)
            links.post(0, [b"before"])
            links.close()
            links.post(0, [b"after"])
            await asyncio.sleep(SOON_S)
            gc.collect()  # a task that failed says so when it is collected
            return failures

        assert asyncio.run(go()) == []


class TestWorkers:
    @pytest.fixture
    def linked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[tuple[WorkerLink, zmq.Socket[bytes], zmq.Socket[bytes]]]:
        """A worker that sends its state on a change only, and its core and API server."""
        monkeypatch.setattr(worker_process, "STATE_POLL_S", WAIT_S * 10)
        core_address, control_address = ipc_address(tmp_path), ipc_address(tmp_path)
        with (
            zmq.Context() as context,
            context.socket(zmq.ROUTER) as core,
            context.socket(zmq.DEALER) as api,
        ):
            core.linger = api.linger = 0
            core.bind(core_address)
            link = WorkerLink(0, core_address=core_address, control_address=control_address)
            try:
                api.connect(control_address)
                yield link, core, api
            finally:
                link.close()

    def test_the_core_is_sent_the_state_after_a_call_before_the_caller_its_reply(
        self,
        linked: tuple[WorkerLink, zmq.Socket[bytes], zmq.Socket[bytes]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A receiver that has joined a newer fleet generates for no request that comes later."""
        link, core, api = linked
        sent: list[int] = []
        for name in ("send", "send_multipart"):
            send = getattr(zmq.asyncio.Socket, name)

            def noted(socket: Any, *args: Any, _send: Any = send, **more: Any) -> Any:
                sent.append(socket.type)
                return _send(socket, *args, **more)

            monkeypatch.setattr(zmq.asyncio.Socket, name, noted)
        states = [WorkerState(version=1)]

        def join(_call: str, _body: bytes) -> bytes:
            states.append(WorkerState(version=1, state="CATCHING_UP", why_not="it is old"))
            return b"joined"

        link.serve(join, lambda: states[-1], lambda _paused: None)
        api.send_multipart([b"1", b"init", b""])
        assert api.poll(int(WAIT_S * 1000))
        assert api.recv_multipart() == [b"1", b"reply", b"joined"]
        assert core.poll(int(WAIT_S * 1000))
        assert decoded(core.recv_multipart()) == states[-1]
        assert sent == [zmq.DEALER, zmq.ROUTER]

    def test_a_hold_that_the_core_does_not_answer_is_released(
        self, linked: tuple[WorkerLink, zmq.Socket[bytes], zmq.Socket[bytes]]
    ) -> None:
        link, core, _ = linked
        link.serve(lambda *_: b"", lambda: WorkerState(version=1), lambda _paused: None)
        with pytest.raises(ws.TransferTimeout, match="the engine core did not answer hold"):
            link.hold(SOON_S)
        for expected in (WorkerCall(call=1, action="hold"), WorkerState(version=1, released=True)):
            assert core.poll(int(WAIT_S * 1000))
            assert decoded(core.recv_multipart()) == expected


def decoded(frames: list[bytes]) -> WorkerMessage:
    """Return a worker's message to its core."""
    decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(
        cast(Any, WorkerMessage)
    )
    return decoder.decode(frames[1])
