"""Tensors of requests, out of band: several sending processes, one that receives.

A tensor is copied once, into shared memory that is made once and used again; a small packet says
where it is, and the handle that `send_tensor` returns goes with the request's message. The receiver
gets a view of that memory, which goes back to its sender when the last use of it is gone. Small
tensors travel in their packet. See docs/tensor-queue.md.
"""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from weightsync.errors import ConfigError, ConnectError
from weightsync.samehost import cuda_handle
from weightsync.samehost.device_keys import host_key
from weightsync.samehost.segment_pool import Block, SegmentPool
from weightsync.samehost.spawning import refuse_forked, refuse_other_process
from weightsync.samehost.tensor_arrivals import Mailbox
from weightsync.samehost.tensor_bytes import as_bytes, from_bytes, spec_of
from weightsync.samehost.tensor_channel import Channel, openable_gpus
from weightsync.samehost.tensor_link import SenderLink
from weightsync.specs import MAX_NAME_LENGTH, TensorSpec
from weightsync.wire.offers import SegmentHandle
from weightsync.wire.tensor_packets import (
    Discard,
    InBlock,
    InPacket,
    OnGpu,
    Packet,
    TensorIpcHandle,
    TensorQueueHandle,
    decode_handle,
    encode,
)

DEFAULT_POOL_NBYTES = 1 << 30
DEFAULT_TIMEOUT_S = 10.0
DEFAULT_PENDING = 1 << 14
PACKET_TENSOR_NBYTES = 16 << 10
"""Tensors up to this size travel in their packet."""


@dataclass(frozen=True)
class TensorIpcData:
    """A tensor, and the names under which it was sent."""

    request_id: str | None
    tensor_id: str
    tensor: torch.Tensor


