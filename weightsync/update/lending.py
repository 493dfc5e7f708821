"""A receiver that is a source: it sends the weights in use to receivers that fetch them.

The fetching receiver calls, also for the requests that it is sent: they are the replies to its
`fetch_weights` calls. So it needs no address, and any transport to this receiver will do.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass

import torch

from weightsync.backends.base import TransferOptions
from weightsync.backends.registry import choose_backends
from weightsync.errors import (
    ConnectError,
    NotReadyError,
    ProtocolError,
    TransportTimeout,
    WeightSyncError,
)
from weightsync.ranks.comm import alone
from weightsync.ranks.group import RankGroup
from weightsync.ranks.worker import RankWorker
from weightsync.report import SyncReport
from weightsync.transports.base import BaseTransport
from weightsync.update.coordinator import Coordinator
from weightsync.update.fleet import Fleet
from weightsync.update.paths import PathSelector
from weightsync.update.session import ReceiverSession
from weightsync.wire import codec
from weightsync.wire.messages import (
    CALL_OF,
    FetchReply,
    FetchRequest,
    Reply,
    Request,
    UpdateRequest,
)
from weightsync.wire.problem import from_problem, to_problem

logger = logging.getLogger(__name__)

MAX_FETCHES = 8
"""Receivers that fetch from one receiver at the same time."""
POLL_S = 1.0
"""How long a call waits for a request to the caller."""
_LOOK_S = 0.05
"""How often it is looked whether an update of others has begun."""
_SILENT_S = 10.0
"""A receiver that has not called for so long is gone."""
_KEPT_S = 60.0
"""How long the result of a fetch is kept, for calls that are repeated."""
_READING_S = 60.0


class Lender:
    """Answers the `fetch_weights` calls of any number of receivers. Thread-safe."""

    def __init__(self, session: ReceiverSession) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._fetches: dict[str, _Fetch] = {}
        self._closed = False

    def answer(self, request: FetchRequest) -> FetchReply:
        """Answer one call. Raises NotReadyError where too many receivers fetch."""
        with self._lock:
            if self._closed:
                raise ProtocolError("this receiver is closed; fetch from another one")
            self._forget()
            fetch = self._fetches.get(request.fetch_id)
            if fetch is None:
                if request.turn:
                    raise ProtocolError(f"fetch {request.fetch_id} is over; begin another one")
                if sum(not other.ended_at for other in self._fetches.values()) >= MAX_FETCHES:
                    raise NotReadyError(
                        f"{MAX_FETCHES} receivers fetch from this one already; fetch from another, "
                        "or later",
                        state=self._session.lifecycle.state.value,
                    )
                fetch = self._fetches[request.fetch_id] = _Fetch(self._session, request)
                fetch.start()
        return fetch.mailbox.take(request)

    def close(self) -> None:
        """Give up all fetches. Idempotent."""
        with self._lock:
            self._closed = True
            for fetch in self._fetches.values():
                fetch.mailbox.close()

    def _forget(self) -> None:
        before = time.monotonic() - _KEPT_S
        for fetch_id, fetch in list(self._fetches.items()):
            if fetch.ended_at and fetch.ended_at < before:
                del self._fetches[fetch_id]


class _Fetch:
    """One fetch: sends the weights in use in a thread, through `mailbox`."""

    def __init__(self, session: ReceiverSession, request: FetchRequest) -> None:
        self.ended_at = 0.0
        self.mailbox = Mailbox(request.address, self._check_free)
        self._session = session
        self._backend, self._timeout_s = request.backend, request.timeout_s

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="weightsync-lend", daemon=True).start()

    def _run(self) -> None:
        try:
            self.mailbox.end(FetchReply(report=self._send()))
        except Exception as exc:
            if not isinstance(exc, WeightSyncError):
                logger.exception("the weights could not be sent to a receiver that fetches them")
            self.mailbox.end(FetchReply(problem=to_problem(exc)))
        finally:
            self.ended_at = time.monotonic()

    def _send(self) -> SyncReport:
        self._check_free()
        with self._session.reading(_READING_S):
            lent = LentWeights(self._session)
        backends, unusable = choose_backends(self._backend)
        options = TransferOptions(adopt=False, timeout_s=self._timeout_s)
        ranks = alone()  # whatever other ranks this process has
        group = RankGroup(RankWorker(lent, options, ranks, backends, "off"), ranks)
        with closing(group), closing(self._fleet(group)) as fleet:
            paths = PathSelector(fleet, options, backends, ordered=False, unusable=unusable)
            coordinator = Coordinator(fleet, paths, takeover=False)
            try:
                coordinator.membership.connect()
                return coordinator.send(
                    lent.version, lent.label, rewind=True, weights_id=lent.weights_id
                )
            finally:
                with suppress(WeightSyncError):
                    coordinator.membership.disconnect(leaves=True)

    def _check_free(self) -> None:
        """Raise NotReadyError where this would slow down an update of other receivers."""
        session = self._session
        if session.senders.feeds_others:
            raise NotReadyError(
                "this receiver passes an update on to others; fetch from another one, or after it",
                state=session.lifecycle.state.value,
                update_id=session.lifecycle.update_id,
            )

    def _fleet(self, group: RankGroup) -> Fleet:
        return Fleet(group, [self.mailbox], timeout_s=self._timeout_s, drops=False, yields=True)


class LentWeights:
    """WeightSource of the weights that a receiver uses now. Made while they are read.

    They stay in use, and an update may replace them at any time: `changed` then has their names.

    Raises ConfigError where the receiver keeps no whole copy, NotReadyError where the copy is being
    overwritten.
    """

    def __init__(self, session: ReceiverSession) -> None:
        lifecycle = session.lifecycle
        self._session = session
        self.version, self.label = lifecycle.version, lifecycle.label
        self.weights_id = lifecycle.weights_id
        starts, is_open = session.starts, session.open_update is not None
        targets = session.load_targets
        self.manifest, self._tensors, self._stay = targets.in_use(self.weights_id)
        if is_open and not self._stay:
            raise NotReadyError(
                "this receiver is in an update, which overwrites the weights that others could "
                "fetch; fetch after it",
                state=lifecycle.state.value,
                update_id=lifecycle.update_id,
            )
        self._held = self.weights_id, self.version, 0 if self._stay else starts

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors by name."""
        for spec, tensor in zip(self.manifest.specs, self._tensors, strict=True):
            yield spec.name, tensor

    def stable_tensors(self) -> list[torch.Tensor]:
        """Return the tensors."""
        return self._tensors

    @property
    def changed(self) -> list[str]:
        """The names of all tensors where these are not in use any more. Waits for a commit."""
        session = self._session
        try:
            with session.reading(_READING_S):
                held = session.lifecycle.weights_id, session.lifecycle.version
                same = (*held, 0 if self._stay else session.starts) == self._held
        except NotReadyError:
            same = False
        return [] if same else [spec.name for spec in self.manifest.specs]


