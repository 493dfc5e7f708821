"""A receiver takes the weights in use from another one, which `weightsync.update.lending` sends."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from urllib.parse import urlsplit

from weightsync.errors import (
    NotReadyError,
    ProtocolError,
    UpdateConflictError,
    VerificationError,
    WeightSyncError,
)
from weightsync.report import SyncReport
from weightsync.transports.base import Transport
from weightsync.wire import codec
from weightsync.wire.messages import (
    CALL_OF,
    AbortRequest,
    FetchReply,
    FetchRequest,
    FinishRequest,
    InitRequest,
    PrepareRequest,
    Reply,
    Request,
    ShutdownRequest,
    StartRequest,
    StatusRequest,
    UpdateRequest,
)
from weightsync.wire.problem import from_problem, to_problem

logger = logging.getLogger(__name__)

Handle = Callable[[Request], Reply]
"""Has the fetching receiver handle one request."""

_POLLERS = 3
"""Requests overlap: an update, and meanwhile a status or an abort."""
_ALLOWED = (
    InitRequest,
    ShutdownRequest,
    StartRequest,
    UpdateRequest,
    PrepareRequest,
    FinishRequest,
    AbortRequest,
    StatusRequest,
)
"""The requests of a sender; a source may make no others."""
_PASSING = (NotReadyError, VerificationError, UpdateConflictError)
"""Errors of a source that is in an update, or that has replaced the weights meanwhile."""
_AGAIN_S = 0.2
_CALL_TIMEOUT_S = 30.0


def first_that_can(attempts: Sequence[Callable[[], SyncReport]], timeout_s: float) -> SyncReport:
    """Return the report of the first attempt to fetch that succeeds.

    Where a source is in an update, or has replaced the weights meanwhile, all are tried again, for
    at most `timeout_s`. Raises the error of the last one.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        errors: list[WeightSyncError] = []
        for attempt in attempts:
            try:
                return attempt()
            except WeightSyncError as exc:
                errors.append(exc)
                logger.info("nothing was fetched: %s", exc)
        if time.monotonic() > deadline or not any(isinstance(e, _PASSING) for e in errors):
            raise errors[-1]
        time.sleep(_AGAIN_S)


def fetch_from(
    source: Transport, handle: Handle, *, target: str, backend: str = "auto", timeout_s: float
) -> SyncReport:
    """Fetch from `source`; `handle` is the fetching receiver, `target` its name in the report.

    Raises the source's errors.
    """
    report = _Fetch(source, handle, backend, timeout_s).run()
    receivers = [replace(r, target=target, source=source.target) for r in report.receivers]
    return replace(report, receivers=tuple(receivers))


class _Fetch:
    """One attempt: several threads call the source, and handle the requests in its replies."""

    def __init__(self, source: Transport, handle: Handle, backend: str, timeout_s: float) -> None:
        self._source = source
        self._handle = handle
        self._id = secrets.token_hex(16)
        self._backend, self._timeout_s = backend, timeout_s
        self._address = _address_of(source.target)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._report: SyncReport | None = None
        self._error: WeightSyncError | None = None
        self._updates: set[str] = set()
        self._senders: set[str] = set()

    def run(self) -> SyncReport:
        """Return when the source says that all is done. Raises its error."""
        pollers = [
            threading.Thread(target=self._poll, args=(i,), name="weightsync-fetch", daemon=True)
            for i in range(_POLLERS)
        ]
        for poller in pollers:
            poller.start()
        try:
            self._over.wait()
        except BaseException:  # an interrupt
            self._end(error=ProtocolError("the fetch was interrupted"))
            raise
        finally:
            if self._report is None:
                self._clean_up()
            for poller in pollers:
                poller.join()
        if self._report is None:
            raise self._error or ProtocolError(f"{self._source.target} ended without a result")
        return self._report

    def _poll(self, poller: int) -> None:
        request = FetchRequest(
            fetch_id=self._id,
            poller=poller,
            address=self._address,
            backend=self._backend,
            timeout_s=self._timeout_s,
        )
        try:
            while not self._over.is_set():
                answer = self._source.call(request, timeout_s=_CALL_TIMEOUT_S)
                request = self._answered(request, answer)
        except WeightSyncError as exc:
            self._end(error=exc)
        except Exception as exc:  # noqa: BLE001  # a user's transport, or a bug: run() raises it
            self._end(error=ProtocolError(f"the fetch failed: {type(exc).__name__}: {exc}"))

    def _answered(self, asked: FetchRequest, answer: Reply) -> FetchRequest:
        """Return the next call to the source, with what the receiver replied to its request."""
        if not isinstance(answer, FetchReply):
            raise ProtocolError(f"{self._source.target} answers {type(answer).__name__}")
        if answer.problem is not None:
            self._end(error=from_problem(answer.problem, peer=self._source.target))
        if answer.report is not None:
            self._end(report=answer.report)
        reply = problem = None
        if answer.request is not None:
            try:
                reply = codec.reply_to_plain(self._handled(codec.from_plain(answer.request)))
            except Exception as exc:  # noqa: BLE001  # the source raises it
                problem = to_problem(exc)
        return FetchRequest(
            fetch_id=asked.fetch_id,
            poller=asked.poller,
            turn=asked.turn + 1,
            reply=reply,
            problem=problem,
        )

    def _handled(self, request: Request) -> Reply:
        if not isinstance(request, _ALLOWED):
            raise ProtocolError(f"a source makes no request {CALL_OF[type(request)]}")
        if isinstance(request, InitRequest) and request.init_info is not None:
            self._senders.add(request.init_info.sender)
        if isinstance(request, UpdateRequest) and request.update_id is not None:
            self._updates.add(request.update_id)
        return self._handle(request)

    def _end(
        self, *, report: SyncReport | None = None, error: WeightSyncError | None = None
    ) -> None:
        with self._lock:
            if not self._over.is_set():
                self._report, self._error = report, error
                self._over.set()

    def _clean_up(self) -> None:
        """Abort what the source has begun, and forget it as a sender: it may be gone."""
        for update_id in self._updates:
            with suppress(WeightSyncError):
                self._handle(AbortRequest(update_id=update_id, reason="the fetch failed"))
        for sender in self._senders:
            with suppress(WeightSyncError):
                self._handle(ShutdownRequest(sender=sender))


def _address_of(target: str) -> str | None:
    """Return the IP address of a source at a URL, None for others."""
    host = urlsplit(target).hostname if "://" in target else None
    if host is None:
        return None
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None
