"""Addresses behind which several receivers stand: found out from what they say of themselves."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from weightsync.errors import (
    NotReadyError,
    ProtocolError,
    RemoteError,
    TransportError,
    WeightSyncError,
)
from weightsync.sending.fleet import Fleet, MemberReply, Server
from weightsync.wire.messages import Status, StatusRequest

logger = logging.getLogger(__name__)

SAYS_NOTHING = (TransportError, NotReadyError, RemoteError)
"""Who was met once and answers so when asked who it is, itself or by a proxy, is lost."""


class WorldSizeChangedError(ProtocolError):
    """A server was restarted with other workers: none of those that were asked is there."""


def expand_servers(
    fleet: Fleet, answers: Sequence[MemberReply], timeout_s: float
) -> list[MemberReply]:
    """Put its workers in the place of each server, and return what they say, errors included.

    Raises ProtocolError for a worker that stands for others.
    """
    told: list[MemberReply] = []
    for answer in answers:
        if not answer.status.workers:
            told.append(answer)
            continue
        workers = fleet.expand(answer.member, answer.status.workers)
        asked = fleet.ask(StatusRequest(), timeout_s=timeout_s, members=workers)
        said = [one for one in asked if one.error is None]
        nested = [one.member.target for one in said if one.status.workers]
        if nested:
            raise ProtocolError(f"{', '.join(nested)}: a worker cannot stand for other workers")
        told += asked
    return told


def find_resized(answers: Sequence[MemberReply], timeout_s: float) -> list[Server]:
    """Return the servers that were restarted, and have other workers than they had.

    `answers` are what members said of themselves.
    """
    suspects = [a.member.server for a in answers if a.member.server is not None and _is_new(a)]
    changed: list[Server] = []
    for server in dict.fromkeys(suspects):
        try:
            now = server.transport.call(StatusRequest(), timeout_s=timeout_s)
        except WeightSyncError as exc:
            logger.debug("who %s is now: %s", server.target, exc)
            continue
        if isinstance(now, Status) and tuple(now.workers) != server.paths:
            logger.warning(
                "%s had %d workers and has %d now",
                server.target,
                len(server.paths),
                len(now.workers),
            )
            changed.append(server)
    return changed


def _is_new(answer: MemberReply) -> bool:
    """Whether somebody else answers, or nobody knows the path any more."""
    if answer.error is not None:
        return isinstance(answer.error, RemoteError)
    return answer.member.instance not in ("", answer.status.instance)
