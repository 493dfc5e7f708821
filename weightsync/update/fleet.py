"""The fleet: all receivers of one sender, called in parallel with the same request."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from weightsync.backends.base import ReaderWatch, part
from weightsync.errors import (
    ConnectError,
    HandleError,
    NotReadyError,
    ProtocolError,
    RemoteError,
    TransportError,
    TransportTimeout,
    WeightSyncError,
    text_of,
)
from weightsync.observe import ObservedCall
from weightsync.ranks.commands import KeepAlive
from weightsync.ranks.group import RankGroup
from weightsync.shm.wait import HEARTBEAT_TIMEOUT_FACTOR
from weightsync.transports.base import BaseTransport, complete
from weightsync.transports.calls import (
    LOOK_S,
    CallThreads,
    InFlightCall,
    InFlightCalls,
    exit_left_s,
    exiting,
)
from weightsync.update.sets import SetUpdate
from weightsync.wire import codec
from weightsync.wire.messages import (
    CALL_OF,
    PROTOCOL,
    PROTOCOL_MIN,
    AbortRequest,
    FinishRequest,
    InitReply,
    Protocols,
    Reply,
    Request,
    ShutdownRequest,
    Status,
    StatusRequest,
    StepReply,
)
from weightsync.wire.offers import Owner, OwnerStatus, WantsInfo

logger = logging.getLogger(__name__)

_IDLE_S = 0.5
_SILENT_TIMEOUT_SHARE = 0.1
"""The part of `timeout_s` that a silent member has to reply to all requests that it is sent."""
_PROBE_S = 10.0
_BRIEF_S = 10.0
_BRIEF = (StatusRequest, AbortRequest, ShutdownRequest)
"""Requests to which a live receiver replies within `timeout_s`; other steps may take longer."""
_SENT_WHILE_SILENT = (AbortRequest, ShutdownRequest)
"""Requests that a silent member is still sent, so that it has them when it resumes."""


@dataclass(slots=True, eq=False)
class Server:
    """A server with several members as its workers: its own transport, and the workers' paths."""

    transport: BaseTransport
    paths: tuple[str, ...]

    @property
    def target(self) -> str:
        """The server's name in messages to a user."""
        return self.transport.target


_NO_STATUS = Status(
    instance="",
    protocol=0,
    state="READY",
    version=0,
    may_generate=False,
    apply="staged",
    verification="none",
)


