"""A Transport to a receiver that calls itself: its requests are the replies to `fetch_weights`."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from weightsync.errors import ConnectError, ProtocolError, TransportTimeout, WeightSyncError
from weightsync.transports.base import BaseTransport
from weightsync.wire import codec
from weightsync.wire.messages import (
    CALL_OF,
    MAIL_FROM,
    MAIL_TO,
    FetchReply,
    FetchRequest,
    JointTurn,
    Mail,
    Reply,
    Request,
    UpdateRequest,
)
from weightsync.wire.problem import from_problem

POLL_S = 1.0
"""How long a poll waits for a request."""
SILENCE_S = 10.0
"""A receiver that has not polled for so long is gone."""
_CHECK_S = 0.05


@dataclass(slots=True, eq=False)
class _Call:
    """One request to the receiver, and its outcome."""

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
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock)


class Mailbox:
    """The messages between one source and the others, sent and arrived. Thread-safe.

    `place` is that of this source among the `places` of all. `alive` says whether the receiver that
    passes the messages on still calls.
    """

    def __init__(self, place: int, places: int, alive: Callable[[], bool]) -> None:
        self.place = place
        self.places = places
        self._alive = alive
        self.changed = threading.Condition()
        self._sent: deque[Mail] = deque()
        self._arrived: dict[int, deque[bytes]] = defaultdict(deque)
        self._notes: set[str] = set()
        self._lost: dict[int, None] = {}
        self._is_closed = False

    def send(self, to: int, body: bytes) -> None:
        """Send a message to the source at the place `to`. Messages to one arrive in order."""
        self._post(Mail(peer=to, body=body))

    def note(self, key: str) -> None:
        """Set a note, which all sources have from then on."""
        with self.changed:
            self._notes.add(key)
        for peer in range(self.places):
            if peer != self.place:
                self._post(Mail(kind="note", peer=peer, body=key.encode()))

    def is_noted(self, key: str) -> bool:
        """Whether any source has set this note."""
        return key in self._notes

    def _post(self, mail: Mail) -> None:
        with self.changed:
            self._sent.append(mail)
            self.changed.notify_all()

    def deliver(self, arrived: Sequence[Mail]) -> None:
        """Add messages of the others; `peer` is the place that each is from."""
        with self.changed:
            for mail in arrived:
                match mail.kind:
                    case "word":
                        self._arrived[mail.peer].append(mail.body)
                    case "note":
                        self._notes.add(mail.body.decode(errors="replace"))
                    case "lost":
                        self._lost[mail.peer] = None
            self.changed.notify_all()

    def take_sent(self) -> list[Mail]:
        """Return what is to be passed on, which may be nothing."""
        with self.changed:
            sent = list(self._sent)
            self._sent.clear()
        return sent

    def wait_sent(self, timeout_s: float, over: Callable[[], bool]) -> list[Mail]:
        """Return what is to be passed on; wait for it, until `over`. See `close` for the end."""
        until = time.monotonic() + timeout_s
        with self.changed:
            while not self._sent and not over() and time.monotonic() < until:
                self.changed.wait(max(until - time.monotonic(), 0.0))
            return self.take_sent()

    def take(self, peer: int) -> bytes | None:
        """Return the next message from a source, None where there is none yet."""
        with self.changed:
            arrived = self._arrived[peer]
            return arrived.popleft() if arrived else None

    def wait(self, timeout_s: float) -> None:
        """Wait for any change."""
        with self.changed:
            self.changed.wait(timeout_s)

    @property
    def lost(self) -> list[int]:
        """The places of the sources that were lost; this one's, where nobody passes mail on."""
        if self._is_closed or not self._alive():
            return [self.place]
        return list(self._lost)

    def close(self) -> None:
        """End all waits: no message is passed on any more."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()


class PolledTransport(BaseTransport):
    """A Transport to a receiver whose polls `take` answers.

    `address` is the one at which that receiver reaches this host. Calls raise ConnectError when it
    has not polled for 10 s; updates raise what `check` raises. With `joint` it fetches from other
    sources as well, and `mailbox` has what these send to each other.
    """

    def __init__(
        self, address: str | None, check: Callable[[], None], joint: JointTurn | None = None
    ) -> None:
        super().__init__("the receiver that fetches")
        self.mailbox = (
            None if joint is None else Mailbox(joint.place, joint.places, lambda: self._is_called)
        )
        self._address = address if address and _is_usable(address) else None
        self._check = check
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._pollers: dict[int, _Poller] = {}
        self._polled_at = time.monotonic()
        self._outcome: FetchReply | None = None

    @property
    def local_address(self) -> str | None:
        """The address at which that receiver reaches this host, unless it is of no use."""
        return self._address

    @property
    def _is_called(self) -> bool:
        return not self._closed and time.monotonic() - self._polled_at <= SILENCE_S

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Pass on one request, and wait for its reply; see Transport.call."""
        self._check_open()
        self._count(len(codec.encode(request)))
        call = _Call(request)
        with self._changed:
            self._waiting.append(call)
            self._changed.notify_all()
            try:
                self._await(call, time.monotonic() + timeout_s)
            finally:
                if call in self._waiting:
                    self._waiting.remove(call)
        if call.error is not None:
            raise call.error
        assert call.reply is not None
        return call.reply

    def _await(self, call: _Call, deadline: float) -> None:
        is_update = isinstance(call.request, UpdateRequest)
        while not call.is_over:
            now = time.monotonic()
            if is_update:
                self._check()
            if not self._is_called:
                raise ConnectError(f"{self.target} has made no call for {SILENCE_S:g} s")
            if now >= deadline:
                what = CALL_OF[type(call.request)]
                raise TransportTimeout(f"{self.target} did not reply to {what} in time")
            self._changed.wait(min(deadline - now, _CHECK_S if is_update else POLL_S))

    def take(self, request: FetchRequest) -> FetchReply:
        """Settle the poller's last request, and return the next one: empty if none comes soon.

        A turn that is repeated gets the same answer. Raises ProtocolError for any other turn than
        the last or the next one.
        """
        until = time.monotonic() + POLL_S
        mailbox = self.mailbox
        if mailbox is not None and request.poller in (MAIL_FROM, MAIL_TO):
            return self._take_mail(request, mailbox)
        with self._changed:
            poller = self._pollers.setdefault(request.poller, _Poller())
            if request.turn not in (poller.turn, poller.turn + 1):
                raise ProtocolError(f"turn {request.turn} comes after turn {poller.turn}")
            if request.turn > poller.turn:
                self._settle(poller.call, request)
                poller.turn, poller.answer, poller.call = request.turn, None, None
            while poller.answer is None:
                now = self._polled_at = time.monotonic()
                if self._outcome is not None:
                    poller.answer = self._outcome
                elif self._waiting:
                    poller.call = self._waiting.popleft()
                    poller.answer = FetchReply(request=codec.to_plain(poller.call.request))
                elif now >= until:
                    poller.answer = FetchReply()
                else:
                    self._changed.wait(until - now)
                if poller.turn != request.turn:
                    raise ProtocolError("the next turn of this poller has come already")
            return poller.answer

    def _take_mail(self, request: FetchRequest, mailbox: Mailbox) -> FetchReply:
        """Return the mail of this source, or take what others have sent to it."""
        with self._changed:
            self._polled_at = time.monotonic()
            poller = self._pollers.setdefault(request.poller, _Poller())
        with poller.one_at_a_time:  # a repeated turn waits for the answer of the first
            if request.turn not in (poller.turn, poller.turn + 1):
                raise ProtocolError(f"turn {request.turn} comes after turn {poller.turn}")
            if request.turn == poller.turn and poller.answer is not None:
                return poller.answer
            if request.poller == MAIL_TO:
                if request.reply is not None:
                    mailbox.deliver(joint_turn(request.reply).mail)
                answer = FetchReply()
            else:
                sent = mailbox.wait_sent(POLL_S, lambda: self._outcome is not None)
                # The outcome comes after all mail: the others need that to end, too.
                answer = FetchReply(mail=sent) if sent else self._outcome or FetchReply()
            poller.turn, poller.answer = request.turn, answer
            return answer

    def _settle(self, call: _Call | None, request: FetchRequest) -> None:
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
        if self.mailbox is not None:
            with self.mailbox.changed:
                self.mailbox.changed.notify_all()

    def close(self) -> None:
        """Refuse further calls, and end those that wait."""
        super().close()
        with self._changed:
            self._changed.notify_all()
        if self.mailbox is not None:
            self.mailbox.close()


def joint_turn(given: Any) -> JointTurn:
    """Return the JointTurn that is the `reply` of a request. Raises ProtocolError for others."""
    try:
        turn = msgspec.convert(given, JointTurn)
    except msgspec.ValidationError as exc:
        raise ProtocolError(f"reply of a joint fetch: {exc}") from exc
    if turn.place >= turn.places:
        raise ProtocolError(f"reply of a joint fetch: of {turn.places} places none is {turn.place}")
    return turn


def _is_usable(address: str) -> bool:
    """Whether another host may reach a port of this one at `address`, an IP address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if found.is_loopback or found.is_unspecified or found.is_multicast or found.is_link_local:
        return False
    family = socket.AF_INET6 if found.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
