"""How a tensor stands in a message: msgpack extensions, each with what is needed to rebuild it."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Ext

from weightsync.errors import ProtocolError
from weightsync.specs import TensorSpec
from weightsync.wire.offers import Shape

T = TypeVar("T")
Frame = bytes | bytearray | memoryview

IN_LINE, IN_FRAME, CARRIED, VALUE = 1, 2, 3, 4
"""Extension codes: a tensor with its bytes, with the number of its frame, with a carrier's handle;
and what is no tensor (message_values)."""
MAX_TENSORS = 1 << 16

_Dtype = Annotated[str, Meta(max_length=32)]


class InLine(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor and its bytes."""

    dtype: _Dtype
    shape: Shape
    data: bytearray


class InFrame(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor whose bytes are an auxiliary frame of the message; frame 0 is the message."""

    dtype: _Dtype
    shape: Shape
    frame: Annotated[int, Meta(ge=1, le=MAX_TENSORS)]


def in_line(spec: TensorSpec, data: memoryview) -> Ext:
    """Return what stands in the message for a tensor with these bytes."""
    tensor = InLine(spec.dtype, list(spec.shape), bytearray(data))
    return Ext(IN_LINE, msgspec.msgpack.encode(tensor))


def in_frame(spec: TensorSpec, number: int) -> Ext:
    """Return what stands in the message for a tensor in auxiliary frame `number`."""
    return Ext(IN_FRAME, msgspec.msgpack.encode(InFrame(spec.dtype, list(spec.shape), number)))


def line_of(data: memoryview) -> InLine:
    """Return what a tensor is that came with its bytes. Raises ProtocolError."""
    return _decode(data, InLine)


def frame_of(data: memoryview) -> InFrame:
    """Return which frame a tensor is in, and what it is. Raises ProtocolError."""
    return _decode(data, InFrame)


def _decode(data: memoryview, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"a tensor of this message cannot be read: {exc}") from exc
