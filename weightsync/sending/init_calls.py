"""The init of several receivers, among them older ones."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from weightsync.errors import ProtocolError
from weightsync.sending.fleet import Answer, Fleet, Member
from weightsync.wire.messages import InitRequest
from weightsync.wire.offers import IpcInit

_UNKNOWN = "unknown field `ready`"


def ask_init(fleet: Fleet, inits: Mapping[Member, IpcInit], *, timeout_s: float) -> list[Answer]:
    """Offer each of these members what is its own; return their answers, in the same order.

    One that does not know of ready events refuses the whole offer, unread: it gets it without.
    """
    answers = _ask(fleet, inits, timeout_s)
    older = {
        answer.member: replace(inits[answer.member], ready=None)
        for answer in answers
        if isinstance(answer.error, ProtocolError) and _UNKNOWN in str(answer.error)
    }
    if not older:
        return answers
    again = {answer.member: answer for answer in _ask(fleet, older, timeout_s)}
    return [again.get(answer.member, answer) for answer in answers]


def _ask(fleet: Fleet, inits: Mapping[Member, IpcInit], timeout_s: float) -> list[Answer]:
    def request(member: Member) -> InitRequest:
        return InitRequest(init_info=inits[member])

    return fleet.ask(request, timeout_s=timeout_s, members=list(inits))
