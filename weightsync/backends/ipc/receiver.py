"""The `ipc` backend's receiver engine: opens the sender's memory, and loads from it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import torch

from weightsync.backends.base import (
    LoadContext,
    Received,
    Steps,
    WeightTransferEngine,
    in_one,
)
from weightsync.backends.ipc.landing import LANDING_NBYTES, Landing
from weightsync.backends.ipc.transfer import (
    IncomingTransfer,
    OpenedMemory,
    chunked_layout,
)
from weightsync.backends.ring import IpcInit
from weightsync.cuda.memory import OpenMemory, check_probe, pick_readable
from weightsync.errors import HandleError, ProtocolError, SegmentError
from weightsync.shm.host_keys import pick
from weightsync.shm.ring import Control
from weightsync.specs import Manifest
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.layout import StreamLayout, units_per_chunk
from weightsync.wire.codec import decode_payload, manifest_from_wire
from weightsync.wire.messages import RegisteredUpdate, SharedMemoryUsage
from weightsync.wire.offers import InitInfo

_OWN_NAME = "this receiver"


class IpcWeightTransferEngine(WeightTransferEngine):
    """Reads a ring and registered memory. `device_keys` select the handles to open.

    Memory of another GPU that this one can read lands on this one first (landing.py).

    A ring that another backend offers is filled by a process that is not the sender.
    """

    def __init__(self, device_keys: Sequence[str]) -> None:
        self._keys = list(device_keys)
        self._opened: OpenedMemory | None = None
        self._since = time.monotonic()
        self._at_work = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Check the probe, then open all memory. Raises HandleError or SegmentError."""
        offer = decode_payload(init_info.payload, IpcInit)
        check_probe(offer.probe, self._keys)
        manifest = manifest_from_wire(init_info.manifest)
        ring = offer.ring
        if offer.reader >= offer.num_readers:
            raise HandleError(
                f"there is no reader {offer.reader} among the {offer.num_readers} of this ring; "
                "the init_info is damaged"
            )
        with ExitStack() as kept:
            control = Control.open(
                offer.control.name,
                offer.control.nbytes,
                slots=ring.num_buckets,
                readers=offer.num_readers,
                entries=offer.entries,
            )
            kept.callback(control.close)
            _check_generation(init_info.generation, control)
            _check_size(offer, manifest)
            handle, gpu = pick_readable(ring.data, self._keys)
            data = OpenMemory(handle)
            kept.callback(data.close)
            storages, storages_gpu = self._open_storages(offer, kept)
            whole = StreamLayout(manifest, unit_nbytes=offer.unit_nbytes)
            buckets = [
                data.part(i * ring.bucket_nbytes, ring.bucket_nbytes)
                for i in range(ring.num_buckets)
            ]
            kept.callback(buckets.clear)  # before the memory that they view is closed
            registered = _registered(offer, whole, storages)
            _check_entries(offer, whole)
            landing = None
            device = gpu or storages_gpu
            if device is not None:
                peer = ", ".join(offer.probe.handle)  # it lies beside them
                landing = Landing(device, peer, _landing_nbytes(offer, whole))
                kept.callback(landing.close)
            self._opened = OpenedMemory(
                info=offer,
                sender=init_info.sender,
                lease_s=init_info.lease_s,
                relayed=init_info.backend != "ipc",
                control=control,
                ring=data,
                buckets=buckets,
                storages=storages,
                whole=whole,
                chunked=chunked_layout(manifest, offer),
                registered=registered,
                kept=kept.pop_all(),
                ring_landing=landing if gpu else None,
                storages_landing=landing if storages_gpu else None,
            )

    def receive_weights(self, update_info: RegisteredUpdate, context: LoadContext) -> Received:
        """Load a registered update into its load target; see the contract."""
        return in_one(self.receive_in_steps(update_info, context))

    def receive_in_steps(self, update_info: RegisteredUpdate, context: LoadContext) -> Steps:
        """Load a registered update chunk by chunk; see the contract."""
        self._at_work = True
        try:
            return (yield from IncomingTransfer(self._open, update_info, context).run())
        finally:
            self._at_work = False

    def sender_alive(self) -> bool | None:
        """Whether the sender's control segment is locked; False once closed. Thread-safe.

        None where it is that of another receiver, which has lost its connection to the sender.
        """
        opened = self._opened
        if opened is None:
            return False
        try:
            alive = opened.control.segment.owner_alive()
            return None if alive and opened.control.sender_lost else alive
        except (SegmentError, ValueError):  # another thread has closed the control segment
            if self._opened is opened:
                raise
            return False

    def sender_beat(self) -> int | None:
        """Return the heartbeat of the ring's writer; None where the writer is not the sender."""
        opened = self._opened
        if opened is None or opened.relayed:
            return None
        with suppress(ValueError):  # another thread has closed the control segment
            return opened.control.writer_beat
        return None

    def usage(self) -> list[SharedMemoryUsage]:
        """Return the mappings of this engine, none once closed. Thread-safe."""
        opened = self._opened
        if opened is None:
            return []
        try:
            entries = _mappings(opened)
            late = [_OWN_NAME] if self._at_work and _holds_chunk(opened) else []
        except (HandleError, ValueError):  # another thread has closed the control segment
            if self._opened is opened:
                raise
            return []
        age = time.monotonic() - self._since
        return [
            SharedMemoryUsage(
                kind=kind,
                name=name,
                nbytes=nbytes,
                owner=False,
                age_s=age,
                sender=opened.sender,
                unreleased=late if kind == "ring" else [],
            )
            for kind, name, nbytes in entries
        ]

    def beat(self) -> None:
        """Show the sender that this process lives and works."""
        opened = self._opened
        if opened is not None:
            opened.control.beat_reader(opened.info.reader)

    def shutdown(self) -> None:
        """Close everything. Idempotent."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _open_storages(
        self, offer: IpcInit, kept: ExitStack
    ) -> tuple[list[OpenMemory], torch.device | None]:
        """Open registered memory, all of it on one GPU or in one segment.

        Returns also this receiver's GPU, where it is that of another one. Raises HandleError.
        """
        storages: list[OpenMemory] = []
        offered = offer.storages.handles if offer.storages else []
        gpu = pick_readable(offered[0], self._keys)[1] if offered else None
        keys = self._keys if gpu is None else list(offered[0])
        for handles in offered:
            storages.append(OpenMemory(pick(handles, keys)))
            kept.callback(storages[-1].close)
        return storages, gpu

    @property
    def _open(self) -> OpenedMemory:
        opened = self._opened
        if opened is None:
            raise ProtocolError("the transfer engine is not initialised; call init first")
        return opened


def _mappings(opened: OpenedMemory) -> list[tuple[str, str, int]]:
    """Return the kind, name and size in bytes of every mapping."""
    control, sender = opened.control.segment, opened.sender
    return [
        ("control", control.name, control.nbytes),
        ("ring", sender, opened.ring.tensor.numel()),
        *(("storage", sender, memory.tensor.numel()) for memory in opened.storages),
    ]


def _holds_chunk(opened: OpenedMemory) -> bool:
    """Whether this reader has not released a published chunk."""
    return opened.control.released(opened.info.reader) < opened.control.published


def _registered(info: IpcInit, whole: StreamLayout, storages: list[OpenMemory]) -> Memory | None:
    """Return the sender's tensors in registered memory, with every range checked."""
    if info.storages is None:
        return None
    specs = whole.manifest.specs
    where, offsets = info.storages.storage, info.storages.offset
    if len(where) != len(specs) or len(offsets) != len(specs):
        raise HandleError(
            f"{len(specs)} tensors, but {len(where)} storages and {len(offsets)} offsets; "
            "they must be equally long"
        )
    if any(i >= len(storages) for i in where):
        raise HandleError(f"a tensor lies in storage {max(where)} of {len(storages)}")
    tensors = [
        storages[i].part(offset, spec.nbytes)
        for i, offset, spec in zip(where, offsets, specs, strict=True)
    ]
    return Memory(tensors, flat=len(storages) == 1 and offsets == whole.offsets)


