"""The payloads of the messages between the two engines of `gloo`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from weightsync.backends.ipc.payload import IpcInit, RingUpdate
from weightsync.wire.offers import KeyedHandle, Message, ProbeInfo, Seconds, SegmentHandle, Size
from weightsync.wire.struct_types import prepare


class GroupInfo(Message, frozen=True, kw_only=True):
    """A private torch.distributed group, and the rank of one receiving host in it.

    The group's store listens on `address`; `epoch` counts the groups of one sender. `members` has
    the name of every rank for messages to a user, the sender (rank 0) first.
    """

    address: Annotated[str, Meta(min_length=1, max_length=256)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    epoch: Annotated[int, Meta(ge=1, le=1 << 62)]
    rank: Annotated[int, Meta(ge=1, le=4096)]
    members: Annotated[list[str], Meta(min_length=2, max_length=4096)]
    timeout_s: Seconds


class RingShape(Message, frozen=True, kw_only=True):
    """The sizes of the ring that a group member creates for its host, as of the sender's ring."""

    num_readers: Annotated[int, Meta(ge=1, le=4096)]
    entries: Annotated[int, Meta(ge=1, le=1 << 32)]
    unit_nbytes: Annotated[int, Meta(ge=4096, le=1 << 40)]
    num_buckets: Annotated[int, Meta(ge=1, le=1024)]
    bucket_nbytes: Annotated[int, Meta(ge=64, le=1 << 40)]


class GlooInit(Message, frozen=True, kw_only=True):
    """A receiver's role: a member of the private `group`, or a reader of its host's `ring`."""

    group: GroupInfo | None = None
    shape: RingShape | None = None
    ring: IpcInit | None = None


class HostRing(Message, frozen=True, kw_only=True):
    """The ring that a group member created for its host. The member itself is reader 0."""

    control: SegmentHandle
    data: KeyedHandle
    probe: ProbeInfo


class RelayedUpdate(RingUpdate, frozen=True, kw_only=True):
    """A packed update. `readers` are the reader indices on the ring of a group member's host."""

    readers: Annotated[list[Size], Meta(max_length=4096)]


prepare(GlooInit, HostRing, RelayedUpdate)