@dataclass(slots=True, eq=False)
class Member:
    """One receiver: its transport, its last known status, its path, and its open requests.

    `name` is set where another member's transport has the same target, `server` for a worker of a
    server with several. Rank `rank` of the trainer sends to the member on `path`, of this `cost`,
    by the engine of `backend`, where its index is `reader`. Where several ranks send, each its
    stream, these are `ranks`: the member has the same index on all of them, and `rank` is 0.
    `skipped` has the reason why each other path was not taken, `wants` the boxes that the receiver
    loads (None: whole tensors), `whole` the tensors of which it knows no box, with the reasons;
    `casts` are the numbers of tensors that it casts itself. `gpus` are the keys of the trainer's
    GPU and of the receiver's, by rank, where the bytes stay in the memory of GPUs, by `gpu_path`.
    `refused` are the reasons why a path failed in an update, by the receiver's instance and path.
    `sender` is the sender id that the receiver knows, `released` the same id after the memory was
    withdrawn. `term` is this sender's term as the owner of the receiver, 0 before the first status.
    `owned` says that this sender has been its owner, `replaced_by` is the owner after it of which
    its user was told.

    `unfinished` and `unaborted` are an update whose finish or abort the receiver did not confirm;
    that request is sent again before the next update. `last_finish_sent` is the update of the last
    finish request. `delta_base` is the id of the weights that the receiver holds, as far as a delta
    can be applied to them. `summed` is the plan of several ranks of which the sums over all of them
    were those of this receiver, with the receiver's instance: one that was restarted is compared
    again, and so is a worker that was sent something without others that hold the rest.
    """

    transport: BaseTransport
    name: str = ""
    server: Server | None = None
    status: Status = _NO_STATUS
    rank: int = 0
    ranks: tuple[int, ...] = ()
    backend: str = ""
    path: str = ""
    cost: float = 0.0
    reader: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    wants: WantsInfo | None = None
    whole: dict[str, str] = field(default_factory=dict)
    casts: dict[str, int] = field(default_factory=dict)
    gpus: dict[int, tuple[str, str]] = field(default_factory=dict)
    gpu_path: str = ""
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    sender: str = ""
    released: str = ""
    term: int = 0
    owned: bool = False
    replaced_by: str = ""
    unfinished: FinishRequest | None = None
    unaborted: str | None = None
    last_finish_sent: str | None = None
    delta_base: str | None = None
    summed: tuple[str, str] = ("", "")

    @property
    def target(self) -> str:
        """The receiver's name in messages to a user."""
        return self.name or self.transport.target

    @property
    def server_target(self) -> str:
        """The name of the server in messages to a user: the member's own where it is no worker."""
        return self.target if self.server is None else self.server.target

    @property
    def sending(self) -> tuple[int, ...]:
        """The ranks that send to this member."""
        return self.ranks or (self.rank,)

    @property
    def shown_path(self) -> str:
        """The path in reports; a transport that forwards the bytes may name its own."""
        return self.transport.path or self.path

    def note_gpus(self, rank: int, path: str, gpus: tuple[str, str] | None) -> None:
        """Note that a rank's bytes go by this path, from GPU to GPU if there are `gpus`."""
        if gpus is not None:
            self.gpus[rank], self.gpu_path = gpus, path

    def why_refused(self, path: str) -> str:
        """Return why a path to this instance of the receiver failed in an update; "" if not."""
        return self.refused.get((self.status.instance, path), "")

    def refuse_gpus(self, error: WeightSyncError) -> bool:
        """Leave the path between GPUs after an update failed with a HandleError; else False."""
        found = bool(self.gpus) and isinstance(error, HandleError)
        if found:
            self.refused[self.status.instance, self.gpu_path] = str(error)
        return found

    def is_named(self, target: str) -> bool:
        """Whether `target` is the name of this member or of its server."""
        return target == self.target or target.rstrip("/") in (self.target, self.server_target)

    def is_new_to(self, status: Status) -> bool:
        """Whether the status is of a restarted receiver, or of one that closed its engine."""
        restarted = status.instance != self.status.instance
        return restarted or self.sender not in ("", *status.senders)


@dataclass(frozen=True, slots=True)
class MemberReply:
    """The result of one call: the member's `reply`, or the `error` of the member or transport."""

    member: Member
    reply: Reply | None = None
    error: WeightSyncError | None = None

    @property
    def step(self) -> StepReply:
        """The reply to a step that succeeded."""
        return cast(StepReply, self.reply)

    @property
    def status(self) -> Status:
        """The status in the reply to a status request or to an init."""
        return self.reply.status if isinstance(self.reply, InitReply) else cast(Status, self.reply)


