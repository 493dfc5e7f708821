"""The offer of a sender at init: manifest, owner, handles of memory; and the fields' limits.

A handle is plain data with which another process opens memory.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from msgspec import Meta, Struct

from weightsync.specs import MAX_VERSION

MAX_TENSORS = 1_000_000

Name = Annotated[str, Meta(min_length=1, max_length=1024)]
BackendName = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z_][\w.-]*$")]
UpdateId = Annotated[str, Meta(min_length=1, max_length=128)]
Size = Annotated[int, Meta(ge=0, le=1 << 62)]
Shape = Annotated[list[Size], Meta(max_length=16)]
Version = Annotated[int, Meta(ge=0, le=MAX_VERSION)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
OwnerName = Annotated[str, Meta(max_length=256)]
Term = Annotated[int, Meta(ge=0, le=1 << 62)]


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all structs on the wire. An unknown field is refused, with its path.

    A receiver must not ignore what it is told to do. Handles, probes and addresses are refused in
    replies, too: the sender passes them on to other receivers, without fields that it does not
    know.
    """


class ReplyMessage(Message, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Base of replies and of structs that only replies have. Unknown fields are ignored.

    A newer receiver may say more than this sender knows. What it may not change are the fields and
    the words that are here: a missing field or another word is refused.
    """


# Handles: plain data with which another process opens memory.


class SegmentHandle(Message, frozen=True, kw_only=True, tag="segment", tag_field="kind"):
    """A shared-memory segment of `nbytes` bytes; a tensor lies `offset` bytes into it."""

    name: Annotated[str, Meta(max_length=128)]
    nbytes: Size
    offset: Size = 0


class CudaHandle(Message, frozen=True, kw_only=True, tag="cuda", tag_field="kind"):
    """A CUDA IPC export of one storage of `nbytes` bytes on the GPU `device` (its UUID).

    The other fields are what torch needs to open it and to count its release.
    """

    device: Annotated[str, Meta(max_length=128)]
    nbytes: Size
    handle: bytes
    base_offset: Size
    ref_counter_handle: bytes
    ref_counter_offset: Size
    event_handle: bytes
    event_sync_required: bool
    offset: Size = 0


Handle = SegmentHandle | CudaHandle
KeyedHandle = dict[Name, Handle]  # one memory, by the device key of the processes that can open it


class ManifestMessage(Message, frozen=True, kw_only=True):
    """A manifest as columns."""

    names: Annotated[list[Name], Meta(max_length=MAX_TENSORS)]
    dtype_names: Annotated[list[str], Meta(max_length=MAX_TENSORS)]
    shapes: Annotated[list[Shape], Meta(max_length=MAX_TENSORS)]
    aliases: dict[Name, Name] = {}


# Init


class RingInfo(Message, frozen=True, kw_only=True):
    """Handles of the packed path's buckets."""

    data: KeyedHandle
    num_buckets: Annotated[int, Meta(ge=1, le=1024)]
    bucket_nbytes: Annotated[int, Meta(ge=64, le=1 << 40)]


class StorageInfo(Message, frozen=True, kw_only=True):
    """The registered memory of the unpacked path.

    Tensor i lies `offset[i]` bytes into `storage[i]`. Every tensor is contiguous there.
    """

    handles: Annotated[list[KeyedHandle], Meta(max_length=MAX_TENSORS)]
    storage: Annotated[list[Size], Meta(max_length=MAX_TENSORS)]
    offset: Annotated[list[Size], Meta(max_length=MAX_TENSORS)]


class ProbeInfo(Message, frozen=True, kw_only=True):
    """Known bytes that a receiver opens and checks before a path counts as usable."""

    handle: KeyedHandle
    nbytes: Annotated[int, Meta(ge=1, le=1 << 16)]
    digest: str


class Owner(Message, frozen=True, kw_only=True):
    """The sender that owns a receiver from its init message on.

    `id` is new for each `connect`; `name` says where it runs. `term` orders the owners of one
    receiver: an offer replaces a living owner of a lower term. An owner that `yields` lets any
    sender take the receiver between updates.
    """

    id: Name
    name: OwnerName
    term: Term = 0
    yields: bool = False


class OwnerStatus(ReplyMessage, frozen=True, kw_only=True):
    """The last owner of a receiver, as its status has it; see Owner.

    `since` is when it became the owner, in seconds of Unix time. `alive` says whether it lives.
    """

    id: Name
    name: OwnerName
    term: Term = 0
    yields: bool = False
    since: float = 0.0
    alive: bool = True


MAX_RANKS = 4096
MAX_SPANS = 1 << 16


class BoxInfo(Message, frozen=True, kw_only=True):
    """A box of a tensor of `shape`: its spans for each dimension, begin and end in elements."""

    shape: Shape
    spans: Annotated[
        list[Annotated[list[tuple[Size, Size]], Meta(max_length=MAX_SPANS)]], Meta(max_length=16)
    ]


class StreamInfo(Message, frozen=True, kw_only=True):
    """The boxes that one rank of the trainer sends; `payload` is for the engine alone.

    Box i is `boxes[box[i]]` of tensor `tensors[i]` of the manifest. `path` is that of its bytes.
    """

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    path: BackendName
    tensors: Annotated[list[Size], Meta(max_length=MAX_TENSORS)]
    boxes: Annotated[list[BoxInfo], Meta(max_length=MAX_TENSORS)]
    box: Annotated[list[Size], Meta(max_length=MAX_TENSORS)]
    payload: Any = None


class WantsInfo(ReplyMessage, frozen=True, kw_only=True):
    """The boxes that a receiver loads of the tensors that it was offered, where not all are whole.

    It loads `boxes[box[i]]` of tensor `tensors[i]` of the manifest.
    """

    tensors: Annotated[list[Size], Meta(max_length=MAX_TENSORS)]
    boxes: Annotated[list[BoxInfo], Meta(max_length=MAX_TENSORS)]
    box: Annotated[list[Size], Meta(max_length=MAX_TENSORS)]


class StreamsInfo(Message, frozen=True, kw_only=True):
    """The payload of an init by which several ranks send, each its boxes: all tensors together.

    The payload of an update is then the list of theirs, in the same order; of a delta, a list of
    StreamPackets.
    """

    streams: Annotated[list[StreamInfo], Meta(min_length=1, max_length=MAX_RANKS)]


class StreamsUpdate(Message, frozen=True, kw_only=True):
    """The payload of each rank, of an update of the whole model.

    `sums`: the reply has the `parts` of each tensor that this update wrote.
    """

    payloads: Annotated[list[Any], Meta(min_length=1, max_length=MAX_RANKS)]
    sums: bool = False


class StreamPackets(Message, frozen=True, kw_only=True):
    """The packets of one rank's delta; `payload` is for the engine alone.

    The fingerprint of a base is then the beginning of the digest of those of all ranks.
    """

    manifest: ManifestMessage
    payload: Any = None


class InitInfo(Message, frozen=True, kw_only=True):
    """The offer of a sender to one receiver; `payload` is for the engine of `backend` alone.

    `path` is the path of the bytes. `lease_s` is how long the receiver waits for progress before it
    aborts an update. `fleet_version` is the version that the other receivers hold: a receiver with
    an older one must not generate before an update. `generation` grows with each init of a sender,
    so that a late one does not undo a newer. `owner` owns the receiver from now on; without it the
    owner stays the same.
    """

    backend: BackendName
    path: BackendName
    protocol_min: int
    protocol_max: int
    sender: Name
    manifest: ManifestMessage
    lease_s: Seconds
    fleet_version: Version | None = None
    generation: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    owner: Owner | None = None
    payload: Any = None


class ProbeRequest(Message, frozen=True, kw_only=True):
    """A backend's probe, which tests a path before other memory is exported."""

    backend: BackendName
    payload: Any = None


def describe(owner: OwnerStatus) -> str:
    """Return an owner's name and the time since it owns the receiver, for a message."""
    return f"{owner.name} (since {utc(owner.since)})"


def utc(seconds: float) -> str:
    """Return Unix time as ISO 8601, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
