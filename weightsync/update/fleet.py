"""All the receivers that one sender keeps in step: the same call to each of them, in parallel."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from weightsync.errors import (
    ConnectError,
    NotReadyError,
    ProtocolError,
    RemoteError,
    TransportError,
    TransportTimeout,
    WeightSyncError,
)
from weightsync.ranks.observers import ObservedCall, Observers
from weightsync.shm.ring import PATIENCE
from weightsync.transports.base import Transport
from weightsync.transports.calls import LOOK_S, CallThreads, InFlightCall, InFlightCalls, exiting
from weightsync.wire.messages import (
    CALL_OF,
    AbortRequest,
    FinishRequest,
    InitReply,
    Reply,
    Request,
    ShutdownRequest,
    Status,
    StatusRequest,
    StepReply,
)
from weightsync.wire.offers import Owner

logger = logging.getLogger(__name__)

_IDLE_S = 0.5
_EXIT_S = 1.0
"""How long a receiver may take to answer while the interpreter exits."""
_ASIDE = 0.1
"""The part of `timeout_s` that a silent member gets for what it is told all the same."""
_PROBE_S = 10.0
_BRIEF = (StatusRequest, AbortRequest, ShutdownRequest)
"""What a living receiver answers within `timeout_s`, too; other steps may take longer."""
_TOLD = (AbortRequest, ShutdownRequest)
"""What a silent member is told, so that it knows when it goes on."""


@dataclass(slots=True, eq=False)
class Server:
    """One address behind which several members stand: its own transport, and their paths."""

    transport: Transport
    paths: tuple[str, ...]

    @property
    def target(self) -> str:
        """How messages name it."""
        return self.transport.target


@dataclass(slots=True, eq=False)
class Member:
    """One receiver: its transport, how it is fed, and who it was when it was last asked.

    Rank `rank` of the trainer feeds it by the engine of `backend`, which knows it as `reader`, on
    `path`; `skipped` says why not on others. `backends` are those that it can use, with what each
    says of it; `unusable` says why others cannot be. `sender` is what it knows this sender by,
    `released` the same once memory was withdrawn. `unfinished` and
    `unaborted` are updates whose end it has not answered for: it is told again before the next one;
    `last_told` is the update that it was last told to finish. `term` is this sender's as the owner
    of the receiver, 0 before it was met. `name` is given where another member's transport has the
    same target. `server` is the one that it is a worker of, where that has several.
    """

    transport: Transport
    name: str = ""
    server: Server | None = None
    rank: int = 0
    backend: str = ""
    path: str = ""
    reader: int = 0
    sender: str = ""
    released: str = ""
    skipped: dict[str, str] = field(default_factory=dict)
    instance: str = ""
    version: int = 0
    term: int = 0
    apply: str = ""
    keys: list[str] = field(default_factory=list)
    backends: dict[str, Any] = field(default_factory=dict)
    unusable: dict[str, str] = field(default_factory=dict)
    last_finished: str | None = None
    last_told: str | None = None
    unfinished: FinishRequest | None = None
    unaborted: str | None = None

    @property
    def target(self) -> str:
        """How messages name it."""
        return self.name or self.transport.target

    @property
    def shown_path(self) -> str:
        """How reports name its path: its transport may carry the bytes on from there."""
        return getattr(self.transport, "path", "") or self.path

    def is_named(self, target: str) -> bool:
        """Whether messages name it so, or the server that it belongs to."""
        server = self.server.target if self.server is not None else self.target
        return target == self.target or target.rstrip("/") in (self.target, server)

    @property
    def host(self) -> str:
        """The key of the host that it runs on."""
        return self.keys[-1] if self.keys else ""

    def is_new_to(self, status: Status) -> bool:
        """Whether who answers so was started again, or has closed what it was offered."""
        return status.instance != self.instance or self.sender not in ("", *status.senders)

    def met(self, status: Status) -> None:
        """Remember who answered."""
        self.instance = status.instance
        self.version = status.version
        self.last_finished = status.last_finished
        self.apply = status.apply
        self.keys = status.device_keys
        self.backends, self.unusable = status.backends, status.unusable_backends


@dataclass(frozen=True, slots=True)
class MemberReply:
    """What one member answered: `reply`, or the `error` that it or its transport raised."""

    member: Member
    reply: Reply | None = None
    error: WeightSyncError | None = None

    @property
    def step(self) -> StepReply:
        """The reply of a step that went well."""
        return cast(StepReply, self.reply)

    @property
    def status(self) -> Status:
        """The status that a member answered, alone or with an init."""
        return self.reply.status if isinstance(self.reply, InitReply) else cast(Status, self.reply)


class Fleet:
    """Members that are called at once. Safe to call from one thread; close it last.

    `idle` is called now and then while `ask` waits; `watch` is told of every message. `beat` is
    what grows while a member lives, where that is seen from here. `yields`: other senders may take
    the receivers between two updates.

    A member that does not answer and gives no sign of life for the `timeout_s` of a call, or
    lives and does not answer for PATIENCE times that, is silent, until `forgive`: further calls
    to it fail at once.
    """

    def __init__(self, transports: Sequence[Transport], *, yields: bool = False) -> None:
        self.members: list[Member] = []
        self.yields = yields
        for transport in transports:
            self.add(transport)
        self._threads: CallThreads[MemberReply] = CallThreads()
        self._probes: CallThreads[bool | None] = CallThreads()
        self._flights: InFlightCalls[MemberReply] = InFlightCalls()
        self._silent: set[Member] = set()
        self._token = secrets.token_hex(6)
        self._updates = itertools.count(1)
        self._gone_nbytes = 0
        self._gone_messages = 0
        self.idle: Callable[[], None] | None = None
        self.watch = Observers()
        self.beat: Callable[[Member], Hashable | None] = lambda _: None

    def new_update_id(self) -> str:
        """Return the id of one more update of this fleet's sender."""
        return f"{self._token}-{next(self._updates)}"

    def owner(self, member: Member) -> Owner:
        """Return what a member is told: to whom it belongs."""
        name = f"{socket.gethostname()}, pid {os.getpid()}"[:256]
        return Owner(id=self._token, name=name, term=member.term, yields=self.yields)

    def owns(self, owner: Owner) -> bool:
        """Whether that is this fleet's sender."""
        return owner.id == self._token

    def add(self, transport: Transport) -> Member:
        """Take one more member in. A second one of the same name is called name#2."""
        member = Member(transport, server=self._server_of(transport))
        names = {other.target for other in self.members}
        if member.target in names:
            numbered = (f"{transport.target}#{n}" for n in range(2, len(names) + 3))
            member.name = next(name for name in numbered if name not in names)
        self.members.append(member)
        return member

    def _server_of(self, transport: Transport) -> Server | None:
        """The server that a transport leads to a worker of, where it says that (`whole`)."""
        whole = getattr(transport, "whole", None)
        if whole is None:
            return None
        known = (server for server in self.servers if server.transport is whole)
        return next(known, None) or Server(whole, whole.paths)

    def remove(self, member: Member) -> None:
        """Let a member go, and close its transport."""
        self.members.remove(member)
        self._close(member.transport)
        if member.server is not None and member.server not in self.servers:
            self._close(member.server.transport)

    def expand(self, member: Member, paths: Sequence[str]) -> list[Member]:
        """Put the workers of a server in the place of the member that stood for all.

        Raises ProtocolError where its transport cannot reach them.
        """
        expand = getattr(member.transport, "expand", None)
        if expand is None:
            raise ProtocolError(
                f"{member.target} stands for {len(paths)} workers, and its transport reaches none "
                "of them by itself; give connect() a URL, or a transport to each worker"
            )
        server = Server(member.transport, tuple(paths))
        at = self.members.index(member)
        workers = [Member(transport, server=server) for transport in expand(paths)]
        self.members[at : at + 1] = workers
        return workers

    def collapse(self, server: Server) -> Member:
        """Put one member in the place of all workers of a server, whatever they are now."""
        gone = [member for member in self.members if member.server is server]
        at = self.members.index(gone[0])
        for member in gone:
            self.members.remove(member)
            self._close(member.transport)
        self.members.insert(at, Member(server.transport))
        return self.members[at]

    @property
    def servers(self) -> list[Server]:
        """Those of which members are workers."""
        return list(dict.fromkeys(m.server for m in self.members if m.server is not None))

    def together(self, members: Iterable[Member]) -> list[Member]:
        """Members, with all workers of their servers: those generate together or not at all."""
        chosen = set(members)
        servers = {member.server for member in chosen if member.server is not None}
        return [m for m in self.members if m in chosen or m.server in servers]

    @property
    def sent_nbytes(self) -> int:
        """Bytes of all requests so far."""
        return self._gone_nbytes + sum(t.sent_nbytes for t in self._transports)

    @property
    def sent_messages(self) -> int:
        """Requests so far."""
        return self._gone_messages + sum(t.sent_messages for t in self._transports)

    def ask(
        self,
        request: Request | Callable[[Member], Request],
        *,
        timeout_s: float,
        members: Sequence[Member] | None = None,
        idle: Callable[[], None] | None = None,
    ) -> list[MemberReply]:
        """Call members (all by default) and wait for every answer; errors come as answers.

        `timeout_s` is how long a member may give no sign of life; see `begin`.
        """
        begun = self.begin(request, timeout_s=timeout_s, members=members)
        self.await_all(begun, idle=idle)
        return [future.result() for future in begun]

    def await_all(
        self, begun: Sequence[Future[MemberReply]], *, idle: Callable[[], None] | None = None
    ) -> None:
        """Return when all have answered or were given up; `idle` is called beside that of all."""
        idled = time.monotonic()
        while wait(begun, timeout=LOOK_S).not_done:
            self.look()
            if time.monotonic() - idled > _IDLE_S:
                for call in filter(None, (self.idle, idle)):
                    call()
                idled = time.monotonic()

    def begin(
        self,
        request: Request | Callable[[Member], Request],
        *,
        timeout_s: float,
        members: Sequence[Member] | None = None,
    ) -> list[Future[MemberReply]]:
        """Call members without waiting; `look` is called while their answers are waited for.

        A member that lives has PATIENCE times `timeout_s` for a step of an update.
        """
        chosen = self.members if members is None else members
        return [self._begin(member, request, timeout_s) for member in chosen]

    def look(self) -> None:
        """Give up calls to members that show no life. Cheap enough for every wait."""
        self._flights.look()

    def forgive(self) -> None:
        """Another call of the sender's user begins: whoever was silent is asked again."""
        self._silent.clear()

    def silence(self, members: Iterable[Member]) -> None:
        """Ask these members nothing more until `forgive`: they gave no sign of life."""
        for member in members:
            self._silent.update(
                m for m in self.members if _answers_with(m) is _answers_with(member)
            )

    def is_silent(self, member: Member) -> bool:
        """Whether it is asked nothing more until `forgive`."""
        return member in self._silent

    def close(self) -> None:
        """Close every transport."""
        for transport in self._transports:
            transport.close()
        self._threads.close()
        self._probes.close()

    def _begin(
        self, member: Member, request: Request | Callable[[Member], Request], timeout_s: float
    ) -> Future[MemberReply]:
        future: Future[MemberReply] = Future()
        try:
            message = request(member) if callable(request) else request
        except WeightSyncError as exc:
            future.set_result(MemberReply(member, error=add_target(exc, member.target)))
            return future
        call = CALL_OF[type(message)]
        if member in self._silent:
            if not isinstance(message, _TOLD):
                future.set_result(MemberReply(member, error=_silent(member, call, timeout_s)))
                return future
            timeout_s *= _ASIDE
        timeout_s = min(timeout_s, _EXIT_S) if exiting() else timeout_s
        brief = isinstance(message, _BRIEF)

        def give_up(lost: bool, over: bool) -> MemberReply:
            if over or not lost:
                self.silence([member])
            waited_s = PATIENCE * timeout_s if over else timeout_s
            return MemberReply(member, error=_silent(member, call, waited_s, lost=lost, over=over))

        flight = InFlightCall(
            member,
            future,
            timeout_s,
            PATIENCE * timeout_s,
            beat=lambda: self.beat(member),
            probe=None if isinstance(message, StatusRequest) else partial(self._probe, member),
            give_up=give_up,
        )
        # Longer than what is waited for here, so that silence is told from a lost answer.
        limit_s = timeout_s * (1.1 if brief else PATIENCE + 1) + LOOK_S
        watch = self.watch
        seen = ObservedCall(member.target, member.rank, member.backend, member.reader, message)
        watch.on_request(seen)

        def ask() -> MemberReply:
            answer = _call(member, message, limit_s)
            if not future.done():
                watch.on_reply(seen, answer.error or answer.reply)
            return answer

        try:
            self._threads.submit(ask, future)
        except RuntimeError as exc:
            error = ConnectError(f"{member.target} cannot be told {call} any more: {exc}")
            future.set_result(MemberReply(member, error=error))
        self._flights.add(flight)
        return future

    def _probe(self, member: Member, future: Future[bool | None]) -> None:
        """Ask a member whether it has a step at work; None where it does not say."""

        def ask() -> bool | None:
            try:
                status = member.transport.call(StatusRequest(), timeout_s=_PROBE_S)
            except TransportError:
                return None
            except Exception:  # noqa: BLE001  # an answer, whatever it is: it lives
                return True
            return isinstance(status, Status) and status.busy

        try:
            self._probes.submit(ask, future)
        except RuntimeError:
            future.set_result(None)

    @property
    def _transports(self) -> list[Transport]:
        own = [member.transport for member in self.members]
        return [*own, *(server.transport for server in self.servers)]

    def _close(self, transport: Transport) -> None:
        """Close the transport of somebody who is not in the fleet any more."""
        self._gone_nbytes += transport.sent_nbytes
        self._gone_messages += transport.sent_messages
        transport.close()