@dataclass(slots=True, eq=False)
class _Call:
    """One request to the fetching receiver, and its reply."""

    request: Request
    reply: Reply | None = None
    error: WeightSyncError | None = None
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Poller:
    """The last turn of one poller: its answer, None as long as it waits, and the call in it."""

    turn: int = -1
    answer: FetchReply | None = None
    call: _Call | None = None


class Mailbox(BaseTransport):
    """A Transport to a receiver that polls for its requests; `take` answers its polls.

    `address` is the one at which that receiver reaches this host. Calls raise ConnectError when it
    has not polled for 10 s, and updates what `check` raises.
    """

    def __init__(self, address: str | None, check: Callable[[], None]) -> None:
        super().__init__("the receiver that fetches")
        self._check = check
        self.local_address = address if address and _is_ours(address) else None
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._pollers: dict[int, _Poller] = {}
        self._heard_at = time.monotonic()
        self._outcome: FetchReply | None = None

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Pass on one request, and wait for its reply; see Transport.call."""
        self._check_open()
        self._count(len(codec.encode(request)))
        deadline = time.monotonic() + timeout_s
        call = _Call(request)
        wait_s = _LOOK_S if isinstance(request, UpdateRequest) else POLL_S
        with self._changed:
            self._waiting.append(call)
            self._changed.notify_all()
            while not call.is_over:
                now = time.monotonic()
                if self._closed or now - self._heard_at > _SILENT_S:
                    self._withdraw(call)
                    raise ConnectError(f"{self.target} does not call any more")
                if now >= deadline:
                    self._withdraw(call)
                    raise TransportTimeout(
                        f"{self.target}: no reply to {CALL_OF[type(request)]} in {timeout_s:g} s"
                    )
                if isinstance(request, UpdateRequest):
                    self._check()
                self._changed.wait(min(deadline - now, wait_s))
        if call.error is not None:
            raise call.error
        assert call.reply is not None
        return call.reply

    def _withdraw(self, call: _Call) -> None:
        if call in self._waiting:
            self._waiting.remove(call)

    def take(self, request: FetchRequest) -> FetchReply:
        """Settle the poller's last request, and return the next one: empty if none comes soon."""
        until = time.monotonic() + POLL_S
        with self._changed:
            poller = self._pollers.setdefault(request.poller, _Poller())
            if request.turn not in (poller.turn, poller.turn + 1):
                raise ProtocolError(f"turn {request.turn} comes after turn {poller.turn}")
            if request.turn > poller.turn:
                self._settle(poller, request)
                poller.turn, poller.answer, poller.call = request.turn, None, None
            while poller.answer is None:
                self._heard_at = time.monotonic()
                if self._outcome is not None:
                    poller.answer = self._outcome
                elif self._waiting:
                    poller.call = self._waiting.popleft()
                    poller.answer = FetchReply(request=codec.to_plain(poller.call.request))
                elif self._heard_at >= until:
                    poller.answer = FetchReply()
                else:
                    self._changed.wait(until - self._heard_at)
                if poller.turn != request.turn:
                    raise ProtocolError("the next turn of this poller has come already")
            self._heard_at = time.monotonic()
            return poller.answer

    def _settle(self, poller: _Poller, request: FetchRequest) -> None:
        call = poller.call
        if call is None:
            return
        try:
            if request.problem is not None:
                call.error = from_problem(request.problem, peer=self.target)
            else:
                call.reply = codec.reply_from_plain(CALL_OF[type(call.request)], request.reply)
        except WeightSyncError as exc:
            call.error = exc
        call.is_over = True
        self._changed.notify_all()

    def end(self, outcome: FetchReply) -> None:
        """Answer all further polls with `outcome`."""
        with self._changed:
            self._outcome = outcome
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse further calls, and end those that wait."""
        super().close()
        with self._changed:
            self._changed.notify_all()


def _is_ours(address: str) -> bool:
    """Whether `address` is an IP address of this host, on which a port can be opened."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except (OSError, ValueError):
        return False
    return True
