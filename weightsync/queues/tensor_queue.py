"""Queue for the tensors of requests, apart from their messages: several senders, one receiver."""

from __future__ import annotations

import logging
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, Self

import torch

from weightsync import TensorSpec
from weightsync.cuda import handles
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ConnectError,
    HandleError,
    ProtocolError,
    TransferError,
    TransferTimeout,
    WeightSyncError,
)
from weightsync.queues.pool import HEADER_NBYTES, SegmentPool
from weightsync.queues.tensor_packets import (
    MAX_NAME_LENGTH,
    MAX_PACKET,
    PROTOCOL,
    Arriving,
    Discard,
    Forget,
    Goodbye,
    Hello,
    InBlock,
    InPacket,
    OnGpu,
    Packet,
    Sent,
    TensorIpcHandle,
    TensorQueueHandle,
    Welcome,
    decode_handle,
    decode_sent,
    decode_welcome,
    encode,
    encode_packet,
)
from weightsync.shm.host_keys import host_key
from weightsync.shm.segment import Segment, cleanup_stale
from weightsync.shm.spawning import refuse_forked, refuse_other_process
from weightsync.shm.store_order import order_stores
from weightsync.tensors import (
    check_dense,
    checked_spec,
    contiguous_bytes,
    from_bytes,
    spec_of,
    tensor_data,
)
from weightsync.wire.offers import SegmentHandle

logger = logging.getLogger(__name__)

