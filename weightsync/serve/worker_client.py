"""The API server's client of the workers, for calls about weights."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Sequence

from weightsync.errors import ConnectError, TransportTimeout, WeightSyncError
from weightsync.serve.links import DealerLinks
from weightsync.serve.messages import READS
from weightsync.server.dispatcher import RemoteReceiver
from weightsync.wire.problem import decode_error

CALL_TIMEOUT_S = 3600.0
"""Longer than any update timeout, so that the worker's error comes first, with the reason."""
READ_TIMEOUT_S = 10.0


class WorkerClient:
    """Sends calls to all workers of a server over ZeroMQ. Open and close it in one event loop."""

    def __init__(self, addresses: Sequence[str], *, identity: bytes) -> None:
        self._addresses = list(addresses)
        self._identity = identity
        self._loop: asyncio.AbstractEventLoop | None = None
        self._links: DealerLinks | None = None
        self._calls: dict[bytes, concurrent.futures.Future[bytes]] = {}
        self._next_call = 0
        self._lock = threading.Lock()

    async def open(self) -> None:
        """Connect to all workers. Called once, before all other methods."""
        self._loop = asyncio.get_running_loop()
        self._links = DealerLinks(
            self._addresses, self._take, identity=self._identity, peer="worker"
        )

    def call(self, worker: int, call: str, body: bytes, timeout_s: float) -> bytes:
        """Make one call and return the body of the reply. Raises the worker's error.

        Called from any thread but that of the event loop. Raises TransportTimeout when the worker
        does not reply, ConnectError after `close`.
        """
        answer: concurrent.futures.Future[bytes] = concurrent.futures.Future()
        with self._lock:
            if self._loop is None or self._links is None:
                raise ConnectError(f"worker {worker} cannot be called: the server is shutting down")
            self._next_call += 1
            number = b"%d" % self._next_call
            self._calls[number] = answer
            frames = [number, call.encode(), body]
            self._loop.call_soon_threadsafe(self._links.post, worker, frames)
        try:
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
        with self._lock:
            links, self._links = self._links, None
            for answer in self._calls.values():
                if not answer.done():
                    answer.set_exception(ConnectError("the server is shutting down"))
        if links is not None:
            links.close()

    def _take(self, _worker: int, frames: list[bytes]) -> None:
        number, kind, body = frames
        with self._lock:
            answer = self._calls.get(number)
        if answer is None or answer.done():
            return  # the caller has stopped waiting
        if kind == b"reply":
            answer.set_result(body)
        else:
            answer.set_exception(decode_error(body))


class RemoteWorker(RemoteReceiver):
    """A worker's WeightReceiver, or the one at the path `below`, for an API server's routes."""

    def __init__(self, client: WorkerClient, worker: int, below: str = "") -> None:
        self._client = client
        self._worker = worker
        self._below = f"{below}/" if below else ""

    def handle_json(self, call: str, body: bytes) -> bytes:
        """Send the JSON of a request as it is: the worker checks it. Raises the worker's error."""
        timeout_s = READ_TIMEOUT_S if call in READS else CALL_TIMEOUT_S
        return self._client.call(self._worker, self._below + call, body, timeout_s)
