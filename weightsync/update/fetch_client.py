"""The receiver of a fetch: it asks a source for requests, and handles them as a trainer's."""

from __future__ import annotations

import copy
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from urllib.parse import urlsplit

from msgspec import structs

from weightsync.errors import (
    ProtocolError,
    SourceBusyError,
    TransportError,
    TransportTimeout,
    UpdateConflictError,
    WeightSyncError,
)
from weightsync.report import ReceiverReport, SyncReport
from weightsync.shm.addresses import resolve
from weightsync.transports.base import Transport
from weightsync.transports.polled import POLL_S
from weightsync.wire import codec
from weightsync.wire.messages import (
    CALL_OF,
    AbortRequest,
    FetchReply,
    FetchRequest,
    FinishRequest,
    InitRequest,
    RegisteredUpdate,
    Reply,
    Request,
    ShutdownRequest,
    Status,
    StatusRequest,
    StepReply,
    UpdateRequest,
)
from weightsync.wire.problem import from_problem, to_problem

logger = logging.getLogger(__name__)

Handle = Callable[[Request], Reply]
"""Has the fetching receiver handle one request."""

_POLLERS = 3
"""Requests overlap: an update, and meanwhile a status or an abort."""
_POLL_TRIES = 3
_CALL_TIMEOUT_S = 30.0
_TICK_S = 0.2
_RETRY_S = 0.2
_NOTHING_YET = FetchReply()
_LEAST_TRIES = 3


def fetch_from_first(
    attempts: Sequence[Callable[[], SyncReport]],
    held: Callable[[], Status],
    timeout_s: float,
    stop: threading.Event | None = None,
) -> SyncReport:
    """Return the report of the first attempt that succeeds; `held` is the receiver's status.

    Where a source is busy, all are tried again, for `timeout_s` or three times. Raises the errors
    of all of them as the first SourceBusyError, or as the last error. Raises UpdateConflictError
    where somebody else has updated the receiver meanwhile. `stop`, when set, ends it.
    """
    stop = stop or threading.Event()
    begun, before = time.monotonic(), _weights_of(held())
    tries = 0
    while True:
        errors: list[WeightSyncError] = []
        for attempt in attempts:
            try:
                return attempt()
            except WeightSyncError as exc:
                errors.append(exc)
                logger.info("nothing was fetched: %s", exc)
            if stop.is_set():
                raise errors[-1]
            if _weights_of(held()) != before:
                raise _overtaken() from errors[-1]
        tries += 1
        is_busy = [isinstance(error, SourceBusyError) for error in errors]
        late = time.monotonic() - begun > timeout_s and tries >= _LEAST_TRIES
        if late or not any(is_busy):
            chosen = errors[is_busy.index(True)] if any(is_busy) else errors[-1]
            raise _with_all(chosen, errors)
        stop.wait(_RETRY_S)


def _overtaken() -> UpdateConflictError:
    return UpdateConflictError(
        "the receiver was updated by somebody else while it fetched; that is kept"
    )


def _with_all(error: WeightSyncError, errors: Sequence[WeightSyncError]) -> WeightSyncError:
    """Return `error` with the texts of all errors."""
    if len(errors) == 1:
        return error
    told = copy.copy(error)
    told.args = ("; ".join(map(str, errors)),)
    return told


def _weights_of(status: Status) -> tuple[int, str | None]:
    return status.version, status.last_finished


def fetch_from(
    source: Transport,
    handle: Handle,
    *,
    target: str,
    timeout_s: float,
    backend: str = "auto",
    weights_id: str | None = None,
    delta_follows: bool = False,
    stop: threading.Event | None = None,
) -> SyncReport:
    """Fetch from `source`; `handle` is the fetching receiver, `target` its name in the report.

    With `weights_id` these weights, as they were sent. `delta_follows`: the next update of the
    receiver may be a delta. `stop`, when set, gives the fetch up. Raises
    the source's errors, and TransportTimeout where it requests nothing for `timeout_s`.
    """
    request = FetchRequest(
        fetch_id=secrets.token_hex(16),
        address=_address_of(source.target),
        backend=backend,
        timeout_s=timeout_s,
        weights_id=weights_id,
    )
    fetch = _Fetch(source, handle, request, target, stop or threading.Event())
    fetch.delta_follows = delta_follows
    return fetch.run()


