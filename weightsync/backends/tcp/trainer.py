"""The `tcp` backend's trainer engine: serves the chunks of a rank to receivers on other hosts.

One receiver of each host is a member, which feeds its host. The members that reach the sender at
the same address are a chain: the first one reads from the sender, each other one from the member
before it, or from the nearest that works. So the bytes leave the sender once for each of its
networks, whatever the number of hosts. Where each of several ranks sends a stream, each has such
an engine: the chains of ranks on unlike hosts begin with unlike receiving hosts.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import asdict, replace

from weightsync.backends.base import (
    Check,
    Handshake,
    HeldMemory,
    Reader,
    ReaderChanges,
    ReaderWatch,
    Round,
    TrainerWeightTransferEngine,
    TransferOptions,
    TransferProgress,
    decode_payload,
)
from weightsync.backends.ring import RingEngine, RingShape
from weightsync.backends.tcp.carrier import Carrier, InStream
from weightsync.backends.tcp.lent import LentChunks, why_packed
from weightsync.backends.tcp.payload import (
    SECRET_NBYTES,
    HostRing,
    Membership,
    PartlyRelayedUpdate,
    Peer,
    RelayedUpdate,
    TcpInit,
)
from weightsync.backends.tcp.receiver import MEMBER_READER, chunks_without
from weightsync.backends.tcp.relay import hold_of, patience_of
from weightsync.backends.tcp.server import ChunkServer
from weightsync.backends.tcp.uplink import Uplink
from weightsync.backends.tcp.window import ChunkWindow
from weightsync.cuda.wait import wait_for
from weightsync.errors import BackendUnavailableError, ConnectError, TransferError
from weightsync.shm.addresses import LOOPBACK, is_loopback, is_own, source_address
from weightsync.shm.host_keys import host_key
from weightsync.weights.copying.fingerprint import table_digest
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.sources.base import WeightSource

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE = "WEIGHTSYNC_ADDRESS"
"""Environment variable: the address at which receivers on other hosts reach this host.

