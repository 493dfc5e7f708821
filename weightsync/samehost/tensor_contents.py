"""Where a tensor of a queue arrives: in its packet, in a block of shared memory, on a GPU."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress

import torch

from weightsync.errors import HandleError, WeightSyncError
from weightsync.samehost import cuda_handle
from weightsync.samehost.segment import Segment
from weightsync.samehost.segment_pool import HEADER_NBYTES
from weightsync.samehost.tensor_arrivals import Arrival, Payload
from weightsync.samehost.tensor_bytes import checked_spec, from_bytes
from weightsync.specs import TensorSpec
from weightsync.wire.tensor_packets import Arriving, InBlock, InPacket, OnGpu


class Mappings:
    """The segments of one sender, mapped when they are first named."""

    def __init__(self) -> None:
        self._open: dict[str, Segment] = {}

    def get(self, name: str, nbytes: int) -> Segment:
        """Return the segment, writable, since tensors handed out may be changed in place."""
        segment = self._open.get(name)
        if segment is None:
            segment = self._open[name] = Segment.open(name, nbytes=nbytes, writable=True)
        if segment.nbytes != nbytes:
            raise HandleError(
                f"segment {name} has {segment.nbytes} bytes, the handle says {nbytes}"
            )
        return segment

    def forget(self, name: str) -> None:
        """Unmap one; views of it that live on keep its memory."""
        segment = self._open.pop(name, None)
        if segment is not None:
            segment.close()

    def close(self) -> None:
        """Unmap all. Idempotent."""
        for name in list(self._open):
            self.forget(name)


def arrival_of(packet: Arriving, mappings: Mappings) -> Arrival:
    """Return what a packet brought; what cannot be opened raises when it is asked for.

    Raises ProtocolError for a packet that describes no tensor, or lies about where it is.
    """
    handle = packet.handle
    spec = checked_spec(handle.tensor_id, handle.dtype, handle.shape)
    try:
        return Arrival(handle, _content(packet, spec, mappings))
    except WeightSyncError as exc:
        return Arrival(handle, _Broken(exc))


def _content(packet: Arriving, spec: TensorSpec, mappings: Mappings) -> Payload:
    if isinstance(packet, InBlock):
        return _SharedBlock(packet, spec, mappings)
    if isinstance(packet, InPacket):
        _check_fits(spec, len(packet.data), exactly=True)
        return _PacketBytes(packet.data, spec)
    _check_fits(spec, packet.memory.nbytes - packet.memory.offset)
    return _GpuMemory(packet, spec)


def _check_fits(spec: TensorSpec, room: int, *, exactly: bool = False) -> None:
    if spec.nbytes > room or (exactly and spec.nbytes != room):
        raise HandleError(
            f"{spec} has {spec.nbytes} bytes and came with {room}; sender and receiver must be of "
            "one version"
        )


class _Broken:
    def __init__(self, error: WeightSyncError) -> None:
        self._error = error

    def tensor(self) -> torch.Tensor:
        raise self._error

    def drop(self) -> None:
        return


class _PacketBytes:
    def __init__(self, data: bytearray, spec: TensorSpec) -> None:
        self._data = data
        self._spec = spec

    def tensor(self) -> torch.Tensor:
        flat = torch.empty(0, dtype=torch.uint8)
        if self._data:
            flat = torch.frombuffer(self._data, dtype=torch.uint8)
        return from_bytes(flat, self._spec.dtype, self._spec.shape)

    def drop(self) -> None:
        return


class _SharedBlock:
    """A block on loan; it goes back when the last tensor that views it is gone."""

    def __init__(self, packet: InBlock, spec: TensorSpec, mappings: Mappings) -> None:
        where = packet.segment
        if packet.block >= _blocks_in(where.nbytes, where.offset, packet.block):
            raise HandleError(f"block {packet.block} lies outside segment {where.name}")
        if not spec.nbytes:
            raise HandleError(f"{spec} has no bytes and needs no block of segment {where.name}")
        _check_fits(spec, where.nbytes - where.offset)
        segment = mappings.get(where.name, where.nbytes)
        self._view = segment.buffer[where.offset : where.offset + spec.nbytes]
        self._words = segment.buffer[:HEADER_NBYTES].cast("Q")
        self._block = packet.block
        self._ticket = packet.ticket
        self._spec = spec

    def tensor(self) -> torch.Tensor:
        view = self._view
        flat = torch.frombuffer(view, dtype=torch.uint8)
        # torch keeps the memoryview for as long as anything uses the storage.
        given = weakref.finalize(
            view, _give_back, self._words, self._block, self._ticket, os.getpid()
        )
        given.atexit = False  # the owner sees that this process ended
        self._view = memoryview(b"")
        return from_bytes(flat, self._spec.dtype, self._spec.shape)

    def drop(self) -> None:
        self._view = memoryview(b"")
        _give_back(self._words, self._block, self._ticket, os.getpid())


def _blocks_in(nbytes: int, offset: int, block: int) -> int:
    """Return how many blocks a segment has where block number `block` starts at `offset`."""
    room = nbytes - HEADER_NBYTES
    start = offset - HEADER_NBYTES
    if start < 0 or offset >= nbytes or (start == 0) != (block == 0):
        return 0
    if block == 0:
        return 1
    size, rest = divmod(start, block)
    return 0 if rest or room % size else room // size


def _give_back(words: memoryview, block: int, ticket: int, pid: int) -> None:
    # Called from wherever the last reference dies, so it takes no lock. A fork drops its copies of
    # the tensors too, and may not give away what its parent still uses.
    if os.getpid() == pid:
        words[block] = ticket


class _GpuMemory:
    def __init__(self, packet: OnGpu, spec: TensorSpec) -> None:
        self._memory = packet.memory
        self._spec = spec

    def tensor(self) -> torch.Tensor:
        flat = cuda_handle.open_handle(self._memory)[: self._spec.nbytes]
        return from_bytes(flat, self._spec.dtype, self._spec.shape)

    def drop(self) -> None:
        with suppress(WeightSyncError):
            cuda_handle.withdraw(self._memory)