def _call(member: Member, message: Request, timeout_s: float) -> MemberReply:
    try:
        return MemberReply(member, reply=member.transport.call(message, timeout_s=timeout_s))
    except WeightSyncError as exc:
        return MemberReply(member, error=add_target(exc, member.target))
    except Exception as exc:  # noqa: BLE001  # a transport of the user's, which may raise anything
        foreign = RemoteError(
            f"{member.target}: its transport raised {type(exc).__name__}: {exc}",
            remote_type=type(exc).__name__,
            remote_message=str(exc),
        )
        foreign.__cause__ = exc
        return MemberReply(member, error=foreign)


def _answers_with(member: Member) -> object:
    """What stands or falls with it: workers of a server that answers for all of them at once."""
    return getattr(member.transport, "round", member)


def _silent(
    member: Member, call: str, timeout_s: float, *, lost: bool = False, over: bool = False
) -> TransportTimeout:
    seen = "gave no sign of life: its process is stopped, or its host cannot be reached"
    if over:
        seen = "lives: see what its model, or the hook that takes the weights, waits for"
    elif lost:
        seen = "says that it has no such call at work: the message or its answer was lost"
    return TransportTimeout(
        f"{member.target} did not answer {call} within {timeout_s:g} s and {seen}; send it again, "
        "or give more time with timeout_s="
    )


