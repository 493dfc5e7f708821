"""What a dead sender left open in a fleet, or an update that failed, ended by who comes after."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from weightsync.errors import TransportError
from weightsync.sending.fleet import Fleet, Member, MemberReply, failures, raise_first
from weightsync.wire.messages import AbortRequest, FinishRequest, StatusRequest

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
