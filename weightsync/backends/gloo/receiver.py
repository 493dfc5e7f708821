"""The `distributed` backend's receiving half: a member of the sender's private group.

It makes a ring for its host, which its Link feeds and from which all workers of the host read: this
one at place 0, the others as readers of an ordinary ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch

from weightsync.backends.base import LoadContext, Received, WeightTransferEngine
from weightsync.backends.gloo.group import GroupRendezvous, LivenessSocket, PrivateGroup
from weightsync.backends.gloo.relay import ChainRelay, RelayUpdate
from weightsync.backends.ipc.memory import Buckets, ProbeMemory
from weightsync.backends.ipc.receiver import IpcWeightTransferEngine
from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.shm.ring import Control
from weightsync.specs import Manifest
from weightsync.weights.layout import StreamLayout
from weightsync.wire.codec import manifest_from_wire
from weightsync.wire.messages import LedgerEntry, RegisteredUpdate, UpdateInfo
from weightsync.wire.offers import (
    DistributedInit,
    GroupInfo,
    HostRing,
    IpcInit,
    Offer,
    RingInfo,
    SegmentHandle,
)

MEMBER_PLACE = 0
_WAIT_S = 0.05


class DistributedWeightTransferEngine(WeightTransferEngine):
    """Takes a sender's chunks off the network for a whole host, and reads them at place 0."""

    def __init__(self, device_keys: Sequence[str]) -> None:
        super().__init__(device_keys)
        self._inner = IpcWeightTransferEngine(device_keys)
        self._closers: list[Callable[[], None]] = []
        self._init: DistributedInit | None = None
        self._ring: HostRing | None = None
        self._control: Control | None = None
        self._link: ChainRelay | None = None
        self._whole_sizes: list[int] = []
        self._lifeline: LivenessSocket | None = None
        self._at_work = False

    def init_transfer_engine(self, init_info: Offer) -> None:
        """Make the host's ring, then join the group, within its timeout.

        Raises SegmentError where `/dev/shm` has no room, ConnectError where the sender cannot be
        reached, TransferTimeout when the group is not complete in time.
        """
        if not isinstance(init_info, DistributedInit):
            raise ProtocolError("this engine joins a private group; it got another init_info")
        _check_place(init_info)
        try:
            self._open(init_info)
        except BaseException:
            self.shutdown()
            raise

    @property
    def manifest(self) -> Manifest:
        return self._inner.manifest

    @property
    def whole_plan(self) -> StreamLayout:
        return self._inner.whole_plan

    def host_ring(self) -> HostRing | None:
        """The ring that this engine made, for the other workers of this host."""
        return self._ring

    def receive_weights(self, update_info: UpdateInfo, reception: LoadContext) -> Received:
        """Bring an update to its landing, and to the rings of this host and those behind it.

        Raises what broke the chain, naming the host, before what this caused here.
        """
        link, init = self._link, self._init
        if link is None or init is None:
            raise ProtocolError("the transfer engine is not initialised; call init first")
        relay_update = _relay_update(update_info, init, self._whole_sizes)
        link.take_in(relay_update)
        self._at_work = True

        def check() -> None:
            reception.check()
            link.check(relay_update)

        try:
            received = self._inner.receive_weights(update_info, replace(reception, check=check))
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

    def sender_alive(self) -> bool:
        """Look at the connection to the sender's store: the sender is on another host."""
        lifeline = self._lifeline
        return lifeline is not None and lifeline.holds()

    def beat(self) -> None:
        self._inner.beat()
        link, control = self._link, self._control
        if self._at_work and link is not None and control is not None and link.failure is None:
            control.beat_writer()

    def ledger(self) -> list[LedgerEntry]:
        """The mappings of this engine; it owns the ring."""
        return [msgspec.structs.replace(entry, owner=True) for entry in self._inner.ledger()]

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

    def _open(self, init: DistributedInit) -> None:
        control = Control.create(
            slots=init.num_slots, readers=init.num_readers, entries=init.entries
        )
        self._closers.append(control.close)
        control.offered = init.number
        ring = Buckets(init.num_slots, init.slot_nbytes, torch.device("cpu"))
        self._closers.append(ring.close)
        probe = ProbeMemory()
        self._closers.append(probe.close)
        self._ring = HostRing(
            control=SegmentHandle(name=control.segment.name, nbytes=control.segment.nbytes),
            data=ring.handle(),
            probe=probe.info(),
        )
        self._control = control
        self._inner.init_transfer_engine(place_on(self._ring, init, MEMBER_PLACE))
        self._whole_sizes = _chunk_sizes(self.manifest, init)
        self._join(init, control, ring)
        self._init = init

    def _join(self, init: DistributedInit, control: Control, ring: Buckets) -> None:
        info = init.group
        meeting = GroupRendezvous.reach(
            info.address, info.port, epoch=info.epoch, timeout_s=info.timeout_s
        )
        self._closers.append(meeting.close)
        self._lifeline = meeting.lifeline
        meeting.enter(info.rank, info.timeout_s)
        group = PrivateGroup(meeting, info.rank, len(info.members), info.timeout_s)
        self._link = ChainRelay(meeting, group, info, control, ring.tensors, init.run_nbytes)


