"""What a sender shares, for whoever asks where shared memory went."""

from __future__ import annotations

import time
from collections.abc import Mapping

from weightsync.backends.exported import Buckets, ProbeMemory
from weightsync.cuda.device_stream import DeviceStream
from weightsync.cuda.memory import PROBE_NBYTES
from weightsync.shm.ring import Control, RingWriter
from weightsync.shm.segment import live_segments
from weightsync.shm.shared_stream import SharedStream
from weightsync.wire.messages import LedgerEntry
from weightsync.wire.offers import SegmentHandle

Registered = SharedStream | DeviceStream | None


class ExportedMemory:
    """The ledger of one engine: its control segment, ring, probe and registered memory.

    It only reads, and may be asked while an update is at work, in any thread.
    """

    def __init__(
        self,
        writer: RingWriter,
        ring: Buckets,
        probe: ProbeMemory,
        memory: Registered,
        *,
        on_gpu: bool,
    ) -> None:
        self._writer = writer
        self._ring = ring
        self._memory = memory
        # GPU memory is exported once per call of info(), so a probe on a GPU is not asked.
        handles = [] if on_gpu else list(probe.info().handle.values())
        self._probe = [handle.name for handle in handles if isinstance(handle, SegmentHandle)]
        self._since = time.monotonic()

    def entries(self, names: Mapping[int, str]) -> list[LedgerEntry]:
        """Return what is shared; `names` are the receivers that were given it, by reader place."""
        age_s = time.monotonic() - self._since
        control = self._writer.control.segment
        ring = _segment_at(self._ring.tensors[0].data_ptr()) if self._ring.tensors else ""
        memories = [("storage", name, nbytes) for name, nbytes in _registered(self._memory)]
        shared = [
            ("control", control.name, control.nbytes),
            ("ring", ring, self._ring.nbytes),
            ("probe", "".join(self._probe), PROBE_NBYTES),
            *memories,
        ]
        readers = sorted(names.values())
        late = sorted(names.get(place, f"reader {place}") for place in unreleased(self._writer))
        return [
            LedgerEntry(
                kind=kind,
                name=name,
                nbytes=nbytes,
                owner=True,
                age_s=age_s,
                readers=readers,
                unreleased=late if kind == "ring" else [],
            )
            for kind, name, nbytes in shared
        ]


def unreleased(writer: RingWriter) -> list[int]:
    """Return the places of the last update's readers that hold a chunk which was published."""
    control: Control = writer.control
    return writer.waiting_for(max(control.published(slot) for slot in range(control.slots)))


def _registered(memory: Registered) -> list[tuple[str, int]]:
    if isinstance(memory, SharedStream):
        return [(memory.segment.name, memory.segment.nbytes)]
    if isinstance(memory, DeviceStream):
        return [(str(storage.device), storage.numel()) for storage in memory.storages()[0]]
    return []


def _segment_at(address: int) -> str:
    """Return the name of this process's segment that is mapped there; a GPU's memory has none."""
    return next((s.name for s in live_segments() if s.address == address), "")