class Fleet:
    """The receivers of one sender, called in parallel. Used by one thread of rank 0; closed last.

    `timeout_s` bounds the time in which a member gives no sign of life. With `drops`, members that
    fail are removed, and the others continue. With `yields`, other senders may take over the
    receivers between two updates. `version` is the newest version that the receivers hold.
    `set_update` is the update of the set whose part this is, until all of its parts are PREPARED.

    A member is silent if it does not reply and gives no sign of life for the timeout of a call, or
    lives and does not reply for HEARTBEAT_TIMEOUT_FACTOR times that. Further calls to it fail at
    once, until `clear_silent`.
    """

    def __init__(
        self,
        group: RankGroup,
        transports: Sequence[BaseTransport],
        *,
        timeout_s: float,
        drops: bool,
        yields: bool,
    ) -> None:
        self.group = group
        self.timeout_s = timeout_s
        self.drops = drops
        self.yields = yields
        self.version = 0
        self.members: list[Member] = []
        for transport in transports:
            self.add(transport)
        self._threads: CallThreads[MemberReply] = CallThreads()
        self._probes: CallThreads[bool | None] = CallThreads()
        self._flights: InFlightCalls[MemberReply] = InFlightCalls()
        self._silent: dict[Member, float | None] = {}
        self._token = secrets.token_hex(6)
        self._updates = itertools.count(1)
        self.set_update: SetUpdate | None = None
        self._gone_nbytes = 0
        self._gone_messages = 0
        self._signs: dict[tuple[str, int, int], int | None] = {}
        self._assumed_alive = 0

    @property
    def brief_s(self) -> float:
        """Timeout of requests that a live receiver answers at once."""
        return min(self.timeout_s, _BRIEF_S)

    @property
    def protocols(self) -> Protocols:
        """The protocols of this sender."""
        return Protocols(PROTOCOL_MIN, PROTOCOL)

    def observe_versions(self, versions: Iterable[int]) -> None:
        """Raise `version` to the newest of these versions, which receivers hold."""
        self.version = max([self.version, *versions])

    def may_drop(self, members: Iterable[Member]) -> bool:
        """Whether members may be dropped: enabled by `drops`, and others remain."""
        return self.drops and len(self.with_workers(members)) < len(self.members)

    def new_update_id(self) -> str:
        """Return a new update id of this fleet's sender; as a part of a set, that of the set."""
        if self.set_update is not None:
            return self.set_update.update_id
        return f"{self._token}-{next(self._updates)}"

    def owner(self, member: Member) -> Owner:
        """Return the owner that an init message carries to a member."""
        name = f"{socket.gethostname()}, pid {os.getpid()}"[:256]
        return Owner(id=self._token, name=name, term=member.term, yields=self.yields)

    def owns(self, owner: OwnerStatus) -> bool:
        """Whether `owner` is this fleet's sender."""
        return owner.id == self._token

    def add(self, transport: BaseTransport) -> Member:
        """Add and return a member. A second one of the same target is named target#2."""
        member = Member(transport, server=self._server_of(transport))
        names = {other.target for other in self.members}
        if member.target in names:
            numbered = (f"{transport.target}#{n}" for n in range(2, len(names) + 3))
            member.name = next(name for name in numbered if name not in names)
        self.members.append(member)
        return member

    def _server_of(self, transport: BaseTransport) -> Server | None:
        """Return the server of a worker's transport (see `whole`), None for any other transport."""
        whole = transport.whole
        if whole is None:
            return None
        known = (server for server in self.servers if server.transport == whole)
        return next(known, None) or Server(whole, whole.paths)

    def remove(self, member: Member) -> None:
        """Remove a member, and close its transport."""
        self.members.remove(member)
        self._close(member.transport)
        if member.server is not None and member.server not in self.servers:
            self._close(member.server.transport)

    def expand_servers(self, answers: Sequence[MemberReply]) -> list[MemberReply]:
        """Replace each server by its workers; return the workers' statuses, errors included.

        Raises ProtocolError for a worker that has workers itself, and where a server's transport
        cannot reach the workers.
        """
        found: list[MemberReply] = []
        for answer in answers:
            member, paths = answer.member, answer.status.workers
            if not paths:
                found.append(answer)
                continue
            server = Server(member.transport, tuple(paths))
            reached = member.transport.expand(paths)
            workers = [Member(complete(transport), server=server) for transport in reached]
            at = self.members.index(member)
            self.members[at : at + 1] = workers
            results = self.call(StatusRequest(), workers)
            nested = [r.member.target for r in results if r.error is None and r.status.workers]
            if nested:
                raise ProtocolError(f"{', '.join(nested)}: a worker cannot have workers itself")
            found += results
        return found

    def resized_servers(self, answers: Sequence[MemberReply]) -> list[Server]:
        """Return the servers that were restarted with a different set of workers.

        `answers` are the members' results of a status request.
        """
        suspects = [a.member.server for a in answers if a.member.server is not None and _is_new(a)]
        changed: list[Server] = []
        for server in dict.fromkeys(suspects):
            try:
                now = server.transport.call(StatusRequest(), timeout_s=self.brief_s)
            except WeightSyncError as exc:
                logger.debug("status of %s: %s", server.target, exc)
                continue
            if isinstance(now, Status) and tuple(now.workers) != server.paths:
                before, after = len(server.paths), len(now.workers)
                logger.warning("%s had %d workers and has %d now", server.target, before, after)
                changed.append(server)
        return changed

    def collapse(self, server: Server) -> Member:
        """Replace all workers of a server by one member for the whole server, and return it."""
        gone = [member for member in self.members if member.server is server]
        at = self.members.index(gone[0])
        for member in gone:
            self.members.remove(member)
            self._close(member.transport)
        self.members.insert(at, Member(server.transport))
        return self.members[at]

    @property
    def servers(self) -> list[Server]:
        """The servers that have members as workers."""
        return list(dict.fromkeys(m.server for m in self.members if m.server is not None))

    def with_workers(self, members: Iterable[Member]) -> list[Member]:
        """Return `members` and all workers of their servers, which cannot generate separately."""
        chosen = set(members)
        servers = {member.server for member in chosen if member.server is not None}
        return [m for m in self.members if m in chosen or m.server in servers]

    @property
    def sent_counts(self) -> tuple[int, int]:
        """Bytes of all requests so far, and their number."""
        nbytes = self._gone_nbytes + sum(t.sent_nbytes for t in self._transports)
        return nbytes, self._gone_messages + sum(t.sent_messages for t in self._transports)

    def call(
        self,
        request: Request | Callable[[Member], Request],
        members: Sequence[Member] | None = None,
        *,
        timeout_s: float | None = None,
        idle: Callable[[], None] | None = None,
    ) -> list[MemberReply]:
        """Call members (None: all), wait, and return every result; errors are returned as results.

        See `begin` and `await_all`.
        """
        begun = self.begin(request, members, timeout_s=timeout_s)
        self.await_all(begun, idle=idle)
        return [future.result() for future in begun]

    def begin(
        self,
        request: Request | Callable[[Member], Request],
        members: Sequence[Member] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Future[MemberReply]]:
        """Call members without waiting; return a future for each. Its waits have to call `look`.

        A member that lives has HEARTBEAT_TIMEOUT_FACTOR times `timeout_s` for a step of an update.
        """
        chosen = self.members if members is None else members
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        return [self._begin(member, request, limit_s) for member in chosen]

    def await_all(
        self, begun: Sequence[Future[MemberReply]], *, idle: Callable[[], None] | None = None
    ) -> None:
        """Wait until every call has a result. `idle` is called periodically in a long wait."""
        looked = idled = time.monotonic()
        for future in begun:
            while not _has_result(future, max(0.0, looked + LOOK_S - time.monotonic())):
                self.look()
                looked = time.monotonic()
                if looked - idled > _IDLE_S:
                    self.group.comm.attend()
                    if idle is not None:
                        idle()
                    idled = time.monotonic()

    def look(self) -> None:
        """Give up calls to members that give no sign of life. Cheap: called in every wait."""
        self._flights.look()

    def liveness_counter(self, member: Member) -> Hashable | None:
        """Return a value that grows while a reader lives and works; None if not observable."""
        if member.rank:
            key = member.backend, member.rank, member.reader
            return self._assumed_alive, self._signs.get(key)
        engine = self.group.worker.engines.get(member.backend)
        if engine is None:
            return None
        return part(engine, ReaderWatch).liveness_counter(member.reader)

    def assume_alive(self) -> None:
        """Count the readers of other ranks as alive: in a transfer their ranks bound the waits."""
        self._assumed_alive += 1

    def collect_signs(self, *, may_raise: bool = True) -> None:
        """Collect the signs of life of all ranks' readers. Raises where a rank left the update."""
        for rank, answer in enumerate(self.group.run_on_all(KeepAlive(may_raise=may_raise))):
            for name, beats in answer.beats.items():
                self._signs.update({(name, rank, reader): n for reader, n in beats.items()})

    def clear_silent(self) -> None:
        """Call silent members again. Called when a call of the sender's user begins."""
        self._silent.clear()

    def mark_silent(self, members: Iterable[Member]) -> None:
        """Mark members that gave no sign of life as silent, until `clear_silent`."""
        for member in members:
            for other in self.members:
                if _reply_group(other) is _reply_group(member):
                    self._silent.setdefault(other, None)

    def is_silent(self, member: Member) -> bool:
        """Whether calls to a member fail at once, until `clear_silent`."""
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
            left_s = self._left_for_silent(member, message, timeout_s)
            if not left_s:
                future.set_result(MemberReply(member, error=_silent(member, call, timeout_s)))
                return future
            timeout_s = left_s
        timeout_s = min(timeout_s, exit_left_s()) if exiting() else timeout_s
        brief = isinstance(message, _BRIEF)

        def give_up(lost: bool, over: bool) -> MemberReply:
            if over or not lost:
                self.mark_silent([member])
            waited_s = HEARTBEAT_TIMEOUT_FACTOR * timeout_s if over else timeout_s
            return MemberReply(member, error=_silent(member, call, waited_s, lost=lost, over=over))

        flight = InFlightCall(
            member,
            future,
            timeout_s,
            HEARTBEAT_TIMEOUT_FACTOR * timeout_s,
            beat=partial(self.liveness_counter, member),
            probe=None if isinstance(message, StatusRequest) else partial(self._probe, member),
            give_up=give_up,
        )
        # Longer than the wait here, which can then distinguish a silent member from a lost reply.
        limit_s = timeout_s * (1.1 if brief else HEARTBEAT_TIMEOUT_FACTOR + 1) + LOOK_S
        observers = self.group.observers
        observed = ObservedCall(member.target, member.rank, member.backend, member.reader, message)
        observers.notify(lambda observer: observer.on_request(observed))

        def run() -> MemberReply:
            answer = _call(member, message, limit_s)
            if not future.done():
                reply = answer.error or answer.reply
                observers.notify(lambda observer: observer.on_reply(observed, reply))
            return answer

        try:
            self._threads.submit(run, future)
        except RuntimeError as exc:
            error = ConnectError(f"{member.target} cannot be sent {call} any more: {exc}")
            future.set_result(MemberReply(member, error=error))
        self._flights.add(flight)
        return future

    def _left_for_silent(self, member: Member, message: Request, timeout_s: float) -> float:
        """Return how long a silent member has to reply to a request, 0 where it is not sent.

        It has one share of `timeout_s`, from the first request on, so that its silence adds no more
        to a call of the user. What follows an abort repeats it, except a shutdown.
        """
        if not isinstance(message, _SENT_WHILE_SILENT):
            return 0.0
        now = time.monotonic()
        until = self._silent[member]
        if until is None:
            until = self._silent[member] = now + _SILENT_TIMEOUT_SHARE * timeout_s
        shortest_s = LOOK_S if isinstance(message, ShutdownRequest) else 0.0  # time to be sent
        return max(until - now, shortest_s)

    def _probe(self, member: Member, future: Future[bool | None]) -> None:
        """Settle `future`: whether the member executes a step, None where that is unknown."""

        def run() -> bool | None:
            try:
                status = member.transport.call(StatusRequest(), timeout_s=_PROBE_S)
            except TransportError:
                return None
            except Exception:  # noqa: BLE001  # any reply is a sign of life
                return True
            return isinstance(status, Status) and status.busy

        try:
            self._probes.submit(run, future)
        except RuntimeError:
            future.set_result(None)

    @property
    def _transports(self) -> list[BaseTransport]:
        own = [member.transport for member in self.members]
        return [*own, *(server.transport for server in self.servers)]

    def _close(self, transport: BaseTransport) -> None:
        """Close the transport of a former member, and keep its counters."""
        self._gone_nbytes += transport.sent_nbytes
        self._gone_messages += transport.sent_messages
        transport.close()


