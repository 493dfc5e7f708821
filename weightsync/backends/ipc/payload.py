"""The payloads of the messages between the two engines of `ipc`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from weightsync.wire.offers import (
    Message,
    ProbeInfo,
    RingInfo,
    SegmentHandle,
    Size,
    StorageInfo,
)
from weightsync.wire.struct_types import prepare


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
