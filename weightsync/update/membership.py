"""Members of the fleet: connect, reconnect, drop and remove; requests that they did not confirm."""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterable, Mapping, Sequence

from weightsync.errors import (
    ConfigError,
    RemoteError,
    TransferError,
    TransportError,
    UnknownSenderError,
    WeightSyncError,
)
from weightsync.ranks.commands import CheckMoved
from weightsync.transports.base import BaseTransport, first_refusal
from weightsync.update.fleet import (
    LOST_ERRORS,
    Fleet,
    Member,
    MemberReply,
    Server,
    WorldSizeChangedError,
    add_target,
    failures,
    names,
    raise_first,
)
from weightsync.update.paths import PathSelector
from weightsync.update.recovery import (
    abort_others,
    abort_prepared,
    check_fleet,
    is_idle,
    other_owner,
    recover_orphans,
)
from weightsync.wire.messages import AbortRequest, FinishRequest, Status, StatusRequest, StepReply

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_REFUSAL_SHARE = 0.2
"""The part of the fleet's timeout that members have to refuse a token, after others failed."""
MAX_PENDING = 256
"""Number of removed members whose unconfirmed requests are kept; most never return."""


class Membership:
    """Connects and removes the members of a sender's fleet. Used on rank 0.

    Where the fleet drops members, one that was connected once and cannot be reached is dropped
    instead of raising its error, unless it is the last. `dropped` has the reasons by target, for
    the next report. With `takeover`, members that belong to another living sender are taken over at
    their first handshake.
    """

    def __init__(self, fleet: Fleet, paths: PathSelector, *, takeover: bool) -> None:
        self.connected = False
        self.dropped: dict[str, str] = {}
        self._fleet = fleet
        self._paths = paths
        self._takeover = takeover
        self._pending_finishes: dict[str, tuple[FinishRequest | None, str | None]] = {}

    def connect(self) -> None:
        """Connect every member by a path, and recover the updates that a dead sender left open.

        The first time every member has to reply: a wrong address is an error, not a lost member.
        """
        answers = self._handshake(self._fleet.members, drops=self._paths.connected_once)
        self._fleet.observe_versions(answer.status.version for answer in answers)
        self._paths.connect_all()
        self.connected = True
        try:
            recover_orphans(self._fleet, answers)
        except BaseException:
            self.disconnect()
            raise
        self._paths.connected_once = True

    def disconnect(self, *, leaves: bool | None = None) -> None:
        """Unregister all memory; the next call that needs it connects.

        Unconfirmed requests are sent first, to members that can be reached. With `leaves` the
        members do not belong to this fleet any more.
        """
        if self.connected:
            self._flush_pending_finishes(self._fleet.members)
        if self.connected or leaves:
            self.connected = False
            self._paths.withdraw(leaves=leaves)

    def ready(self, members: Sequence[Member] | None = None, *, checks_memory: bool = True) -> None:
        """Connect members (None: all), and send them their unconfirmed requests.

        Connects after `release`, and where registered memory has moved. An update of the model
        finds that itself.
        """
        group = self._fleet.group
        if (
            self.connected
            and checks_memory
            and any(result.moved for result in group.run_on_all(CheckMoved()))
        ):
            self.disconnect()
        if not self.connected:
            self.connect()
        self.retry_pending(self._fleet.members if members is None else members, drops=True)
        self.repair_group(self._fleet.members if members is None else members)

    def add(self, transport: BaseTransport) -> list[Member]:
        """Add and connect a receiver, or all workers of a server; return the new members.

        An error leaves the fleet unchanged. Raises ConfigError for a receiver of the fleet.
        """
        self.check_new(transport)
        self.ready()
        added = [self._fleet.add(transport)]
        try:
            self._extend(self._handshake(added, drops=False))
        except BaseException:
            for member in self._members_of(transport):
                self.remove(member)
            raise
        return self._members_of(transport)

    def check_new(self, transport: BaseTransport) -> None:
        """Raise ConfigError for a receiver of the fleet."""
        if self._members_of(transport):
            raise ConfigError(f"{transport.target} is in the fleet already")

    def connect_workers(self, stale: Member) -> list[Member]:
        """Replace the workers of a restarted server by those that it has now, and connect these.

        Returns the new members: none where they are dropped.
        """
        transport = stale.transport if stale.server is None else stale.server.transport
        try:
            answers = self._handshake(self._members_of(transport), drops=True)
            self._extend(answers)
        except WeightSyncError as exc:
            present = self._members_of(transport)
            if not self._fleet.may_drop(present):
                self.disconnect()
                raise
            for member in present:
                self.drop(member, exc)
        return self._members_of(transport)

    def find(self, target: str) -> list[Member]:
        """Return the member of that name, or all workers of that server.

        Raises ConfigError that lists the fleet, or for one worker of several.
        """
        if not isinstance(target, str):  # user input
            raise ConfigError(
                f"a {type(target).__name__} is no name of a receiver; those of the fleet are "
                f"{names(self._fleet.members)}"
            )
        found = [member for member in self._fleet.members if member.is_named(target)]
        if not found:
            raise ConfigError(f"no receiver {target} in the fleet: {names(self._fleet.members)}")
        server = found[0].server
        if server is not None and len(self._fleet.with_workers(found)) > len(found):
            raise ConfigError(
                f"{target} is one worker of {server.target}, whose {len(server.paths)} workers "
                f"hold the same weights or generate nothing; name {server.target}"
            )
        return found

    def drop_all(self, failed: Mapping[Member, WeightSyncError]) -> None:
        """Drop failed members, where that is enabled and others remain."""
        if self._fleet.may_drop(failed):
            for member, error in failed.items():
                self.drop(member, error)

    def drop(self, member: Member, reason: WeightSyncError) -> None:
        """Remove a failed member and the other workers of its server; record the reason."""
        if member not in self._fleet.members:
            return
        text = str(add_target(reason, member.target))
        for one in self._fleet.with_workers([member]):
            why = text if one is member else f"its server lost a worker: {text}"
            logger.warning("%s is dropped from the fleet: %s", one.target, why)
            self.dropped[one.target] = why
            self.remove(one)

    def remove(self, member: Member) -> None:
        """Shut down a member's engine, and remove it from the fleet. It need not reply."""
        self._flush_pending_finishes([member])
        if member.unfinished is not None or member.unaborted is not None:
            self._pending_finishes[member.status.instance] = member.unfinished, member.unaborted
            while len(self._pending_finishes) > MAX_PENDING:
                del self._pending_finishes[next(iter(self._pending_finishes))]
        self._paths.withdraw([member], leaves=True)
        self._paths.remove(member)
        self._fleet.remove(member)

    def retry_pending(
        self, members: Sequence[Member], *, drops: bool = False, timeout_s: float | None = None
    ) -> dict[Member, StepReply]:
        """Send finish and abort requests again that members did not confirm.

        Returns the replies to the finish requests. Raises the error of a member that cannot be
        reached, unless `drops`; any other error means that the update is over on that member.
        """
        finished: dict[Member, StepReply] = {}
        if all(m.unfinished is None and m.unaborted is None for m in members):
            return finished
        pending = [m for m in members if m.unfinished is not None]
        answers = self._fleet.call(
            lambda m: m.unfinished or FinishRequest(), pending, timeout_s=timeout_s
        )
        self._drop_unreachable(answers, drops=drops)
        for answer in answers:
            answer.member.unfinished = None
            if answer.error is None:
                finished[answer.member] = answer.step
            elif isinstance(answer.error, RemoteError):  # not retried; a proxy may have raised it
                abort_prepared(self._fleet, answer.member)
        pending = [m for m in members if m.unaborted is not None and m in self._fleet.members]
        answers = self._fleet.call(
            lambda m: AbortRequest(update_id=m.unaborted, reason="abort sent again"),
            pending,
            timeout_s=timeout_s,
        )
        self._drop_unreachable(answers, drops=drops)
        for answer in answers:
            answer.member.unaborted = None
        self._fleet.observe_versions(reply.version for reply in finished.values())
        return finished

    def repair_group(self, members: Iterable[Member]) -> None:
        """Reconnect those of `members` whose engine is not ready for them."""
        chosen = list(members)
        while failed := failures(
            self._paths.repair([m for m in chosen if m in self._fleet.members])
        ):
            if not self._fleet.may_drop(answer.member for answer in failed):
                raise_first(failed)
            for answer in failed:
                self.drop(answer.member, answer.error or TransferError("it did not join"))

    def reconnect(
        self,
        failed: Mapping[Member, WeightSyncError],
        members: Sequence[Member] | None = None,
        *,
        anew: Container[Member] = (),
    ) -> bool:
        """After a failed update: query the members' versions, and connect new instances again.

        A new instance is a receiver that was restarted, or closed this sender's engine. One that
        cannot read a GPU any more gets another path. Those of `anew` are connected in any case: the
        trainer may be reached at another address now. Returns whether any were connected, or open
        updates of a dead sender were recovered.
        """
        fleet = self._fleet
        answers = fleet.call(StatusRequest(), members, timeout_s=fleet.brief_s)
        known = [answer for answer in answers if isinstance(answer.reply, Status)]
        resized = [server.target for server in fleet.resized_servers(answers)]
        resized += [answer.member.target for answer in known if answer.status.workers]
        if resized and members is not None:
            raise WorldSizeChangedError(
                f"{', '.join(resized)} was restarted with another number of workers; "
                "send_weights() connects them, or remove() it and add() it again"
            )
        if resized:
            self.disconnect()
            self.connect()
            return True
        fleet.observe_versions(answer.status.version for answer in known)
        left = [member for member, error in failed.items() if member.refuse_gpus(error)]
        unconnected = [
            answer
            for answer in known
            if answer.member.is_new_to(answer.status)
            or isinstance(failed.get(answer.member), UnknownSenderError)
            or answer.member in left
            or answer.member in anew
        ]
        recovered = False
        if any(answer.status.orphaned for answer in known):  # open updates of another, dead sender
            statuses = fleet.call(StatusRequest(), timeout_s=fleet.brief_s)
            if not failures(statuses):
                recover_orphans(fleet, statuses)
                recovered = True
        if unconnected and self.connected:
            logger.warning("connecting again: %s", names(a.member for a in unconnected))
            unconnected = self._await_owners(unconnected, drops=False)
            check_fleet(fleet, unconnected, takeover=self._takeover)
            self._extend(unconnected)
            recovered = True
        return abort_others(fleet, known) or recovered

    def _extend(self, answers: Sequence[MemberReply]) -> None:
        """Connect members of the fleet, each by a path that works for it now.

        Where that needs other engines, the whole fleet is connected anew.
        """
        if not all(self._paths.extend(answer.member) for answer in answers):
            self.disconnect()
            self.connect()

    def _handshake(self, members: Sequence[Member], *, drops: bool) -> list[MemberReply]:
        """Return the statuses of members that are to be connected, with servers expanded.

        Raises the first error, and the errors of `check_fleet`.
        """
        answers = self._fleet.call(StatusRequest(), list(members))
        resized = self._fleet.resized_servers(answers)
        if resized:
            answers = self._query_servers(resized, answers)
        answers = self._without_lost(answers, drops=drops)
        for answer in answers:
            if answer.status.workers:
                self._paths.remove(answer.member)
        expanded = self._fleet.expand_servers(answers)
        answers = self._await_owners(self._without_lost(expanded, drops=drops), drops=drops)
        answers = [self._restore_pending(answer) for answer in answers]
        check_fleet(self._fleet, answers, takeover=self._takeover)
        return answers

    def _await_owners(self, answers: Sequence[MemberReply], *, drops: bool) -> list[MemberReply]:
        """Wait until owners that yield have ended their open updates, at most the fleet's timeout.

        Returns the members' statuses after the wait.
        """
        deadline = time.monotonic() + self._fleet.timeout_s
        current = list(answers)
        while busy := [answer.member for answer in current if self._is_owner_busy(answer)]:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
            again = self._fleet.call(StatusRequest(), busy)
            current = [answer for answer in current if answer.member not in busy]
            current += self._without_lost(again, drops=drops)
        return current

    def _is_owner_busy(self, answer: MemberReply) -> bool:
        """Whether a member is in an update of another sender that yields the member afterwards."""
        owner = other_owner(self._fleet, answer, takeover=self._takeover)
        return owner is not None and owner.yields and not is_idle(answer.status)

    def _without_lost(self, answers: Sequence[MemberReply], *, drops: bool) -> list[MemberReply]:
        """Drop members without a status, with `drops`. Raises the first error that remains."""
        if failures(answers) and not drops:
            self._raise_refusal(answers)
            raise_first(answers)
        self._drop_unreachable(answers, drops=drops, kinds=LOST_ERRORS)
        staying = [answer for answer in answers if answer.member in self._fleet.members]
        raise_first(staying)
        return staying

    def _raise_refusal(self, answers: Sequence[MemberReply]) -> None:
        """Raise AuthError where a member that was reached refuses the token.

        A status needs none, and the error of a member that was not reached would hide it.
        """
        reached = [answer.member for answer in answers if answer.error is None]
        refusal = first_refusal(
            [member.transport for member in reached], _REFUSAL_SHARE * self._fleet.timeout_s
        )
        if refusal is not None:
            raise refusal

    def _query_servers(
        self, servers: Sequence[Server], answers: Sequence[MemberReply]
    ) -> list[MemberReply]:
        """Replace the workers of restarted servers by the servers, and query their status."""
        kept = [answer for answer in answers if answer.member.server not in servers]
        for answer in answers:
            if answer.member.server in servers:
                self._paths.remove(answer.member)
        whole = [self._fleet.collapse(server) for server in servers]
        return [*kept, *self._fleet.call(StatusRequest(), whole)]

    def _members_of(self, transport: BaseTransport) -> list[Member]:
        """Return the member of a transport, or the workers that it expanded to."""
        return [
            member
            for member in self._fleet.members
            if transport in (member.transport, member.server and member.server.transport)
        ]

    def _flush_pending_finishes(self, members: Sequence[Member]) -> None:
        """Send unconfirmed requests to members that are removed. Errors are only logged."""
        for member in members:
            if member.unfinished is None and member.unaborted is None:
                continue
            try:
                self.retry_pending([member], timeout_s=self._fleet.brief_s)
            except WeightSyncError as exc:
                logger.warning("%s is removed with an update open: %s", member.target, exc)

    def _restore_pending(self, answer: MemberReply) -> MemberReply:
        """Send a returning member its unconfirmed requests; return its status after that."""
        pending = self._pending_finishes.pop(answer.status.instance, None)
        if pending is None:
            return answer
        answer.member.unfinished, answer.member.unaborted = pending
        self.retry_pending([answer.member])
        again = self._fleet.call(StatusRequest(), [answer.member])
        raise_first(again)
        return again[0]

    def _drop_unreachable(
        self,
        answers: Sequence[MemberReply],
        *,
        drops: bool,
        kinds: tuple[type[WeightSyncError], ...] = (TransportError,),
    ) -> None:
        """Drop members that cannot be reached, with `drops`; else raise the first error."""
        lost = [answer for answer in answers if isinstance(answer.error, kinds)]
        if not drops or not self._fleet.may_drop(answer.member for answer in lost):
            raise_first(lost)
        for answer in lost:
            self.drop(answer.member, answer.error or TransferError("it was lost"))
