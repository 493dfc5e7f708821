"""What a dead sender left open in a fleet, or an update that failed, ended by who comes after."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from weightsync.errors import TransportError
from weightsync.sending.fleet import Answer, Fleet, Member, failures, raise_first
from weightsync.wire.messages import AbortRequest, FinishRequest, Request, StatusRequest

logger = logging.getLogger(__name__)


def end_orphans(fleet: Fleet, answers: Sequence[Answer], timeout_s: float) -> list[int]:
    """End the open updates of dead senders; return the versions that receivers hold then.

    `answers` are what the fleet said when it was met. An update that anyone has committed is
    finished everywhere, any other is aborted. Raises the error of one that is out of reach; any
    other means that the update is over there, and the next one heals what it left.
    """
    orphans = {a.status.update_id for a in answers if a.status.orphaned and a.status.update_id}
    versions: list[int] = []
    for update_id in orphans:
        committed = any(a.status.last_finished == update_id for a in answers)
        holders = [a.member for a in answers if a.status.update_id == update_id]
        end = "finished" if committed else "aborted"
        logger.warning("update %s of a dead sender is %s", update_id, end)
        request: Request = (
            FinishRequest(update_id=update_id)
            if committed
            else AbortRequest(update_id=update_id, reason="its sender died")
        )
        done = fleet.ask(request, timeout_s=timeout_s, members=holders)
        lost = [answer for answer in done if isinstance(answer.error, TransportError)]
        raise_first(lost, f"ending update {update_id} of a dead sender")
        for answer in failures(done):
            logger.warning("%s has ended it otherwise: %s", answer.member.target, answer.error)
        versions += [answer.step.version for answer in done if answer.error is None]
    return versions


def end_own(fleet: Fleet, answers: Sequence[Answer], timeout_s: float) -> bool:
    """Abort updates of this sender that receivers hold though none is at work; say if there were.

    A late message opens one where its end is not remembered: in a receiver that was started again.
    One whose finish the member still owes an answer for stays. Called between two updates, with
    what the receivers said just before.
    """
    stale = [a for a in answers if fleet.began(a.status.update_id) and _is_stale(a)]
    for answer in stale:
        update_id = answer.status.update_id or ""
        logger.warning("update %s came late to %s and is aborted", update_id, answer.member.target)
        request = AbortRequest(update_id=update_id, reason="it is over; its start came late")
        fleet.ask(request, timeout_s=timeout_s, members=[answer.member])
    return bool(stale)


def _is_stale(answer: Answer) -> bool:
    """Whether an open update of this sender has nobody left who would finish it."""
    owed = answer.member.unfinished
    is_owed = owed is not None and owed.update_id == answer.status.update_id
    return answer.status.state in ("UPDATING", "PREPARED") and not is_owed


def end_prepared(fleet: Fleet, member: Member, timeout_s: float) -> None:
    """Abort the update of this sender that a member holds, whose finish failed.

    Raises what its abort raises.
    """
    answer = fleet.ask(StatusRequest(), timeout_s=timeout_s, members=[member])[0]
    held = answer.status.update_id if answer.error is None else None
    if held is None or answer.status.state != "PREPARED" or held != member.last_told:
        return
    request = AbortRequest(update_id=held, reason="its finish failed")
    raise_first(fleet.ask(request, timeout_s=timeout_s, members=[member]), "abort")