Or several of them, with commas: each receiving host is given the first one that it reaches.
"""
_REACH_S = 3.0
"""How long it is tried whether a host is reached from an address: the first packet may be lost."""
_TRIALS = 16
"""Hosts that are tried at the same time."""
_PORTS = {"https": 443}


_Tensors = frozenset[int] | None
"""Tensors of the source by index; None is all."""


@dataclass(slots=True, eq=False)
class _Host:
    """Readers of one host that share a ring: their indices on it (the member's is 0), and names.

    `sender` is the sender's end as this host reaches it, `peer` the member's own.
    """

    key: str
    sender: Peer
    peer: Peer
    ring: HostRing
    on_ring: dict[int, int]
    names: dict[int, str]
    wanted: dict[int, _Tensors]
    used: int = 1

    @classmethod
    def of(cls, key: str, sender: Peer, member: Reader, made: Any) -> _Host:
        """Return the host of a member that has replied to its init message."""
        if made is None:
            raise TransferError(f"{member.target}: no ring was created on its host")
        ring = decode_payload(made, HostRing)
        peer = Peer(
            name=member.target, place=member.index, address=ring.peer.address, port=ring.peer.port
        )
        names = {member.index: member.target}
        made_for = cls(key, sender, peer, ring, {member.index: MEMBER_READER}, names, {})
        made_for.note_wants(member)
        return made_for

    @property
    def has_member(self) -> bool:
        """Whether the member, which feeds the others, is still there."""
        return self.peer.place in self.on_ring

    def place(self, reader: Reader) -> int:
        """Return the index of a reader on the ring, a new one for a new reader."""
        if reader.index not in self.on_ring:
            self.on_ring[reader.index], self.names[reader.index] = self.used, reader.target
            self.used += 1
            self.note_wants(reader)
        return self.on_ring[reader.index]

    def note_wants(self, reader: Reader) -> None:
        """Note the tensors of which a reader loads a part, None for all."""
        wants = None if reader.wants is None else frozenset(reader.wants)
        self.wanted[reader.index] = wants

    def wants(self, readers: Container[int]) -> _Tensors:
        """Return the tensors of which any of these readers on this host loads a part."""
        found: set[int] = set()
        for index in self.on_ring:
            wants = self.wanted[index]
            if index not in readers:
                continue
            if wants is None:
                return None
            found |= wants
        return frozenset(found)

    def drop(self, names: Container[str]) -> None:
        """Forget readers, which connect again."""
        for index in [index for index, name in self.names.items() if name in names]:
            del self.on_ring[index], self.names[index]


class TcpTrainerEngine(TrainerWeightTransferEngine, HeldMemory, ReaderWatch, ReaderChanges):
    """Serves the chunks of a rank's ring, or of `source` if the carrier lends its tensors.

    Hosts join and leave without the others.
    """

    def __init__(
        self,
        source: WeightSource,
        ring: RingEngine,
        options: TransferOptions,
        make_carrier: Callable[[], Carrier] = InStream,
    ) -> None:
        self._make_carrier = make_carrier
        self._carrier: Carrier | None = None
        self._source = source
        self._lent: LentChunks | None = None
        self._lent_table: list[int] | None = None
        self._ring = ring
        self._relay_reader = ring.add_relay()
        self._timeout_s = options.timeout_s
        self._turn, self._is_one_of_several = options.turn, options.streams > 1
        self._secret = secrets.token_bytes(SECRET_NBYTES)
        self._hosts: list[_Host] = []
        self._joining: dict[str, _Host] = {}
        self._window: ChunkWindow | None = None
        self._server: ChunkServer | None = None
        self._uplink: Uplink | None = None
        self._follows_delta = False
        self._chunks: dict[frozenset[int], list[tuple[int, int]]] = {}

    def handshake(self, readers: Sequence[Reader], generation: int) -> Handshake:
        """Make one reader of each host a member, then connect the others to its ring.

        A reader that joins a host later is a member at first, so that it can be sent the weights
        that the others have. Before the next update of all it joins the ring; see `unready`.
        """
        by_host: dict[str, list[Reader]] = {}
        for reader in readers:
            by_host.setdefault(reader.host or reader.target, []).append(reader)
        joining, self._joining = self._joining, {}
        names = {reader.target for reader in readers}
        for host in self._hosts:
            host.drop(names)
        self._hosts = [host for host in self._hosts if host.has_member]
        fed: dict[str, _Host] = {}
        for key, on_host in by_host.items():
            at = joining.get(on_host[0].target)
            if at in self._hosts and all(joining.get(r.target) is at for r in on_host):
                fed[key] = at
        shape = self._ring.shape
        members = {key: on_host[0] for key, on_host in by_host.items() if key not in fed}
        if members:
            found = addresses_for(list(members.values()))
            senders = {
                key: self._listen(each, shape) for key, each in zip(members, found, strict=True)
            }
            replies = yield Round(
                messages={
                    member.index: TcpInit(
                        member=self._membership(member.index, senders[key], shape)
                    )
                    for key, member in members.items()
                }
            )
            if replies.failed:
                return
            for key, member in members.items():
                made = replies.payloads.get(member.index)
                fed[key] = _Host.of(key, senders[key], member, made)
                self._hosts.append(fed[key])
        self._close_unused_ports()
        others = {
            reader.index: TcpInit(
                ring=fed[key].ring.offer(place, shape), generation=fed[key].ring.generation
            )
            for key, on_host in by_host.items()
            for reader in on_host
            if (place := fed[key].place(reader)) != MEMBER_READER
        }
        if others:
            replies = yield Round(messages=others)
            for index in replies.failed:
                self.remove_reader(index)

    def base_readers(self, readers: Sequence[int]) -> list[int]:
        """Return the one reader index that serves all other hosts."""
        return [self._relay_reader] if readers else []

    def begin(
        self, readers: Sequence[int], *, verify: bool, source: WeightSource
    ) -> dict[int, RelayedUpdate]:
        """Start to serve the update that the ring has begun."""
        window = self._window
        if window is None:
            raise TransferError("no receiver on another host is connected")
        wanted = set(readers)
        taking = [host for host in self._hosts if wanted.intersection(host.on_ring)]
        lost = [host.peer.name for host in taking if host.peer.place not in wanted]
        if lost:
            raise TransferError(f"the receiver that feeds the host of {lost[0]} takes no part")
        stream = self._ring.stream(self._relay_reader)
        is_whole = self._follows_delta or source is not self._source
        by_network: dict[tuple[str, _Tensors], list[_Host]] = {}
        for host in taking:
            wants = None if is_whole else host.wants(wanted)
            by_network.setdefault((host.sender.address, wants), []).append(host)
        for chain in by_network.values():
            first = self._turn % len(chain)
            chain[:] = chain[first:] + chain[:first]
        chains = [[host.peer.place for host in chain] for chain in by_network.values()]
        updates: dict[int, RelayedUpdate] = {}
        left_out: dict[int, Container[int]] = {}
        for (_, wants), chain in by_network.items():
            plain = RelayedUpdate(epoch=stream.epoch, base=stream.base, packed=True)
            if wants is not None:
                chunks = self._chunks_of(stream.layout, wants)
                plain = PartlyRelayedUpdate(**asdict(plain), chunks=chunks)
                without = chunks_without(chunks, len(stream.layout.chunks))
                left_out.update((host.peer.place, without) for host in chain)
            for i, host in enumerate(chain):
                reading = {index: at for index, at in host.on_ring.items() if index in wanted}
                updates.update(dict.fromkeys(reading, plain))
                updates[host.peer.place] = replace(
                    plain,
                    readers=sorted(reading.values()),
                    sources=[*(before.peer for before in reversed(chain[:i])), host.sender],
                    followers=[after.peer.place for after in chain[i + 1 :]],
                )
        lent = self._lent_chunks(source, verify=verify)
        self._uplink = Uplink(stream, window, chains, source, lent, left_out)
        self._lent_table = self._uplink.table if lent is not None and verify else None
        return updates

    def _chunks_of(self, layout: StreamLayout, wants: frozenset[int]) -> list[tuple[int, int]]:
        """Return the chunks that have bytes of these tensors, as RelayedUpdate has them."""
        if wants not in self._chunks:
            found: list[tuple[int, int]] = []
            for j, chunk in enumerate(layout.chunks):
                slices = layout.slices(chunk.start, chunk.stop)
                if any(each.nbytes and each.index in wants for each in slices):
                    first = found.pop()[0] if found and found[-1][1] == j else j
                    found.append((first, j + 1))
            self._chunks[wants] = found
        return self._chunks[wants]

    def expect_delta(self, *, follows: bool) -> None:
        """Note whether the next update needs all bytes on all hosts."""
        self._follows_delta = follows

    def _lent_chunks(self, source: WeightSource, *, verify: bool) -> LentChunks | None:
        """Return the chunks of the source's own tensors, None where the ring's are read."""
        lent = self._lent
        if lent is not None:
            lent.packed_nbytes = 0
        if lent is not None and lent.is_on_gpu and verify:
            return None  # a GPU makes other fingerprints than the hosts that read
        stable = source.stable_tensors() if lent is not None and source is self._source else None
        if lent is None or stable is None:
            return None
        if not lent.lie_in(stable):
            self._lent = None
            if self._carrier is not None:
                self._carrier.lend(())
            logger.warning(
                "the source's tensors have moved, so they are packed for other hosts from now on; "
                "connect again to have them read where they lie"
            )
            return None
        wait_for({tensor.device for tensor in stable})  # what wrote to them on a GPU
        return lent

    def transfer(self, check: Check) -> None:
        """Wait until every chunk is with the first host that works."""
        if self._uplink is not None:
            self._uplink.finish(check)

    def check(self) -> None:
        """Raise the error of the thread that reads the ring."""
        if self._uplink is not None:
            self._uplink.check()

    def cancel(self) -> None:
        """Tell the hosts that the update is given up."""
        if self._uplink is not None:
            self._uplink.stop()

    def end(self) -> None:
        """End the update."""
        self.cancel()
        self._uplink = None

    @property
    def table_digest(self) -> str | None:
        """The digest of the chunks that were lent, or of the ring's, which are sent unchanged."""
        if self._lent_table is not None:
            return table_digest(self._lent_table)
        return self._ring.table_digest

    def unready(self, readers: Sequence[int]) -> list[int]:
        """Return the readers that need another handshake before an update of `readers` alone.

        Nobody would feed those of a host whose member is lost, or takes no part: they get a ring of
        their own, until the next update in which the member takes part. Second members of one host
        join the first one's ring. Readers whose handshake failed, or ended since that of another
        one did, are among the unready ones. So are all readers of a host whose ring has no index
        left for one that joins: they get a ring.
        """
        known = {index for host in self._hosts for index in host.on_ring}
        found = [reader for reader in readers if reader not in known]
        feeding: dict[str, _Host] = {}
        for host in self._hosts:
            if host.has_member and host.peer.place in readers:
                feeding.setdefault(host.key, host)
        for host in self._hosts:
            at = feeding.get(host.key)
            joining = [index for index in host.on_ring if index in readers and at is not host]
            if not joining:
                continue
            found += joining
            if at is None:
                continue
            if at.used + len(joining) <= self._ring.shape.num_readers:
                self._joining.update((host.names[index], at) for index in joining)
            else:
                found += [i for i in at.on_ring if i in readers and i not in found]
        return found

    def remove_reader(self, reader: int) -> None:
        """Remove a reader. If it fed its host, the host's others need another handshake."""
        for host in self._hosts:
            host.on_ring.pop(reader, None)
            host.names.pop(reader, None)
        self._hosts = [host for host in self._hosts if host.on_ring]
        if self._hosts:
            self._close_unused_ports()
        else:
            self._close_server()

    def goes_on_without(self, reader: int) -> bool:
        """True for all readers: hosts read from another one, and members are told of readers.

        Of several ranks that send, only this one would tell the member of a reader beside it.
        """
        return any(
            host.peer.place == reader if self._is_one_of_several else reader in host.on_ring
            for host in self._hosts
        )

    def drop_reader(self, reader: int) -> None:
        """Tell the member of a reader's host not to wait for it, or all hosts for such a member."""
        server, window = self._server, self._window
        host = next((host for host in self._hosts if reader in host.on_ring), None)
        if host is None or not (server and window and self._uplink):
            return
        if host.peer.place == reader:
            server.lose_host(reader, window.epoch)
        else:
            server.lose_reader(host.peer.place, window.epoch, host.on_ring[reader])

    def liveness_counter(self, reader: int) -> int | None:
        """Return a value that grows while a reader works, as the member of its host shows it."""
        host = next((h for h in self._hosts if reader in h.on_ring), None)
        if host is None or self._server is None:
            return None
        counters, at = self._server.liveness(host.peer.place), host.on_ring[reader]
        return counters[at] if at < len(counters) else None

    @property
    def needs_init(self) -> bool:
        """Whether hosts read at an address that this host has no more: they are told another."""
        return self._server is not None and self._server.has_lost_address

    @property
    def extra_nbytes(self) -> int:
        """Bytes of the memory into which parts of lent chunks are packed."""
        return self._lent.extra_nbytes if self._lent is not None else 0

    @property
    def written_nbytes(self) -> int:
        """Bytes that this update has packed for lent chunks so far."""
        return self._lent.packed_nbytes if self._lent is not None else 0

    def progress(self) -> TransferProgress:
        """Return the progress of the first host."""
        return _UplinkProgress(self._ring.progress(), self._relay_reader)

    def close(self) -> None:
        """Close the port and all connections."""
        self.end()
        self._close_server()
        self._hosts.clear()

    def _close_server(self) -> None:
        window, self._window = self._window, None
        server, self._server = self._server, None
        if window is not None:
            window.close()
        if server is not None:
            server.close()
        carrier, self._carrier, self._lent = self._carrier, None, None
        if carrier is not None:
            carrier.close()

    def _close_unused_ports(self) -> None:
        if self._server is not None:
            self._server.listen_only({host.sender.address for host in self._hosts})

    def _membership(self, place: int, sender: Peer, shape: RingShape) -> Membership:
        return Membership(
            sender=sender,
            place=place,
            secret=self._secret.hex(),
            shape=shape,
            timeout_s=self._timeout_s,
        )

    def _listen(self, found: str | ConnectError, shape: RingShape) -> Peer:
        """Listen at an address that a receiving host can reach, as `addresses_for` found it."""
        if isinstance(found, ConnectError):
            if not self._is_one_of_several:
                raise found
            raise BackendUnavailableError(str(found)) from found  # rank 0 may send for all
        server = self._server or self._start_server(found, shape)
        return Peer(name="the sender", place=-1, address=found, port=server.listen(found))

    def _start_server(self, address: str, shape: RingShape) -> ChunkServer:
        patience_s = patience_of(self._timeout_s)
        self._window = ChunkWindow(max(shape.num_buckets // 2, 1), hold_of(patience_s))
        carrier = self._carrier = self._make_carrier()
        carrier.register(self._ring.buckets)
        stable, layout = self._source.stable_tensors(), self._ring.packed_layout
        if stable and carrier.lends:
            if why := why_packed(layout, stable):
                logger.info("the source's tensors are packed for other hosts: %s", why)
            else:
                lent = LentChunks(layout, stable, self._window.slots)
                self._lent = lent if carrier.lend(lent.memory) else None
        server = self._server = ChunkServer(
            address, self._secret, self._window, patience_s, carrier, tells_lost=True
        )
        return server


class _UplinkProgress:
    """The progress of the one reader of the ring, for all readers."""

    def __init__(self, ring: TransferProgress, reader: int) -> None:
        self._own, self._reader = ring, reader
        self.layout = self._own.layout

    def taken_nbytes(self, reader: int) -> int:
        return self._own.taken_nbytes(self._reader)


def addresses_for(readers: Sequence[Reader]) -> list[str | ConnectError]:
    """Return `address_for` of each reader, or its error."""

    def find(reader: Reader) -> str | ConnectError:
        try:
            return address_for(reader)
        except ConnectError as exc:
            return exc

    if len(readers) < 2 or len(_configured()) < 2:
        return [find(reader) for reader in readers]
    with ThreadPoolExecutor(_TRIALS, "weightsync-reach") as pool:
        return list(pool.map(find, readers))


def address_for(reader: Reader) -> str:
    """Return the address of this host that a receiver can reach.

    It is WEIGHTSYNC_ADDRESS where that is set: of several there, the first from which a connection
    to the target's URL is answered, or else the first; the loopback address for a receiver on this
    host; otherwise the source address of the route to the target's URL; otherwise `local_address`
    of the transport, or the source address of the default route. Raises ConnectError when there is
    none.
    """
    configured = _configured()
    if configured:
        several = configured if len(configured) > 1 else ()
        return next((each for each in several if _is_reached(reader, each)), configured[0])
    host = urlsplit(reader.route).hostname if "://" in reader.route else None
    # Containers may share the memory of one host, and have a network of their own each.
    if reader.host == host_key() and (host is None or is_own(host)):
        return LOOPBACK
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


def _configured() -> list[str]:
    listed = os.environ.get(ADDRESS_VARIABLE, "").split(",")
    return [each.strip() for each in listed if each.strip()]


def _is_reached(reader: Reader, address: str) -> bool:
    """Whether a connection from an address of this host to a reader's URL is answered there."""
    if "://" not in reader.route:
        return False
    url = urlsplit(reader.route)
    try:
        port = url.port or _PORTS.get(url.scheme.rpartition("+")[2], 80)
        there = url.hostname or "", port
        socket.create_connection(there, _REACH_S, (address, 0)).close()
    except (OSError, ValueError):
        return False
    return True
