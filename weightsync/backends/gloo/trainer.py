"""The `gloo` backend's trainer engine: receivers on other hosts, fed from the ring of rank 0.

Of each host one receiver is a member of a private group; the others of the host read its ring.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from weightsync.backends.base import (
    Check,
    Handshake,
    Mark,
    Reader,
    Round,
    TrainerWeightTransferEngine,
    TransferOptions,
    TransferProgress,
    decode_payload,
)
from weightsync.backends.gloo.payload import GlooInit, HostRing, RelayedUpdate, RingShape
from weightsync.backends.gloo.receiver import place_on
from weightsync.backends.gloo.sender import Chain, RingFeed
from weightsync.backends.ipc.payload import IpcInit
from weightsync.backends.ipc.sender import RELAY_READER, IpcTrainerEngine
from weightsync.errors import ConfigError, ConnectError, TransferError
from weightsync.shm.addresses import is_loopback, source_address
from weightsync.shm.host_keys import host_key
from weightsync.weights.source import WeightSource

ADDRESS_VARIABLE = "WEIGHTSYNC_ADDRESS"
"""The address under which receivers on other hosts reach this one, where it cannot be found out."""

Hosts = dict[str, list[Reader]]
"""The readers of each host; the first is the member of the group, and reads at place 0."""


class GlooTrainerEngine(TrainerWeightTransferEngine):
    """Sends what rank 0's ring carries down a chain of hosts. Every membership is a new group."""

    def __init__(self, ring: IpcTrainerEngine, options: TransferOptions) -> None:
        self._ring = ring
        self._timeout_s = options.timeout_s
        self._hosts: Hosts = {}
        self._epoch = 0
        self._parted = False
        self._chain: Chain | None = None
        self._active = False

    def init_payload(self, reader: Reader, number: int) -> Any:
        """Not used: what a reader needs depends on its group."""
        raise ConfigError("receivers of a private group are connected together")

    def handshake(self, readers: Sequence[Reader], number: int) -> Handshake:
        """Make a group of these readers' hosts, then give the others of each host their places.

        Raises TransferTimeout naming members that answered, but did not join.
        """
        self._leave()
        hosts: Hosts = {}
        for reader in readers:
            hosts.setdefault(reader.host or reader.target, []).append(reader)
        leaders = [on_host[0] for on_host in hosts.values()]
        ring = self._ring.offer(RELAY_READER, number)
        self._epoch += 1
        chain = Chain(
            _address_for_all(leaders),
            [leader.target for leader in leaders],
            epoch=self._epoch,
            timeout_s=self._timeout_s,
        )
        try:
            joining = _Joining(chain)
            shape = ring_shape(ring)
            inits = {
                leader.index: GlooInit(group=chain.info(rank), shape=shape)
                for rank, leader in enumerate(leaders, 1)
            }
            # A member answers when the group is complete.
            replies = yield Round(messages=inits, patience=2.0)
            if replies.failed:
                # Who came and waited in vain for others is not to blame.
                came = set(range(1, len(leaders) + 1)).difference(chain.absent())
                victims = [leaders[rank - 1].index for rank in came]
                victims = [index for index in victims if index in replies.failed]
                chain.close()
                return [] if set(victims) == set(replies.failed) else victims
            joining.finish()
        except BaseException:
            chain.close()
            raise
        self._chain, self._hosts = chain, hosts
        others: dict[int, GlooInit] = {}
        for on_host in hosts.values():
            for place, reader in enumerate(on_host[1:], 1):
                made = replies.payloads.get(on_host[0].index)
                if made is None:
                    raise TransferError(f"{reader.target}: nobody made a ring for its host")
                theirs = decode_payload(made, HostRing)
                others[reader.index] = GlooInit(ring=place_on(theirs, shape, place))
        if others:
            yield Round(messages=others)
        return ()

    @property
    def _readers(self) -> dict[int, tuple[int, int]]:
        """The rank in the group, and the place on its host's ring, of every reader."""
        return {
            reader.index: (rank, place)
            for rank, on_host in enumerate(self._hosts.values(), 1)
            for place, reader in enumerate(on_host)
        }

    def places_on_base(self, readers: Sequence[int]) -> list[int]:
        """One place feeds every other host."""
        return [RELAY_READER] if readers else []

    def begin(
        self, readers: Sequence[int], *, verify: bool, source: WeightSource
    ) -> dict[int, RelayedUpdate]:
        """Send what the ring, which has begun, carries; each member feeds these of its host."""
        chain = self._chain
        if chain is None:
            raise TransferError("the private group is not joined")
        feed = RingFeed(self._ring, RELAY_READER)
        stream = self._ring.stream
        places = self._readers
        updates: dict[int, RelayedUpdate] = {}
        for index in readers:
            rank, place = places[index]
            on_host = [places[other][1] for other in readers if places[other][0] == rank]
            updates[index] = RelayedUpdate(
                epoch=stream.epoch,
                base=stream.base,
                packed=True,
                readers=[] if place else on_host,
            )
        chain.start(feed)
        self._active = True
        return updates

    def transfer(self, check: Check) -> None:
        """Return when every chunk has left for the first host."""
        if self._chain is not None:
            self._chain.finish(check)

    def check(self) -> None:
        """Raise what broke the group."""
        if self._active and self._chain is not None:
            self._chain.check()

    def cancel(self) -> None:
        """The members are told in band, so that the group stays usable."""
        if self._active and self._chain is not None:
            self._chain.stop()

    def end(self) -> None:
        """End the update in the group, too."""
        self.cancel()
        self._active = False

    @property
    def table_digest(self) -> str | None:
        """The ring's: its chunks are sent on as they are."""
        return self._ring.table_digest

    def is_ready(self, readers: Sequence[int]) -> bool:
        """Whether the group holds, and is of these readers alone: it waits for all of its own."""
        broken = self._parted or self._chain is None or self._chain.broken
        return not broken and set(readers) == set(self._readers)

    def forget(self, reader: int) -> None:
        """Without this reader the group is another one."""
        self._parted = True
        for on_host in self._hosts.values():
            on_host[:] = [other for other in on_host if other.index != reader]
        if not any(self._hosts.values()):
            self._leave()

    def blame(self, error: BaseException) -> list[int]:
        """Return the readers of the hosts that an error of the chain names."""
        failure = self._chain.failure if self._chain is not None else None
        said = f"{error} {failure}"
        return [
            reader.index
            for on_host in self._hosts.values()
            for reader in on_host
            if host_of(reader.target) in said
        ]

    def signs(self, reader: int) -> int | None:
        """Return what grows while a reader lives, as the member of its host tells."""
        known = self._readers.get(reader)
        return None if known is None or self._chain is None else self._chain.signs(*known)

    def progress(self) -> TransferProgress:
        """Return how far the first host is."""
        return _ChainProgress(self._ring)

    def close(self) -> None:
        """Leave the group."""
        self._leave()

    def _leave(self) -> None:
        self._parted = False
        self._hosts = {}
        chain, self._chain = self._chain, None
        if chain is not None:
            chain.close()