MAX_CLEANED = 1 << 14
"""Maximum number of remembered request cleanups, needed to drop tensors that arrive later."""
MAX_UNWANTED = 1 << 12
"""Maximum number of tensors of one sender that are discarded before they arrive."""
MAX_GONE = 1 << 10
"""Maximum number of remembered senders that ended."""

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tensor that arrived.

    `tensor()`, called once, returns it; its memory is released with the last tensor that views it.
    `drop()` releases the memory without returning the tensor.
    """

    handle: TensorIpcHandle
    tensor: Callable[[], torch.Tensor]
    drop: Callable[[], None]

    @property
    def key(self) -> Key:
        """The key of the tensor: sender and sequence number."""
        return self.handle.sender, self.handle.sequence


@dataclass(slots=True)
class SenderState:
    """State of one sender; `gone` is the reason why the sender ended, "" while it is connected.

    `waiting` counts its stored tensors.
    """

    name: str
    last: int = 0
    gone: str = ""
    waiting: int = 0
    unwanted: set[int] = field(default_factory=set)

    def wants(self, sequence: int) -> bool:
        """Record the arrival of a tensor; return False if it was discarded before."""
        self.last = max(self.last, sequence)
        wanted = sequence not in self.unwanted
        self.unwanted = {later for later in self.unwanted if later > sequence}
        return wanted


@dataclass(frozen=True, slots=True)
class Cleanup:
    """Cleanup of a request: its number, and the senders that retried under the same request id."""

    number: int
    again: set[str] = field(default_factory=set)


class Mailbox:
    """Received tensors of all senders, by key. Thread-safe; waits release the lock."""

    def __init__(self, *, max_pending: int, late_s: float) -> None:
        self._max_pending = max_pending
        self._late_s = late_s
        self._changed = threading.Condition()
        self._pending: dict[Key, Arrival] = {}
        self._senders: OrderedDict[str, SenderState] = OrderedDict()
        self._cleaned: OrderedDict[str, Cleanup] = OrderedDict()
        self._late: OrderedDict[Key, float] = OrderedDict()
        self._cleanups = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def full(self) -> bool:
        """True if no more packets may be read, so that the senders wait."""
        return len(self._pending) >= self._max_pending

    def meet(self, sender: str, name: str) -> bool:
        """Register a new sender; return False if its id is known already."""
        with self._changed:
            if sender in self._senders:
                return False
            self._senders[sender] = SenderState(name)
            return True

    def add(self, arrivals: Iterable[Arrival]) -> None:
        """Store tensors in the order of arrival.

        A tensor of a cleaned-up request expires after `late_s`. Such a tensor belongs to the
        aborted attempt, or to a retry under the same id. Only tensors of a retry are taken. After
        the first `take`, later tensors of the same sender belong to the retry.
        """
        with self._dropping() as dropped:
            for arrival in arrivals:
                handle = arrival.handle
                state = self._senders[handle.sender]
                self._pending[arrival.key] = arrival
                state.waiting += 1
                if not state.wants(handle.sequence) or self._closed:
                    dropped.append(arrival)
                elif self._aborted(handle) is not None:
                    self._late[arrival.key] = time.monotonic() + self._late_s

    def take(self, handle: TensorIpcHandle, timeout_s: float) -> torch.Tensor:
        """Return the tensor of `handle`; wait for its arrival.

        Raises TransferError at once if the tensor can no longer arrive, TransferTimeout if it does
        not arrive in time, ProtocolError if another tensor arrived under its number.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            cleanups = self._cleanups
            while (arrival := self._pending.get((handle.sender, handle.sequence))) is None:
                cleanup = self._aborted(handle)
                if cleanup is not None and cleanup.number > cleanups:
                    raise _cleaned_up(handle)
                self._check_may_come(handle)
                self._wait(deadline, f"tensor {_describe(handle)} did not arrive", timeout_s)
            if arrival.handle != handle:
                raise ProtocolError(
                    f"tensor {_describe(handle)} is wanted, but its sender sent "
                    f"{_describe(arrival.handle)}; the handle was changed in transit"
                )
            self._forget(arrival)
            cleanup = self._aborted(handle)
            if cleanup is not None:
                cleanup.again.add(handle.sender)
        return arrival.tensor()

    def take_next(self, timeout_s: float) -> tuple[TensorIpcHandle, torch.Tensor]:
        """Return the oldest tensor. Raises TransferTimeout when none arrives in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._pending:
                self._check_open()
                self._wait(deadline, "no tensor arrived", timeout_s)
            arrival = next(iter(self._pending.values()))
            self._forget(arrival)
        return arrival.handle, arrival.tensor()

    def clean(self, request_id: str) -> int:
        """Drop the tensors of a request, stored and future ones; return the number stored."""
        with self._dropping() as dropped:
            self._cleanups += 1
            self._cleaned[request_id] = Cleanup(self._cleanups)
            self._cleaned.move_to_end(request_id)
            while len(self._cleaned) > MAX_CLEANED:
                self._cleaned.popitem(last=False)
            dropped.extend(a for a in self._pending.values() if a.handle.request_id == request_id)
        return len(dropped)

    @property
    def any_late(self) -> bool:
        """True if `drop_late` will have tensors to drop."""
        return bool(self._late)

    def drop_late(self, now: float) -> None:
        """Drop the expired tensors of cleaned-up requests."""
        if self._late:
            with self._dropping() as dropped:
                dropped.extend(
                    self._pending[key] for key, until in self._late.items() if until <= now
                )

    def discard(self, sender: str, sequence: int) -> None:
        """Drop one tensor: now if it is stored, else on arrival."""
        with self._dropping() as dropped:
            state = self._senders.get(sender)
            if (sender, sequence) in self._pending:
                dropped.append(self._pending[sender, sequence])
            elif state and sequence > state.last and len(state.unwanted) < MAX_UNWANTED:
                state.unwanted.add(sequence)

    def part(self, sender: str, reason: str) -> None:
        """Record the end of a sender. Its stored tensors can still be taken."""
        with self._changed:
            self._senders[sender].gone = reason
            gone = [key for key, state in self._senders.items() if state.gone and not state.waiting]
            for key in gone[:-MAX_GONE]:
                del self._senders[key]
            self._changed.notify_all()

    def waiting_of(self, sender: str) -> int:
        """Return the number of stored tensors of a sender."""
        state = self._senders.get(sender)
        return state.waiting if state else 0

    def drop_all_of(self, sender: str) -> int:
        """Drop the stored tensors of a sender; return their number."""
        with self._dropping() as dropped:
            dropped.extend(a for a in self._pending.values() if a.handle.sender == sender)
        return len(dropped)

    def close(self) -> None:
        """Drop all tensors; waiting calls raise TransferError. Idempotent."""
        with self._dropping() as dropped:
            self._closed = True
            dropped.extend(self._pending.values())

    @contextmanager
    def _dropping(self) -> Iterator[list[Arrival]]:
        """Hold the lock in the block; then drop the tensors that the block adds to the list."""
        dropped: list[Arrival] = []
        with self._changed:
            yield dropped
            for arrival in dropped:
                self._forget(arrival)
            self._changed.notify_all()
        for arrival in dropped:
            arrival.drop()

    def _forget(self, arrival: Arrival) -> None:
        del self._pending[arrival.key]
        self._late.pop(arrival.key, None)
        self._senders[arrival.handle.sender].waiting -= 1

    def _aborted(self, handle: TensorIpcHandle) -> Cleanup | None:
        """Return the cleanup of the tensor's request; None if there is none, or after a retry."""
        if handle.request_id is None:
            return None
        cleanup = self._cleaned.get(handle.request_id)
        return None if cleanup is None or handle.sender in cleanup.again else cleanup

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError("this tensor queue is closed")

    def _check_may_come(self, handle: TensorIpcHandle) -> None:
        self._check_open()
        state = self._senders.get(handle.sender)
        if state is None:
            raise TransferError(
                f"tensor {_describe(handle)} is from a sender that this queue does not know, or no "
                "longer; send each message to the queue that its tensors were sent to"
            )
        if handle.sequence <= state.last and self._aborted(handle) is not None:
            raise _cleaned_up(handle)
        if handle.sequence <= state.last:
            raise TransferError(
                f"tensor {_describe(handle)} was taken or dropped before; each can be taken once"
            )
        if state.gone:
            raise TransferError(
                f"tensor {_describe(handle)} will not arrive: sender {state.name} {state.gone}"
            )

    def _wait(self, deadline: float, event: str, timeout_s: float) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TransferTimeout(
                f"{event} in {timeout_s:.1f} s; {len(self._pending)} others are here, of "
                f"{sum(not state.gone for state in self._senders.values())} living senders"
            )
        self._changed.wait(remaining)