def _has_result(future: Future[MemberReply], wait_s: float) -> bool:
    """Wait for at most `wait_s`. For one call cheaper than `concurrent.futures.wait`."""
    try:
        future.exception(wait_s)
    except TimeoutError:
        return False
    return True


def _call(member: Member, message: Request, timeout_s: float) -> MemberReply:
    try:
        reply = member.transport.call(message, timeout_s=timeout_s)
        codec.check_reply(CALL_OF[type(message)], reply)
        return MemberReply(member, reply=reply)
    except WeightSyncError as exc:
        return MemberReply(member, error=add_target(exc, member.target))
    except Exception as exc:  # noqa: BLE001  # a transport of the user's, which may raise anything
        foreign = RemoteError(
            f"{member.target}: its transport raised {type(exc).__name__}: {text_of(exc)}",
            remote_type=type(exc).__name__,
            remote_message=text_of(exc),
        )
        foreign.__cause__ = exc
        return MemberReply(member, error=foreign)


def _reply_group(member: Member) -> object:
    """Return the same object for all workers of a server that replies for all of them at once."""
    return member.transport.round


def _silent(
    member: Member, call: str, timeout_s: float, *, lost: bool = False, over: bool = False
) -> TransportTimeout:
    seen = "gave no sign of life: its process is stopped, or its host cannot be reached"
    if over:
        seen = "is alive: find out what its model, or the hook that loads the weights, waits for"
    elif lost:
        seen = "reports that it executes no such call: the message or its reply was lost"
    return TransportTimeout(
        f"{member.target} did not answer {call} within {timeout_s:g} s and {seen}; send it again, "
        "or give more time with timeout_s="
    )