def add_target(error: WeightSyncError, target: str) -> WeightSyncError:
    """Have the error say which receiver it is about, unless it begins with that."""
    if not str(error).startswith((f"{target}:", f"{target} ")):
        error.args = (f"{target}: {error}", *error.args[1:])
    return error


def failures(answers: Sequence[MemberReply]) -> list[MemberReply]:
    """Those that answered with an error."""
    return [answer for answer in answers if answer.error is not None]


def raise_first(answers: Sequence[MemberReply], doing: str) -> None:
    """Raise the first error, with a note that names every member that failed."""
    failed = failures(answers)
    if not failed:
        return
    error = failed[0].error or WeightSyncError(doing)
    for answer in failed:
        error.add_note(f"{doing}: {answer.error}")
    raise error


SAYS_NOTHING = (TransportError, NotReadyError, RemoteError)
"""Who was met once and answers so when asked who it is, itself or by a proxy, is lost."""


class WorldSizeChangedError(ProtocolError):
    """A server was restarted with other workers: none of those that were asked is there."""


def expand_servers(
    fleet: Fleet, answers: Sequence[MemberReply], timeout_s: float
) -> list[MemberReply]:
    """Put its workers in the place of each server, and return what they say, errors included.

    Raises ProtocolError for a worker that stands for others.
    """
    told: list[MemberReply] = []
    for answer in answers:
        if not answer.status.workers:
            told.append(answer)
            continue
        workers = fleet.expand(answer.member, answer.status.workers)
        asked = fleet.ask(StatusRequest(), timeout_s=timeout_s, members=workers)
        said = [one for one in asked if one.error is None]
        nested = [one.member.target for one in said if one.status.workers]
        if nested:
            raise ProtocolError(f"{', '.join(nested)}: a worker cannot stand for other workers")
        told += asked
    return told


def find_resized(answers: Sequence[MemberReply], timeout_s: float) -> list[Server]:
    """Return the servers that were restarted, and have other workers than they had.

    `answers` are what members said of themselves.
    """
    suspects = [a.member.server for a in answers if a.member.server is not None and _is_new(a)]
    changed: list[Server] = []
    for server in dict.fromkeys(suspects):
        try:
            now = server.transport.call(StatusRequest(), timeout_s=timeout_s)
        except WeightSyncError as exc:
            logger.debug("who %s is now: %s", server.target, exc)
            continue
        if isinstance(now, Status) and tuple(now.workers) != server.paths:
            logger.warning(
                "%s had %d workers and has %d now",
                server.target,
                len(server.paths),
                len(now.workers),
            )
            changed.append(server)
    return changed


def _is_new(answer: MemberReply) -> bool:
    """Whether somebody else answers, or nobody knows the path any more."""
    if answer.error is not None:
        return isinstance(answer.error, RemoteError)
    return answer.member.instance not in ("", answer.status.instance)
