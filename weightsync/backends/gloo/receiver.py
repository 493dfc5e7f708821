"""The `gloo` backend's receiver engine: a member of the sender's private group.

The member creates a ring for its host. Its ChainRelay fills the ring, and all receivers of the host
read it: the member as reader 0, the others as readers of an ordinary ring.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from typing import ClassVar

import torch
from msgspec.structs import replace

from weightsync.backends.base import LoadContext, Received, WeightTransferEngine
from weightsync.backends.gloo.group import GroupRendezvous, LivenessSocket, PrivateGroup
from weightsync.backends.gloo.payload import (
    GlooInit,
    GroupInfo,
    HostRing,
    RelayedUpdate,
    RingShape,
)
from weightsync.backends.gloo.relay import ChainRelay, RelayUpdate
from weightsync.backends.ipc.memory import Buckets, ProbeMemory
from weightsync.backends.ipc.payload import IpcInit
from weightsync.backends.ipc.receiver import IpcWeightTransferEngine
from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.shm.ring import Control
from weightsync.specs import Manifest
from weightsync.weights.layout import StreamLayout
from weightsync.wire.codec import decode_payload, manifest_from_wire
from weightsync.wire.messages import RegisteredUpdate, SharedMemoryUsage
from weightsync.wire.offers import InitInfo, RingInfo, SegmentHandle

MEMBER_READER = 0
_WAIT_S = 0.05


class GlooWeightTransferEngine(WeightTransferEngine):
    """Receives a sender's chunks over the network for a whole host, and reads them as reader 0.

    On a host with several receivers the others only read the ring that this engine fills.
    """

    exclusive: ClassVar[bool] = True  # /dev/shm may have no room for two rings

    def __init__(self, device_keys: Sequence[str]) -> None:
        self._inner = IpcWeightTransferEngine(device_keys, relayed=True)
        self._kept = ExitStack()
        self._shape: RingShape | None = None
        self._ring: HostRing | None = None
        self._control: Control | None = None
        self._link: ChainRelay | None = None
        self._whole_sizes: list[int] = []
        self._liveness: LivenessSocket | None = None
        self._at_work = False
        self._joins = False

    def check_init_info(self, init_info: InitInfo) -> None:
        """Decode the payload. Raises ProtocolError."""
        offer = decode_payload(init_info.payload, GlooInit)
        if offer.ring is None and (offer.group is None or offer.shape is None):
            raise ProtocolError("the init_info has neither a group to join nor a ring to read")

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Create the host's ring and join the group, or open the ring that a member created.

        Raises SegmentError where `/dev/shm` has no room, ConnectError where the sender cannot be
        reached, TransferTimeout when the group is not complete in time.
        """
        offer = decode_payload(init_info.payload, GlooInit)
        try:
            if offer.ring is not None:
                self._inner.init_transfer_engine(replace(init_info, payload=offer.ring))
            elif offer.group is not None and offer.shape is not None:
                _check_place(offer.group)
                self._joins = True
                self._open(init_info, offer.group, offer.shape)
        except BaseException:
            self.shutdown()
            raise

    def init_reply(self) -> HostRing | None:
        """Return the ring that this engine created, for the other receivers of this host."""
        return self._ring

    def receive_weights(self, update_info: RegisteredUpdate, context: LoadContext) -> Received:
        """Load an update into its load target, and relay it to the ring and to the next host.

        Raises the error that broke the chain, which names the host, rather than its consequences.
        """
        update = decode_payload(update_info.payload, RelayedUpdate)
        info = replace(update_info, payload=update)
        link, shape = self._link, self._shape
        if not self._joins:
            return self._inner.receive_weights(info, context)
        if link is None or shape is None:
            raise ProtocolError("the transfer engine is not initialised; call init first")
        relay_update = _relay_update(info, update, shape, self._whole_sizes)
        link.submit(relay_update)
        self._at_work = True

        def check() -> None:
            context.check()
            link.check(relay_update)

        try:
            received = self._inner.receive_weights(info, dataclasses.replace(context, check=check))
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
            self._at_work = False
        return received

    def sender_alive(self) -> bool | None:
        """Whether the connection to the sender's store, on another host, is open.

        Returns None where it is lost: the sender may live, and have a new group without this
        receiver.
        """
        if not self._joins:
            return self._inner.sender_alive()
        liveness = self._liveness
        return True if liveness is not None and liveness.holds() else None

    def beat(self) -> None:
        self._inner.beat()
        link, control = self._link, self._control
        if self._at_work and link is not None and control is not None and link.failure is None:
            control.beat_writer()

    def usage(self) -> list[SharedMemoryUsage]:
        """Return the mappings of this engine. A member owns its ring."""
        return [replace(entry, owner=self._joins) for entry in self._inner.usage()]

    def shutdown(self) -> None:
        """Leave the group, free the ring. Idempotent."""
        link, self._link = self._link, None
        kept = self._kept.pop_all()
        self._ring = None
        self._inner.shutdown()
        if link is None:
            kept.close()
        else:
            link.close(kept.close)
        self._control = self._liveness = None

    def _open(self, init_info: InitInfo, group: GroupInfo, shape: RingShape) -> None:
        control = Control.create(
            slots=shape.num_buckets, readers=shape.num_readers, entries=shape.entries
        )
        self._kept.callback(control.close)
        control.offered = init_info.generation
        ring = Buckets(shape.num_buckets, shape.bucket_nbytes, torch.device("cpu"))
        self._kept.callback(ring.close)
        probe = ProbeMemory()
        self._kept.callback(probe.close)
        self._ring = HostRing(
            control=SegmentHandle(name=control.segment.name, nbytes=control.segment.nbytes),
            data=ring.handle(),
            probe=probe.info(),
        )
        self._control = control
        own = init_of(self._ring, shape, MEMBER_READER)
        self._inner.init_transfer_engine(replace(init_info, payload=own))
        self._whole_sizes = _chunk_sizes(manifest_from_wire(init_info.manifest), shape)
        self._join(group, shape, control, ring)
        self._shape = shape

    def _join(self, info: GroupInfo, shape: RingShape, control: Control, ring: Buckets) -> None:
        rendezvous = GroupRendezvous.reach(
            info.address, info.port, epoch=info.epoch, timeout_s=info.timeout_s
        )
        self._kept.callback(rendezvous.close)
        self._liveness = rendezvous.liveness
        rendezvous.enter(info.rank, info.timeout_s)
        group = PrivateGroup(rendezvous, info.rank, len(info.members), info.timeout_s)
        self._link = ChainRelay(rendezvous, group, info, control, ring.tensors, shape.unit_nbytes)