def add_target(error: WeightSyncError, target: str) -> WeightSyncError:
    """Begin an error's message with the receiver's name, unless it does; return the error."""
    text = text_of(error)
    if not text.startswith((f"{target}:", f"{target} ")):
        error.args = (f"{target}: {text}", *error.args[1:])
    return error


def names(members: Iterable[Member]) -> str:
    """Return the targets of members, for a message."""
    return ", ".join(member.target for member in members)


def failures(answers: Sequence[MemberReply]) -> list[MemberReply]:
    """Return the results that are errors."""
    return [answer for answer in answers if answer.error is not None]


def raise_first(answers: Sequence[MemberReply]) -> None:
    """Raise the first error, with a note for each other member that failed.

    A TransportError only where there is no other: an error that a receiver gave says more than
    that another receiver cannot be reached.
    """
    errors = [answer.error for answer in answers if answer.error is not None]
    if not errors:
        return
    errors.sort(key=lambda error: isinstance(error, TransportError))
    for other in errors[1:]:
        errors[0].add_note(f"and {other}")
    raise errors[0]


LOST_ERRORS = (TransportError, NotReadyError, RemoteError)
"""Errors of a status request that mean that a previously connected receiver is gone (raised by it,
or by a proxy in front of it)."""


class WorldSizeChangedError(ProtocolError):
    """A server was restarted with other workers; its previous workers do not exist any more."""


def _is_new(answer: MemberReply) -> bool:
    """Whether another instance answered, or the path does not exist any more."""
    if answer.error is not None:
        return isinstance(answer.error, RemoteError)
    return answer.member.status.instance not in ("", answer.status.instance)
