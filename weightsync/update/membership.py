"""Members of the fleet: connecting, leaving, and recovery of what dead senders left."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from weightsync.errors import (
    ConfigError,
    ProtocolError,
    RemoteError,
    SenderConflictError,
    SenderReplacedError,
    TransferError,
    TransportError,
    UnknownSenderError,
    WeightSyncError,
)
from weightsync.ranks.group import RankGroup
from weightsync.ranks.worker import CheckMoved
from weightsync.transports.base import Transport
from weightsync.update.fleet import (
    SAYS_NOTHING,
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
from weightsync.wire.messages import (
    PROTOCOL,
    AbortRequest,
    FinishRequest,
    Status,
    StatusRequest,
    StepReply,
)
from weightsync.wire.offers import describe, utc

logger = logging.getLogger(__name__)


def recover_orphans(fleet: Fleet, answers: Sequence[MemberReply], timeout_s: float) -> list[int]:
    """End the open updates of dead senders; return the versions that receivers hold then.

    `answers` are what the fleet said when it was met. An update that anyone has committed is
    finished wherever it is PREPARED; what is not, and any other update, is aborted: a late message
    may have begun a committed one anew. Raises the error of one that is out of reach; any other
    means that the update is over there, and the next one heals what it left.
    """
    orphans = {a.status.update_id for a in answers if a.status.orphaned and a.status.update_id}
    versions: list[int] = []
    for update_id in orphans:
        committed = any(a.status.last_finished == update_id for a in answers)
        holders = [a for a in answers if a.status.update_id == update_id]
        prepared = [a.member for a in holders if committed and a.status.state == "PREPARED"]
        others = [a.member for a in holders if a.member not in prepared]
        finish = FinishRequest(update_id=update_id)
        abort = AbortRequest(update_id=update_id, reason="its sender died")
        versions += _end(fleet, finish, prepared, timeout_s)
        versions += _end(fleet, abort, others, timeout_s)
    return versions


def _end(
    fleet: Fleet, request: FinishRequest | AbortRequest, members: list[Member], timeout_s: float
) -> list[int]:
    """End a dead sender's update at those who hold it; return the versions that they have then."""
    if not members:
        return []
    update_id = request.update_id
    end = "finished" if isinstance(request, FinishRequest) else "aborted"
    logger.warning("update %s of a dead sender is %s", update_id, end)
    done = fleet.ask(request, timeout_s=timeout_s, members=members)
    lost = [answer for answer in done if isinstance(answer.error, TransportError)]
    raise_first(lost, f"ending update {update_id} of a dead sender")
    for answer in failures(done):
        logger.warning("%s has ended it otherwise: %s", answer.member.target, answer.error)
    return [answer.step.version for answer in done if answer.error is None]


def abort_others(fleet: Fleet, answers: Sequence[MemberReply], timeout_s: float) -> bool:
    """Abort what receivers of this sender hold open though it sends nothing; say if there was such.

    A late message opens an update where its end is not remembered: in a receiver that was started
    again. Others are sessions of clients that do not connect. One whose finish the member still
    owes an answer for stays. Called between two updates, with what the receivers said just before.
    """
    stale = [answer for answer in answers if _is_stale(answer)]
    for answer in stale:
        update_id = answer.status.update_id or ""
        logger.warning("update %s of %s is aborted", update_id, answer.member.target)
        request = AbortRequest(update_id=update_id, reason="the receiver's owner did not start it")
        fleet.ask(request, timeout_s=timeout_s, members=[answer.member])
    return bool(stale)


def _is_stale(answer: MemberReply) -> bool:
    """Whether a receiver that belongs to this sender is in an update that it will not finish."""
    member, status = answer.member, answer.status
    is_owed = member.unfinished is not None and member.unfinished.update_id == status.update_id
    is_open = status.state in ("UPDATING", "PREPARED") and not status.orphaned
    return is_open and not is_owed and bool(member.sender)


