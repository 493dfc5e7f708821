"""The ring that carries weights to the readers of one host, and what a backend builds on it.

The backend `ipc` packs a source into a ring, for readers on the same host. A backend that names it
in `requires` gets its engine, a RingEngine, and relays the chunks to other places: each relay is
one more reader of the ring. So the tensors are packed and fingerprinted once for all backends.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Annotated

import torch
from msgspec import Meta

from weightsync.backends.base import (
    Check,
    HeldMemory,
    ReaderWatch,
    TrainerWeightTransferEngine,
    TransferProgress,
)
from weightsync.cuda import handles
from weightsync.cuda.memory import PROBE_NBYTES, probe_digest
from weightsync.cuda.pinning import Driver, Pinned
from weightsync.cuda.staging import CopyStream, StagedBuckets
from weightsync.cuda.wait import wait_for_all_streams
from weightsync.errors import ConfigError, TransferError, WeightSyncError
from weightsync.runtime.interpreter_exit import end_at_exit
from weightsync.shm.host_keys import host_key
from weightsync.shm.ring import Control, RingReader
from weightsync.shm.segment import Segment
from weightsync.specs import Manifest
from weightsync.weights.copying.layout import StreamLayout
from weightsync.wire.offers import (
    KeyedHandle,
    Message,
    ProbeInfo,
    RingInfo,
    SegmentHandle,
    Size,
    StorageInfo,
)
from weightsync.wire.struct_types import prepare

logger = logging.getLogger(__name__)

HOST_BUCKET_NBYTES = 2 << 20
HOST_BUCKETS = 4
MAX_READERS = 64
"""Readers of a sender's ring on its host or GPU."""
MAX_RELAYS = 4
"""Relays of a sender's ring: their reader indices come after those of the readers."""
_CPU = torch.device("cpu")
_WAIT_S = 0.05


class RingShape(Message, frozen=True, kw_only=True):
    """The sizes of a ring. Rings of one shape hold the same chunks of a model."""

    num_readers: Annotated[int, Meta(ge=1, le=4096)]
    entries: Annotated[int, Meta(ge=1, le=1 << 32)]
    unit_nbytes: Annotated[int, Meta(ge=4096, le=1 << 40)]
    num_buckets: Annotated[int, Meta(ge=1, le=1024)]
    bucket_nbytes: Annotated[int, Meta(ge=64, le=1 << 40)]

    def layout(self, manifest: Manifest) -> StreamLayout:
        """Return the stream of these tensors, cut into chunks and units as in the ring."""
        return StreamLayout(
            manifest, bucket_nbytes=self.bucket_nbytes, unit_nbytes=self.unit_nbytes
        )

    def offer(
        self,
        reader: int,
        control: SegmentHandle,
        data: KeyedHandle,
        probe: ProbeInfo,
        storages: StorageInfo | None = None,
    ) -> IpcInit:
        """Return the init payload of a reader of such a ring, in this memory."""
        return IpcInit(
            probe=probe,
            control=control,
            reader=reader,
            num_readers=self.num_readers,
            entries=self.entries,
            unit_nbytes=self.unit_nbytes,
            ring=RingInfo(
                data=data, num_buckets=self.num_buckets, bucket_nbytes=self.bucket_nbytes
            ),
            storages=storages,
        )


class IpcInit(Message, frozen=True, kw_only=True):
    """A ring in memory that the receiver can open, and its reader index there.

    `entries` is the number of fingerprints for which the control segment has room.
    """

    probe: ProbeInfo
    control: SegmentHandle
    reader: Annotated[int, Meta(ge=0, le=4096)]
    num_readers: Annotated[int, Meta(ge=1, le=4096)]
    entries: Annotated[int, Meta(ge=1, le=1 << 32)]
    unit_nbytes: Annotated[int, Meta(ge=4096, le=1 << 40)]
    ring: RingInfo
    storages: StorageInfo | None = None


class RingUpdate(Message, frozen=True, kw_only=True):
    """An update through the ring (`packed`) or from registered memory; `epoch` is the ring's.

    `base` is the sequence number of the ring, or of the table of registered memory, before it.
    """

    epoch: Annotated[int, Meta(ge=1, le=1 << 62)]
    base: Size
    packed: bool


prepare(IpcInit, RingUpdate, ProbeInfo)


