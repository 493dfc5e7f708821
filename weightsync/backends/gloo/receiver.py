"""The `gloo` backend's receiving half: a member of the sender's private group.

It makes a ring for its host, which its Link feeds and from which all workers of the host read: this
one at place 0, the others as readers of an ordinary ring.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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
from weightsync.wire.messages import LedgerEntry, RegisteredUpdate
from weightsync.wire.offers import InitInfo, RingInfo, SegmentHandle

MEMBER_PLACE = 0
_WAIT_S = 0.05


class GlooWeightTransferEngine(WeightTransferEngine):
    """Takes a sender's chunks off the network for a whole host, and reads them at place 0.

    On a host of several receivers the others only read the ring that this one fills.
    """

    exclusive: ClassVar[bool] = True  # the former group is over; /dev/shm may not hold two rings

    def __init__(self, device_keys: Sequence[str]) -> None:
        self._inner = IpcWeightTransferEngine(device_keys, relayed=True)
        self._closers: list[Callable[[], None]] = []
        self._shape: RingShape | None = None
        self._ring: HostRing | None = None
        self._control: Control | None = None
        self._link: ChainRelay | None = None
        self._whole_sizes: list[int] = []
        self._lifeline: LivenessSocket | None = None
        self._at_work = False
        self._joins = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Make the host's ring, then join the group, within its timeout; or open the host's ring.

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
            else:
                raise ProtocolError("this engine joins a group or reads a ring; it got neither")
        except BaseException:
            self.shutdown()
            raise

    def init_reply(self) -> HostRing | None:
        """The ring that this engine made, for the other receivers of this host."""
        return self._ring

    def receive_weights(self, update_info: RegisteredUpdate, context: LoadContext) -> Received:
        """Bring an update to its load target, and to the rings of this host and those behind it.

        Raises what broke the chain, naming the host, before what this caused here.
        """
        update = decode_payload(update_info.payload, RelayedUpdate)
        info = replace(update_info, payload=update)
        link, shape = self._link, self._shape
        if not self._joins:
            return self._inner.receive_weights(info, context)
        if link is None or shape is None:
            raise ProtocolError("the transfer engine is not initialised; call init first")
        relay_update = _relay_update(info, update, shape, self._whole_sizes)
        link.take_in(relay_update)
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
        """Look at the connection to the sender's store: the sender is on another host.

        When that is lost, the group may have been made anew without this receiver.
        """
        if not self._joins:
            return self._inner.sender_alive()
        lifeline = self._lifeline
        return True if lifeline is not None and lifeline.holds() else None

    def beat(self) -> None:
        self._inner.beat()
        link, control = self._link, self._control
        if self._at_work and link is not None and control is not None and link.failure is None:
            control.beat_writer()

    def ledger(self) -> list[LedgerEntry]:
        """The mappings of this engine; a member owns the ring."""
        return [replace(entry, owner=self._joins) for entry in self._inner.ledger()]

    def shutdown(self) -> None:
        """Leave the group, free the ring. Idempotent."""
        link, self._link = self._link, None
        closers, self._closers = self._closers, []
        self._ring = None
        self._inner.shutdown()

        def free() -> None:
            for close in reversed(closers):
                close()

        if link is None:
            free()
        else:
            link.close(free)
        self._control = self._lifeline = None

    def _open(self, init_info: InitInfo, group: GroupInfo, shape: RingShape) -> None:
        control = Control.create(
            slots=shape.num_slots, readers=shape.num_readers, entries=shape.entries
        )
        self._closers.append(control.close)
        control.offered = init_info.number
        ring = Buckets(shape.num_slots, shape.slot_nbytes, torch.device("cpu"))
        self._closers.append(ring.close)
        probe = ProbeMemory()
        self._closers.append(probe.close)
        self._ring = HostRing(
            control=SegmentHandle(name=control.segment.name, nbytes=control.segment.nbytes),
            data=ring.handle(),
            probe=probe.info(),
        )
        self._control = control
        own = place_on(self._ring, shape, MEMBER_PLACE)
        self._inner.init_transfer_engine(replace(init_info, payload=own))
        self._whole_sizes = _chunk_sizes(manifest_from_wire(init_info.manifest), shape)
        self._join(group, shape, control, ring)
        self._shape = shape

    def _join(self, info: GroupInfo, shape: RingShape, control: Control, ring: Buckets) -> None:
        meeting = GroupRendezvous.reach(
            info.address, info.port, epoch=info.epoch, timeout_s=info.timeout_s
        )
        self._closers.append(meeting.close)
        self._lifeline = meeting.lifeline
        meeting.enter(info.rank, info.timeout_s)
        group = PrivateGroup(meeting, info.rank, len(info.members), info.timeout_s)
        self._link = ChainRelay(meeting, group, info, control, ring.tensors, shape.run_nbytes)


def place_on(ring: HostRing, shape: RingShape, reader: int) -> IpcInit:
    """Return what a receiver needs of the `ring` of its host, at place `reader`."""
    return IpcInit(
        probe=ring.probe,
        control=ring.control,
        reader=reader,
        num_readers=shape.num_readers,
        entries=shape.entries,
        run_nbytes=shape.run_nbytes,
        ring=RingInfo(data=ring.data, num_slots=shape.num_slots, slot_nbytes=shape.slot_nbytes),
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
        raise ProtocolError("the member of a private group takes packed updates of its own sender")
    part = info.manifest
    return RelayUpdate(
        epoch=update.epoch,
        base=update.base,
        readers=sorted({MEMBER_PLACE, *update.readers}),
        sizes=whole if part is None else _chunk_sizes(manifest_from_wire(part), shape),
    )


def _chunk_sizes(manifest: Manifest, shape: RingShape) -> list[int]:
    """The bytes of each chunk, as this sender cuts its stream."""
    plan = StreamLayout(manifest, bucket_nbytes=shape.slot_nbytes, run_nbytes=shape.run_nbytes)
    return [chunk.stop - chunk.start for chunk in plan.chunks]