def _cleaned_up(handle: TensorIpcHandle) -> TransferError:
    return TransferError(f"tensor {_describe(handle)} was dropped: its request was cleaned up")


def _describe(handle: TensorIpcHandle) -> str:
    request = "" if handle.request_id is None else f" of request {handle.request_id[:80]!r}"
    return f"{handle.tensor_id[:80]!r}{request} ({handle.dtype}{handle.shape})"


class Mappings:
    """The mapped segments of one sender; a segment is mapped on first use."""

    def __init__(self) -> None:
        order_stores()  # registers this process for the fence of the blocks' owner
        self._open: dict[str, Segment] = {}

    def get(self, name: str, nbytes: int) -> Segment:
        """Return the segment, writable, because the user may change received tensors in place."""
        segment = self._open.get(name)
        if segment is None:
            segment = self._open[name] = Segment.open(name, nbytes=nbytes, writable=True)
        if segment.nbytes != nbytes:
            raise HandleError(
                f"segment {name} has {segment.nbytes} bytes, the handle says {nbytes}"
            )
        return segment

    def forget(self, name: str) -> None:
        """Unmap one segment; views that are still in use keep its memory."""
        segment = self._open.pop(name, None)
        if segment is not None:
            segment.close()

    def close(self) -> None:
        """Unmap all. Idempotent."""
        for name in list(self._open):
            self.forget(name)


def arrival_of(packet: Arriving, mappings: Mappings) -> Arrival:
    """Return the tensor of a packet. If its memory cannot be opened, `take` raises the error.

    Raises ProtocolError for a packet with an invalid tensor description.
    """
    handle = packet.handle
    spec = checked_spec(handle.tensor_id, handle.dtype, handle.shape)
    try:
        memory, drop = _memory_of(packet, spec, mappings)
    except WeightSyncError as exc:
        return Arrival(handle, partial(_fail, exc), _nothing)
    return Arrival(handle, lambda: from_bytes(memory(), spec), drop)


def _fail(error: WeightSyncError) -> NoReturn:
    raise error


def _nothing() -> None:
    """Do nothing: the `drop` of a tensor without memory of its own."""


Memory = tuple[Callable[[], torch.Tensor], Callable[[], None]]
"""A call that returns the bytes of a tensor, and one that releases them unread."""


def _memory_of(packet: Arriving, spec: TensorSpec, mappings: Mappings) -> Memory:
    if isinstance(packet, InBlock):
        return _block_of(packet, spec, mappings)
    if isinstance(packet, InPacket):
        _check_fits(spec, len(packet.data), exactly=True)
        if not packet.data:  # which frombuffer refuses
            return partial(torch.empty, 0, dtype=torch.uint8), _nothing
        return partial(torch.frombuffer, packet.data, dtype=torch.uint8), _nothing
    memory = packet.memory
    _check_fits(spec, memory.nbytes - memory.offset)

    def withdraw() -> None:
        with suppress(WeightSyncError):
            handles.withdraw(memory)

    return lambda: handles.open_handle(memory)[: spec.nbytes], withdraw


