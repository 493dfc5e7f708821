"""A receiver that joins a fleet: it fetches the fleet's weights from a receiver that has them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any

from weightsync.errors import ConfigError, WeightSyncError
from weightsync.report import SyncReport
from weightsync.shm.wait import HEARTBEAT_TIMEOUT_FACTOR
from weightsync.transports.base import BaseTransport, Transport
from weightsync.transports.calls import CallThreads
from weightsync.update.fetch_client import fetch_from, fetch_from_first, fetch_parts
from weightsync.update.fleet import Fleet, MemberReply
from weightsync.update.lifecycle import State
from weightsync.wire.messages import Reply, Request, Status, StatusRequest

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_STOP_S = 10.0
"""How long an interrupt waits for a fetch to end."""


class Joining:
    """Brings the receiver behind `transport` to the weights of the fleet, before it is a member.

    The fleet's sender passes on the messages between the two receivers. The bytes go from one to
    the other. `delta_follows`: the fleet's next update may be a delta.
    """

    def __init__(self, fleet: Fleet, transport: BaseTransport, *, delta_follows: bool) -> None:
        self._fleet = fleet
        self._transport = transport
        self._delta_follows = delta_follows
        self._weights: tuple[int, str] | None = None

    def holds(self, status: Status) -> bool:
        """Whether this is the status of a receiver that is ready, with the weights of the fleet."""
        same = (status.version, status.weights_id or "") == self._weights
        return same and status.state == State.READY and status.may_generate

    def fetch(self) -> SyncReport | None:
        """Have every worker of the receiver fetch the weights, from one of the fleet after another.

        Returns the report, None where none can be fetched.
        """
        fleet = self._fleet
        held = fleet.call(StatusRequest(), timeout_s=fleet.brief_s)
        ready = [a for a in held if _is_ready(a) and a.status.version == fleet.version]
        weights = {(answer.status.version, answer.status.weights_id or "") for answer in ready}
        if len(weights) != 1:  # none, or they have other weights under the same version
            return None
        self._weights = weights.pop()
        sources = [a for a in ready if a.status.fetchable or a.status.lends]
        if not self._weights[1] or not sources:
            return None
        try:
            reports = self._fetch_all(sources)
        except WeightSyncError as exc:
            logger.warning(
                "%s could not fetch the weights from the other receivers, so the source has to "
                "send them: %s",
                self._transport.target,
                exc,
            )
            return None
        if not reports:
            return None
        receivers = tuple(receiver for report in reports for receiver in report.receivers)
        slowest = max(reports, key=lambda report: report.seconds["total"])
        return replace(slowest, receivers=receivers)

    def _fetch_all(self, sources: Sequence[MemberReply]) -> list[SyncReport]:
        whole = self._transport
        status = _status(whole, self._fleet.brief_s)
        if not status.workers:
            return [self._fetch(whole, status, sources)]
        workers = whole.expand(status.workers)
        try:
            statuses = [_status(worker, self._fleet.brief_s) for worker in workers]
            return [
                self._fetch(worker, status, sources)
                for worker, status in zip(workers, statuses, strict=True)
            ]
        finally:
            for worker in workers:
                worker.close()

    def _fetch(
        self, worker: Transport, status: Status, sources: Sequence[MemberReply]
    ) -> SyncReport:
        """Fetch from the first source that can send; those on the worker's own host come first."""
        timeout_s = self._fleet.timeout_s

        def handle(request: Request) -> Reply:
            return worker.call(request, timeout_s=timeout_s * HEARTBEAT_TIMEOUT_FACTOR)

        def distance(source: MemberReply) -> bool:
            return source.status.device_keys[-1:] != status.device_keys[-1:]

        stop = threading.Event()
        options: Any = {
            "target": worker.target,
            "timeout_s": timeout_s,
            "weights_id": self._weights[1] if self._weights else None,
            "delta_follows": self._delta_follows,
            "stop": stop,
        }
        ordered = sorted(sources, key=distance)
        attempts = [
            partial(fetch_from, source.member.transport, handle, **options)
            for source in ordered
            if source.status.fetchable
        ]
        lenders = [a.member.transport for a in ordered if a.status.lends]
        if lenders:
            attempts.append(partial(fetch_parts, lenders, handle, **options))
        held = partial(_status, worker, self._fleet.brief_s)
        future: Future[SyncReport] = Future()
        threads: CallThreads[SyncReport] = CallThreads()
        threads.submit(partial(fetch_from_first, attempts, held, timeout_s, stop), future)
        threads.close()
        try:
            while not wait([future], _LOOK_S).done:  # the other ranks are kept waiting
                self._fleet.group.comm.attend()
                self._fleet.collect_signs(may_raise=False)
        finally:
            stop.set()
            wait([future], _STOP_S)
        return future.result()


def _is_ready(answer: MemberReply) -> bool:
    if not isinstance(answer.reply, Status):
        return False
    return answer.status.state in (State.READY, State.UPDATING) and answer.status.may_generate


def _status(transport: Transport, timeout_s: float) -> Status:
    reply = transport.call(StatusRequest(), timeout_s=timeout_s)
    if not isinstance(reply, Status):
        raise ConfigError(f"{transport.target} answers {type(reply).__name__} to weight_info")
    return reply
