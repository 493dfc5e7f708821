"""What a tensor queue says: its handles, and the small packets of its socket (msgpack arrays)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from weightsync.errors import ConfigError, ProtocolError, TransferError
from weightsync.wire.offers import CudaHandle, Message, SegmentHandle, Shape, Size

PROTOCOL = 1
MAX_PACKET = 64 << 10
"""Bytes of the longest packet."""
MAX_BLOCKS = 64
"""Blocks of one segment; each has a word in its first page."""

Text = Annotated[str, Meta(max_length=1024)]
Token = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Sequence = Annotated[int, Meta(ge=1, le=1 << 62)]


class TensorQueueHandle(Message, frozen=True, kw_only=True):
    """Where a tensor queue listens, as plain data for the processes that send to it."""

    address: Token
    host: Annotated[str, Meta(max_length=128)]
    protocol: int = PROTOCOL


class TensorIpcHandle(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor on its way through a queue: what the message that goes with it carries.

    `sender` and `sequence` find it; the rest describes it. `device` is where it arrives.
    """

    request_id: Text | None
    tensor_id: Text
    shape: Shape
    dtype: Annotated[str, Meta(max_length=32)]
    device: Annotated[str, Meta(max_length=128)]
    sender: Token
    sequence: Sequence


class Packet(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of everything on the socket."""


class Hello(Packet, frozen=True, array_like=True, tag=1):
    """A sender's first packet; `word` stands at the start of the segment `probe`."""

    protocol: int
    sender: Token
    name: Text
    probe: SegmentHandle
    word: Size


class Welcome(Packet, frozen=True, array_like=True, tag=2):
    """The queue takes the sender, and opens CUDA handles of `gpus`; with `refusal` it does not."""

    gpus: Annotated[list[str], Meta(max_length=1024)]
    refusal: str = ""


class InPacket(Packet, frozen=True, array_like=True, tag=3):
    """A small tensor, with its bytes."""

    handle: TensorIpcHandle
    data: bytearray


class InBlock(Packet, frozen=True, array_like=True, tag=4):
    """A tensor at the start of a block of a segment.

    Whoever is done with it sets the block's word in the segment's first page to `ticket`.
    """

    handle: TensorIpcHandle
    segment: SegmentHandle
    block: Annotated[int, Meta(ge=0, lt=MAX_BLOCKS)]
    ticket: Sequence


class OnGpu(Packet, frozen=True, array_like=True, tag=5):
    """A tensor in CUDA memory."""

    handle: TensorIpcHandle
    memory: CudaHandle


class Forget(Packet, frozen=True, array_like=True, tag=6):
    """The segment `name` will not be named again."""

    name: Annotated[str, Meta(max_length=128)]


class Discard(Packet, frozen=True, array_like=True, tag=7):
    """Nobody will ask for the tensor of this sequence number."""

    sequence: Sequence


class Goodbye(Packet, frozen=True, array_like=True, tag=8):
    """The sender ends by its own will, and waits for any answer before its segments go."""


Arriving = InPacket | InBlock | OnGpu
Sent = Hello | InPacket | InBlock | OnGpu | Forget | Discard | Goodbye

_encoder = msgspec.msgpack.Encoder()
_sent: msgspec.msgpack.Decoder[Sent] = msgspec.msgpack.Decoder(Sent)
_welcome = msgspec.msgpack.Decoder(Welcome)
_handle = msgspec.msgpack.Decoder(TensorIpcHandle)


def encode(packet: Packet | TensorIpcHandle) -> bytes:
    """Return a packet or a handle as bytes."""
    return _encoder.encode(packet)


def encode_packet(packet: Packet) -> bytes:
    """Return a packet as bytes.

    Raises TransferError for one that is too long for the socket, ConfigError for names that are no
    text.
    """
    try:
        raw = _encoder.encode(packet)
    except UnicodeEncodeError as exc:
        raise ConfigError(f"a name of a tensor cannot be sent: {exc}") from exc
    if len(raw) > MAX_PACKET:
        raise TransferError(
            f"the description of a tensor takes {len(raw)} bytes and may take {MAX_PACKET}; "
            "shorten request_id and tensor_id"
        )
    return raw


def decode_sent(raw: bytes | memoryview) -> Sent:
    """Return a sender's packet. Raises ProtocolError when it is none."""
    try:
        return _sent.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"this is no packet of a tensor queue: {exc}") from exc


def decode_welcome(raw: bytes) -> Welcome:
    """Return the queue's answer to a hello. Raises ProtocolError when it is none."""
    try:
        return _welcome.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"the tensor queue's answer is not one of ours: {exc}") from exc


def decode_handle(raw: bytes | memoryview) -> TensorIpcHandle:
    """Return the handle that `encode` made. Raises ProtocolError when it is none."""
    try:
        return _handle.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"this is no handle of a tensor in a queue: {exc}") from exc
