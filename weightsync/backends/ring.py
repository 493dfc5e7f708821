"""The ring that carries weights to the readers of one host: its offers, and its memory."""

from __future__ import annotations

import logging
import os
from typing import Annotated

import torch
from msgspec import Meta

from weightsync.cuda import handles
from weightsync.cuda.memory import PROBE_NBYTES, probe_digest
from weightsync.cuda.pinning import Driver, Pinned
from weightsync.cuda.staging import CopyStream, StagedBuckets
from weightsync.cuda.wait import wait_for_all_streams
from weightsync.errors import ConfigError
from weightsync.shm.host_keys import host_key
from weightsync.shm.segment import Segment
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


class RingShape(Message, frozen=True, kw_only=True):
    """The sizes of the ring that a receiver creates for its host, as of the sender's ring."""

    num_readers: Annotated[int, Meta(ge=1, le=4096)]
    entries: Annotated[int, Meta(ge=1, le=1 << 32)]
    unit_nbytes: Annotated[int, Meta(ge=4096, le=1 << 40)]
    num_buckets: Annotated[int, Meta(ge=1, le=1024)]
    bucket_nbytes: Annotated[int, Meta(ge=64, le=1 << 40)]


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