def _check_generation(generation: int, control: Control) -> None:
    """Raise HandleError for a generation that the sender has not used yet."""
    if generation > control.offered:
        raise HandleError(
            f"generation {generation} is not one of the sender's, whose newest is "
            f"{control.offered}; the init_info is damaged"
        )


def _check_size(info: IpcInit, manifest: Manifest) -> None:
    """Raise HandleError for more bytes than the ring is made for.

    Called before a layout is computed, which takes time per byte.
    """
    if manifest.nbytes > info.entries * info.unit_nbytes:
        raise HandleError(
            f"the tensors offered have {manifest.nbytes} bytes; the control segment has room for "
            f"{info.entries} fingerprints of {info.unit_nbytes} bytes each"
        )


def _landing_nbytes(offer: IpcInit, whole: StreamLayout) -> int:
    """Return the bytes that land at once: a copy unit at least, and no more than there are."""
    unit = max(LANDING_NBYTES, offer.unit_nbytes)
    return min(unit, max(whole.nbytes, offer.ring.bucket_nbytes))


def _check_entries(info: IpcInit, whole: StreamLayout) -> None:
    per_chunk = units_per_chunk(info.ring.bucket_nbytes, info.unit_nbytes)
    needed = max(info.ring.num_buckets * per_chunk, len(whole.units))
    if info.entries < needed:
        raise HandleError(
            f"the control segment has room for {info.entries} fingerprints, {needed} are needed"
        )
