"""All the receivers that one sender keeps in step: the same call to each of them, in parallel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

from weightsync.errors import WeightSyncError
from weightsync.transports.base import Transport
from weightsync.wire.messages import InitReply, Reply, Request, Status, StepReply

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Member:
    """One receiver: its transport, its place in the ring, and who it was when it was last asked.

    `unfinished` and `unaborted` are updates whose end it has not answered for: it is told again
    before the next one.
    """

    transport: Transport
    reader: int
    instance: str = ""
    apply: str = ""
    unfinished: str | None = None
    unaborted: str | None = None

    @property
    def target(self) -> str:
        """How messages name it."""
        return self.transport.target

    def met(self, reply: InitReply) -> None:
        """Remember who answered."""
        self.instance = reply.status.instance
        self.apply = reply.status.apply


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
        """The status of a member that answered an init."""
        return cast(InitReply, self.reply).status


class Fleet:
    """Members that are called at once. Safe to call from one thread; close it last."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.members = [Member(transport, i) for i, transport in enumerate(transports)]
        self._pool = ThreadPoolExecutor(max_workers=2 * len(self.members))

    @property
    def sent_nbytes(self) -> int:
        """Bytes of all requests so far."""
        return sum(member.transport.sent_nbytes for member in self.members)

    @property
    def sent_messages(self) -> int:
        """Requests so far."""
        return sum(member.transport.sent_messages for member in self.members)

    def ask(
        self,
        request: Request | Callable[[Member], Request],
        *,
        timeout_s: float,
        members: Sequence[Member] | None = None,
    ) -> list[Answer]:
        """Call members (all by default) and wait for every answer; errors come as answers."""
        chosen = self.members if members is None else members
        if len(chosen) == 1:
            return [_ask(chosen[0], request, timeout_s)]
        return [
            future.result() for future in self.begin(request, timeout_s=timeout_s, members=chosen)
        ]

    def begin(
        self,
        request: Request | Callable[[Member], Request],
        *,
        timeout_s: float,
        members: Sequence[Member] | None = None,
    ) -> list[Future[Answer]]:
        """Call members without waiting."""
        chosen = self.members if members is None else members
        return [self._pool.submit(_ask, member, request, timeout_s) for member in chosen]

    def close(self) -> None:
        """Close every transport."""
        for member in self.members:
            member.transport.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _ask(
    member: Member, request: Request | Callable[[Member], Request], timeout_s: float
) -> Answer:
    try:
        message = request(member) if callable(request) else request
        return Answer(member, reply=member.transport.call(message, timeout_s=timeout_s))
    except WeightSyncError as exc:
        return Answer(member, error=exc)


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
        error.add_note(f"{doing}: {answer.member.target}: {answer.error}")
    raise error