def _check_fits(spec: TensorSpec, room: int, *, exactly: bool = False) -> None:
    if spec.nbytes > room or (exactly and spec.nbytes != room):
        raise HandleError(
            f"{spec} has {spec.nbytes} bytes but came with {room}; sender and receiver must have "
            "the same weightsync version"
        )


def _block_of(packet: InBlock, spec: TensorSpec, mappings: Mappings) -> Memory:
    """Return a shared block, which is released with the last tensor that views it."""
    where = packet.segment
    if packet.block >= _blocks_in(where.nbytes, where.offset, packet.block):
        raise HandleError(f"block {packet.block} lies outside segment {where.name}")
    if not spec.nbytes:
        raise HandleError(f"{spec} has no bytes and needs no block of segment {where.name}")
    _check_fits(spec, where.nbytes - where.offset)
    segment = mappings.get(where.name, where.nbytes)
    view = segment.buffer[where.offset : where.offset + spec.nbytes]
    words = segment.buffer[:HEADER_NBYTES].cast("Q")
    release = partial(_release_block, words, packet.block, packet.ticket, os.getpid())

    def memory() -> torch.Tensor:
        flat = torch.frombuffer(view, dtype=torch.uint8)
        # torch keeps the memoryview as long as the storage is in use.
        finalizer = weakref.finalize(view, release)
        finalizer.atexit = False  # the owner detects the end of this process
        return flat

    return memory, release


def _blocks_in(nbytes: int, offset: int, block: int) -> int:
    """Return the number of blocks in a segment whose block `block` starts at `offset`."""
    room = nbytes - HEADER_NBYTES
    start = offset - HEADER_NBYTES
    if start < 0 or offset >= nbytes or (start == 0) != (block == 0):
        return 0
    if block == 0:
        return 1
    size, rest = divmod(start, block)
    return 0 if rest or room % size else room // size


def _release_block(words: memoryview, block: int, ticket: int, pid: int) -> None:
    # The last reference may die in any thread, so this takes no lock. A forked child drops its
    # copies too, and must not release a block that its parent still uses.
    if os.getpid() == pid:
        words[block] = ticket


_BATCH = 64
_FULL_NAP_S = 0.002
_POLL_S = 0.05  # polling interval while tensors of ended senders are stored
_CLEANUP_DELAYS_S = (0.05, 0.5, 3.0)  # the kernel releases a killed process's locks with a delay
_JOIN_S = 5.0
PROBE_NBYTES = 4096

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def own_socket(connection: socket.socket) -> socket.socket:
    """Register a socket that forked children close: a copy would hide the end of this process."""
    _sockets.add(connection)
    return connection


def _after_fork_in_child() -> None:
    for connection in list(_sockets):
        connection.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


def bound_name(address: str) -> bytes:
    """Return the abstract socket name of a queue's address."""
    return b"\0weightsync-tensors-" + address.encode("ascii")


