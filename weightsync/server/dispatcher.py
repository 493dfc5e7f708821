"""From an async route handler to a blocking receiver, and from its errors to HTTP responses."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, TypeVar

import anyio
from fastapi import Request as HttpRequest
from fastapi import Response
from msgspec import structs
from starlette.requests import ClientDisconnect

from weightsync.errors import AuthError, ConfigError, WeightSyncError
from weightsync.server.auth import challenge
from weightsync.server.threads import run_limited
from weightsync.wire import codec, problem
from weightsync.wire.messages import CALL_OF, REPORT_CALL, Reply, Request, Status, WorkerReport

T = TypeVar("T")

logger = logging.getLogger(__name__)

DEFAULT_MAX_BODY_NBYTES = 64 << 20
BODY_TIMEOUT_S = 60.0


class Receiver(Protocol):
    """The interface that the routes call: of a WeightReceiver, or of `Workers` for several."""

    def handle_json(self, call: str, body: bytes) -> bytes:
        """Handle the JSON of a request, and return that of its reply."""
        return codec.encode(self.dispatch(codec.decode_request(call, body)))

    def dispatch(self, request: Request) -> Reply:
        """Handle one request; blocks. Called from several threads at once."""

    def status(self) -> Status:
        """Return the current state; does not wait for a step in progress."""

    def report(self) -> WorkerReport:
        """Return status, counts and last reply, read at one moment."""


class RemoteReceiver(Receiver, ABC):
    """A WeightReceiver in another process. A subclass has the way there: `handle_json`.

    It takes `call` and `body` to the `handle_json` of that receiver, and returns what this returns,
    or raises its error; `weightsync.wire.problem` carries errors. A request of a route is decoded
    there alone.
    """

    @abstractmethod
    def handle_json(self, call: str, body: bytes) -> bytes:
        """Return the reply of the other process; called from several threads at once."""

    def dispatch(self, request: Request) -> Reply:
        """Send the request; return its reply, or raise its error."""
        call = CALL_OF[type(request)]
        return codec.decode_reply(call, self.handle_json(call, codec.encode(request)))

    def status(self) -> Status:
        """Return the state of the receiver."""
        return self.report().status

    def report(self) -> WorkerReport:
        """Return the report of the receiver."""
        return codec.decode_report(self.handle_json(REPORT_CALL, b""))


class BodyError(ConfigError):
    """The body of a request did not arrive, or is too long; `status` is the response's."""

    def __init__(self, message: str, *, status: int) -> None:
        self.status = status
        super().__init__(message)


class AsyncDispatcher:
    """Runs the blocking calls of one receiver in worker threads.

    Loads, interrupts (abort and resume) and reads each have their own threads, so that long loads
    delay neither an abort nor a status read. A step continues when its client disconnects, and the
    client's retry joins it.
    """

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self._loads = anyio.CapacityLimiter(32)
        self._reads = anyio.CapacityLimiter(8)
        interrupts = anyio.CapacityLimiter(8)
        self._limiters = {
            "weight_info": self._reads,
            "abort_weight_update": interrupts,
            "resume": interrupts,
            "fetch_weights": anyio.CapacityLimiter(64),
        }

    async def step(self, call: str, body: bytes) -> Response:
        """Dispatch the JSON of a request, and return that of its reply. Raises their errors."""
        limiter = self._limiters.get(call, self._loads)
        answer = await run_limited(limiter, self._step, call, body)
        return Response(answer, media_type="application/json")

    async def read(self, reading: Callable[[], T]) -> T:
        """Return what `reading` returns: a short call that may wait for a receiver's lock."""
        return await run_limited(self._reads, reading)

    def _step(self, call: str, body: bytes) -> bytes:
        try:
            return self.receiver.handle_json(call, body)
        except Exception:
            raise
        except BaseException as exc:
            # A hook's SystemExit, for instance: raised in a task, it would end the event loop.
            logger.exception("%s ended with an exception that is no Exception", call)
            raise problem.from_problem(problem.to_problem(exc)) from exc


async def read_body(request: HttpRequest, max_nbytes: int) -> bytes:
    """Return the body. Raises BodyError once it is too long, or has not arrived in 60 s.

    Content-Length alone suffices to refuse a body. A body whose Content-Length is small enough, or
    is missing (chunked), is counted while it is read.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > max_nbytes:
        raise _too_long(max_nbytes)
    received = bytearray()
    try:
        with anyio.fail_after(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                received += chunk
                if len(received) > max_nbytes:
                    raise _too_long(max_nbytes)
    except TimeoutError as exc:
        raise BodyError(
            f"the body did not arrive within {BODY_TIMEOUT_S:g} s; send it again", status=408
        ) from exc
    except ClientDisconnect as exc:
        raise BodyError("the client went away while it sent the body", status=400) from exc
    return bytes(received)


def error_response(exc: Exception) -> Response:
    """Return the problem document of an error; logs an error that is no WeightSyncError."""
    if not isinstance(exc, WeightSyncError):
        logger.error("a request failed", exc_info=exc)
    document = problem.to_problem(exc)
    headers: dict[str, str] = {}
    if isinstance(exc, BodyError):
        document = structs.replace(document, status=exc.status)
        headers["connection"] = "close"
    if isinstance(exc, AuthError):
        headers.update((name.decode(), value.decode()) for name, value in challenge(exc))
        headers["connection"] = "close"
    return Response(
        problem.encode_problem(document),
        status_code=document.status,
        headers=headers,
        media_type=problem.MEDIA_TYPE,
    )


def _too_long(max_nbytes: int) -> BodyError:
    return BodyError(
        f"the body is longer than {max_nbytes} bytes; weights are in shared memory, not in "
        "messages, so this is either not for this server or needs a larger max_body_nbytes",
        status=413,
    )