class _ChainProgress:
    """The ring's progress, seen from the one place at which the chain reads it."""

    def __init__(self, ring: IpcTrainerEngine) -> None:
        self._own = ring.reader_progress
        self.plan, self.packed = self._own.plan, self._own.packed

    @property
    def marks(self) -> list[Mark] | None:
        return self._own.marks

    @marks.setter
    def marks(self, marks: list[Mark] | None) -> None:
        self._own.marks = marks

    @property
    def slots(self) -> int:
        return self._own.slots

    def taken_nbytes(self, reader: int) -> int:
        return self._own.taken_nbytes(RELAY_READER)


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


def ring_shape(ring: IpcInit) -> RingShape:
    """Return what a member makes for its host: a ring like the sender's own."""
    return RingShape(
        num_readers=ring.num_readers,
        entries=ring.entries,
        run_nbytes=ring.run_nbytes,
        num_slots=ring.ring.num_slots,
        slot_nbytes=ring.ring.slot_nbytes,
    )


def host_of(target: str) -> str:
    """Return how the private group names the host of its member `target`."""
    return f"the host of {target} "


def _address_for_all(leaders: Sequence[Reader]) -> str:
    """Return one address that all of them reach: loopback where none is on another host."""
    elsewhere = [leader for leader in leaders if leader.host != host_key()]
    return address_for(elsewhere[0]) if elsewhere else "127.0.0.1"


def address_for(reader: Reader) -> str:
    """Return the address of this host that a receiver elsewhere can reach.

    It is WEIGHTSYNC_ADDRESS where that is set; else the source address of the route to the
    target's URL; else what the transport knows, or the source address of the default route.
    Raises ConnectError when there is none.
    """
    said = os.environ.get(ADDRESS_VARIABLE)
    if said:
        return said
    host = urlsplit(reader.route).hostname if "://" in reader.route else None
    known = None if host else reader.local_address
    if known and not is_loopback(known):
        return known
    try:
        return source_address(host or "192.0.2.1")  # an address for documentation, on no network
    except OSError as exc:
        raise ConnectError(
            f"cannot find the address under which {reader.target} reaches this host: {exc}; "
            f"set {ADDRESS_VARIABLE}"
        ) from exc