def recover_prepared(fleet: Fleet, member: Member, timeout_s: float) -> None:
    """Abort the update of this sender that a member holds, whose finish failed.

    Raises what its abort raises.
    """
    answer = fleet.ask(StatusRequest(), timeout_s=timeout_s, members=[member])[0]
    held = answer.status.update_id if answer.error is None else None
    if held is None or answer.status.state != "PREPARED" or held != member.last_told:
        return
    request = AbortRequest(update_id=held, reason="its finish failed")
    raise_first(fleet.ask(request, timeout_s=timeout_s, members=[member]), "abort")


_STATUS_TIMEOUT_S = 10.0
_POLL_S = 0.05
MAX_OWED = 256
"""Of how many members that left it is known what they were not told; most never return."""


class Membership:
    """The fleet of one sender, on rank 0.

    `version` is the last version that receivers hold. With `drops`, a member that was connected
    once and is out of reach is dropped instead of raised about, unless it is the last; `dropped`
    says who and why, and is taken by the next report. With `takeover`, members that belong to
    another living sender are taken from it the first time that they are met.
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
        """Take a path to everyone, and end what a dead sender left open.

        The first time everyone has to be there: a wrong address is no failure to go on without.
        """
        answers = self._handshake(self.fleet.members, drops=self._drops and self.paths.met)
        check_fleet(self.fleet, answers, takeover=self._takeover)
        self.observe_versions(answer.status.version for answer in answers)
        self.paths.take(self.version)
        self.connected = True
        try:
            self.observe_versions(recover_orphans(self.fleet, answers, self._timeout_s))
        except BaseException:
            self.disconnect()
            raise
        self.paths.met = True

    def disconnect(self, *, leaves: bool | None = None) -> None:
        """Unregister all memory; the next call that needs it connects.

        What is still owed to members is told them first, as far as they can be reached. With
        `leaves` the fleet ends.
        """
        if self.connected:
            self._flush_pending_finishes(self.fleet.members)
        if self.connected or leaves:
            self.connected = False
            self.paths.withdraw(leaves=leaves)

    def ready(self, members: Sequence[Member] | None = None) -> None:
        """Have members (None: all) connected and free of updates that are over.

        Connects after `release`, or where registered memory has moved.
        """
        if self.connected and any(told.moved for told in self._group.run_on_all(CheckMoved())):
            self.disconnect()
        if not self.connected:
            self.connect()
        self.retry_pending(self.fleet.members if members is None else members, drops=self._drops)
        self.repair_group(self.fleet.members if members is None else members)

    def add(self, transport: Transport) -> list[Member]:
        """Take a receiver, or all of a server, in and connect it. What fails changes no fleet."""
        if self._behind(transport):
            raise ConfigError(f"{transport.target} is in the fleet already")
        self.ready()
        taken = [self.fleet.add(transport)]
        try:
            self._take_in(taken, drops=False)
        except BaseException:
            for member in self._behind(transport):
                self.remove(member)
            raise
        return self._behind(transport)

    def meet_workers(self, stale: Member) -> list[Member]:
        """Connect the workers that a restarted server has now, in the place of those it had.

        Returns them: none where they are dropped.
        """
        transport = stale.transport if stale.server is None else stale.server.transport
        try:
            self._take_in(self._behind(transport), drops=self._drops)
        except WeightSyncError as exc:
            there = self._behind(transport)
            if not self.may_drop(there):
                self.disconnect()
                raise
            for member in there:
                self.drop(member, exc)
        return self._behind(transport)

    def _take_in(self, members: Sequence[Member], *, drops: bool) -> None:
        answers = self._handshake(members, drops=drops)
        check_fleet(self.fleet, answers, takeover=self._takeover)
        if not all(self.paths.extend(answer.member, self.version) for answer in answers):
            self.disconnect()
            self.connect()

    def find(self, target: str) -> list[Member]:
        """Return the member of that name, or all workers of that server.

        Raises ConfigError listing the fleet, or for one worker of several.
        """
        found = [member for member in self.fleet.members if member.is_named(target)]
        if not found:
            raise ConfigError(f"no receiver {target} in the fleet: {names(self.fleet.members)}")
        server = found[0].server
        if server is not None and len(self.fleet.together(found)) > len(found):
            raise ConfigError(
                f"{target} is one worker of {server.target}, whose {len(server.paths)} workers "
                f"hold the same weights or generate nothing; name {server.target}"
            )
        return found

    def drop(self, member: Member, reason: WeightSyncError) -> None:
        """Go on without a member that failed, and without the other workers of its server."""
        if member not in self.fleet.members:
            return
        said = str(add_target(reason, member.target))
        for one in self.fleet.together([member]):
            why = said if one is member else f"its server lost a worker: {said}"
            logger.warning("%s is dropped from the fleet: %s", one.target, why)
            self.dropped[one.target] = why
            self.remove(one)

    def may_drop(self, members: Iterable[Member]) -> bool:
        """Whether these may be dropped: not where that leaves nobody."""
        return self._drops and len(self.fleet.together(members)) < len(self.fleet.members)

    def remove(self, member: Member) -> None:
        """Have a member close what it opened, and forget it. It need not answer."""
        self._flush_pending_finishes([member])
        if member.unfinished is not None or member.unaborted is not None:
            self._pending_finishes[member.instance] = (member.unfinished, member.unaborted)
            while len(self._pending_finishes) > MAX_OWED:
                del self._pending_finishes[next(iter(self._pending_finishes))]
        self.paths.withdraw([member], leaves=True)
        self.paths.forget(member)
        self.fleet.remove(member)

    def retry_pending(
        self, members: Sequence[Member], *, drops: bool = False, timeout_s: float | None = None
    ) -> dict[Member, StepReply]:
        """Tell members again what they could not be told the last time.

        Returns what those said who had still to finish. Raises the error of one that is out of
        reach; any other error means that the update is over there.
        """
        finished: dict[Member, StepReply] = {}
        owing = [m for m in members if m.unfinished is not None]
        answers = self.fleet.ask(
            lambda m: m.unfinished or FinishRequest(),
            timeout_s=timeout_s or self._timeout_s,
            members=owing,
        )
        self._refuse_unreachable(answers, "finish", drops=drops)
        for answer in answers:
            answer.member.unfinished = None
            if answer.error is None:
                finished[answer.member] = answer.step
            elif isinstance(answer.error, RemoteError):  # for good, and perhaps not its receiver's
                self.end_open_update(answer.member)
        owing = [m for m in members if m.unaborted is not None and m in self.fleet.members]
        answers = self.fleet.ask(
            lambda m: AbortRequest(update_id=m.unaborted, reason="as told before"),
            timeout_s=timeout_s or self._timeout_s,
            members=owing,
        )
        self._refuse_unreachable(answers, "abort", drops=drops)
        for answer in answers:
            answer.member.unaborted = None
        self.observe_versions(reply.version for reply in finished.values())
        return finished

    def end_open_update(self, member: Member) -> None:
        """Abort the update of ours that a member which failed in its finish still holds."""
        recover_prepared(self.fleet, member, self._timeout_s)

    def repair_group(self, members: Sequence[Member]) -> None:
        """Connect those anew, together, whose engine is not ready for these members."""
        while apart := self.paths.unready([m for m in members if m in self.fleet.members]):
            failed = failures(self.paths.repair(self.version, apart))
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
        """After a failed update: learn what members hold, connect those who do not know us.

        They are a new instance behind a known target, or have closed what was offered. Returns
        whether there were such, or updates of a dead sender that are ended now.
        """
        timeout_s = min(self._timeout_s, _STATUS_TIMEOUT_S)
        answers = self.fleet.ask(StatusRequest(), timeout_s=timeout_s, members=members)
        known = [answer for answer in answers if isinstance(answer.reply, Status)]
        reshaped = [s.target for s in find_resized(answers, timeout_s)]
        reshaped += [answer.member.target for answer in known if answer.status.workers]
        if reshaped:
            return self._meet_reshaped(reshaped, everyone=members is None)
        self.observe_versions(answer.status.version for answer in known)
        strangers = [
            answer
            for answer in known
            if answer.member.is_new_to(answer.status)
            or isinstance(failed.get(answer.member), UnknownSenderError)
        ]
        ended = any(answer.status.orphaned for answer in known) and self._end_orphans(timeout_s)
        if strangers and self.connected:
            logger.warning("connecting again: %s", names(a.member for a in strangers))
            strangers = self._await_turns(strangers, drops=False)
            check_fleet(self.fleet, strangers, takeover=self._takeover)
            self._offer([answer.member for answer in strangers])
            ended = True
        return abort_others(self.fleet, known, timeout_s) or ended

    def _end_orphans(self, timeout_s: float) -> bool:
        """End what a sender that died beside this one left open, once everyone can be asked."""
        answers = self.fleet.ask(StatusRequest(), timeout_s=timeout_s)
        if failures(answers):
            return False
        self.observe_versions(recover_orphans(self.fleet, answers, self._timeout_s))
        return True

    def _meet_reshaped(self, servers: Sequence[str], *, everyone: bool) -> bool:
        if not everyone:
            raise WorldSizeChangedError(
                f"{', '.join(servers)} was restarted with another number of workers; "
                "send_weights() meets them, or remove() it and add() it again"
            )
        self.disconnect()
        self.connect()
        return True

    def observe_versions(self, versions: Iterable[int]) -> None:
        """Some receiver holds these versions."""
        self.version = max([self.version, *versions])

    def _handshake(self, members: Sequence[Member], *, drops: bool) -> list[MemberReply]:
        """Ask members who they are, and the workers of servers. Raises what the first did not say.

        Only who is not connected is greeted.
        """
        answers = self.fleet.ask(StatusRequest(), timeout_s=self._timeout_s, members=list(members))
        reshaped = find_resized(answers, min(self._timeout_s, _STATUS_TIMEOUT_S))
        if reshaped:
            answers = self._ask_whole(reshaped, answers)
        answers = self._without_lost(answers, drops=drops)
        for answer in answers:
            if answer.status.workers:
                self.paths.forget(answer.member)
        told = expand_servers(self.fleet, answers, self._timeout_s)
        answers = self._await_turns(self._without_lost(told, drops=drops), drops=drops)
        return [self._restore_pending(answer) for answer in answers]

    def _await_turns(self, answers: Sequence[MemberReply], *, drops: bool) -> list[MemberReply]:
        """Wait, up to `timeout_s`, until owners that yield have ended the updates that they began.

        Returns what members say then.
        """
        deadline = time.monotonic() + self._timeout_s
        told = list(answers)
        while busy := [answer.member for answer in told if self._is_in_turn(answer)]:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
            again = self.fleet.ask(StatusRequest(), timeout_s=self._timeout_s, members=busy)
            told = [answer for answer in told if answer.member not in busy]
            told += self._without_lost(again, drops=drops)
        return told

    def _is_in_turn(self, answer: MemberReply) -> bool:
        """Whether a member is in an update of another sender, which gives it up afterwards."""
        owner, member = answer.status.owner, answer.member
        if owner is None or not owner.yields or (self._takeover and not member.term):
            return False
        free = not owner.alive or self.fleet.owns(owner) or owner.term < member.term
        return not free and not _is_idle(answer.status)

    def _without_lost(self, answers: Sequence[MemberReply], *, drops: bool) -> list[MemberReply]:
        """Drop those who do not say who they are, where that is done. Raises any other error."""
        self._refuse_unreachable(answers, "status", drops=drops, kinds=SAYS_NOTHING)
        staying = [answer for answer in answers if answer.member in self.fleet.members]
        raise_first(staying, "status")
        return staying

    def _ask_whole(
        self, servers: Sequence[Server], answers: Sequence[MemberReply]
    ) -> list[MemberReply]:
        """Ask servers themselves who they are now, in the place of the workers that they had."""
        kept = [answer for answer in answers if answer.member.server not in servers]
        for answer in answers:
            if answer.member.server in servers:
                self.paths.forget(answer.member)
        whole = [self.fleet.collapse(server) for server in servers]
        asked = self.fleet.ask(StatusRequest(), timeout_s=self._timeout_s, members=whole)
        return [*kept, *asked]

    def _behind(self, transport: Transport) -> list[Member]:
        """Members that are reached by a transport, or by what it expanded to."""
        return [
            member
            for member in self.fleet.members
            if transport in (member.transport, member.server and member.server.transport)
        ]

    def _flush_pending_finishes(self, members: Sequence[Member]) -> None:
        """Tell leaving members how their updates ended; who cannot be reached is not missed."""
        for member in members:
            if member.unfinished is None and member.unaborted is None:
                continue
            try:
                self.retry_pending([member], timeout_s=min(self._timeout_s, _STATUS_TIMEOUT_S))
            except WeightSyncError as exc:
                logger.warning("%s leaves with an update open: %s", member.target, exc)

    def _restore_pending(self, answer: MemberReply) -> MemberReply:
        """One that left with an update of ours open is told how it ended before it is connected."""
        owed = self._pending_finishes.pop(answer.status.instance, None)
        if owed is None:
            return answer
        answer.member.unfinished, answer.member.unaborted = owed
        self.retry_pending([answer.member])
        again = self.fleet.ask(StatusRequest(), timeout_s=self._timeout_s, members=[answer.member])
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
        """Connect members again, by the path that works for them now."""
        together = [member for member in members if self.paths.is_collective(member)]
        for member in members:
            if member not in together and not self.paths.extend(member, self.version):
                self.disconnect()
                self.connect()
                return
        if together:
            self.paths.offer(together, self.version)


def names(members: Iterable[Member]) -> str:
    """Name members for a message."""
    return ", ".join(member.target for member in members)


def check_fleet(fleet: Fleet, answers: Sequence[MemberReply], *, takeover: bool = False) -> None:
    """Take note of who members are, before anything is made for them.

    Raises ConfigError when two targets are one receiver, ProtocolError for a receiver of another
    protocol, SenderConflictError for one that belongs to another living sender.
    """
    asked = {answer.member for answer in answers}
    seen = {member.instance: member for member in fleet.members if member not in asked}
    for answer in answers:
        answer.member.met(answer.status)
        if answer.status.protocol != PROTOCOL:
            raise ProtocolError(
                f"{answer.member.target} speaks protocol {answer.status.protocol}, this sender "
                f"{PROTOCOL}; install the same version of weightsync on both sides"
            )
        known = seen.setdefault(answer.status.instance, answer.member)
        if known is not answer.member:
            raise ConfigError(
                f"{known.target} and {answer.member.target} are the same receiver (instance "
                f"{answer.status.instance}); name every receiver once"
            )
    for answer in answers:
        _check_owner(fleet, answer, takeover=takeover and not answer.member.term)
    for answer in answers:
        owner = answer.status.owner
        if owner is not None:
            newer = owner.term if fleet.owns(owner) else owner.term + 1
            answer.member.term = max(answer.member.term, newer)
        answer.member.term = max(answer.member.term, 1)


def _check_owner(fleet: Fleet, answer: MemberReply, *, takeover: bool) -> None:
    """Raise where a member belongs to another living sender, and neither yields nor is ours."""
    owner, member = answer.status.owner, answer.member
    if owner is None or not owner.alive or fleet.owns(owner) or takeover:
        return
    if (owner.yields and _is_idle(answer.status)) or owner.term < member.term:
        return  # the other came by an offer that was on its way when we took the member over
    if not member.term:
        raise SenderConflictError(
            f"{member.target} belongs to another living sender: {describe(owner)}; close() that "
            "one, or connect(takeover=True) to replace it",
            owner=owner.name,
            since=utc(owner.since),
        )
    raise SenderReplacedError(
        f"{member.target} was taken over by another sender: {describe(owner)}; close() this one or "
        f"remove({member.target!r}), or connect(takeover=True) to take it back",
        owner=owner.name,
        since=utc(owner.since),
    )


def _is_idle(status: Status) -> bool:
    return status.state not in ("UPDATING", "PREPARED", "ABORTING")
