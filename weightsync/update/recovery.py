"""Recovery: ends updates that dead senders or late messages left open; checks of ownership."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from weightsync.errors import (
    ConfigError,
    ProtocolError,
    SenderConflictError,
    SenderReplacedError,
    TransportError,
)
from weightsync.update.fleet import Fleet, Member, MemberReply, failures, names, raise_first
from weightsync.wire.messages import (
    AbortRequest,
    FinishRequest,
    Status,
    StatusRequest,
    choose_protocol,
)
from weightsync.wire.offers import OwnerStatus, describe, utc

logger = logging.getLogger(__name__)


def recover_orphans(fleet: Fleet, answers: Sequence[MemberReply]) -> None:
    """Commit or abort the open updates of dead senders.

    `answers` are the statuses of the fleet. An update that any receiver committed is finished where
    it is PREPARED, and aborted elsewhere: a late message may have started it again. Any other
    update is aborted. Raises the error of a receiver that cannot be reached. Any other error means
    that the update is over on that receiver, and the next update heals it.
    """
    orphans = {a.status.update_id for a in answers if a.status.orphaned and a.status.update_id}
    versions: list[int] = []
    for update_id in orphans:
        committed = any(a.status.last_finished == update_id for a in answers)
        holders = [a for a in answers if a.status.update_id == update_id]
        prepared = [a.member for a in holders if committed and a.status.state == "PREPARED"]
        others = [a.member for a in holders if a.member not in prepared]
        versions += _end(fleet, FinishRequest(update_id=update_id), prepared)
        versions += _end(fleet, AbortRequest(update_id=update_id, reason="its sender died"), others)
    fleet.observe_versions(versions)


def _end(
    fleet: Fleet, request: FinishRequest | AbortRequest, members: Sequence[Member]
) -> list[int]:
    """Finish or abort a dead sender's update on `members`; return their versions."""
    if not members:
        return []
    end = "finished" if isinstance(request, FinishRequest) else "aborted"
    logger.warning("update %s of a dead sender is %s", request.update_id, end)
    done = fleet.call(request, members)
    lost = [answer for answer in done if isinstance(answer.error, TransportError)]
    if lost:
        logger.warning("update %s of a dead sender could not be %s", request.update_id, end)
    raise_first(lost)
    for answer in failures(done):
        logger.warning("%s refused: the update is over: %s", answer.member.target, answer.error)
    return [answer.step.version for answer in done if answer.error is None]


def abort_others(fleet: Fleet, answers: Sequence[MemberReply]) -> bool:
    """Abort stale updates on receivers of this sender; return whether there were any.

    A late message opens an update on a restarted receiver, which does not know that the update is
    over. Other stale updates are sessions of clients that do not connect. An update with an
    unconfirmed finish is not stale. Called between two updates, with current statuses.
    """
    stale = [answer for answer in answers if _is_stale(answer)]
    for answer in stale:
        update_id = answer.status.update_id or ""
        logger.warning("update %s of %s is aborted", update_id, answer.member.target)
        request = AbortRequest(update_id=update_id, reason="the receiver's owner did not start it")
        fleet.call(request, [answer.member], timeout_s=fleet.brief_s)
    return bool(stale)


def _is_stale(answer: MemberReply) -> bool:
    """Whether a receiver of this sender has an open update that the sender will not finish."""
    member, status = answer.member, answer.status
    is_pending = member.unfinished is not None and member.unfinished.update_id == status.update_id
    is_open = status.state in ("UPDATING", "PREPARED") and not status.orphaned
    return is_open and not is_pending and bool(member.sender)


def abort_prepared(fleet: Fleet, member: Member) -> None:
    """Abort this sender's update on a member where it is still PREPARED after a failed finish.

    Raises the error of the abort.
    """
    answer = fleet.call(StatusRequest(), [member])[0]
    held = answer.status.update_id if answer.error is None else None
    if held is None or answer.status.state != "PREPARED" or held != member.last_finish_sent:
        return
    request = AbortRequest(update_id=held, reason="its finish failed")
    raise_first(fleet.call(request, [member]))


def check_fleet(fleet: Fleet, answers: Sequence[MemberReply], *, takeover: bool) -> None:
    """Record the members' statuses, and check that they can be connected.

    Raises ConfigError when two targets are one receiver, ProtocolError for a receiver with which
    this sender has no common protocol, SenderConflictError for a receiver that belongs to another
    living sender, and SenderReplacedError for one that another sender has taken from this one,
    alive or not.
    """
    checked = {answer.member for answer in answers}
    seen = {member.status.instance: member for member in fleet.members if member not in checked}
    for answer in answers:
        answer.member.status = answer.status
        try:
            choose_protocol(fleet.protocols, answer.status.protocols)
        except ProtocolError as exc:
            raise ProtocolError(f"{answer.member.target}: {exc}") from None
        known = seen.setdefault(answer.status.instance, answer.member)
        if known is not answer.member:
            raise ConfigError(
                f"{known.target} and {answer.member.target} are the same receiver (instance "
                f"{answer.status.instance}); name every receiver once"
            )
    replaced = [answer for answer in answers if _is_replaced(fleet, answer)]
    for answer in replaced:  # its user is told now, of all of them
        answer.member.replaced_by = answer.status.owner.id if answer.status.owner else ""
    for answer in answers:
        _check_owner(fleet, answer, takeover=takeover)
    if replaced:
        raise _replaced(replaced)
    for answer in answers:
        owner = answer.status.owner
        if owner is not None:
            newer = owner.term if fleet.owns(owner) else owner.term + 1
            answer.member.term = max(answer.member.term, newer)
        answer.member.term = max(answer.member.term, 1)


def other_owner(fleet: Fleet, answer: MemberReply, *, takeover: bool) -> OwnerStatus | None:
    """Return the other living sender that owns a member, None where this sender may take it.

    With `takeover`, members that this sender has not owned yet are taken. An owner of a lower term
    than this sender's had its init message in flight when this sender took the member over.
    """
    owner, term = answer.status.owner, answer.member.term
    if owner is None or not owner.alive or fleet.owns(owner):
        return None
    return None if owner.term < term or (takeover and not term) else owner


def _check_owner(fleet: Fleet, answer: MemberReply, *, takeover: bool) -> None:
    """Raise where a member belongs to another living sender that does not yield it now."""
    owner, member = other_owner(fleet, answer, takeover=takeover), answer.member
    if owner is None or (owner.yields and is_idle(answer.status)):
        return
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


def _is_replaced(fleet: Fleet, answer: MemberReply) -> bool:
    """Whether another sender, alive or not, took a member from this one, which is not told yet.

    A sender that yields its receivers expects others to have used them.
    """
    owner, member = answer.status.owner, answer.member
    if owner is None or fleet.owns(owner) or fleet.yields or not member.owned:
        return False
    return owner.term >= member.term and owner.id != member.replaced_by


def _replaced(answers: Sequence[MemberReply]) -> SenderReplacedError:
    """Return the error for members that another sender took, and does not hold any more."""
    owners = [answer.status.owner for answer in answers if answer.status.owner is not None]
    targets = names(answer.member for answer in answers)
    return SenderReplacedError(
        f"{targets} was taken over by another sender, which has left since: {describe(owners[0])}; "
        "its weights may be newer than those of this sender: close() this one, or call again to "
        "take it back",
        owner=owners[0].name,
        since=utc(owners[0].since),
    )


def is_idle(status: Status) -> bool:
    """Whether the receiver is in no update."""
    return status.state not in ("UPDATING", "PREPARED", "ABORTING")
