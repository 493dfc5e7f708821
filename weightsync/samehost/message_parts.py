"""How the parts of a message lie in memory: a table of sizes, the msgpack, then each buffer."""

from __future__ import annotations

import ctypes
import struct

from weightsync.errors import ProtocolError
from weightsync.samehost.buffer_address import buffer_address

ALIGNMENT = 64
_COUNTS = struct.Struct("<QQ")
# A copy of this size or more lets other threads run meanwhile.
_LARGE_NBYTES = 256 << 10


class Encoded:
    """A message ready to be written: `body` is msgpack, `buffers` are views of the sender's data.

    The views must be read before the sender changes that data; `kept` holds it until then.
    """

    __slots__ = ("body", "buffers", "kept", "nbytes")

    def __init__(self, body: bytes, buffers: list[memoryview], kept: list[object]) -> None:
        self.body = body
        self.buffers = buffers
        self.kept = kept
        self.nbytes = _COUNTS.size + 8 * len(buffers) + len(body)
        for buffer in buffers:
            self.nbytes = _aligned(self.nbytes) + len(buffer)

    def write(self, target: memoryview) -> None:
        """Copy everything into the first `nbytes` bytes of `target`, which is 64-byte aligned."""
        body, buffers = self.body, self.buffers
        _COUNTS.pack_into(target, 0, len(body), len(buffers))
        at = _COUNTS.size
        if buffers:
            struct.pack_into(f"<{len(buffers)}Q", target, at, *map(len, buffers))
            at += 8 * len(buffers)
        target[at : at + len(body)] = body
        at += len(body)
        for buffer in buffers:
            at = _aligned(at)
            copy_bytes(target[at : at + len(buffer)], buffer)
            at += len(buffer)


def buffer_offset(body: bytes) -> int:
    """Return where the buffer of a message with this `body` and a single buffer begins."""
    return _aligned(_COUNTS.size + 8 + len(body))


def write_around(target: memoryview, body: bytes) -> memoryview:
    """Write a message with a single buffer, but for that: it is returned, the rest of `target`."""
    at = buffer_offset(body)
    _COUNTS.pack_into(target, 0, len(body), 1)
    struct.pack_into("<Q", target, _COUNTS.size, len(target) - at)
    target[_COUNTS.size + 8 : _COUNTS.size + 8 + len(body)] = body
    return target[at:]


def split(source: memoryview) -> tuple[memoryview, list[memoryview]]:
    """Return body and buffers of what `Encoded.write` wrote, as views. Raises ProtocolError."""
    try:
        body_nbytes, count = _COUNTS.unpack_from(source)
        at = _COUNTS.size + 8 * count
        sizes = struct.unpack_from(f"<{count}Q", source, _COUNTS.size) if count else ()
    except (struct.error, OverflowError, MemoryError) as exc:
        raise ProtocolError(f"a message of {len(source)} bytes has no table: {exc}") from exc
    body = source[at : at + body_nbytes]
    at += body_nbytes
    buffers = []
    for size in sizes:
        at = _aligned(at)
        buffers.append(source[at : at + size])
        at += size
    if at != len(source):
        raise ProtocolError(f"the parts of a message have {at} bytes, it has {len(source)}")
    return body, buffers


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy `source` over `target`, of the same size; other threads may run while much is copied.

    Not by torch's copy, whose worker threads wait for each other where processors are busy.
    """
    nbytes = len(source)
    if nbytes < _LARGE_NBYTES:
        target[:] = source
    else:
        ctypes.memmove(buffer_address(target), buffer_address(source), nbytes)
