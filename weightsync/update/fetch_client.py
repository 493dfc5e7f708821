"""The receiver of a fetch: it asks a source for requests, and handles them as a trainer's."""

from __future__ import annotations

import copy
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from urllib.parse import urlsplit

from msgspec import structs, to_builtins

from weightsync.errors import (
    ConfigError,
    ManifestMismatchError,
    ProtocolError,
    SourceBusyError,
    TransportError,
    TransportTimeout,
    UpdateConflictError,
    WeightSyncError,
)
from weightsync.report import ReceiverReport, SyncReport
from weightsync.shm.addresses import resolve
from weightsync.transports.base import Transport, complete
from weightsync.transports.polled import POLL_S
from weightsync.wire import codec
from weightsync.wire.messages import (
    CALL_OF,
    MAIL_FROM,
    MAIL_TO,
    AbortRequest,
    FetchReply,
    FetchRequest,
    FinishRequest,
    InitRequest,
    JointTurn,
    Mail,
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
_STATUS_TIMEOUT_S = 20.0
_LAST_MAIL_S = 2.0
"""How long sources may take to hear of the end of a fetch, before it counts without them."""


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
                if not isinstance(exc, NoSourceError):
                    logger.info("nothing was fetched: %s", exc)
            if stop.is_set():
                raise errors[-1]
            if _weights_of(held()) != before:
                raise _overtaken() from errors[-1]
        errors = [e for e in errors if not isinstance(e, NoSourceError)] or errors
        tries += 1
        is_busy = [isinstance(error, SourceBusyError) for error in errors]
        late = time.monotonic() - begun > timeout_s and tries >= _LEAST_TRIES
        if late or not any(is_busy):
            chosen = errors[is_busy.index(True)] if any(is_busy) else errors[-1]
            raise _with_all(chosen, errors)
        stop.wait(_RETRY_S)


class NoSourceError(ConfigError):
    """An attempt was not made: its source holds parts alone, or no source does. Others count."""


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


def fetch_parts(
    sources: Sequence[Transport],
    handle: Handle,
    *,
    target: str,
    timeout_s: float,
    backend: str = "auto",
    weights_id: str | None = None,
    delta_follows: bool = False,
    stop: threading.Event | None = None,
) -> SyncReport:
    """Fetch from those of `sources` that hold parts of the same weights, from all of them at once.

    The arguments are those of `fetch_from`. Each element is read from one source; of those that
    hold equal parts each sends a share. Where one is lost, the others are tried without it.

    Raises the sources' errors, ManifestMismatchError where their parts do not make a model,
    SourceBusyError where one replaced its weights meanwhile, NoSourceError where none has parts.
    """
    stop = stop or threading.Event()
    answer_s = min(timeout_s, _STATUS_TIMEOUT_S)
    lenders, errors = _lenders(sources, weights_id, answer_s)
    if not lenders:
        raise _with_all(errors[-1], errors) if errors else NoSourceError("no source holds parts")
    for held, listed in _by_weights(lenders).items():
        group = listed
        while True:
            try:
                request = FetchRequest(
                    fetch_id=secrets.token_hex(16),
                    backend=backend,
                    timeout_s=timeout_s,
                    weights_id=weights_id,
                )
                if len(group) < 2:
                    raise ManifestMismatchError(
                        f"{group[0].target} holds parts of tensors, and no other source holds the "
                        f"rest of version {held[0]}; name those that do"
                    )
                fetch = _JointFetch(group, held[1], handle, request, target, stop)
                fetch.delta_follows = delta_follows
                return fetch.run()
            except WeightSyncError as exc:
                errors.append(exc)
                logger.info("nothing was fetched: %s", exc)
            if stop.is_set():
                raise errors[-1]
            still = _by_weights(_lenders(group, weights_id, answer_s)[0])
            left = still.get(held, [])
            if len(left) == len(group):
                break
            if still and list(still) != [held]:
                raise SourceBusyError(
                    "a source replaced the weights meanwhile, of which others have parts"
                ) from errors[-1]
            if not left:
                break
            group = left
    busy = (error for error in errors if isinstance(error, SourceBusyError))
    # Else the first one: that a part is missing may be for a source that was lost.
    raise _with_all(next(busy, errors[0]), errors)


def holds_parts(source: Transport) -> bool:
    """Whether a source has parts of tensors alone, as it says now; False where it says nothing."""
    try:
        status = source.call(StatusRequest(), timeout_s=_STATUS_TIMEOUT_S)
    except WeightSyncError:
        return False
    return isinstance(status, Status) and status.lends and not status.fetchable


def workers_of(source: Transport) -> Sequence[Transport]:
    """Return transports to all workers of a server, or that to a receiver that is one itself.

    Raises TransportError where it does not answer.
    """
    status = source.call(StatusRequest(), timeout_s=_STATUS_TIMEOUT_S)
    workers = status.workers if isinstance(status, Status) else []
    return complete(source).expand(workers) if workers else [source]


_Held = tuple[int, str]
"""A version, and the id of its weights."""


def _lenders(
    sources: Sequence[Transport], weights_id: str | None, answer_s: float
) -> tuple[list[tuple[Transport, Status]], list[WeightSyncError]]:
    """Return the sources that hold parts of weights, each once, and the errors of others."""
    found: dict[str, tuple[Transport, Status]] = {}
    errors: list[WeightSyncError] = []
    for source in sources:
        try:
            status = source.call(StatusRequest(), timeout_s=answer_s)
        except WeightSyncError as exc:
            errors.append(exc)
            continue
        if not isinstance(status, Status) or not (status.lends and status.weights_id):
            continue
        if weights_id in (None, status.weights_id):
            found.setdefault(status.instance, (source, status))
    return list(found.values()), errors


def _by_weights(lenders: Sequence[tuple[Transport, Status]]) -> dict[_Held, list[Transport]]:
    """Return sources by the weights that they hold, in the order of the first ones."""
    found: dict[_Held, list[Transport]] = {}
    for source, status in lenders:
        found.setdefault((status.version, status.weights_id or ""), []).append(source)
    return found


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
            threading.Thread(target=poll, name="weightsync-fetch", daemon=True)
            for poll in self._polls()
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

    def _polls(self) -> list[Callable[[], None]]:
        """Return what threads run until the end."""
        return [partial(self._poll, poller) for poller in range(_POLLERS)]

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
            self._end(error=TransportTimeout(f"{self._silent()} sent nothing for {silent_s:.3g} s"))

    def _silent(self) -> str:
        """Return the name of what has sent nothing."""
        return self._source.target

    def _poll(self, poller: int) -> None:
        request = structs.replace(self._request, poller=poller)
        try:
            while not self._over.is_set():
                called_at = time.monotonic()
                reply = self._called(self._source, request)
                request = self._answered(request, reply)
                if reply == _NOTHING_YET and time.monotonic() - called_at < POLL_S / 2:
                    self._over.wait(_TICK_S)  # a server that does not wait, perhaps a foreign one
        except WeightSyncError as exc:
            self._end(error=exc)
        except Exception as exc:  # noqa: BLE001  # a user's transport, or a bug: run() raises it
            self._end(error=ProtocolError(f"the fetch failed: {type(exc).__name__}: {exc}"))

    def _called(self, source: Transport, request: FetchRequest) -> FetchReply:
        """Call a source, again where a reply was lost: a repeated turn changes nothing."""
        timeout_s = min(_CALL_TIMEOUT_S, self._request.timeout_s + POLL_S)
        for tries_left in reversed(range(_POLL_TRIES)):
            try:
                reply = source.call(request, timeout_s=timeout_s)
                break
            except TransportError:
                if not tries_left or self._over.wait(_RETRY_S):
                    raise
        if not isinstance(reply, FetchReply):
            raise ProtocolError(f"{source.target} answers {type(reply).__name__}")
        return reply

    def _answered(self, asked: FetchRequest, answer: FetchReply) -> FetchRequest:
        """Return the next call to the source, with what the receiver replied to its request."""
        if answer.problem is not None or answer.report is not None:
            self._source_ended(answer)
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

    def _source_ended(self, answer: FetchReply) -> None:
        """End with the outcome of the source."""
        if answer.problem is not None:
            self._end(error=from_problem(answer.problem, peer=self._source.target))
        elif answer.report is not None:
            self._end(report=self._checked(answer.report))

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
                source=self._sender,
                peers=self._peers(done),
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

    @property
    def _sender(self) -> str:
        """The name of the source, or of all sources, for the report."""
        return self._source.target

    def _peers(self, done: StepReply) -> dict[str, int]:
        """Return the bytes that came from each of several sources."""
        return {}

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
            source=self._sender,
            peers=self._peers(done),
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


class _JointFetch(_Fetch):
    """One attempt at several sources, each of which sends the parts that it holds.

    They are the ranks of one sender, in this order. The first makes the requests to this receiver,
    and what they say to each other is passed on here.
    """

    def __init__(
        self,
        sources: Sequence[Transport],
        weights_id: str,
        handle: Handle,
        request: FetchRequest,
        target: str,
        stop: threading.Event,
    ) -> None:
        super().__init__(sources[0], handle, request, target, stop)
        self._sources = list(sources)
        self._weights_id = weights_id
        self._mail: list[SimpleQueue[Mail]] = [SimpleQueue() for _ in sources]
        self._outcomes: dict[int, FetchReply] = {}
        self._answered_at = [time.monotonic()] * len(self._sources)
        self._ended_at = 0.0

    def run(self) -> SyncReport:
        """As of one source. Errors end with which rank is which source."""
        try:
            return super().run()
        except WeightSyncError as exc:
            told = copy.copy(exc)
            ranks = ", ".join(f"rank {i} is {name}" for i, name in enumerate(self._names))
            told.args = (f"{exc} ({ranks})", *exc.args[1:])
            raise told from exc

    def _polls(self) -> list[Callable[[], None]]:
        found = super()._polls()
        for place in range(len(self._sources)):
            found += [partial(self._pass_on, place), partial(self._bring, place)]
        return found

    def _called(self, source: Transport, request: FetchRequest) -> FetchReply:
        place = self._sources.index(source)
        if request.turn == 0 and request.reply is None:
            first = self._turn(place)
            request = structs.replace(
                request, address=_address_of(source.target), reply=to_builtins(first)
            )
        return super()._called(source, request)

    def _turn(self, place: int, mail: Sequence[Mail] = ()) -> JointTurn:
        return JointTurn(
            place=place,
            places=len(self._sources),
            weights_id=self._weights_id,
            mail=list(mail),
        )

    def _pass_on(self, place: int) -> None:
        """Take the mail of one source until it has ended, and give it to the others."""
        source = self._sources[place]
        request = structs.replace(self._request, poller=MAIL_FROM)
        with self._failing():
            while not self._over.is_set():
                called_at = time.monotonic()
                reply = self._called(source, request)
                self._answered_at[place] = time.monotonic()
                for mail in reply.mail:
                    if mail.peer == place or mail.peer >= len(self._sources):
                        raise ProtocolError(f"{source.target} has mail for place {mail.peer}")
                    self._mail[mail.peer].put(structs.replace(mail, peer=place))
                if reply.problem is not None or reply.report is not None:
                    self._note_outcome(place, reply)
                    return
                if reply == _NOTHING_YET and time.monotonic() - called_at < POLL_S / 2:
                    self._over.wait(_TICK_S)
                request = FetchRequest(
                    fetch_id=request.fetch_id, poller=MAIL_FROM, turn=request.turn + 1
                )

    def _bring(self, place: int) -> None:
        """Bring one source what the others have sent to it, and that the fetch has failed."""
        source, turn = self._sources[place], 0
        with self._failing():
            while not self._over.is_set() and place not in self._outcomes:
                mail = self._next_mail(place)
                if mail:
                    self._bring_mail(source, place, turn, mail)
                    turn += 1
        if self._error is not None and turn and place not in self._outcomes:
            lost = Mail(kind="lost", peer=(place + 1) % len(self._sources))
            with suppress(WeightSyncError):  # it may be the one that is lost
                self._bring_mail(source, place, turn, [lost])

    def _bring_mail(self, source: Transport, place: int, turn: int, mail: list[Mail]) -> None:
        brought = self._turn(place, mail)
        request = structs.replace(
            self._request,
            address=_address_of(source.target),
            poller=MAIL_TO,
            turn=turn,
            reply=to_builtins(brought),
        )
        self._called(source, request)

    def _next_mail(self, place: int) -> list[Mail]:
        """Return the mail to a source; wait for it for a moment."""
        found: list[Mail] = []
        with suppress(Empty):
            found.append(self._mail[place].get(timeout=_TICK_S))
            while True:
                found.append(self._mail[place].get_nowait())
        return found

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """End the fetch with an error of the block."""
        try:
            yield
        except WeightSyncError as exc:
            self._end(error=exc)
        except Exception as exc:  # noqa: BLE001  # a user's transport, or a bug: run() raises it
            self._end(error=ProtocolError(f"the fetch failed: {type(exc).__name__}: {exc}"))

    def _source_ended(self, answer: FetchReply) -> None:
        self._note_outcome(0, answer)

    def _note_outcome(self, place: int, answer: FetchReply) -> None:
        """Keep the outcome of a source: the fetch ends when all have one, or a moment later.

        An error ends it at once. Sources that agree on one have the same.
        """
        if answer.problem is not None:
            self._end(error=from_problem(answer.problem, peer=self._names[place]))
        with self._lock:
            self._outcomes.setdefault(place, answer)
            self._ended_at = self._ended_at or time.monotonic()
            all_ended = len(self._outcomes) == len(self._sources)
        if all_ended:
            self._end_with_report()

    def _check_progress(self) -> None:
        super()._check_progress()
        if self._ended_at and time.monotonic() - self._ended_at > _LAST_MAIL_S:
            self._end_with_report()

    def _end_with_report(self) -> None:
        """End with the report of the first source, if it has made one."""
        first = self._outcomes.get(0)
        if first is not None and first.report is not None:
            self._end(report=self._checked(first.report))

    def _silent(self) -> str:
        """Return the names of those that do not answer, else of all: one waits for another."""
        now = time.monotonic()
        late = [
            name
            for name, at in zip(self._names, self._answered_at, strict=True)
            if now - at > 2 * POLL_S
        ]
        return ", ".join(late) or self._sender

    @property
    def _sender(self) -> str:
        return ", ".join(self._names)

    @property
    def _names(self) -> list[str]:
        """The names of the sources; those that are not the only ones of a name have their rank."""
        given = [source.target for source in self._sources]
        return [
            name if given.count(name) == 1 else f"{name} (rank {i})" for i, name in enumerate(given)
        ]

    def _peers(self, done: StepReply) -> dict[str, int]:
        names = self._names
        return {names[rank]: n for rank, n in done.sources.items() if rank < len(names)}


def _address_of(target: str) -> str | None:
    """Return the IP address of a source at a URL, None for others."""
    host = urlsplit(target).hostname if "://" in target else None
    if host is None:
        return None
    try:
        return str(resolve(host)[0][1][0])
    except (OSError, UnicodeError):
        return None
