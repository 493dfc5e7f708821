"""Members of the fleet: connect, remove, and recovery of updates that dead senders left open."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from weightsync.errors import (
    ConfigError,
    RemoteError,
    TransferError,
    TransportError,
    UnknownSenderError,
    WeightSyncError,
)
from weightsync.ranks.commands import CheckMoved
from weightsync.ranks.group import RankGroup
from weightsync.transports.base import Transport
from weightsync.update.fleet import (
    LOST_ERRORS,
    Fleet,
    Member,
    MemberReply,
    Server,
    WorldSizeChangedError,
    add_target,
    expand_servers,
    failures,
    find_resized,
    raise_first,
)
from weightsync.update.paths import PathSelector
from weightsync.update.recovery import (
    abort_others,
    check_fleet,
    is_idle,
    recover_orphans,
    recover_prepared,
)
from weightsync.wire.messages import (
    AbortRequest,
    FinishRequest,
    Status,
    StatusRequest,
    StepReply,
)

logger = logging.getLogger(__name__)


_STATUS_TIMEOUT_S = 10.0
_POLL_S = 0.05
MAX_PENDING = 256
"""Number of removed members whose unconfirmed requests are kept; most never return."""


class Membership:
    """Connects and removes the members of a sender's fleet. Used on rank 0.

    `version` is the newest version that the receivers hold. With `drops`, a member that was
    connected once and cannot be reached is dropped instead of raising its error, unless it is the
    last. `dropped` has the reasons by target, for the next report. With `takeover`, members that
    belong to another living sender are taken over at their first handshake.
    """

    def __init__(
        self,
        group: RankGroup,
        fleet: Fleet,
        paths: PathSelector,
        *,
        timeout_s: float,
        drops: bool,
        takeover: bool = False,
    ) -> None:
        self.fleet = fleet
        self.paths = paths
        self.version = 0
        self.connected = False
        self.dropped: dict[str, str] = {}
        self._drops = drops
        self._takeover = takeover
        self._group = group
        self._timeout_s = timeout_s
        self._pending_finishes: dict[str, tuple[FinishRequest | None, str | None]] = {}

    def connect(self) -> None:
        """Connect every member by a path, and recover the updates that a dead sender left open.

        The first time every member has to reply: a wrong address is an error, not a lost member.
        """
        answers = self._handshake(
            self.fleet.members, drops=self._drops and self.paths.connected_once
        )
        check_fleet(self.fleet, answers, takeover=self._takeover)
        self.observe_versions(answer.status.version for answer in answers)
        self.paths.connect_all(self.version)
        self.connected = True
        try:
            self.observe_versions(recover_orphans(self.fleet, answers, self._timeout_s))
        except BaseException:
            self.disconnect()
            raise
        self.paths.connected_once = True

    def disconnect(self, *, leaves: bool | None = None) -> None:
        """Unregister all memory; the next call that needs it connects.

        Unconfirmed requests are sent first, to members that can be reached. With `leaves` the
        members do not belong to this fleet any more.
        """
        if self.connected:
            self._flush_pending_finishes(self.fleet.members)
        if self.connected or leaves:
            self.connected = False
            self.paths.withdraw(leaves=leaves)

    def ready(self, members: Sequence[Member] | None = None) -> None:
        """Connect members (None: all), and send them their unconfirmed requests.

        Connects after `release`, or where registered memory has moved.
        """
        if self.connected and any(result.moved for result in self._group.run_on_all(CheckMoved())):
            self.disconnect()
        if not self.connected:
            self.connect()
        self.retry_pending(self.fleet.members if members is None else members, drops=self._drops)
        self.repair_group(self.fleet.members if members is None else members)

    def add(self, transport: Transport) -> list[Member]:
        """Add and connect a receiver, or all workers of a server; return the new members.

        An error leaves the fleet unchanged. Raises ConfigError for a receiver of the fleet.
        """
        if self._behind(transport):
            raise ConfigError(f"{transport.target} is in the fleet already")
        self.ready()
        added = [self.fleet.add(transport)]
        try:
            self._connect_members(added, drops=False)
        except BaseException:
            for member in self._behind(transport):
                self.remove(member)
            raise
        return self._behind(transport)

    def connect_workers(self, stale: Member) -> list[Member]:
        """Replace the workers of a restarted server by those that it has now, and connect these.

        Returns the new members: none where they are dropped.
        """
        transport = stale.transport if stale.server is None else stale.server.transport
        try:
            self._connect_members(self._behind(transport), drops=self._drops)
        except WeightSyncError as exc:
            present = self._behind(transport)
            if not self.may_drop(present):
                self.disconnect()
                raise
            for member in present:
                self.drop(member, exc)
        return self._behind(transport)

    def _connect_members(self, members: Sequence[Member], *, drops: bool) -> None:
        answers = self._handshake(members, drops=drops)
        check_fleet(self.fleet, answers, takeover=self._takeover)
        if not all(self.paths.extend(answer.member, self.version) for answer in answers):
            self.disconnect()
            self.connect()

    def find(self, target: str) -> list[Member]:
        """Return the member of that name, or all workers of that server.

        Raises ConfigError that lists the fleet, or for one worker of several.
        """
        found = [member for member in self.fleet.members if member.is_named(target)]
        if not found:
            raise ConfigError(f"no receiver {target} in the fleet: {names(self.fleet.members)}")
        server = found[0].server
        if server is not None and len(self.fleet.with_workers(found)) > len(found):
            raise ConfigError(
                f"{target} is one worker of {server.target}, whose {len(server.paths)} workers "
                f"hold the same weights or generate nothing; name {server.target}"
            )
        return found

    def drop(self, member: Member, reason: WeightSyncError) -> None:
        """Remove a failed member and the other workers of its server; record the reason."""
        if member not in self.fleet.members:
            return
        text = str(add_target(reason, member.target))
        for one in self.fleet.with_workers([member]):
            why = text if one is member else f"its server lost a worker: {text}"
            logger.warning("%s is dropped from the fleet: %s", one.target, why)
            self.dropped[one.target] = why
            self.remove(one)

    def may_drop(self, members: Iterable[Member]) -> bool:
        """Whether members may be dropped: enabled by `drops`, and others remain."""
        return self._drops and len(self.fleet.with_workers(members)) < len(self.fleet.members)

    def remove(self, member: Member) -> None:
        """Shut down a member's engine, and remove it from the fleet. It need not reply."""
        self._flush_pending_finishes([member])
        if member.unfinished is not None or member.unaborted is not None:
            self._pending_finishes[member.instance] = (member.unfinished, member.unaborted)
            while len(self._pending_finishes) > MAX_PENDING:
                del self._pending_finishes[next(iter(self._pending_finishes))]
        self.paths.withdraw([member], leaves=True)
        self.paths.remove(member)
        self.fleet.remove(member)

    def retry_pending(
        self, members: Sequence[Member], *, drops: bool = False, timeout_s: float | None = None
    ) -> dict[Member, StepReply]:
        """Send finish and abort requests again that members did not confirm.

        Returns the replies to the finish requests. Raises the error of a member that cannot be
        reached, unless `drops`; any other error means that the update is over on that member.
        """
        finished: dict[Member, StepReply] = {}
        pending = [m for m in members if m.unfinished is not None]
        answers = self.fleet.call(
            lambda m: m.unfinished or FinishRequest(),
            timeout_s=timeout_s or self._timeout_s,
            members=pending,
        )
        self._refuse_unreachable(answers, "finish", drops=drops)
        for answer in answers:
            answer.member.unfinished = None
            if answer.error is None:
                finished[answer.member] = answer.step
            elif isinstance(answer.error, RemoteError):  # not retried; a proxy may have raised it
                self.end_open_update(answer.member)
        pending = [m for m in members if m.unaborted is not None and m in self.fleet.members]
        answers = self.fleet.call(
            lambda m: AbortRequest(update_id=m.unaborted, reason="abort sent again"),
            timeout_s=timeout_s or self._timeout_s,
            members=pending,
        )
        self._refuse_unreachable(answers, "abort", drops=drops)
        for answer in answers:
            answer.member.unaborted = None
        self.observe_versions(reply.version for reply in finished.values())
        return finished

    def end_open_update(self, member: Member) -> None:
        """Abort this sender's update on a member that is still PREPARED after a failed finish."""
        recover_prepared(self.fleet, member, self._timeout_s)

    def repair_group(self, members: Sequence[Member]) -> None:
        """Reconnect together the members whose engine is not ready for an update of `members`."""
        while unready := self.paths.unready([m for m in members if m in self.fleet.members]):
            failed = failures(self.paths.repair(self.version, unready))
            if not failed:
                return
            if not self.may_drop(answer.member for answer in failed):
                raise_first(failed, "rendezvous")
            for answer in failed:
                self.drop(answer.member, answer.error or TransferError("it did not join"))

    def reconnect(
        self,
        failed: Mapping[Member, WeightSyncError],
        members: Sequence[Member] | None = None,
    ) -> bool:
        """After a failed update: query the members' versions, and connect new instances again.

        A new instance is a receiver that was restarted, or closed this sender's engine. Returns
        whether any were connected, or open updates of a dead sender were recovered.
        """
        timeout_s = min(self._timeout_s, _STATUS_TIMEOUT_S)
        answers = self.fleet.call(StatusRequest(), timeout_s=timeout_s, members=members)
        known = [answer for answer in answers if isinstance(answer.reply, Status)]
        resized = [s.target for s in find_resized(answers, timeout_s)]
        resized += [answer.member.target for answer in known if answer.status.workers]
        if resized:
            return self._reconnect_resized(resized, all_members=members is None)
        self.observe_versions(answer.status.version for answer in known)
        unconnected = [
            answer
            for answer in known
            if answer.member.is_new_to(answer.status)
            or isinstance(failed.get(answer.member), UnknownSenderError)
        ]
        ended = any(answer.status.orphaned for answer in known) and self._end_orphans(timeout_s)
        if unconnected and self.connected:
            logger.warning("connecting again: %s", names(a.member for a in unconnected))
            unconnected = self._await_owners(unconnected, drops=False)
            check_fleet(self.fleet, unconnected, takeover=self._takeover)
            self._offer([answer.member for answer in unconnected])
            ended = True
        return abort_others(self.fleet, known, timeout_s) or ended

    def _end_orphans(self, timeout_s: float) -> bool:
        """Recover the open updates of another, dead sender; False where a member does not reply."""
        answers = self.fleet.call(StatusRequest(), timeout_s=timeout_s)
        if failures(answers):
            return False
        self.observe_versions(recover_orphans(self.fleet, answers, self._timeout_s))
        return True

    def _reconnect_resized(self, servers: Sequence[str], *, all_members: bool) -> bool:
        if not all_members:
            raise WorldSizeChangedError(
                f"{', '.join(servers)} was restarted with another number of workers; "
                "send_weights() connects them, or remove() it and add() it again"
            )
        self.disconnect()
        self.connect()
        return True

    def observe_versions(self, versions: Iterable[int]) -> None:
        """Raise `version` to the newest of these versions, which receivers hold."""
        self.version = max([self.version, *versions])

    def _handshake(self, members: Sequence[Member], *, drops: bool) -> list[MemberReply]:
        """Return the statuses of members that are to be connected, with servers expanded.

        Raises the first error.
        """
        answers = self.fleet.call(StatusRequest(), timeout_s=self._timeout_s, members=list(members))
        resized = find_resized(answers, min(self._timeout_s, _STATUS_TIMEOUT_S))
        if resized:
            answers = self._query_servers(resized, answers)
        answers = self._without_lost(answers, drops=drops)
        for answer in answers:
            if answer.status.workers:
                self.paths.remove(answer.member)
        expanded = expand_servers(self.fleet, answers, self._timeout_s)
        answers = self._await_owners(self._without_lost(expanded, drops=drops), drops=drops)
        return [self._restore_pending(answer) for answer in answers]

    def _await_owners(self, answers: Sequence[MemberReply], *, drops: bool) -> list[MemberReply]:
        """Wait until owners that yield have ended their open updates, at most `timeout_s`.

        Returns the members' statuses after the wait.
        """
        deadline = time.monotonic() + self._timeout_s
        current = list(answers)
        while busy := [answer.member for answer in current if self._is_owner_busy(answer)]:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
            again = self.fleet.call(StatusRequest(), timeout_s=self._timeout_s, members=busy)
            current = [answer for answer in current if answer.member not in busy]
            current += self._without_lost(again, drops=drops)
        return current

    def _is_owner_busy(self, answer: MemberReply) -> bool:
        """Whether a member is in an update of another sender that yields the member afterwards."""
        owner, member = answer.status.owner, answer.member
        if owner is None or not owner.yields or (self._takeover and not member.term):
            return False
        free = not owner.alive or self.fleet.owns(owner) or owner.term < member.term
        return not free and not is_idle(answer.status)

    def _without_lost(self, answers: Sequence[MemberReply], *, drops: bool) -> list[MemberReply]:
        """Drop members without a status, with `drops`. Raises the first error that remains."""
        self._refuse_unreachable(answers, "status", drops=drops, kinds=LOST_ERRORS)
        staying = [answer for answer in answers if answer.member in self.fleet.members]
        raise_first(staying, "status")
        return staying

    def _query_servers(
        self, servers: Sequence[Server], answers: Sequence[MemberReply]
    ) -> list[MemberReply]:
        """Replace the workers of restarted servers by the servers, and query their status."""
        kept = [answer for answer in answers if answer.member.server not in servers]
        for answer in answers:
            if answer.member.server in servers:
                self.paths.remove(answer.member)
        whole = [self.fleet.collapse(server) for server in servers]
        statuses = self.fleet.call(StatusRequest(), timeout_s=self._timeout_s, members=whole)
        return [*kept, *statuses]

    def _behind(self, transport: Transport) -> list[Member]:
        """Return the member of a transport, or the workers that it expanded to."""
        return [
            member
            for member in self.fleet.members
            if transport in (member.transport, member.server and member.server.transport)
        ]

    def _flush_pending_finishes(self, members: Sequence[Member]) -> None:
        """Send unconfirmed requests to members that are removed. Errors are only logged."""
        for member in members:
            if member.unfinished is None and member.unaborted is None:
                continue
            try:
                self.retry_pending([member], timeout_s=min(self._timeout_s, _STATUS_TIMEOUT_S))
            except WeightSyncError as exc:
                logger.warning("%s is removed with an update open: %s", member.target, exc)

    def _restore_pending(self, answer: MemberReply) -> MemberReply:
        """Send a returning member its unconfirmed requests; return its status after that."""
        pending = self._pending_finishes.pop(answer.status.instance, None)
        if pending is None:
            return answer
        answer.member.unfinished, answer.member.unaborted = pending
        self.retry_pending([answer.member])
        again = self.fleet.call(StatusRequest(), timeout_s=self._timeout_s, members=[answer.member])
        raise_first(again, "status")
        return again[0]

    def _refuse_unreachable(
        self,
        answers: Sequence[MemberReply],
        doing: str,
        *,
        drops: bool,
        kinds: tuple[type[WeightSyncError], ...] = (TransportError,),
    ) -> None:
        lost = [answer for answer in answers if isinstance(answer.error, kinds)]
        if not drops or not self.may_drop(answer.member for answer in lost):
            raise_first(lost, doing)
        for answer in lost:
            self.drop(answer.member, answer.error or TransferError(doing))

    def _offer(self, members: Sequence[Member]) -> None:
        """Connect members again, each by a path that works for it now."""
        collective = [member for member in members if self.paths.is_collective(member)]
        for member in members:
            if member not in collective and not self.paths.extend(member, self.version):
                self.disconnect()
                self.connect()
                return
        if collective:
            self.paths.offer(collective, self.version)


def names(members: Iterable[Member]) -> str:
    """Return the targets of members, for a message."""
    return ", ".join(member.target for member in members)
