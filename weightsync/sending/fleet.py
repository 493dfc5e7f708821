"""All the receivers that one sender keeps in step: the same call to each of them, in parallel."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import cast

from weightsync.errors import ProtocolError, RemoteError, WeightSyncError
from weightsync.sending.watch import Call, Watch
from weightsync.transports.base import Transport
from weightsync.wire.messages import FinishRequest, InitReply, Reply, Request, Status, StepReply

logger = logging.getLogger(__name__)

_IDLE_S = 0.5

MAX_CALLS = 4096
"""Calls in flight at once: a load and an abort beside it for every member. Threads start late."""


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

    Rank `rank` of the trainer feeds it, on `road`; `skipped` says why not on a faster one. It reads
    at place `reader` of that rank's ring or, on the road `distributed`, of the ring of its own
    host, which the one of `group_rank` (1 or more) fills. `sender` is what it knows this sender by,
    `released` the same once memory was withdrawn. `unfinished` and `unaborted` are updates whose
    end it has not answered for: it is told again before the next one; `last_told` is the update
    that it was last told to finish. `name` is given where another member's transport has the same
    target. `server` is the one that it is a worker of, where that has several.
    """

    transport: Transport
    name: str = ""
    server: Server | None = None
    rank: int = 0
    road: str = ""
    reader: int = 0
    group_rank: int = 0
    sender: str = ""
    released: str = ""
    skipped: dict[str, str] = field(default_factory=dict)
    instance: str = ""
    version: int = 0
    apply: str = ""
    keys: list[str] = field(default_factory=list)
    last_finished: str | None = None
    last_told: str | None = None
    unfinished: FinishRequest | None = None
    unaborted: str | None = None

    @property
    def target(self) -> str:
        """How messages name it."""
        return self.name or self.transport.target

    @property
    def shown_road(self) -> str:
        """How reports name its road: its transport may carry the bytes on from there."""
        return getattr(self.transport, "road", "") or self.road

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


@dataclass(frozen=True, slots=True)
class Answer:
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

    `idle` is called now and then while `ask` waits; `watch` is told of every message.
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.members: list[Member] = []
        for transport in transports:
            self.add(transport)
        self._pool = ThreadPoolExecutor(max_workers=MAX_CALLS)
        self._token = secrets.token_hex(6)
        self._updates = itertools.count(1)
        self._gone_nbytes = 0
        self._gone_messages = 0
        self.idle: Callable[[], None] | None = None
        self.watch = Watch()

    def new_update_id(self) -> str:
        """Return the id of one more update of this fleet's sender."""
        return f"{self._token}-{next(self._updates)}"

    def began(self, update_id: str | None) -> bool:
        """Whether an update of this id was this sender's."""
        return update_id is not None and update_id.startswith(f"{self._token}-")

    def add(self, transport: Transport) -> Member:
        """Take one more member in. A second one of the same name is called name#2."""
        member = Member(transport)
        names = {other.target for other in self.members}
        if member.target in names:
            numbered = (f"{transport.target}#{n}" for n in range(2, len(names) + 3))
            member.name = next(name for name in numbered if name not in names)
        self.members.append(member)
        return member

    def remove(self, member: Member) -> None:
        """Let a member go, and close its transport."""
        self.members.remove(member)
        self._close(member.transport)
        if member.server is not None and member.server not in self.servers:
            self._close(member.server.transport)

    def unfold(self, member: Member, paths: Sequence[str]) -> list[Member]:
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

    def fold(self, server: Server) -> Member:
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
    ) -> list[Answer]:
        """Call members (all by default) and wait for every answer; errors come as answers."""
        chosen = self.members if members is None else members
        if len(chosen) == 1 and self.idle is None:
            return [_ask(chosen[0], request, timeout_s, self.watch)]
        begun = self.begin(request, timeout_s=timeout_s, members=chosen)
        while self.idle and wait(begun, timeout=_IDLE_S).not_done:
            self.idle()
        return [future.result() for future in begun]

    def begin(
        self,
        request: Request | Callable[[Member], Request],
        *,
        timeout_s: float,
        members: Sequence[Member] | None = None,
    ) -> list[Future[Answer]]:
        """Call members without waiting."""
        chosen = self.members if members is None else members
        submit, watch = self._pool.submit, self.watch
        return [submit(_ask, member, request, timeout_s, watch) for member in chosen]

    def close(self) -> None:
        """Close every transport."""
        for transport in self._transports:
            transport.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def _transports(self) -> list[Transport]:
        own = [member.transport for member in self.members]
        return [*own, *(server.transport for server in self.servers)]

    def _close(self, transport: Transport) -> None:
        """Close the transport of somebody who is not in the fleet any more."""
        self._gone_nbytes += transport.sent_nbytes
        self._gone_messages += transport.sent_messages
        transport.close()


def _ask(
    member: Member,
    request: Request | Callable[[Member], Request],
    timeout_s: float,
    watch: Watch,
) -> Answer:
    if not watch:
        return _call(member, request, timeout_s)
    call: Call | None = None

    def seen(member: Member) -> Request:
        nonlocal call
        message = request(member) if callable(request) else request
        call = Call(member.target, member.rank, member.reader, member.road, message)
        watch.asked(call)
        return message

    answer = _call(member, seen, timeout_s)
    if call is not None:
        watch.answered(call, answer.error or answer.reply)
    return answer


def _call(
    member: Member, request: Request | Callable[[Member], Request], timeout_s: float
) -> Answer:
    try:
        message = request(member) if callable(request) else request
        return Answer(member, reply=member.transport.call(message, timeout_s=timeout_s))
    except WeightSyncError as exc:
        return Answer(member, error=named(exc, member.target))
    except Exception as exc:  # noqa: BLE001  # a transport of the user's, which may raise anything
        foreign = RemoteError(
            f"{member.target}: its transport raised {type(exc).__name__}: {exc}",
            remote_type=type(exc).__name__,
            remote_message=str(exc),
        )
        foreign.__cause__ = exc
        return Answer(member, error=foreign)


def named(error: WeightSyncError, target: str) -> WeightSyncError:
    """Have the error say which receiver it is about, unless it begins with that."""
    if not str(error).startswith((f"{target}:", f"{target} ")):
        error.args = (f"{target}: {error}", *error.args[1:])
    return error


def failures(answers: Sequence[Answer]) -> list[Answer]:
    """Those that answered with an error."""
    return [answer for answer in answers if answer.error is not None]


def raise_first(answers: Sequence[Answer], doing: str) -> None:
    """Raise the first error, with a note that names every member that failed."""
    failed = failures(answers)
    if not failed:
        return
    error = failed[0].error or WeightSyncError(doing)
    for answer in failed:
        error.add_note(f"{doing}: {answer.error}")
    raise error
