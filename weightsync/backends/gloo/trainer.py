"""The `gloo` backend's trainer engine: sends the ring of rank 0 to receivers on other hosts.

On each host one receiver is a member of a private group; the host's other receivers read its ring.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
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
from weightsync.backends.gloo.group import BoundedCall
from weightsync.backends.gloo.payload import GlooInit, HostRing, RelayedUpdate, RingShape
from weightsync.backends.gloo.receiver import init_of
from weightsync.backends.gloo.sender import Chain, RingFeed
from weightsync.backends.ipc.payload import IpcInit
from weightsync.backends.ipc.sender import RELAY_READER, IpcTrainerEngine
from weightsync.errors import ConnectError, TransferError
from weightsync.shm.addresses import is_loopback, source_address
from weightsync.shm.host_keys import host_key
from weightsync.weights.source import WeightSource

ADDRESS_VARIABLE = "WEIGHTSYNC_ADDRESS"
"""Environment variable: the address at which receivers on other hosts reach this host."""

Hosts = dict[str, list[Reader]]
"""The readers of each host. The first is the member of the group, and reader 0 of its ring."""


@dataclass(frozen=True, slots=True)
class _RingReader:
    """A reader of the group: its host's rank, and its reader index on the ring of that host."""

    target: str
    rank: int
    on_ring: int


class GlooTrainerEngine(TrainerWeightTransferEngine):
    """Sends the chunks of rank 0's ring through a chain of hosts. New members mean a new group."""

    def __init__(self, ring: IpcTrainerEngine, options: TransferOptions) -> None:
        self._ring = ring
        self._timeout_s = options.timeout_s
        self._readers: dict[int, _RingReader] = {}
        self._epoch = 0
        self._has_left = False
        self._chain: Chain | None = None
        self._active = False

    def handshake(self, readers: Sequence[Reader], generation: int) -> Handshake:
        """Create a group of the readers' hosts, then connect each host's other readers to its ring.

        Raises TransferTimeout that names members that replied, but did not join.
        """
        self._leave()
        hosts: Hosts = {}
        for reader in readers:
            hosts.setdefault(reader.host or reader.target, []).append(reader)
        leaders = [on_host[0] for on_host in hosts.values()]
        ring = self._ring.offer(RELAY_READER, generation)
        self._epoch += 1
        chain = self._chain = Chain(
            _address_for_all(leaders),
            [leader.target for leader in leaders],
            epoch=self._epoch,
            timeout_s=self._timeout_s,
        )
        try:
            joining = BoundedCall(chain.join)  # while the init messages are in flight
            shape = ring_shape(ring)
            inits = {
                leader.index: GlooInit(group=chain.info(rank), shape=shape)
                for rank, leader in enumerate(leaders, 1)
            }
            # A member replies when the group is complete.
            replies = yield Round(messages=inits, timeout_factor=2.0)
            if replies.failed:
                # A member that entered, and failed because others did not, is not to blame.
                entered = set(range(1, len(leaders) + 1)).difference(chain.absent())
                excused = [leaders[rank - 1].index for rank in entered]
                excused = [index for index in excused if index in replies.failed]
                self._leave()
                return [] if set(excused) == set(replies.failed) else excused
            joining.result(None)
            others: dict[int, GlooInit] = {}
            for on_host in hosts.values():
                for on_ring, reader in enumerate(on_host[1:], 1):
                    made = replies.payloads.get(on_host[0].index)
                    if made is None:
                        raise TransferError(f"{reader.target}: no ring was created on its host")
                    theirs = decode_payload(made, HostRing)
                    others[reader.index] = GlooInit(ring=init_of(theirs, shape, on_ring))
            if others:
                replies = yield Round(messages=others)
                if replies.failed:
                    self._leave()
                    return ()
        except BaseException:
            self._leave()
            raise
        self._readers = {
            reader.index: _RingReader(reader.target, rank, on_ring)
            for rank, on_host in enumerate(hosts.values(), 1)
            for on_ring, reader in enumerate(on_host)
        }
        return ()

    def base_readers(self, readers: Sequence[int]) -> list[int]:
        """Return the one reader index of the chain, which serves all other hosts."""
        return [RELAY_READER] if readers else []

    def begin(
        self, readers: Sequence[int], *, verify: bool, source: WeightSource
    ) -> dict[int, RelayedUpdate]:
        """Start to send the update that the ring has begun; each member relays to its host."""
        chain = self._chain
        if chain is None:
            raise TransferError("the private group is not joined")
        feed = RingFeed(self._ring, RELAY_READER)
        stream = self._ring.stream
        on_host: dict[int, list[int]] = {}
        for index in readers:
            on_host.setdefault(self._readers[index].rank, []).append(self._readers[index].on_ring)
        updates = {
            index: RelayedUpdate(
                epoch=stream.epoch,
                base=stream.base,
                packed=True,
                readers=[] if self._readers[index].on_ring else on_host[self._readers[index].rank],
            )
            for index in readers
        }
        chain.start(feed)
        self._active = True
        return updates

    def transfer(self, check: Check) -> None:
        """Wait until every chunk is sent to the first host."""
        if self._chain is not None:
            self._chain.finish(check)

    def check(self) -> None:
        """Raise the error that broke the group."""
        if self._active and self._chain is not None:
            self._chain.check()

    def cancel(self) -> None:
        """Abort the update in band, so that the group stays usable."""
        if self._active and self._chain is not None:
            self._chain.stop()

    def end(self) -> None:
        """End the update, also in the group."""
        self.cancel()
        self._active = False

    @property
    def table_digest(self) -> str | None:
        """The digest of the ring, whose chunks are sent unchanged."""
        return self._ring.table_digest

    def is_ready(self, readers: Sequence[int]) -> bool:
        """Whether the group works and has exactly these readers, for all of which it waits."""
        broken = self._has_left or self._chain is None or self._chain.broken
        return not broken and set(readers) == set(self._readers)

    def remove_reader(self, reader: int) -> None:
        """Remove a reader. The next update needs a new group."""
        self._has_left = True
        self._readers.pop(reader, None)
        if not self._readers:
            self._leave()

    def readers_at_fault(self, error: BaseException) -> list[int]:
        """Return the readers of the hosts that an error of the chain names."""
        failure = self._chain.failure if self._chain is not None else None
        text = f"{error} {failure}"
        return [index for index, at in self._readers.items() if host_of(at.target) in text]

    def liveness_counter(self, reader: int) -> int | None:
        """Return a value that grows while a reader works, as its host's member publishes it."""
        at = self._readers.get(reader)
        return None if at is None or self._chain is None else self._chain.signs(at.rank, at.on_ring)

    def progress(self) -> TransferProgress:
        """Return the progress of the first host."""
        return _ChainProgress(self._ring)

    def close(self) -> None:
        """Leave the group."""
        self._leave()

    def _leave(self) -> None:
        self._has_left = False
        self._readers = {}
        chain, self._chain = self._chain, None
        if chain is not None:
            chain.close()


