"""Receivers on other hosts: one member of a private group a host, and the workers beside it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import cast
from urllib.parse import urlsplit

from msgspec.structs import replace

from weightsync.backends.gloo.receiver import member_init, place_on
from weightsync.backends.gloo.sender import Chain
from weightsync.backends.ipc.sender import IpcOptions
from weightsync.errors import ConfigError, ConnectError, TransferError, WeightSyncError
from weightsync.ranks.worker import RELAY_READER, RankWorker
from weightsync.shm.addresses import is_loopback, source_address
from weightsync.shm.host_keys import host_key
from weightsync.transports.base import Transport
from weightsync.update.fleet import Fleet, Member, MemberReply, failures
from weightsync.wire.messages import InitReply, InitRequest, Request
from weightsync.wire.offers import IpcInit

ADDRESS_VARIABLE = "WEIGHTSYNC_ADDRESS"
"""The address under which receivers on other hosts reach this one, where it cannot be found out."""


class Rendezvous:
    """Makes the private group of one sender, on rank 0. Every membership is a group of its own."""

    def __init__(self, rank_worker: RankWorker, fleet: Fleet, options: IpcOptions) -> None:
        self._rank_worker = rank_worker
        self._fleet = fleet
        self._timeout_s = options.timeout_s
        self._epoch = 0
        self.parted = False

    @property
    def broken(self) -> bool:
        """Whether the group must be made anew: a connection broke, or a member left."""
        relay = self._rank_worker.relay
        return self.parted or (relay is not None and relay.broken)

    @property
    def failure(self) -> WeightSyncError | None:
        """What broke the group, if anything did."""
        relay = self._rank_worker.relay
        return relay.failure if relay is not None else None

    def meet(self, members: Sequence[Member], fleet_version: int | None) -> list[MemberReply]:
        """Make a group of these members' hosts; return what each answered, errors included.

        Where some stay away, those who came and waited for them in vain are left out. Raises
        TransferTimeout naming members that answered, but did not join.
        """
        engine = self._rank_worker.engine
        if engine is None:
            raise ConfigError("rank 0 has no ring from which other hosts could be fed")
        self.leave()
        hosts = _by_host(members)
        leaders = [workers[0] for workers in hosts]
        base = engine.init_info(RELAY_READER, fleet_version=fleet_version)
        answers = self._gather_leaders(leaders, base)
        if failures(answers):
            return answers
        rings = {a.member.host: cast(InitReply, a.reply).ring for a in answers}
        others = [worker for workers in hosts for worker in workers[1:]]

        def request(worker: Member) -> Request:
            ring, relay = rings[worker.host], self._rank_worker.relay
            if ring is None or relay is None:
                raise TransferError(f"{worker.target}: nobody made a ring for its host")
            init = member_init(base, relay.info(worker.group_rank))
            init = replace(init, owner=self._fleet.owner(worker))
            return InitRequest(init_info=place_on(ring, init, worker.reader))

        return answers + self._fleet.ask(request, timeout_s=self._timeout_s, members=others)

    def leave(self) -> None:
        """End the group."""
        self.parted = False
        relay, self._rank_worker.relay = self._rank_worker.relay, None
        if relay is not None:
            relay.close()

    def _gather_leaders(self, leaders: list[Member], base: IpcInit) -> list[MemberReply]:
        self._epoch += 1
        chain = Chain(
            _address_for_all(leaders),
            [leader.target for leader in leaders],
            epoch=self._epoch,
            timeout_s=self._timeout_s,
        )
        joining = _Joining(chain)

        def request(leader: Member) -> Request:
            init = member_init(base, chain.info(leader.group_rank))
            return InitRequest(init_info=replace(init, owner=self._fleet.owner(leader)))

        try:
            answers = self._fleet.ask(request, timeout_s=2 * self._timeout_s, members=leaders)
            if failures(answers):
                absent = chain.absent()
                chain.close()
                return _without_victims(answers, absent)
            joining.finish()
        except BaseException:
            chain.close()
            raise
        self._rank_worker.relay = chain
        return answers


class _Joining:
    """Rank 0 joins its own group while the others are asked to."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._join, name="weightsync-join", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _join(self) -> None:
        try:
            self._chain.join()
        except BaseException as exc:  # noqa: BLE001  # raised by `finish`, in the caller's thread
            self._error = exc


def _by_host(members: Sequence[Member]) -> list[list[Member]]:
    """Group members by host, and number hosts and the places on their rings."""
    hosts: dict[str, list[Member]] = {}
    for member in members:
        workers = hosts.setdefault(member.host or member.target, [])
        member.reader = len(workers)
        workers.append(member)
        member.group_rank = list(hosts).index(member.host or member.target) + 1
    return list(hosts.values())


def _without_victims(answers: list[MemberReply], absent: Sequence[int]) -> list[MemberReply]:
    """Leave those out who came and failed, where others did not come."""
    victims = [a for a in failures(answers) if a.member.group_rank not in absent]
    if len(victims) == len(failures(answers)):
        return answers
    return [answer for answer in answers if answer not in victims]


def host_of(target: str) -> str:
    """Return how the private group names the host of its member `target`."""
    return f"the host of {target} "


def _address_for_all(leaders: Sequence[Member]) -> str:
    """Return one address that all of them reach: loopback where none is on another host."""
    elsewhere = [leader.transport for leader in leaders if leader.host != host_key()]
    return address_for(elsewhere[0]) if elsewhere else "127.0.0.1"


def address_for(transport: Transport) -> str:
    """Return the address of this host that the receiver behind `transport`, elsewhere, can reach.

    It is WEIGHTSYNC_ADDRESS where that is set; else the source address of the route to the
    target's URL; else what the transport knows, or the source address of the default route.
    Raises ConnectError when there is none.
    """
    said = os.environ.get(ADDRESS_VARIABLE)
    if said:
        return said
    host = urlsplit(transport.target).hostname if "://" in transport.target else None
    known = None if host else getattr(transport, "local_address", None)
    if known and not is_loopback(known):
        return str(known)
    try:
        return source_address(host or "192.0.2.1")  # an address for documentation, on no network
    except OSError as exc:
        raise ConnectError(
            f"cannot find the address under which {transport.target} reaches this host: {exc}; "
            f"set {ADDRESS_VARIABLE}"
        ) from exc