class Buckets:
    """The buckets of a ring, in a segment or GPU memory; `tensors` are `uint8[bucket_nbytes]`."""

    def __init__(self, num_buckets: int, bucket_nbytes: int, device: torch.device) -> None:
        self.nbytes = num_buckets * bucket_nbytes
        self._segment = Segment.create(self.nbytes) if device.type == "cpu" else None
        buffer = (
            self._segment.tensor()
            if self._segment
            else torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        )
        self._buffer: torch.Tensor | None = buffer
        self.bucket_nbytes = bucket_nbytes
        self.tensors = [
            buffer[i * bucket_nbytes : (i + 1) * bucket_nbytes] for i in range(num_buckets)
        ]
        self._stage: StagedBuckets | None = None
        self._pinned: Pinned | None = None

    def stage(self, device: torch.device, lane: CopyStream, driver: Driver) -> StagedBuckets | None:
        """Add staging memory on `device` to buckets on the host, and pin them; once, before use.

        Neither failure raises: returns None when `device` has no memory left; copies are slower
        when the driver does not pin. Raises ConfigError for closed buckets or buckets on a GPU.
        """
        if self._buffer is None or self._segment is None:
            raise ConfigError("only open buckets on the host are staged")
        try:
            self._stage = StagedBuckets(self.tensors, device, lane)
        except torch.OutOfMemoryError as exc:
            reason = str(exc).partition("\n")[0]
            logger.warning("tensors are copied to the host singly: no memory to stage (%s)", reason)
            return None
        self._pinned = Pinned(self._buffer, driver)
        return self._stage

    @property
    def name(self) -> str:
        """The name of the segment; an empty string on a GPU."""
        return self._segment.name if self._segment else ""

    def handle(self) -> KeyedHandle:
        """Return the handle of the buckets; GPU memory is exported once per call."""
        return keyed_handle(self._segment, self._buffer)

    def close(self) -> None:
        """Wait for copies into the buckets, and free the buckets."""
        if self._stage:
            self._stage.close()
        if self._pinned:
            self._pinned.close()
        self._stage = self._pinned = None
        self.tensors = []
        self._buffer = None
        if self._segment:
            self._segment.close()


def keyed_handle(segment: Segment | None, memory: torch.Tensor | None = None) -> KeyedHandle:
    """Return the handle of a segment, or of GPU memory, by the device key that can open it."""
    if segment is not None:
        return {host_key(): SegmentHandle(name=segment.name, nbytes=segment.nbytes)}
    if memory is None:
        raise ConfigError("there is no memory to make a handle of")
    exported = handles.export(memory)
    return {exported.device: exported}


class ProbeMemory:
    """Known bytes in the kind of memory that a path uses: a segment, or memory of GPU `device`."""

    def __init__(self, device: torch.device | None = None) -> None:
        content = os.urandom(PROBE_NBYTES)
        self._digest = probe_digest(content)
        self._segment: Segment | None = None
        self._tensor: torch.Tensor | None = None
        if device is not None:
            self._tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
            wait_for_all_streams([device])
        else:
            self._segment = Segment.create(PROBE_NBYTES)
            self._segment.buffer[:] = content

    @property
    def name(self) -> str:
        """The name of the segment; an empty string on a GPU."""
        return self._segment.name if self._segment else ""

    def info(self) -> ProbeInfo:
        """Return the handle and digest for a reader; GPU memory is exported once per call."""
        handle = keyed_handle(self._segment, self._tensor)
        return ProbeInfo(handle=handle, nbytes=PROBE_NBYTES, digest=self._digest)

    def close(self) -> None:
        """Free the memory."""
        self._tensor = None
        if self._segment:
            self._segment.close()


class Ring:
    """A ring that this process owns: counters, buckets on `device`, and a probe on `probe_device`.

    Raises SegmentError where `/dev/shm` has no room.
    """

    def __init__(
        self,
        shape: RingShape,
        device: torch.device = _CPU,
        probe_device: torch.device | None = None,
    ) -> None:
        self.shape = shape
        with ExitStack() as kept:
            self.control = Control.create(
                slots=shape.num_buckets, readers=shape.num_readers, entries=shape.entries
            )
            kept.callback(self.control.close)
            self.buckets = Buckets(shape.num_buckets, shape.bucket_nbytes, device)
            kept.callback(self.buckets.close)
            self.probe = ProbeMemory(probe_device)
            kept.callback(self.probe.close)
            self._kept = kept.pop_all()

    def offer(self, reader: int, generation: int, storages: StorageInfo | None = None) -> IpcInit:
        """Return the init payload of a reader; GPU memory is exported once per call."""
        self.control.offered = generation
        segment = self.control.segment
        control = SegmentHandle(name=segment.name, nbytes=segment.nbytes)
        data, probe = self.buckets.handle(), self.probe.info()
        return self.shape.offer(reader, control, data, probe, storages)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._kept.close()