class _ChainProgress:
    """The progress of the chain's reader of the ring, for all readers."""

    def __init__(self, ring: IpcTrainerEngine) -> None:
        self._own = ring.reader_progress
        self.layout, self.packed = self._own.layout, self._own.packed

    @property
    def marks(self) -> list[Mark] | None:
        return self._own.marks

    @marks.setter
    def marks(self, marks: list[Mark] | None) -> None:
        self._own.marks = marks

    @property
    def num_buckets(self) -> int:
        return self._own.num_buckets

    def taken_nbytes(self, reader: int) -> int:
        return self._own.taken_nbytes(RELAY_READER)


def ring_shape(ring: IpcInit) -> RingShape:
    """Return the shape of a member's ring: the sender's own."""
    return RingShape(
        num_readers=ring.num_readers,
        entries=ring.entries,
        unit_nbytes=ring.unit_nbytes,
        num_buckets=ring.ring.num_buckets,
        bucket_nbytes=ring.ring.bucket_nbytes,
    )


def host_of(target: str) -> str:
    """Return the name of a member's host in messages of the private group."""
    return f"the host of {target} "


def _address_for_all(leaders: Sequence[Reader]) -> str:
    """Return an address that all leaders can reach: loopback if none is on another host."""
    elsewhere = [leader for leader in leaders if leader.host != host_key()]
    return address_for(elsewhere[0]) if elsewhere else "127.0.0.1"


def address_for(reader: Reader) -> str:
    """Return the address of this host that a receiver on another host can reach.

    It is WEIGHTSYNC_ADDRESS where that is set; otherwise the source address of the route to the
    target's URL; otherwise `local_address` of the transport, or the source address of the default
    route. Raises ConnectError when there is none.
    """
    configured = os.environ.get(ADDRESS_VARIABLE)
    if configured:
        return configured
    host = urlsplit(reader.route).hostname if "://" in reader.route else None
    known = None if host else reader.local_address
    if known and not is_loopback(known):
        return known
    try:
        return source_address(host or "192.0.2.1")  # RFC 5737: not in use
    except OSError as exc:
        raise ConnectError(
            f"cannot find the address at which {reader.target} reaches this host: {exc}; "
            f"set {ADDRESS_VARIABLE}"
        ) from exc
