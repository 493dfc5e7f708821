"""The `tcp` backend's receiver engine.

One receiver of each host is the member: it creates a ring for its host, and its HostRelay fills
that. All receivers of the host read the ring: the member as reader 0, the others as readers of an
ordinary ring.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import ClassVar

from msgspec.structs import replace

from weightsync.backends.base import (
    LoadContext,
    Received,
    Steps,
    WeightTransferEngine,
    in_one,
)
from weightsync.backends.rank_streams import RankStreamsEngine
from weightsync.backends.ring import Ring, RingShape
from weightsync.backends.tcp.carrier import Carrier, InStream
from weightsync.backends.tcp.payload import (
    HostRing,
    Membership,
    PartlyRelayedUpdate,
    Peer,
    RelayedUpdate,
    TcpInit,
)
from weightsync.backends.tcp.relay import HostRelay, RelayUpdate
from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.shm.ring import Control
from weightsync.specs import Manifest
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.sinks.base import LoadTarget
from weightsync.wire.codec import decode_payload, manifest_from_wire
from weightsync.wire.messages import RegisteredUpdate, SharedMemoryUsage
from weightsync.wire.offers import InitInfo, StreamsInfo

MEMBER_READER = 0
_WAIT_S = 0.05


class TcpWeightTransferEngine(WeightTransferEngine):
    """Receives a sender's chunks over the network for a whole host, and reads them as reader 0.

    On a host with several receivers the others only read the ring that this engine fills.
    `reads_ring` is an engine of the backend `ipc`, which does that.
    """

    exclusive: ClassVar[bool] = True  # /dev/shm may have no room for two rings

    def __init__(
        self, reads_ring: WeightTransferEngine, make_carrier: Callable[[], Carrier] = InStream
    ) -> None:
        self._make_carrier = make_carrier
        self._inner = reads_ring
        self._kept = ExitStack()
        self._membership: Membership | None = None
        self._ring: HostRing | None = None
        self._control: Control | None = None
        self._relay: HostRelay | None = None
        self._whole_sizes: list[int] = []
        self._at_work = self._feeds_others = False
        self._complete: weakref.WeakKeyDictionary[Memory, Sequence[tuple[int, int]]] = (
            weakref.WeakKeyDictionary()
        )

    def check_init_info(self, init_info: InitInfo) -> None:
        """Decode the payload. Raises ProtocolError."""
        offer = decode_payload(init_info.payload, TcpInit)
        if offer.ring is None and offer.member is None:
            raise ProtocolError("the init_info makes this receiver neither a member nor a reader")

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Create the host's ring and connect to the sender, or open the ring of a member.

        Raises SegmentError where `/dev/shm` has no room, TransferError and ConnectError where the
        sender cannot be reached.
        """
        offer = decode_payload(init_info.payload, TcpInit)
        try:
            if offer.ring is not None:
                self._inner.init_transfer_engine(
                    replace(init_info, payload=offer.ring, generation=offer.generation)
                )
            elif offer.member is not None:
                self._open(init_info, offer.member)
        except BaseException:
            self.shutdown()
            raise

    def init_reply(self) -> HostRing | None:
        """Return the ring that this engine created, for the other receivers of this host."""
        return self._ring

    def receive_weights(self, update_info: RegisteredUpdate, context: LoadContext) -> Received:
        """Load an update into its load target, while the relay fills the ring.

        Raises the error of the relay, which names the hosts, rather than its consequences.
        """
        return in_one(self.receive_in_steps(update_info, context))

    def receive_in_steps(self, update_info: RegisteredUpdate, context: LoadContext) -> Steps:
        """Load an update chunk by chunk; the relay is at work in between, too."""
        payload = update_info.payload
        is_part = isinstance(payload, Mapping) and "chunks" in payload
        update = decode_payload(payload, PartlyRelayedUpdate if is_part else RelayedUpdate)
        info = replace(update_info, payload=update)
        if isinstance(update, PartlyRelayedUpdate):
            # Without all bytes there is no sum of them, and no base of a delta.
            info = replace(info, delta_follows=False)
            context = self._with_all_chunks(context, update.chunks)
        relay, membership = self._relay, self._membership
        if relay is None or membership is None:
            return (yield from self._inner.receive_in_steps(info, context))
        relay_update = _relay_update(info, update, membership.shape, self._whole_sizes)
        relay.submit(relay_update)
        self._at_work, self._feeds_others = True, bool(update.followers)

        def check() -> None:
            context.check()
            relay.check(relay_update)

        try:
            yield  # the relays of other streams begin, too
            own = dataclasses.replace(context, check=check)
            received = yield from self._inner.receive_in_steps(info, own)
            while not relay_update.done.wait(_WAIT_S):
                check()
            check()
        except BaseException as exc:
            cause = relay_update.error
            relay_update.fail(exc if isinstance(exc, WeightSyncError) else ProtocolError(repr(exc)))
            if cause is not None and cause is not exc:
                raise cause from exc
            raise
        finally:
            self._at_work = self._feeds_others = False
        return received

    def _with_all_chunks(
        self, context: LoadContext, chunks: Sequence[tuple[int, int]]
    ) -> LoadContext:
        """Return a context that refuses load targets which need chunks that do not come."""

        def open_target(layout: StreamLayout) -> LoadTarget:
            target = context.open_target(layout)
            key = target.memory
            known = None if key is None else self._complete.get(key)
            if known != chunks:
                check_complete(layout, target, chunks)
                if key is not None:
                    self._complete[key] = chunks
            return target

        return dataclasses.replace(context, open_target=open_target)

    def sender_alive(self) -> bool | None:
        """Whether the connection to the sender's process, on another host, is open.

        Returns None where it is lost: the sender may live, and connect this receiver again.
        """
        if self._membership is None:
            return self._inner.sender_alive()
        relay = self._relay  # which another thread may drop meanwhile
        return True if relay is not None and relay.sender_alive else None

    def beat(self) -> None:
        self._inner.beat()
        control = self._control
        if self._at_work and control is not None:
            control.beat_writer()

    @property
    def feeds_others(self) -> bool:
        """Whether a host reads the chunks of an update that are received now."""
        return self._feeds_others

    def usage(self) -> list[SharedMemoryUsage]:
        """Return the mappings of this engine. A member owns its ring."""
        owns = self._membership is not None
        return [replace(entry, owner=owns) for entry in self._inner.usage()]

    def shutdown(self) -> None:
        """Close the connections, free the ring. Idempotent."""
        relay, self._relay = self._relay, None
        kept = self._kept.pop_all()
        self._ring = None
        self._inner.shutdown()
        if relay is None:
            kept.close()
        else:
            relay.close(kept.close)
        self._control = None

    def _open(self, init_info: InitInfo, membership: Membership) -> None:
        ring = Ring(membership.shape)
        self._kept.callback(ring.close)
        carrier = self._make_carrier()
        self._kept.callback(carrier.close)
        buckets = ring.buckets.tensors
        carrier.register(buckets)
        relay = self._relay = HostRelay(membership, ring.control, buckets, carrier)
        own = ring.offer(MEMBER_READER, init_info.generation)
        self._ring = HostRing(
            control=own.control,
            data=own.ring.data,
            probe=own.probe,
            peer=Peer(name="", place=membership.place, address=relay.address, port=relay.port),
            generation=init_info.generation,
        )
        self._control = ring.control
        self._inner.init_transfer_engine(replace(init_info, payload=own))
        self._whole_sizes = _chunk_sizes(manifest_from_wire(init_info.manifest), ring.shape)
        self._membership = membership