def init_of(ring: HostRing, shape: RingShape, reader: int) -> IpcInit:
    """Return the init payload of reader `reader` of a host's ring."""
    return IpcInit(
        probe=ring.probe,
        control=ring.control,
        reader=reader,
        num_readers=shape.num_readers,
        entries=shape.entries,
        unit_nbytes=shape.unit_nbytes,
        ring=RingInfo(
            data=ring.data, num_buckets=shape.num_buckets, bucket_nbytes=shape.bucket_nbytes
        ),
    )


def _check_place(group: GroupInfo) -> None:
    if group.rank >= len(group.members):
        raise ProtocolError(
            f"rank {group.rank} is outside a group of {len(group.members)}; the init_info is "
            "damaged"
        )


def _relay_update(
    info: RegisteredUpdate, update: RelayedUpdate, shape: RingShape, whole: list[int]
) -> RelayUpdate:
    if not update.packed:
        raise ProtocolError("a member of a private group receives packed updates only")
    part = info.manifest
    return RelayUpdate(
        epoch=update.epoch,
        base=update.base,
        readers=sorted({MEMBER_READER, *update.readers}),
        sizes=whole if part is None else _chunk_sizes(manifest_from_wire(part), shape),
    )


def _chunk_sizes(manifest: Manifest, shape: RingShape) -> list[int]:
    """Return the bytes of each chunk, in the layout of this sender."""
    layout = StreamLayout(
        manifest, bucket_nbytes=shape.bucket_nbytes, unit_nbytes=shape.unit_nbytes
    )
    return [chunk.stop - chunk.start for chunk in layout.chunks]