def member_init(base: IpcInit, group: GroupInfo) -> DistributedInit:
    """Return the init of a group member, that makes a ring for its host like the sender's own."""
    return DistributedInit(
        protocol_min=base.protocol_min,
        protocol_max=base.protocol_max,
        sender=base.sender,
        manifest=base.manifest,
        num_readers=base.num_readers,
        entries=base.entries,
        run_nbytes=base.run_nbytes,
        lease_s=base.lease_s,
        fleet_version=base.fleet_version,
        number=base.number,
        owner=base.owner,
        group=group,
        num_slots=base.ring.num_slots,
        slot_nbytes=base.ring.slot_nbytes,
    )


def place_on(ring: HostRing, init: DistributedInit, reader: int) -> IpcInit:
    """Return the init of a worker of the host whose member made `ring`, at place `reader`."""
    return IpcInit(
        protocol_min=init.protocol_min,
        protocol_max=init.protocol_max,
        sender=init.sender,
        manifest=init.manifest,
        num_readers=init.num_readers,
        entries=init.entries,
        run_nbytes=init.run_nbytes,
        lease_s=init.lease_s,
        fleet_version=init.fleet_version,
        number=init.number,
        owner=init.owner,
        path="distributed",
        probe=ring.probe,
        control=ring.control,
        reader=reader,
        ring=RingInfo(data=ring.data, num_slots=init.num_slots, slot_nbytes=init.slot_nbytes),
    )


def _check_place(init: DistributedInit) -> None:
    if init.group.rank >= len(init.group.members):
        raise ProtocolError(
            f"rank {init.group.rank} is outside a group of {len(init.group.members)}; the "
            "init_info is damaged"
        )


def _relay_update(info: UpdateInfo, init: DistributedInit, whole: list[int]) -> RelayUpdate:
    if not isinstance(info, RegisteredUpdate) or not info.packed or info.readers is None:
        raise ProtocolError(
            "the member of a private group takes packed updates of its own sender, with the reader "
            "places of its host"
        )
    part = info.manifest
    return RelayUpdate(
        epoch=info.epoch,
        base=info.base,
        readers=sorted({MEMBER_PLACE, *info.readers}),
        sizes=whole if part is None else _chunk_sizes(manifest_from_wire(part), init),
    )


def _chunk_sizes(manifest: Manifest, init: DistributedInit) -> list[int]:
    """The bytes of each chunk, as this sender cuts its stream."""
    plan = StreamLayout(manifest, bucket_nbytes=init.slot_nbytes, run_nbytes=init.run_nbytes)
    return [chunk.stop - chunk.start for chunk in plan.chunks]