class TcpStreamsEngine(RankStreamsEngine):
    """Receives from one rank over the network, or from each of several its stream."""

    exclusive: ClassVar[bool] = True  # as each of its engines

    def check_init_info(self, init_info: InitInfo) -> None:
        """Decode the payload, of each rank. Raises ProtocolError."""
        offer = init_info.payload
        if isinstance(offer, Mapping) and "streams" in offer:
            offer = decode_payload(offer, StreamsInfo)
        one = self._make()
        for payload in (
            [stream.payload for stream in offer.streams]
            if isinstance(offer, StreamsInfo)
            else [offer]
        ):
            one.check_init_info(replace(init_info, payload=payload))


def _relay_update(
    info: RegisteredUpdate, update: RelayedUpdate, shape: RingShape, whole: list[int]
) -> RelayUpdate:
    if not update.packed:
        raise ProtocolError("receivers on other hosts are sent packed updates only")
    part = info.manifest
    sizes = whole if part is None else _chunk_sizes(manifest_from_wire(part), shape)
    return RelayUpdate(
        epoch=update.epoch,
        base=update.base,
        readers=sorted({MEMBER_READER, *update.readers}),
        sizes=sizes,
        sources=update.sources,
        followers=update.followers,
        left_out=(
            chunks_without(update.chunks, len(sizes))
            if isinstance(update, PartlyRelayedUpdate)
            else ()
        ),
    )


def chunks_without(chunks: Sequence[tuple[int, int]], count: int) -> frozenset[int]:
    """Return which of `count` chunks are not among these. Raises ProtocolError."""
    ends = [end for each in chunks for end in each]
    if ends != sorted(ends) or (ends and ends[-1] > count):
        raise ProtocolError(f"the update lists chunks {chunks[:10]} of {count}")
    inside = {j for first, end in chunks for j in range(first, end)}
    return frozenset(range(count)).difference(inside)


def check_complete(
    layout: StreamLayout, target: LoadTarget, chunks: Sequence[tuple[int, int]]
) -> None:
    """Raise ProtocolError where a load target needs a chunk that does not come."""
    memory = target.memory
    shares = None if memory is None else memory.shares
    needed = None if shares is None else {each.index for each in shares if each.blocks}
    for j in sorted(chunks_without(chunks, len(layout.chunks))):
        chunk = layout.chunks[j]
        for part in layout.slices(chunk.start, chunk.stop):
            if part.nbytes and (needed is None or part.index in needed):
                name = layout.manifest.specs[part.index].name
                raise ProtocolError(
                    f"the sender leaves out bytes of {name}, which this receiver loads: it holds "
                    "other shards than when it was connected; connect again"
                )


def _chunk_sizes(manifest: Manifest, shape: RingShape) -> list[int]:
    """Return the bytes of each chunk, in the layout of this sender."""
    return [chunk.stop - chunk.start for chunk in shape.layout(manifest).chunks]
