"""The payloads of the messages between the two engines of `tcp`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from weightsync.backends.ring import IpcInit, RingShape, RingUpdate
from weightsync.wire.offers import (
    MAX_TENSORS,
    KeyedHandle,
    Message,
    ProbeInfo,
    ReplyMessage,
    Seconds,
    SegmentHandle,
    Size,
)
from weightsync.wire.struct_types import prepare

SECRET_NBYTES = 16


class Peer(Message, frozen=True, kw_only=True):
    """A process that serves chunks at an address: the sender, or one receiver of a host.

    `place` is the reader index of that receiver, -1 for the sender. `name` is for messages.
    """

    name: Annotated[str, Meta(max_length=1024)]
    place: Annotated[int, Meta(ge=-1, le=1 << 32)]
    address: Annotated[str, Meta(min_length=1, max_length=256)]
    port: Annotated[int, Meta(ge=1, le=65535)]


class Membership(Message, frozen=True, kw_only=True):
    """The init data of a receiver that feeds its host: the `sender`, and its own `place`.

    `secret` (hex) opens the connections of this sender's receivers to it and to each other.
    """

    sender: Peer
    place: Annotated[int, Meta(ge=0, le=1 << 32)]
    secret: Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * SECRET_NBYTES}}}$")]
    shape: RingShape
    timeout_s: Seconds


class TcpInit(Message, frozen=True, kw_only=True):
    """A receiver's role: it feeds its host as a `member`, or reads the `ring` of one that does.

    `generation` is that of the init message of the ring's member.
    """

    member: Membership | None = None
    ring: IpcInit | None = None
    generation: Size = 0


class HostRing(ReplyMessage, frozen=True, kw_only=True):
    """The ring that a member created for its host, as reader 0, and where it serves chunks.

    `generation` is that of the init message.
    """

    control: SegmentHandle
    data: KeyedHandle
    probe: ProbeInfo
    peer: Peer
    generation: Size

    def offer(self, reader: int, shape: RingShape) -> IpcInit:
        """Return the init payload of another reader of this ring."""
        return shape.offer(reader, self.control, self.data, self.probe)


class RelayedUpdate(RingUpdate, frozen=True, kw_only=True):
    """A packed update, and what a member needs for it.

    `readers` are the reader indices on the ring of its host. `sources` serve the chunks, the best
    first and the sender last. `followers` are the places of the hosts after this one, nearest
    first; they read from the nearest host before them that works.
    """

    readers: Annotated[list[Size], Meta(max_length=4096)] = field(default_factory=list)
    sources: Annotated[list[Peer], Meta(max_length=4096)] = field(default_factory=list)
    followers: Annotated[list[Size], Meta(max_length=4096)] = field(default_factory=list)


class PartlyRelayedUpdate(RelayedUpdate, frozen=True, kw_only=True):
    """An update of which only the bytes of some `chunks` come to a host, and all fingerprints.

    `chunks` are runs, growing: the first, and the one after the last. The readers of the host want
    nothing of the others.
    """

    chunks: Annotated[list[tuple[Size, Size]], Meta(max_length=MAX_TENSORS)]


prepare(TcpInit, HostRing, RelayedUpdate, PartlyRelayedUpdate)
