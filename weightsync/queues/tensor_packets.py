"""Wire format of a tensor queue: handles, and the packets of its socket (msgpack arrays)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from weightsync.errors import ConfigError, ProtocolError, TransferError
from weightsync.wire.offers import CudaHandle, Message, SegmentHandle, Shape, Size

PROTOCOL = 1
MAX_PACKET = 64 << 10
"""Maximum size of a packet in bytes."""
MAX_BLOCKS = 64
"""Maximum number of blocks in a segment; each has a word in the segment's first page."""

MAX_NAME_LENGTH = 1024
Text = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]
Token = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Sequence = Annotated[int, Meta(ge=1, le=1 << 62)]


class TensorQueueHandle(Message, frozen=True, kw_only=True):
    """Address of a tensor queue, as plain data for the processes that send to it."""

    address: Token
    host: Annotated[str, Meta(max_length=128)]
    protocol: int = PROTOCOL


class TensorIpcHandle(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Handle of one tensor in a queue, carried by the message that the tensor belongs to.

    `sender` and `sequence` identify the tensor; the other fields describe it. `device` is the
    device on which it arrives.
    """

    request_id: Text | None
    tensor_id: Text
    shape: Shape
    dtype: Annotated[str, Meta(max_length=32)]
    device: Annotated[str, Meta(max_length=128)]
    sender: Token
    sequence: Sequence


class Packet(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all packets on the socket."""


class Hello(Packet, frozen=True, array_like=True, tag=1):
    """A sender's first packet. `word` is the first 64-bit word of the segment `probe`."""

    protocol: int
    sender: Token
    name: Text
    probe: SegmentHandle
    word: Size


class Welcome(Packet, frozen=True, array_like=True, tag=2):
    """Reply to Hello. The queue can open CUDA memory of `gpus`; a `refusal` gives its reason."""

    gpus: Annotated[list[str], Meta(max_length=1024)]
    refusal: str = ""


class InPacket(Packet, frozen=True, array_like=True, tag=3):
    """A small tensor with its bytes."""

    handle: TensorIpcHandle
    data: bytearray


class InBlock(Packet, frozen=True, array_like=True, tag=4):
    """A tensor at the start of a block of a segment.

    The receiver releases the block: it sets the block's word in the first page to `ticket`.
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
    """The sender will not use the segment `name` again."""

    name: Annotated[str, Meta(max_length=128)]


class Discard(Packet, frozen=True, array_like=True, tag=7):
    """The tensor with this sequence number is not needed."""

    sequence: Sequence


class Goodbye(Packet, frozen=True, array_like=True, tag=8):
    """The sender closes; it waits for any reply before it removes its segments."""


Arriving = InPacket | InBlock | OnGpu
Sent = Hello | InPacket | InBlock | OnGpu | Forget | Discard | Goodbye

_encoder = msgspec.msgpack.Encoder()
_sent: msgspec.msgpack.Decoder[Sent] = msgspec.msgpack.Decoder(Sent)
_welcome = msgspec.msgpack.Decoder(Welcome)
_handle = msgspec.msgpack.Decoder(TensorIpcHandle)


def encode(packet: Packet | TensorIpcHandle) -> bytes:
    """Encode a packet or a handle, without the checks of `encode_packet`."""
    return _encoder.encode(packet)


def encode_packet(packet: Packet) -> bytes:
    """Encode a packet.

    Raises TransferError if it is too long for the socket, ConfigError if a name is not valid text.
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
    """Decode a sender's packet. Raises ProtocolError for other bytes."""
    try:
        return _sent.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"this is no packet of a tensor queue: {exc}") from exc


def decode_welcome(raw: bytes) -> Welcome:
    """Decode the queue's reply to a Hello. Raises ProtocolError for other bytes."""
    try:
        return _welcome.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"the tensor queue's reply is not a welcome packet: {exc}") from exc


def decode_handle(raw: bytes | memoryview) -> TensorIpcHandle:
    """Decode a handle made by `encode`. Raises ProtocolError for other bytes."""
    try:
        return _handle.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"this is no handle of a tensor in a queue: {exc}") from exc
