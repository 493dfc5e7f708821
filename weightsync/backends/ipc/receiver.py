"""The `ipc` backend's receiving half: opens what the sender offered, and brings it to a landing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from weightsync.backends.base import LoadContext, Received, WeightTransferEngine
from weightsync.backends.ipc.transfer import Assembly, IncomingTransfer, OpenedMemory, chunked_plan
from weightsync.cuda.events import open_fence
from weightsync.cuda.memory import OpenMemory, check_probe
from weightsync.errors import HandleError, ProtocolError, SegmentError
from weightsync.shm.host_keys import pick
from weightsync.shm.ring import Control
from weightsync.specs import Manifest
from weightsync.weights.copy_plan import CopyPlan, Memory
from weightsync.weights.layout import StreamLayout, runs_per_chunk
from weightsync.wire.codec import manifest_from_wire
from weightsync.wire.messages import LedgerEntry, RegisteredUpdate, UpdateInfo
from weightsync.wire.offers import IpcInit, Offer

_KEPT_PROGRAMS = 4
_HERE = "this receiver"
"""Two slabs in turn, for the ring and for registered memory."""


class IpcWeightTransferEngine(WeightTransferEngine):
    """Reads one sender's ring and registered memory. `device_keys` say what it can open."""

    def __init__(self, device_keys: Sequence[str]) -> None:
        super().__init__(device_keys)
        self._opened: OpenedMemory | None = None
        self._programs: dict[tuple[int, int, int], tuple[object, list[CopyPlan]]] = {}
        self._assembly = Assembly()
        self._since = time.monotonic()
        self._at_work = False

    def init_transfer_engine(self, init_info: Offer) -> None:
        """Check the probe, then open everything. Raises HandleError or SegmentError."""
        if not isinstance(init_info, IpcInit):
            raise ProtocolError("this engine reads rings of its own host; it got another init_info")
        check_probe(init_info.probe, self._keys)
        manifest = manifest_from_wire(init_info.manifest)
        ring = init_info.ring
        if init_info.reader >= init_info.num_readers:
            raise HandleError(
                f"reader place {init_info.reader} is outside the {init_info.num_readers} places of "
                "this ring; the init_info is damaged"
            )
        opened: list[Callable[[], None]] = []
        try:
            control = Control.open(
                init_info.control.name,
                init_info.control.nbytes,
                slots=ring.num_slots,
                readers=init_info.num_readers,
                entries=init_info.entries,
            )
            opened.append(control.close)
            _check_offer(init_info, control)
            _check_size(init_info, manifest)
            data = OpenMemory(pick(ring.data, self._keys))
            opened.append(data.close)
            storages = _open_storages(init_info, self._keys, opened)
            stored = init_info.storages
            fenced = ring.data if stored is None or not stored.handles else stored.handles[0]
            fence = open_fence(init_info.ready, fenced, self._keys, slots=ring.num_slots)
            if fence is not None:
                opened.append(fence.close)
            whole = StreamLayout(manifest, run_nbytes=init_info.run_nbytes)
            self._opened = OpenedMemory(
                info=init_info,
                manifest=manifest,
                control=control,
                ring=data,
                slots=[
                    data.part(i * ring.slot_nbytes, ring.slot_nbytes) for i in range(ring.num_slots)
                ],
                storages=storages,
                whole=whole,
                chunked=chunked_plan(manifest, init_info),
                registered=_registered(init_info, whole, storages),
                fence=fence,
            )
            _check_entries(self._opened)
            # An init that came before, with the same number, may have said otherwise.
            control.take_events(init_info.reader, 0 if fence is None else init_info.number)
        except BaseException:
            self._opened = None
            for close in reversed(opened):
                close()
            raise

    @property
    def manifest(self) -> Manifest:
        """What the sender sends."""
        return self._open.manifest

    @property
    def whole_plan(self) -> StreamLayout:
        """The stream of the whole model."""
        return self._open.whole

    def receive_weights(self, update_info: UpdateInfo, reception: LoadContext) -> Received:
        """Bring a registered update to its landing; see the contract."""
        if not isinstance(update_info, RegisteredUpdate):
            raise ProtocolError("this engine takes updates of its own sender only")
        self._at_work = True
        try:
            received = IncomingTransfer(
                self._open, update_info, reception, self._programs, self._assembly
            ).run()
        finally:
            self._at_work = False
        while len(self._programs) > _KEPT_PROGRAMS:
            self._programs.pop(next(iter(self._programs)))
        return received

    def sender_alive(self) -> bool:
        """Look at the lock of the sender's control segment. No, once closed; any thread asks."""
        opened = self._opened
        if opened is None:
            return False
        try:
            return opened.control.segment.owner_alive()
        except SegmentError:
            if self._opened is opened:
                raise
            return False

    def sender_beat(self) -> int | None:
        """The heartbeat of the ring's writer; on a ring of this host's member, its alone."""
        opened = self._opened
        if opened is None or opened.info.path == "distributed":
            return None
        with suppress(ValueError):  # of words that another thread has let go
            return opened.control.writer_beat
        return None

    def ledger(self) -> list[LedgerEntry]:
        """The mappings of this engine, none once closed; any thread asks."""
        opened = self._opened
        if opened is None:
            return []
        try:
            entries = _mappings(opened)
            late = [_HERE] if self._at_work and _holds_chunk(opened) else []
        except (HandleError, ValueError):  # of words that another thread has let go
            if self._opened is opened:
                raise
            return []
        age = time.monotonic() - self._since
        return [
            LedgerEntry(
                kind=kind,
                name=name,
                nbytes=nbytes,
                owner=False,
                age_s=age,
                sender=opened.info.sender,
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
        self._programs.clear()
        self._assembly.clear()
        if opened is None:
            return
        opened.slots.clear()
        if opened.registered is not None:
            opened.registered.forget()
        if opened.fence is not None:
            opened.fence.close()
        for storage in opened.storages:
            storage.close()
        opened.ring.close()
        opened.control.close()

    @property
    def _open(self) -> OpenedMemory:
        opened = self._opened
        if opened is None:
            raise ProtocolError("the transfer engine is not initialised; call init first")
        return opened


def _mappings(opened: OpenedMemory) -> list[tuple[str, str, int]]:
    """Kind, name and bytes of everything that is mapped."""
    control, sender = opened.control.segment, opened.info.sender
    return [
        ("control", control.name, control.nbytes),
        ("ring", sender, opened.ring.tensor.numel()),
        *(("storage", sender, memory.tensor.numel()) for memory in opened.storages),
    ]


def _holds_chunk(opened: OpenedMemory) -> bool:
    """Whether a chunk was published that this reader has not released."""
    control = opened.control
    newest = max(control.published(slot) for slot in range(len(opened.slots)))
    return control.released(opened.info.reader) < newest


def _open_storages(
    info: IpcInit, keys: list[str], opened: list[Callable[[], None]]
) -> list[OpenMemory]:
    memories: list[OpenMemory] = []
    for handle in info.storages.handles if info.storages else []:
        memories.append(OpenMemory(pick(handle, keys)))
        opened.append(memories[-1].close)
    return memories


def _registered(info: IpcInit, whole: StreamLayout, storages: list[OpenMemory]) -> Memory | None:
    """Return the sender's tensors where they lie, every range checked."""
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


def _check_offer(info: IpcInit, control: Control) -> None:
    """Refuse a number that the sender has not given out: its own next offers would come after."""
    if info.number > control.offered:
        raise HandleError(
            f"offer {info.number} is none of the sender's, whose newest is {control.offered}; the "
            "init_info is damaged"
        )


def _check_size(info: IpcInit, manifest: Manifest) -> None:
    """Refuse what the ring cannot be for before a plan is made, which takes time by the byte."""
    if manifest.nbytes > info.entries * info.run_nbytes:
        raise HandleError(
            f"the tensors offered have {manifest.nbytes} bytes; the control segment has room for "
            f"{info.entries} fingerprints of {info.run_nbytes} bytes each"
        )


def _check_entries(opened: OpenedMemory) -> None:
    per_chunk = runs_per_chunk(opened.info.ring.slot_nbytes, opened.info.run_nbytes)
    needed = max(opened.info.ring.num_slots * per_chunk, len(opened.whole.runs))
    if opened.info.entries < needed:
        raise HandleError(
            f"the control segment has room for {opened.info.entries} fingerprints, "
            f"{needed} are needed"
        )