def same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end runs as the same user."""
    layout = struct.Struct("3i")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    return bool(layout.unpack(raw)[1] == os.geteuid())


@dataclass(eq=False, slots=True)
class _Peer:
    """One connection: the sender's id after its Hello, and the sender's mapped segments."""

    connection: socket.socket
    sender: str = ""
    last: int = 0
    said_goodbye: bool = False
    mappings: Mappings = field(default_factory=Mappings)


class Channel:
    """Receives packets under a random `address` and stores tensors in `arrivals`, until `close`."""

    def __init__(self, arrivals: Mailbox, *, gpus: list[str], grace_s: float) -> None:
        self.address = secrets.token_hex(16)
        self._arrivals = arrivals
        self._gpus = gpus
        self._grace_s = grace_s
        self._peers: set[_Peer] = set()
        self._ended: list[tuple[float, _Peer]] = []
        self._cleanup_times: list[float] = []
        self._buffer = memoryview(bytearray(MAX_PACKET + 1))
        self._stopping = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._listener = own_socket(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._listener.bind(bound_name(self.address))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._wake, self._waker = map(own_socket, socket.socketpair())
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="weightsync-tensors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop receiving; senders detect the closed socket. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        with suppress(OSError):
            self._waker.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._arrivals.full:
                    time.sleep(_FULL_NAP_S)  # without reads, the senders wait
                else:
                    self._step()
                self._clean_up(time.monotonic())
        finally:
            self._end()

    def _step(self) -> None:
        for key, _ in self._selector.select(self._select_timeout_s()):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Peer):
                self._receive(key.data)

    def _select_timeout_s(self) -> float | None:
        if self._ended or self._arrivals.any_late:
            return _POLL_S
        return (
            max(min(self._cleanup_times) - time.monotonic(), 0.0) if self._cleanup_times else None
        )

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as exc:
            logger.warning("a connection of a tensor sender could not be accepted: %s", exc)
            time.sleep(_POLL_S)  # probably out of descriptors; the connection stays in the backlog
            return
        own_socket(connection)
        if not same_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        peer = _Peer(connection)
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _receive(self, peer: _Peer) -> None:
        """Handle the received packets of a sender, at most `_BATCH` of them."""
        arrived: list[Arrival] = []
        end = ""
        try:
            for _ in range(_BATCH):
                nbytes = peer.connection.recv_into(self._buffer)
                if nbytes == 0:
                    end = "closed its end" if peer.said_goodbye else "died"
                    break
                self._handle(decode_sent(self._buffer[:nbytes]), peer, arrived)
        except BlockingIOError:
            pass
        except OSError as exc:
            end = "closed its end" if peer.said_goodbye else f"was disconnected ({exc})"
        except ProtocolError as exc:
            end = f"sent an invalid packet ({exc})"
            logger.warning("a tensor sender was disconnected: %s", exc)
        if arrived:
            self._arrivals.add(arrived)
        if end:
            self._disconnect(peer, end)

    def _handle(self, packet: Sent, peer: _Peer, arrived: list[Arrival]) -> None:
        if isinstance(packet, Hello):
            self._welcome(packet, peer)
        elif not peer.sender:
            raise ProtocolError("the first packet was no Hello")
        elif isinstance(packet, Goodbye):
            peer.said_goodbye = True
            with suppress(OSError):
                peer.connection.send(b"\0")  # all segments are mapped: the sender may unlink them
        elif isinstance(packet, Forget):
            peer.mappings.forget(packet.name)
        elif isinstance(packet, Discard):
            self._arrivals.add(arrived)
            arrived.clear()
            self._arrivals.discard(peer.sender, packet.sequence)
        else:
            handle = packet.handle
            if handle.sender != peer.sender or handle.sequence <= peer.last:
                raise ProtocolError(
                    f"tensor {handle.sequence} of {handle.sender} came from {peer.sender} "
                    f"after its number {peer.last}"
                )
            peer.last = handle.sequence
            arrived.append(arrival_of(packet, peer.mappings))

    def _welcome(self, hello: Hello, peer: _Peer) -> None:
        refusal = _refusal(hello)
        if not refusal and (peer.sender or not self._arrivals.meet(hello.sender, hello.name)):
            refusal = "a sender with this id was connected before"
        with suppress(OSError):
            peer.connection.send(encode(Welcome(self._gpus, refusal)))
        if refusal:
            raise ProtocolError(refusal)
        peer.sender = hello.sender

    def _disconnect(self, peer: _Peer, reason: str) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._peers.discard(peer)
        now = time.monotonic()
        if peer.sender:
            self._arrivals.part(peer.sender, reason)
            self._ended.append((now + self._grace_s, peer))
        if not peer.said_goodbye:
            self._cleanup_times.extend(now + delay for delay in _CLEANUP_DELAYS_S)

    def _clean_up(self, now: float) -> None:
        """Clean up after senders that ended: segments of dead senders, and unclaimed tensors."""
        if any(when <= now for when in self._cleanup_times):
            self._cleanup_times = [when for when in self._cleanup_times if when > now]
            cleanup_stale()
        self._arrivals.drop_late(now)
        for until, peer in list(self._ended):
            if until <= now or not self._arrivals.waiting_of(peer.sender):
                self._ended.remove((until, peer))
                left = self._arrivals.drop_all_of(peer.sender)
                peer.mappings.close()
                if left:
                    logger.warning("dropped %d unclaimed tensors of a sender that ended", left)

    def _end(self) -> None:
        for peer in self._peers:
            peer.connection.close()
        self._arrivals.close()
        for peer in [*self._peers, *(peer for _, peer in self._ended)]:
            peer.mappings.close()
        self._selector.close()
        for connection in (self._listener, self._wake, self._waker):
            connection.close()


def _refusal(hello: Hello) -> str:
    """Return the reason why the sender cannot share memory with this process, "" if it can."""
    if hello.protocol != PROTOCOL:
        return f"the sender has protocol version {hello.protocol}, this queue {PROTOCOL}"
    if hello.probe.nbytes != PROBE_NBYTES:
        return f"a probe has {PROBE_NBYTES} bytes, this has {hello.probe.nbytes}"
    try:
        with Segment.open(hello.probe.name, nbytes=PROBE_NBYTES, writable=True) as probe:
            word = int.from_bytes(bytes(probe.buffer[:8]), "little")
    except WeightSyncError as exc:
        return f"the receiver cannot open the sender's shared memory: {exc}"
    return "" if word == hello.word else "the receiver reads other bytes in the sender's memory"


def openable_gpus() -> list[str]:
    """Return the device keys of the GPUs whose memory this process can open by handle."""
    return [] if handles.why_not() else list(handles.local_gpu_keys())


_SEND_BUFFER = 1 << 20
_NAP_S = 0.001
_GOODBYE_S = 5.0


class SenderLink:
    """A sender's connection to a queue, verified by a probe of shared memory.

    `gpus` are the device keys whose memory the receiver can open. Raises BackendUnavailableError
    if the two processes cannot share memory, ConnectError if the receiver is gone.
    """

    def __init__(
        self, queue: TensorQueueHandle, *, sender: str, name: str, timeout_s: float
    ) -> None:
        self._lock = threading.Lock()
        self._closed = ""
        self._forgotten: deque[str] = deque()
        self._socket = _connect(queue, timeout_s)
        try:
            self.gpus = _handshake(self._socket, sender, name).gpus
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def forget(self, segment: str) -> None:
        """Send the receiver a request to unmap a segment, before the next packet."""
        self._forgotten.append(segment)

    def post(self, packet: Callable[[], Packet], deadline: float) -> None:
        """Send the packet that `packet()` returns; it is called under the lock for each attempt.

        Raises TransferTimeout when the receiver reads nothing until `deadline`, ConnectError when
        it is gone.
        """
        while not self._try_post(packet):
            if time.monotonic() >= deadline:
                raise TransferTimeout(
                    "the tensor receiver reads nothing; it holds its maximum number of tensors, "
                    "or its process hangs"
                )
            with suppress(ValueError, OSError):  # closed meanwhile; the next attempt raises
                select.select([], [self._socket], [], _NAP_S)
            time.sleep(_NAP_S)  # select may report a socket with too little room for a packet

    def check(self) -> None:
        """Raise ConnectError if the receiver is gone or this end is closed."""
        self._check_open()
        try:
            ended = self._socket.recv(1) == b""
        except BlockingIOError:
            return
        except OSError as exc:
            raise self._gone(exc) from exc
        if ended:
            raise self._gone(None)

    def close(self) -> None:
        """Close, after the receiver has mapped all segments. Idempotent."""
        if self._closed:
            return
        deadline = time.monotonic() + _GOODBYE_S
        with suppress(WeightSyncError, OSError, ValueError):
            self.post(Goodbye, deadline)
            # The receiver replies or closes its end; for one that hangs, the wait times out.
            if select.select([self._socket], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                self._socket.recv(MAX_PACKET)  # an unread reply would reset the connection
        self._end("this tensor sender is closed")

    def _try_post(self, packet: Callable[[], Packet]) -> bool:
        with self._lock:
            self._check_open()
            while self._forgotten:
                if not self._try_send(Forget(self._forgotten[0])):
                    return False
                self._forgotten.popleft()
            return self._try_send(packet())

    def _try_send(self, packet: Packet) -> bool:
        raw = encode_packet(packet)
        try:
            self._socket.send(raw)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise self._gone(exc) from exc
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectError(self._closed)

    def _gone(self, cause: OSError | None) -> ConnectError:
        self._end(f"the tensor receiver is gone ({cause or 'it closed the queue'})")
        return ConnectError(self._closed)

    def _end(self, reason: str) -> None:
        self._closed = self._closed or reason
        self._socket.close()


def _handshake(connection: socket.socket, sender: str, name: str) -> Welcome:
    word = secrets.randbits(62)
    with Segment.create(PROBE_NBYTES) as probe:
        probe.buffer[:8] = word.to_bytes(8, "little")
        where = SegmentHandle(name=probe.name, nbytes=probe.nbytes)
        try:
            connection.send(encode(Hello(PROTOCOL, sender, name[:MAX_NAME_LENGTH], where, word)))
            welcome = decode_welcome(connection.recv(MAX_PACKET))
        except OSError as exc:
            raise ConnectError(f"the tensor queue did not reply: {exc}") from exc
    if welcome.refusal:
        raise BackendUnavailableError(
            f"the tensor queue cannot be used from here: {welcome.refusal}"
        )
    return welcome


def _connect(queue: TensorQueueHandle, timeout_s: float) -> socket.socket:
    if queue.protocol != PROTOCOL:
        raise BackendUnavailableError(
            f"the tensor queue has protocol version {queue.protocol}, this process {PROTOCOL}; "
            "run the same weightsync version on both sides"
        )
    if queue.host != host_key():
        raise BackendUnavailableError(
            f"the tensor queue is on {queue.host}, this process on {host_key()}: they share no "
            "memory (another host, or containers without --ipc=host)"
        )
    connection = own_socket(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        connection.connect(bound_name(queue.address))
        if not same_user(connection):
            raise ConfigError("the tensor queue belongs to another user; run both as the same user")
    except OSError as exc:
        connection.close()
        raise ConnectError(
            f"the tensor queue cannot be reached ({exc}): its process ended, or runs in a "
            "container with a separate network namespace"
        ) from exc
    except BaseException:
        connection.close()
        raise
    return connection


DEFAULT_POOL_NBYTES = 1 << 30
DEFAULT_TIMEOUT_S = 10.0
DEFAULT_PENDING = 1 << 14
PACKET_TENSOR_NBYTES = 16 << 10
"""Tensors up to this size are sent inside their packet."""


@dataclass(frozen=True)
class TensorIpcData:
    """A received tensor with its request id and tensor id."""

    request_id: str | None
    tensor_id: str
    tensor: torch.Tensor


class TensorIpcReceiver:
    """The receiving end of a tensor queue: give its `handle` to the senders. Thread-safe.

    `gpus` are the device keys (GPU UUIDs) whose tensors may stay on the GPU; the default is every
    GPU whose memory this process can open. Tensors of other GPUs arrive on the CPU. Tensors of a
    sender that ended, and tensors that arrive after the cleanup of their request, are kept for
    `grace_s`. Raises ConfigError in a forked process.
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
        """Return the tensor of `handle`; wait for its arrival. The caller may change the tensor.

        Raises TransferTimeout. Raises TransferError at once if the tensor was taken or cleaned up
        before, or if its sender ended without sending it.
        """
        refuse_other_process("this tensor queue", self._pid)
        return self._arrivals.take(handle, timeout_s)

    def recv_any(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> TensorIpcData:
        """Return the oldest tensor. Raises TransferTimeout when none arrives."""
        refuse_other_process("this tensor queue", self._pid)
        handle, tensor = self._arrivals.take_next(timeout_s)
        return TensorIpcData(handle.request_id, handle.tensor_id, tensor)

    def cleanup_request_tensors(self, request_id: str) -> int:
        """Drop the stored tensors of a request; return their number.

        Tensors that arrive later under this id are dropped after `grace_s`, unless a retry under
        the same id takes them.
        """
        refuse_other_process("this tensor queue", self._pid)
        return self._arrivals.clean(request_id)

    def take(self, handle: bytes) -> torch.Tensor:
        """Return the tensor of a handle that a sender's `put` returned. Called by TensorDecoder."""
        return self.recv_tensor(decode_handle(handle))

    def drop(self, handle: bytes) -> None:
        """Drop the tensor of a handle, now or on arrival. Called for messages that failed."""
        dropped = decode_handle(handle)
        self._arrivals.discard(dropped.sender, dropped.sequence)

    @property
    def pending(self) -> int:
        """Number of stored tensors that were not taken."""
        return len(self._arrivals)

    def close(self) -> None:
        """Close the queue and drop its tensors; tensors taken before stay valid. Idempotent."""
        if os.getpid() == self._pid:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorIpcSender:
    """A sending end of a tensor queue, made from the receiver's handle. Thread-safe.

    Holds at most `max_nbytes` of shared memory. Raises BackendUnavailableError if the two processes
    cannot share memory, ConnectError if the receiver is gone, ConfigError in a forked process.
    """

    def __init__(
        self,
        queue: TensorQueueHandle,
        *,
        name: str = "",
        max_nbytes: int = DEFAULT_POOL_NBYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        refuse_forked("a tensor sender")
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
        """Send a copy of a tensor and return the handle with which the receiver takes it.

        A tensor on a GPU that the receiver can open is not copied: do not change it until the
        receiver has it. Raises ConfigError for a tensor that cannot be sent, TransferTimeout when
        no memory becomes free in time, SegmentError when the tensor exceeds the pool, ConnectError
        when the receiver is gone.
        """
        refuse_other_process("this tensor sender", self._pid)
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        _check_name(request_id)
        check_dense(tensor)
        spec = spec_of(tensor_id or "tensor", tensor)
        on_gpu = self._stays_on_gpu(tensor)
        device = str(tensor.device) if on_gpu else "cpu"
        shape = list(spec.shape)
        handle: TensorIpcHandle | None = None

        def numbered() -> Packet:
            nonlocal handle
            self._sequence = number = self._sequence + 1
            own_id = str(number) if tensor_id is None else tensor_id
            handle = TensorIpcHandle(
                request_id, own_id, shape, spec.dtype, device, self._id, number
            )
            return packet(handle)

        try:
            packet, take_back = self._pack(tensor, spec, deadline, on_gpu=on_gpu)
            try:
                self._link.post(numbered, deadline)
            except Exception:  # not KeyboardInterrupt: the receiver may have the memory already
                take_back()
                raise
        except ConnectError:
            self._pool.close()  # the receiver is gone
            raise
        assert handle is not None
        return handle

    def _pack(
        self, tensor: torch.Tensor, spec: TensorSpec, deadline: float, *, on_gpu: bool
    ) -> tuple[Callable[[TensorIpcHandle], Packet], Callable[[], None]]:
        """Make a tensor readable for the receiver; return what makes its packet, and its undo."""
        if on_gpu:
            memory = handles.export(contiguous_bytes(tensor))
            return lambda handle: OnGpu(handle, memory), partial(handles.withdraw, memory)
        if spec.nbytes <= PACKET_TENSOR_NBYTES:
            data = bytearray(tensor_data(tensor))
            return lambda handle: InPacket(handle, data), _nothing
        timeout_s = max(deadline - time.monotonic(), 0.0)
        self._link.check()
        block = self._pool.take(spec.nbytes, timeout_s=timeout_s, check=self._link.check)
        take_back = partial(self._pool.give_back, block)
        try:
            from_bytes(block.data[: spec.nbytes], spec).copy_(tensor.detach())
        except Exception:
            take_back()
            raise
        segment = block.slab.segment
        where = SegmentHandle(name=segment.name, nbytes=segment.nbytes, offset=block.offset)
        return lambda handle: InBlock(handle, where, block.index, block.ticket), take_back

    def discard(self, handle: TensorIpcHandle) -> None:
        """Send the receiver a request to drop a tensor whose message will not be sent."""
        refuse_other_process("this tensor sender", self._pid)
        with suppress(ConnectError):
            self._link.post(lambda: Discard(handle.sequence), time.monotonic() + self.timeout_s)

    def put(self, tensor: torch.Tensor, key: str | None) -> bytes:
        """Send a tensor of request `key`; return its handle as bytes. Called by TensorEncoder."""
        return encode(self.send_tensor(tensor, key))

    def take_back(self, handle: bytes) -> None:
        """Discard the tensor of a handle that `put` returned."""
        self.discard(decode_handle(handle))

    def trim(self) -> int:
        """Free shared memory that is not in use; return the bytes freed."""
        return self._pool.trim()

    @property
    def pool(self) -> SegmentPool:
        """The pool of shared memory that tensors are copied to."""
        return self._pool

    def close(self) -> None:
        """Close the connection. The receiver keeps the tensors sent before. Idempotent."""
        if os.getpid() == self._pid:
            self._stop()

    def _stays_on_gpu(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.device.type == "cuda"
            and tensor.numel() > 0
            and handles.why_not() is None
            and handles.gpu_key(tensor.device) in self._link.gpus
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