class _Fetch:
    """One attempt: several threads call the source, and handle the requests in its replies.

    A source may send a whole model by senders of its own, which this receiver did not know before,
    and nothing else.
    """

    def __init__(
        self,
        source: Transport,
        handle: Handle,
        request: FetchRequest,
        target: str,
        stop: threading.Event,
    ) -> None:
        self._source = source
        self._handle = handle
        self._request = request
        self._target = target
        self._stop = stop
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._handling = 0
        self._requested_at = time.monotonic()
        self._report: SyncReport | None = None
        self._error: WeightSyncError | None = None
        self._known: set[str] = set()
        self._before: tuple[int, str | None] | None = None
        self._path, self._tensors = "", 0
        self._updates: set[str] = set()
        self._senders: set[str] = set()
        self._finished: StepReply | None = None
        self.delta_follows = False

    def run(self) -> SyncReport:
        """Return when the source says that all is done. Raises its error."""
        status = self._status()
        self._known, self._before = set(status.senders), _weights_of(status)
        pollers = [
            threading.Thread(target=self._poll, args=(i,), name="weightsync-fetch", daemon=True)
            for i in range(_POLLERS)
        ]
        for poller in pollers:
            poller.start()
        try:
            while not self._over.wait(_TICK_S):
                self._check_progress()
        finally:  # also of an interrupt
            self._end(error=ProtocolError("the fetch was interrupted"))
            if self._report is None:
                self._clean_up()
            if self._report is None and self._finished is not None:
                self._report = self._own_report(self._finished)  # the source's was lost
            until = time.monotonic() + 2 * POLL_S
            for poller in pollers:  # one whose call hangs handles nothing any more
                poller.join(max(until - time.monotonic(), 0.0))
        if self._report is None:
            raise self._error or ProtocolError(f"{self._source.target} ended without a result")
        return self._report

    def _status(self) -> Status:
        status = self._handle(StatusRequest())
        if not isinstance(status, Status):
            raise ProtocolError(f"{self._target} answers {type(status).__name__} to weight_info")
        return status

    def _check_progress(self) -> None:
        silent_s = time.monotonic() - self._requested_at
        if self._stop.is_set():
            self._end(error=ProtocolError("the fetch was given up"))
        elif not self._handling and silent_s > self._request.timeout_s:
            self._end(
                error=TransportTimeout(f"{self._source.target} sent nothing for {silent_s:.3g} s")
            )

    def _poll(self, poller: int) -> None:
        request = structs.replace(self._request, poller=poller)
        try:
            while not self._over.is_set():
                called_at = time.monotonic()
                reply = self._called(request)
                request = self._answered(request, reply)
                if reply == _NOTHING_YET and time.monotonic() - called_at < POLL_S / 2:
                    self._over.wait(_TICK_S)  # a server that does not wait, perhaps a foreign one
        except WeightSyncError as exc:
            self._end(error=exc)
        except Exception as exc:  # noqa: BLE001  # a user's transport, or a bug: run() raises it
            self._end(error=ProtocolError(f"the fetch failed: {type(exc).__name__}: {exc}"))

    def _called(self, request: FetchRequest) -> FetchReply:
        """Call the source, again where a reply was lost: a repeated turn changes nothing."""
        timeout_s = min(_CALL_TIMEOUT_S, self._request.timeout_s + POLL_S)
        for tries_left in reversed(range(_POLL_TRIES)):
            try:
                reply = self._source.call(request, timeout_s=timeout_s)
                break
            except TransportError:
                if not tries_left or self._over.wait(_RETRY_S):
                    raise
        if not isinstance(reply, FetchReply):
            raise ProtocolError(f"{self._source.target} answers {type(reply).__name__}")
        return reply

    def _answered(self, asked: FetchRequest, answer: FetchReply) -> FetchRequest:
        """Return the next call to the source, with what the receiver replied to its request."""
        if answer.problem is not None:
            self._end(error=from_problem(answer.problem, peer=self._source.target))
        if answer.report is not None:
            self._end(report=self._checked(answer.report))
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
        with self._lock:
            if self._over.is_set() or self._stop.is_set():
                raise ProtocolError("this fetch is over")
            self._check_allowed(request)
            self._handling += 1
        try:
            begins = isinstance(request, UpdateRequest) and request.start is not None
            if begins and _weights_of(self._status()) != self._before:
                raise _overtaken()
            if isinstance(request, FinishRequest):  # the source knows nothing of the next update
                request = structs.replace(request, delta_follows=self.delta_follows)
            reply = self._handle(request)
        finally:
            with self._lock:
                self._handling -= 1
                self._requested_at = time.monotonic()
        is_finish = isinstance(request, FinishRequest)
        if is_finish and isinstance(reply, StepReply) and reply.verified != "none":
            self._finished = reply
        return reply

    def _check_allowed(self, request: Request) -> None:
        """Raise ProtocolError unless this is a request of one of the source's own senders."""
        allowed = False
        match request:
            case StatusRequest() | InitRequest(init_info=None):
                allowed = True
            case InitRequest(init_info=info) if info is not None:
                allowed = info.sender not in self._known
                if allowed:
                    self._senders.add(info.sender)
                    self._path, self._tensors = info.path, len(info.manifest.names)
            case ShutdownRequest(sender=sender):
                allowed = sender in self._senders
            case UpdateRequest(
                update_id=str() as update_id, update_info=RegisteredUpdate() as info, start=start
            ):
                begins = start is not None and not start.partial
                allowed = info.sender in self._senders and (begins or update_id in self._updates)
                if allowed:
                    self._updates.add(update_id)
            case FinishRequest(update_id=update_id) | AbortRequest(update_id=update_id):
                allowed = update_id in self._updates
        if not allowed:
            raise ProtocolError(f"a source may not make this request {CALL_OF[type(request)]}")

    def _checked(self, report: SyncReport) -> SyncReport:
        """Return the report as this receiver knows it. Raises ProtocolError where it is untrue."""
        done = self._finished
        if done is None or done.version != report.version:
            raise ProtocolError(f"{self._source.target} says that it has sent what did not arrive")
        receivers = tuple(
            replace(
                one,
                target=self._target,
                source=self._source.target,
                apply=done.apply,
                verified=done.verified,
                names_nothing=done.names_nothing,
            )
            for one in report.receivers[:1]
        )
        return replace(
            report,
            nbytes=done.nbytes,
            apply=done.apply,
            verified=done.verified,
            receivers=receivers,
        )

    def _own_report(self, done: StepReply) -> SyncReport:
        """Return the report of an update that this receiver has committed."""
        phases = {name: spent for name, spent in done.seconds.items() if name != "wait"}  # of load
        seconds = {**phases, "total": sum(phases.values())}
        receiver = ReceiverReport(
            target=self._target,
            path=self._path,
            apply=done.apply,
            verified=done.verified,
            stall_s=done.stall_s,
            seconds=done.seconds,
            source=self._source.target,
            names_nothing=done.names_nothing,
        )
        return SyncReport(
            version=done.version,
            label=self._status().label,
            update_id=done.update_id or "",
            tensors=self._tensors,
            nbytes=done.nbytes,
            packed=True,
            path=self._path,
            apply=done.apply,
            verified=done.verified,
            stall_s=done.stall_s,
            seconds=seconds,
            control_nbytes=0,
            control_messages=0,
            peak_extra_nbytes=0,
            receivers=(receiver,),
        )

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
        until = time.monotonic() + _CALL_TIMEOUT_S
        while self._handling and time.monotonic() < until:  # an init, perhaps
            time.sleep(_TICK_S / 10)
        for sender in self._senders:
            with suppress(WeightSyncError):
                self._handle(ShutdownRequest(sender=sender))


def _address_of(target: str) -> str | None:
    """Return the IP address of a source at a URL, None for others."""
    host = urlsplit(target).hostname if "://" in target else None
    if host is None:
        return None
    try:
        return str(resolve(host)[0][1][0])
    except (OSError, UnicodeError):
        return None