class TensorIpcReceiver:
    """The one end that receives: give `handle` to the senders; any thread may call.

    `gpus` are the device keys (GPU UUIDs) whose tensors may stay on the GPU: by default all that
    this process can open; tensors of others arrive on the CPU. What a sender that ended left, and
    what comes of a request after its cleanup, is kept for `grace_s`. Raises ConfigError in a
    process that was forked.
    """

    def __init__(
        self,
        *,
        gpus: list[str] | None = None,
        max_pending: int = DEFAULT_PENDING,
        grace_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        refuse_forked("a tensor queue")
        self._pid = os.getpid()
        self._arrivals = Mailbox(max_pending=max_pending, late_s=grace_s)
        keys = openable_gpus() if gpus is None else gpus
        self._channel = Channel(self._arrivals, gpus=keys, grace_s=grace_s)
        self.handle = TensorQueueHandle(address=self._channel.address, host=host_key())
        self._stop = weakref.finalize(self, self._channel.close)

    def recv_tensor(
        self, handle: TensorIpcHandle, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> torch.Tensor:
        """Hand out the tensor of `handle`, waiting for it if it is still to come.

        It is the caller's to change. Raises TransferTimeout; TransferError at once when it was
        handed out before, cleaned up, or its sender ended without sending it.
        """
        refuse_other_process("this tensor queue", self._pid)
        return self._arrivals.take(handle, timeout_s)

    def recv_any(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> TensorIpcData:
        """Hand out the tensor that came first. Raises TransferTimeout when none comes."""
        refuse_other_process("this tensor queue", self._pid)
        handle, tensor = self._arrivals.take_next(timeout_s)
        return TensorIpcData(handle.request_id, handle.tensor_id, tensor)

    def cleanup_request_tensors(self, request_id: str) -> int:
        """Drop what a request left here; returns how many tensors were here.

        What comes later under this id is dropped after `grace_s` unless it is asked for, as the
        tensors of another attempt under the same id are.
        """
        refuse_other_process("this tensor queue", self._pid)
        return self._arrivals.clean(request_id)

    def take(self, handle: bytes) -> torch.Tensor:
        """Hand out the tensor of a handle that a sender's `put` returned: the codec's door."""
        return self.recv_tensor(decode_handle(handle))

    def drop(self, handle: bytes) -> None:
        """Give up the tensor of such a handle, here or to come: called for messages that failed."""
        given_up = decode_handle(handle)
        self._arrivals.discard(given_up.sender, given_up.sequence)

    @property
    def pending(self) -> int:
        """How many tensors are here and were not asked for."""
        return len(self._arrivals)

    def close(self) -> None:
        """End the queue: what was not asked for is dropped, tensors handed out stay. Idempotent."""
        if os.getpid() == self._pid:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class TensorIpcSender:
    """One of the ends that send, made from a receiver's handle; any thread may call.

    It holds at most `max_nbytes` of shared memory. Raises BackendUnavailableError where shared
    memory does not work between the two, ConnectError when the receiver is gone, ConfigError in a
    process that was forked.
    """

    def __init__(
        self,
        queue: TensorQueueHandle,
        *,
        name: str = "",
        max_nbytes: int = DEFAULT_POOL_NBYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        refuse_forked("a sender of tensors")
        if not isinstance(queue, TensorQueueHandle):
            raise ConfigError(
                f"a {type(queue).__name__} is no handle of a tensor queue; give the `handle` of "
                "a TensorIpcReceiver, which is plain data"
            )
        self.timeout_s = timeout_s
        self._pid = os.getpid()
        self._id = secrets.token_hex(16)
        self._sequence = 0
        self._link = SenderLink(
            queue, sender=self._id, name=name or f"pid {self._pid}", timeout_s=timeout_s
        )
        self._pool = SegmentPool(max_nbytes=max_nbytes, on_forget=self._link.forget)
        self._stop = weakref.finalize(self, _end, self._link, self._pool)

    def send_tensor(
        self,
        tensor: torch.Tensor,
        request_id: str | None = None,
        tensor_id: str | None = None,
        *,
        timeout_s: float | None = None,
    ) -> TensorIpcHandle:
        """Send a copy of a tensor and return the handle with which the receiver finds it.

        A tensor on a GPU that the receiver can open is not copied: leave it unchanged until the
        receiver has it. Raises ConfigError for tensors that cannot travel, TransferTimeout when
        there is no room for so long, SegmentError when there never will be, ConnectError when the
        receiver is gone.
        """
        refuse_other_process("this sender of tensors", self._pid)
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        _check_name(request_id)
        spec = spec_of(tensor, tensor_id or "tensor")
        on_gpu = self._stays_on_gpu(tensor)
        device = str(tensor.device) if on_gpu else "cpu"
        shape = list(spec.shape)

        def handle() -> TensorIpcHandle:
            number = self._sequence
            own_id = str(number) if tensor_id is None else tensor_id
            return TensorIpcHandle(request_id, own_id, shape, spec.dtype, device, self._id, number)

        if on_gpu:
            return self._send_on_gpu(tensor, handle, deadline)
        if spec.nbytes <= PACKET_TENSOR_NBYTES:
            data = _bytes_of(tensor)
            return self._send(lambda given: InPacket(given, data), handle, deadline)
        return self._send_in_block(tensor, spec, handle, deadline)

    def discard(self, handle: TensorIpcHandle) -> None:
        """Have the receiver drop a tensor whose message will not be sent."""
        refuse_other_process("this sender of tensors", self._pid)
        with suppress(ConnectError):
            self._link.post(lambda: Discard(handle.sequence), time.monotonic() + self.timeout_s)

    def put(self, tensor: torch.Tensor, key: str | None) -> bytes:
        """Send a tensor of request `key` and return its handle as bytes: the codec's door."""
        return encode(self.send_tensor(tensor, key))

    def take_back(self, handle: bytes) -> None:
        """Discard the tensor of a handle that `put` returned."""
        self.discard(decode_handle(handle))

    def trim(self) -> int:
        """Give up shared memory that nobody reads; returns how many bytes that freed."""
        return self._pool.trim()

    @property
    def pool(self) -> SegmentPool:
        """The shared memory that tensors are copied to."""
        return self._pool

    def close(self) -> None:
        """Take leave. Tensors that were sent stay with the receiver. Idempotent."""
        if os.getpid() == self._pid:
            self._stop()

    def _stays_on_gpu(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and tensor.numel() > 0 and self._opens(tensor.device)

    def _opens(self, device: torch.device) -> bool:
        return cuda_handle.why_not() is None and cuda_handle.gpu_key(device) in self._link.gpus

    def _send_on_gpu(
        self, tensor: torch.Tensor, handle: Callable[[], TensorIpcHandle], deadline: float
    ) -> TensorIpcHandle:
        memory = cuda_handle.export(as_bytes(tensor))
        try:
            return self._send(lambda given: OnGpu(given, memory), handle, deadline)
        except Exception:  # as below
            cuda_handle.withdraw(memory)
            raise

    def _send_in_block(
        self,
        tensor: torch.Tensor,
        spec: TensorSpec,
        handle: Callable[[], TensorIpcHandle],
        deadline: float,
    ) -> TensorIpcHandle:
        timeout_s = max(deadline - time.monotonic(), 0.0)
        with self._receiver_needed():
            self._link.check()
            block = self._pool.take(spec.nbytes, timeout_s=timeout_s, check=self._link.check)
        try:
            place = from_bytes(block.data[: spec.nbytes], spec.dtype, spec.shape)
            place.copy_(tensor.detach())
            return self._send(lambda given: _in_block(given, block), handle, deadline)
        except Exception:  # not KeyboardInterrupt: then the receiver may have it already
            self._pool.give_back(block)
            raise

    def _send(
        self,
        packet: Callable[[TensorIpcHandle], Packet],
        handle: Callable[[], TensorIpcHandle],
        deadline: float,
    ) -> TensorIpcHandle:
        """Send a packet under the next sequence number and return the handle that it got."""
        sent: list[TensorIpcHandle] = []

        def numbered() -> Packet:
            self._sequence += 1
            sent[:] = [handle()]
            return packet(sent[0])

        with self._receiver_needed():
            self._link.post(numbered, deadline)
        return sent[0]

    @contextmanager
    def _receiver_needed(self) -> Iterator[None]:
        """Give up all shared memory when the receiver turns out to be gone: nobody reads it."""
        try:
            yield
        except ConnectError:
            self._pool.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _end(link: SenderLink, pool: SegmentPool) -> None:
    link.close()
    pool.close()


def _check_name(request_id: str | None) -> None:
    if request_id is not None and len(request_id) > MAX_NAME_LENGTH:
        raise ConfigError(
            f"a request_id has at most {MAX_NAME_LENGTH} characters, this has {len(request_id)}: "
            f"{request_id[:40]!r}"
        )


def _bytes_of(tensor: torch.Tensor) -> bytearray:
    flat = as_bytes(tensor)
    data = bytearray(flat.numel())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(flat)
    return data


def _in_block(handle: TensorIpcHandle, block: Block) -> InBlock:
    segment = block.lot.segment
    where = SegmentHandle(name=segment.name, nbytes=segment.nbytes, offset=block.offset)
    return InBlock(handle, where, block.index, block.ticket)
