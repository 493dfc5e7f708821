"""What the two halves of `ipc` tell each other: the payloads of its messages."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from weightsync.wire.offers import (
    Message,
    ProbeInfo,
    ReadyEvents,
    RingInfo,
    SegmentHandle,
    Size,
    StorageInfo,
)
from weightsync.wire.struct_types import prepare


class IpcInit(Message, frozen=True, kw_only=True):
    """A ring in memory that the receiver can open, and its reader place there.

    `entries` is the room for fingerprints in the control segment.
    """

    probe: ProbeInfo
    control: SegmentHandle
    reader: Annotated[int, Meta(ge=0, le=4096)]
    num_readers: Annotated[int, Meta(ge=1, le=4096)]
    entries: Annotated[int, Meta(ge=1, le=1 << 32)]
    run_nbytes: Annotated[int, Meta(ge=4096, le=1 << 40)]
    ring: RingInfo
    storages: StorageInfo | None = None
    ready: ReadyEvents | None = None


class RingUpdate(Message, frozen=True, kw_only=True):
    """An update by the ring (`packed`) or from registered memory; `epoch` is the ring's.

    `base` counts what the ring, or the table of registered memory, carried before.
    """

    epoch: Annotated[int, Meta(ge=1, le=1 << 62)]
    base: Size
    packed: bool


prepare(IpcInit, RingUpdate, ProbeInfo)
