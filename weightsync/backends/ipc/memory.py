"""Memory that a sender allocates for its readers: buckets, probes, their handles and usage."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from weightsync.cuda import handles
from weightsync.cuda.device_stream import DeviceStream
from weightsync.cuda.memory import PROBE_NBYTES, probe_digest
from weightsync.cuda.pinning import CudaDriver, Driver, Pinned
from weightsync.cuda.staging import CopyStream, CudaCopyStream, StagedBuckets
from weightsync.errors import ConfigError
from weightsync.shm.host_keys import host_key
from weightsync.shm.ring import Control, RingWriter
from weightsync.shm.segment import Segment
from weightsync.shm.shared_stream import SharedStream
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.copying.copy_plan import Memory, UnitCompiler
from weightsync.weights.copying.fused import hashers
from weightsync.weights.copying.layout import StreamLayout
from weightsync.wire.offers import KeyedHandle, ProbeInfo, SegmentHandle, StorageInfo

logger = logging.getLogger(__name__)


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


def stage_on_gpu(ring: Buckets, device: torch.device) -> StagedBuckets | None:
    """Stage a ring on the host for tensors on `device`; None for tensors on the host."""
    if device.type != "cuda":
        return None
    return ring.stage(device, CudaCopyStream(device), CudaDriver(device))


def register(
    layout: StreamLayout,
    stable: list[torch.Tensor] | None,
    device: torch.device | None,
    *,
    adopt: bool,
) -> SharedStream | DeviceStream:
    """Register a layout's tensors on the GPU `device`, or in a segment where `device` is None."""
    specs = layout.manifest.specs
    dtypes = [TORCH_DTYPES[spec.dtype] for spec in specs]
    shapes = [spec.shape for spec in specs]
    if device is not None:
        return DeviceStream(dtypes, shapes, device, stable)
    return SharedStream(layout.offsets, dtypes, shapes, layout.nbytes, adopt=adopt)


def in_place_hashers(
    memory: SharedStream | DeviceStream, layout: StreamLayout
) -> list[Callable[[], int]]:
    """Return a function for each copy unit of registered memory that fingerprints it in place."""
    in_place = Memory(memory.tensors, flat=isinstance(memory, SharedStream))
    compiler = UnitCompiler(layout, in_place, in_place)
    return hashers([compiler.compile(unit) for unit in layout.units])


def storage_info(
    memory: SharedStream | DeviceStream | None, layout: StreamLayout
) -> StorageInfo | None:
    """Return the handles of registered memory; GPU memory is exported once per call."""
    if memory is None:
        return None
    if isinstance(memory, SharedStream):
        return StorageInfo(
            handles=[keyed_handle(memory.segment)],
            storage=[0] * len(layout.offsets),
            offset=layout.offsets,
        )
    storages, where, offsets = memory.storages()
    handles = [keyed_handle(None, storage) for storage in storages]
    return StorageInfo(handles=handles, storage=where, offset=offsets)


def keyed_handle(segment: Segment | None, memory: torch.Tensor | None = None) -> KeyedHandle:
    """Return the handle of a segment, or of GPU memory, by the device key that can open it."""
    if segment is not None:
        return {host_key(): SegmentHandle(name=segment.name, nbytes=segment.nbytes)}
    if memory is None:
        raise ConfigError("there is no memory to make a handle of")
    exported = handles.export(memory)
    return {exported.device: exported}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStream:
    """A packed update in progress, for a reader in the sender's own process."""

    control: Control
    buckets: list[torch.Tensor]
    layout: StreamLayout
    epoch: int
    base: int
    verify: bool
    timeout_s: float


class ProbeMemory:
    """Known bytes in the kind of memory that a path uses: a segment, or memory of GPU `device`."""

    def __init__(self, device: torch.device | None = None) -> None:
        content = os.urandom(PROBE_NBYTES)
        self._digest = probe_digest(content)
        self._segment: Segment | None = None
        self._tensor: torch.Tensor | None = None
        if device is not None:
            self._tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
            torch.cuda.synchronize(device)
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


def memory_names(memory: SharedStream | DeviceStream | None) -> list[tuple[str, int]]:
    """Return a name for each piece of registered memory, and its bytes."""
    if isinstance(memory, SharedStream):
        return [(memory.segment.name, memory.segment.nbytes)]
    if isinstance(memory, DeviceStream):
        return [(str(storage.device), storage.numel()) for storage in memory.storages()[0]]
    return []


def unreleased(writer: RingWriter) -> list[int]:
    """Return the last update's readers that have not released a published chunk."""
    published = writer.control.published
    # A reader that joined since has released nothing of an earlier update.
    return writer.control.behind(published) if published > writer.base else []