class RingStream:
    """One packed update of a ring, as a relay reads it: chunk by chunk, in order.

    `layout` cuts the update into chunks. Rings that are filled with it have the same `epoch` and
    `base`; see RingUpdate. Without `verify` chunks have no fingerprints.
    """

    def __init__(
        self,
        ring: Ring,
        layout: StreamLayout,
        reader: int,
        update: RingUpdate,
        *,
        verify: bool,
        timeout_s: float,
        exclude: Callable[[int], None],
    ) -> None:
        self.layout = layout
        self.epoch, self.base = update.epoch, update.base
        self.verify = verify
        self.timeout_s = timeout_s
        self.device = ring.buckets.tensors[0].device
        self._buckets = ring.buckets.tensors
        self._control = ring.control
        self._index = reader
        self._exclude = exclude
        self._has_left = False
        self._reader = RingReader(
            ring.control, reader, epoch=update.epoch, base=update.base, spin_s=0.0
        )

    def read(self, chunk: int, check: Check) -> tuple[torch.Tensor, list[int]]:
        """Wait for a chunk. Return its bytes (`uint8[nbytes]`) and the fingerprints of its units.

        The bytes are a view of a bucket, valid until `release`. Raises TransferTimeout.
        """
        cut = self.layout.chunks[chunk]
        bucket = self._reader.wait(chunk, check=check, timeout_s=self.timeout_s)
        count = cut.last_unit - cut.first_unit if self.verify else 0
        fingerprints = self._control.fingerprints(bucket * self._control.room, count)
        return self._buckets[bucket][: cut.stop - cut.start], fingerprints

    def release(self, chunk: int) -> None:
        """Let the buckets of all chunks up to this one be filled again; after `leave`: show it.

        Raises TransferError if a bucket was filled again before, or another update has begun.
        """
        if self._has_left:
            self._control.release(self._index, self.base + chunk + 1)
        else:
            self._reader.release(chunk)

    def beat(self) -> None:
        """Show the ring's engine that this reader works, however long a chunk takes.

        Else the update fails after `timeout_s` without a release.
        """
        self._control.beat_reader(self._index)

    def leave(self) -> None:
        """Read no chunk: the ring goes on without this reader; without any, nothing is packed."""
        self._has_left = True
        self._exclude(self._index)


class Relay:
    """A thread that relays one update of a ring: the ring's engine waits for all its readers.

    `run(check)` reads a RingStream to its end. It calls `check` in every wait, which raises after
    `stop`. What it raises is the `error` of the update: a WeightSyncError, or made one.
    """

    def __init__(self, run: Callable[[Check], None], *, name: str = "weightsync-relay") -> None:
        self.error: WeightSyncError | None = None
        self._run_to_end = run
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        end_at_exit(self)

    @property
    def has_ended(self) -> bool:
        """Whether `run` has returned or raised."""
        return self._ended.is_set()

    def check(self) -> None:
        """Raise the error of this update, if it has failed. For `check` of an engine."""
        if self.error is not None:
            raise self.error

    def finish(self, check: Check) -> None:
        """Wait until `run` has returned, and raise what it raised. For `transfer`."""
        while not self._ended.wait(_WAIT_S):
            check()
        self.check()

    def stop(self) -> None:
        """End the thread, and wait for it. Idempotent. For `cancel` and `end`."""
        self._stop.set()
        self._thread.join()

    def end(self, timeout_s: float) -> None:
        """Have the thread end, and wait at most `timeout_s` for it. Idempotent."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._run_to_end(self._check_wanted)
        except WeightSyncError as exc:
            self.error = exc
        except Exception as exc:  # noqa: BLE001 # the caller that waits must get any error
            self.error = TransferError(f"the chunks of this update could not be relayed: {exc!r}")
        finally:
            self._ended.set()

    def _check_wanted(self) -> None:
        if self._stop.is_set():
            raise TransferError("the update was aborted by its sender")


class RingEngine(TrainerWeightTransferEngine, HeldMemory, ReaderWatch):
    """The sending half that packs a source into a ring; a base of other backends' engines.

    A backend with `requires = {"ipc": "shared_memory"}` gets one for its own engine (`of`). That
    engine calls `add_relay` once and returns the index from `base_readers`. The core begins this
    engine first, runs its `transfer` first, and ends it last. `stream` reads what it packs, in the
    thread of a Relay, because `transfer` returns when all readers have released all chunks.

    `table_digest` is that of the chunks; a relay that sends them unchanged has the same one.
    """

    @classmethod
    def of(cls, bases: Mapping[str, TrainerWeightTransferEngine]) -> RingEngine:
        """Return the ring's engine among those of `requires`. Raises ConfigError without one."""
        for engine in bases.values():
            if isinstance(engine, RingEngine):
                return engine
        raise ConfigError(f"none of the engines of {', '.join(bases) or 'no backend'} has a ring")

    @abstractmethod
    def add_relay(self) -> int:
        """Return a reader index for an engine that is built on this one, until `close`.

        Raises ConfigError for more than MAX_RELAYS.
        """

    @abstractmethod
    def stream(self, reader: int) -> RingStream:
        """Return the packed update that `begin` has begun, for a relay. Raises ConfigError."""

    @property
    @abstractmethod
    def shape(self) -> RingShape:
        """The sizes of the ring."""

    @property
    @abstractmethod
    def buckets(self) -> list[torch.Tensor]:
        """The buckets of the ring, `uint8[bucket_nbytes]` each, for instance to register them."""

    @property
    @abstractmethod
    def packed_layout(self) -> StreamLayout:
        """The layout of packed updates of the whole source."""

    @abstractmethod
    def progress(self) -> TransferProgress:
        """Return the progress of the ring's readers, relays included."""
