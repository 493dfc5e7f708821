"""The API server's client of the workers, for calls about weights."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Sequence

import msgspec
import zmq
import zmq.asyncio

from weightsync.errors import ConnectError, TransportTimeout, WeightSyncError
from weightsync.serve import links
from weightsync.serve.links import end_process
from weightsync.serve.messages import REPORT_CALL
from weightsync.update.history import WorkerReport
from weightsync.wire import codec
from weightsync.wire.messages import (
    CALL_OF,
    CALLS,
    Reply,
    Request,
    Status,
    StatusRequest,
)
from weightsync.wire.problem import Problem, from_problem

CALL_TIMEOUT_S = 3600.0
"""Longer than any update timeout, so that the worker's error comes first, with the reason."""
LOOK_TIMEOUT_S = 10.0


class WorkerClient:
    """Sends calls to all workers of a server over ZeroMQ. Thread-safe.

    Its sockets belong to an event loop in a thread of its own.
    """

    def __init__(self, addresses: Sequence[str], *, identity: bytes) -> None:
        self._calls: dict[bytes, concurrent.futures.Future[bytes]] = {}
        self._next_call = 0
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        self._sending: set[asyncio.Task[None]] = set()
        opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._run,
            args=(list(addresses), identity, opened),
            name="worker client",
            daemon=True,
        )
        self._thread.start()
        opened.result()

    def call(self, worker: int, call: str, body: bytes, timeout_s: float) -> bytes:
        """Make one call and return the body of the reply. Raises the worker's error.

        Raises TransportTimeout when the worker does not reply, ConnectError after `close`.
        """
        with self._lock:
            self._next_call += 1
            number = b"%d" % self._next_call
            answer = self._calls[number] = concurrent.futures.Future()
        try:
            if not self._thread.is_alive():
                raise ConnectError(f"worker {worker} cannot be called: the server is shutting down")
            frames = [number, call.encode(), body]
            self._loop.call_soon_threadsafe(self._send, worker, frames)
            return answer.result(timeout_s)
        except WeightSyncError:
            raise  # of the worker; it may be a TimeoutError too
        except TimeoutError:
            raise TransportTimeout(
                f"worker {worker} did not answer {call} within {timeout_s:g} s"
            ) from None
        finally:
            with self._lock:
                del self._calls[number]

    def close(self) -> None:
        """Close the sockets. Calls in progress raise ConnectError."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)
        gone = ConnectError("the server is shutting down")
        with self._lock:
            for answer in self._calls.values():
                if not answer.done():
                    answer.set_exception(gone)

    def _run(
        self, addresses: list[str], identity: bytes, opened: concurrent.futures.Future[None]
    ) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            for address in addresses:
                self._sockets.append(self._connect(address, identity))
        except BaseException as exc:
            opened.set_exception(exc)
            raise
        opened.set_result(None)
        tasks = [self._loop.create_task(self._listen(socket)) for socket in self._sockets]
        for task in tasks:
            task.add_done_callback(end_process)
        try:
            self._loop.run_forever()
        finally:
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._context.destroy(linger=0)
            self._loop.close()

    def _connect(self, address: str, identity: bytes) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        return socket

    def _send(self, worker: int, frames: list[bytes]) -> None:
        sending = self._loop.create_task(_send_all(self._sockets[worker], frames))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            with links.dropped("a worker"):
                self._take(*frames)

    def _take(self, number: bytes, kind: bytes = b"", body: bytes = b"", *_: bytes) -> None:
        with self._lock:
            answer = self._calls.get(number)
        if answer is None or answer.done():
            return  # the caller has stopped waiting
        if kind == b"reply":
            answer.set_result(body)
        else:
            problem = msgspec.json.decode(body, type=Problem)
            answer.set_exception(from_problem(problem, peer=""))


async def _send_all(socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
    await socket.send_multipart(frames)


class RemoteReceiver:
    """A proxy for one worker's WeightReceiver, used by the routes of an API server."""

    def __init__(self, client: WorkerClient, worker: int) -> None:
        self._client = client
        self._worker = worker

    def dispatch(self, request: Request) -> Reply:
        """Send the request to the worker; return its reply, or raise its error."""
        call = CALL_OF[type(request)]
        return codec.decode_reply(call, self.forward(call, codec.encode(request)))

    def forward(self, call: str, body: bytes) -> bytes:
        """Send the JSON of a request as it is: the worker checks it. Raises the worker's error."""
        timeout_s = LOOK_TIMEOUT_S if CALLS.get(call) is StatusRequest else CALL_TIMEOUT_S
        return self._client.call(self._worker, call, body, timeout_s)

    def status(self) -> Status:
        """Return the state of the worker's receiver."""
        return self.report().status

    def report(self) -> WorkerReport:
        """Return the report of the worker's receiver."""
        body = self._client.call(self._worker, REPORT_CALL, b"", LOOK_TIMEOUT_S)
        return msgspec.json.decode(body, type=WorkerReport)
