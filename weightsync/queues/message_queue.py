"""Broadcast queue: one writer, many readers; shared memory on one host, TCP between hosts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import msgspec

from weightsync.errors import (
    ConfigError,
    HandleError,
    PeerLostError,
    ProtocolError,
    TransferCancelled,
)
from weightsync.queues.codec import (
    BYTES_BODY,
    Encoded,
    MessageCodec,
    buffer_offset,
    split,
    write_around,
)
from weightsync.queues.message_ring import (
    INLINE,
    INLINE_NBYTES,
    SLOT,
    SOCKET,
    MessageRingLayout,
    MessageRingReader,
    MessageRingWriter,
)
from weightsync.queues.sockets import (
    LOCAL,
    READY,
    REMOTE,
    Publisher,
    Subscriber,
    own_address,
)
from weightsync.shm.segment import cleanup_stale, socket_path
from weightsync.shm.wait import SPIN_S, Cancel, ClosableLock, WaitPolicy

if TYPE_CHECKING:
    import torch.distributed as dist

    from weightsync.queues.group import StoreGroup


logger = logging.getLogger(__name__)

CHECK_S = 1.0
"""Interval of the reader liveness check of a writer that never waits."""
_NO_READER = "no reader is left"


class QueueHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Description that a reader needs to open a queue: plain data, sent by any channel."""

    local_reader_ranks: tuple[int, ...] = ()
    remote_reader_ranks: tuple[int, ...] = ()
    writer_rank: int | None = None
    control: str | None = None
    data: str | None = None
    slots: int = 0
    slot_nbytes: int = 0
    remote_endpoint: str | None = None
    spin_s: float = 0.0

    @property
    def layout(self) -> MessageRingLayout:
        """Sizes of the ring of the local readers."""
        return MessageRingLayout(self.slots, self.slot_nbytes, len(self.local_reader_ranks))


class Writer:
    """The writing end, which owns the segments and the socket. Safe to use from several threads.

    `settings` is a handle without segments and endpoint; `handle` is the one that readers open.
    `lock.close()` ends the calls that wait and releases everything. Readers may read to the end.
    """

    def __init__(
        self, settings: QueueHandle, *, connect_ip: str | None, drop_dead_readers: bool
    ) -> None:
        """Raise ConfigError for invalid settings."""
        local, remote = settings.local_reader_ranks, settings.remote_reader_ranks
        ranks = (*local, *remote)
        if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
            raise ConfigError(
                f"the readers have ranks {list(ranks)}; give one or more, each once, none negative"
            )
        if settings.slots < 1 or settings.slot_nbytes < 1:
            raise ConfigError(
                f"{settings.slots} slots of {settings.slot_nbytes} bytes make no queue"
            )
        self._drop_dead_readers = drop_dead_readers
        self._local_ranks = local
        self._slot_nbytes = settings.slot_nbytes
        self._count = 0
        self._checked_at = time.monotonic()
        self._all_joined = False
        self._ring: MessageRingWriter | None = None
        cleanup_stale()
        if local:
            self._ring = MessageRingWriter(settings.layout, spin_s=settings.spin_s)
        try:
            self._publisher = Publisher(
                path=socket_path(self._ring.control.segment.name) if self._ring else None,
                connect_ip=(connect_ip or own_address()) if remote else None,
                window_nbytes=settings.slots * settings.slot_nbytes,
            )
        except BaseException:
            if self._ring:
                self._ring.close()
            raise
        self._publisher.remote = remote
        self.handle = msgspec.structs.replace(
            settings,
            control=self._ring.control.segment.name if self._ring else None,
            data=self._ring.data.name if self._ring else None,
            remote_endpoint=self._publisher.tcp_endpoint,
        )
        self.lock = ClosableLock(
            "message queue",
            wake=self._ring.interrupt if self._ring else lambda: None,
            release=partial(_release, self._publisher, self._ring),
        )

    def send(self, message: Encoded, timeout_s: float | None, cancel: Cancel | None) -> None:
        """Send one message to all readers; if this raises, no reader gets it."""
        timeout_s = self._enter(timeout_s, cancel)
        try:
            policy = self._ready_for(message.nbytes, timeout_s, cancel)
            if self._ring is not None:
                self._put(self._ring, message, policy)
            if self._publisher.remote:
                self._publisher.send(REMOTE, self._count, message)
            self._count += 1
        finally:
            self.lock.leave()

    @contextmanager
    def write_in_place(
        self, nbytes: int | None, timeout_s: float | None, cancel: Cancel | None
    ) -> Iterator[memoryview]:
        """Yield `nbytes` writable bytes, by default a whole slot; send them when the block ends."""
        most = self._slot_nbytes - buffer_offset(BYTES_BODY)
        nbytes = most if nbytes is None else nbytes
        if not 0 <= nbytes <= most:
            raise ConfigError(f"{nbytes} bytes do not fit into a slot, which takes {most}")
        whole = buffer_offset(BYTES_BODY) + nbytes
        timeout_s = self._enter(timeout_s, cancel)
        view = memoryview(b"")
        try:
            policy = self._ready_for(whole, timeout_s, cancel)
            slot, room = 0, memoryview(b"")
            if self._ring is None:
                room = memoryview(bytearray(whole))
            else:
                if not self._ring.record_free:
                    self._ring.wait_record(policy())
                slot = self._ring.wait_slot(policy())
                room = self._ring.slot(slot, whole)
            view = write_around(room, BYTES_BODY)
            yield view
            if self._ring is not None:
                self._ring.publish(SLOT, whole, slot)
            if self._publisher.remote:
                self._publisher.send(REMOTE, self._count, Encoded(BYTES_BODY, [view]))
            self._count += 1
        finally:
            with suppress(BufferError):
                view.release()
            self.lock.leave()

    def wait_until_ready(self, timeout_s: float | None) -> None:
        """Return when every reader has opened its end; the readers' calls return then, too."""
        timeout_s = self._enter(timeout_s, None)
        try:
            self._wait_joined(self._wait_policy(self._pending_condition, timeout_s)())
            if self._ring is not None:
                self._ring.announce_ready()
            if self._publisher.remote:
                self._publisher.announce(READY)
        finally:
            self.lock.leave()

    def drop_reader(self, rank: int) -> None:
        """Exclude a reader; its next read raises TransferError. Raises ConfigError if unknown."""
        with self.lock:
            if rank not in self._readers():
                raise ConfigError(f"rank {rank} is not among the readers, {self._readers()}")
            self._drop(rank)

    def _enter(self, timeout_s: float | None, cancel: Cancel | None) -> float | None:
        """Take the lock, which another thread may hold; return the rest of the timeout."""
        if self.lock.acquire(0):
            return timeout_s
        started = time.monotonic()
        policy = WaitPolicy(
            lambda: "another thread's message to be sent",
            lambda: None,
            timeout_s=timeout_s,
            cancel=cancel,
            closing=self.lock,
        )
        while not self.lock.acquire(policy.poll()):
            pass
        return None if timeout_s is None else max(0.0, started + timeout_s - time.monotonic())

    def _ready_for(
        self, nbytes: int, timeout_s: float | None, cancel: Cancel | None
    ) -> Callable[[], WaitPolicy]:
        """Wait until the remote readers' window has room for `nbytes`; return the wait policy.

        Raises PeerLostError when all readers were dropped.
        """
        if not (self._publisher.remote or (self._ring and self._ring.control.active)):
            raise PeerLostError(_NO_READER)
        if time.monotonic() - self._checked_at > CHECK_S:
            self._check_readers()
        policy = self._wait_policy(self._pending_condition, timeout_s, cancel)
        if self._publisher.remote:
            self._wait_joined(policy())
            self._publisher.wait_window(nbytes, policy())
        return policy

    def _put(
        self, ring: MessageRingWriter, message: Encoded, policy: Callable[[], WaitPolicy]
    ) -> None:
        if not ring.record_free:
            ring.wait_record(policy())
        nbytes = message.nbytes
        if nbytes <= INLINE_NBYTES:
            message.write(ring.inline(nbytes))
            ring.publish(INLINE, nbytes)
        elif nbytes <= self._slot_nbytes:
            slot = ring.wait_slot(policy())
            message.write(ring.slot(slot, nbytes))
            ring.publish(SLOT, nbytes, slot)
        else:
            self._wait_joined(policy())
            ring.wait_post(policy())
            self._publisher.send(LOCAL, self._count, message)
            ring.publish(SOCKET, nbytes)

    def _wait_policy(
        self, condition: Callable[[], str], timeout_s: float | None, cancel: Cancel | None = None
    ) -> Callable[[], WaitPolicy]:
        """Return a function that makes the call's wait policy on first use, and then reuses it."""
        made: WaitPolicy | None = None

        def policy() -> WaitPolicy:
            nonlocal made
            if made is None:
                made = WaitPolicy(
                    condition,
                    self._check_readers,
                    timeout_s=timeout_s,
                    cancel=cancel,
                    closing=self.lock,
                )
            return made

        return policy

    def _wait_joined(self, policy: WaitPolicy) -> None:
        if self._all_joined:
            return
        self._publisher.wait_joined(self._expected, policy)
        self._all_joined = True

    def _expected(self) -> set[tuple[bytes, int]]:
        """Return the subscriptions of the readers that were not dropped."""
        local = {(LOCAL, rank) for rank in self._local()}
        return local | {(REMOTE, rank) for rank in self._publisher.remote}

    def _local(self) -> list[int]:
        return (
            [self._local_ranks[place] for place in self._ring.control.active] if self._ring else []
        )

    def _readers(self) -> list[int]:
        return [*self._local(), *self._publisher.remote]

    def _missing_readers(self) -> str:
        """Return the condition of readers that have not opened their ends; "" if all have."""
        self._publisher.pump()  # readers that have opened it since are not missing
        gone = self._expected() - self._publisher.joined
        return f"reader {_listed(rank for _, rank in gone)} to open this queue" if gone else ""

    def _pending_condition(self) -> str:
        missing = "" if self._all_joined else self._missing_readers()
        if missing:
            return missing
        behind = list(self._publisher.behind())
        if self._ring is not None:
            behind += [self._local_ranks[p] for p in self._ring.control.behind(self._count)]
        return f"reader {_listed(behind)} to read the last messages"

    def _check_readers(self) -> None:
        """Raise PeerLostError for the readers that are gone, or drop them and continue."""
        self._checked_at = time.monotonic()
        self._publisher.pump()
        lost = dict(self._publisher.lost)
        if self._ring is not None:
            lost |= {self._local_ranks[p]: evidence for p, evidence in self._ring.lost().items()}
        if not lost:
            return
        cleanup_stale()
        named = "; ".join(
            f"reader {rank} is gone: {evidence}" for rank, evidence in sorted(lost.items())
        )
        if not self._drop_dead_readers:
            raise PeerLostError(
                f"{named}. Restart the group, or make the queue with drop_dead_readers=True to "
                "continue without lost readers",
                ranks=sorted(lost),
            )
        logger.warning("%s; the message queue continues without", named)
        for rank in lost:
            self._drop(rank)

    def _drop(self, rank: int) -> None:
        if self._ring is not None and rank in self._local_ranks:
            self._ring.evict(self._local_ranks.index(rank))
        else:
            self._publisher.drop(rank)
        if not self._readers():
            raise PeerLostError(_NO_READER, ranks=(rank,))


def _release(publisher: Publisher, ring: MessageRingWriter | None) -> None:
    publisher.hide()  # first, because a socket without its segment counts as stale
    if ring is not None:
        ring.close()
    publisher.close()


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks)) or "(none)"


Parts = tuple[memoryview, list[memoryview]]


class LocalReader(MessageRingReader):
    """Reads the ring, and the local socket for messages that fit no slot. Not thread-safe."""

    _subscriber: Subscriber | None = None

    def __init__(self, handle: QueueHandle, rank: int) -> None:
        if handle.control is None or handle.data is None:
            raise HandleError("the handle has local readers but no segments; it is damaged")
        place = handle.local_reader_ranks.index(rank)
        super().__init__(handle.layout, handle.control, handle.data, place, spin_s=handle.spin_s)
        try:
            self._subscriber = Subscriber(f"ipc://{socket_path(handle.control)}", LOCAL, rank)
        except BaseException:
            self.close()
            raise
        self.join()

    def next_message(self, policy: Callable[[], WaitPolicy]) -> Parts:
        """Return body and buffers of the next message, valid until `release`."""
        number, place, view = self.take()
        if place == SOCKET:
            assert self._subscriber is not None
            return self._subscriber.receive(number, policy())
        return split(view)

    def close(self) -> None:
        """Leave the queue. Idempotent."""
        super().close()
        if self._subscriber is not None:
            self._subscriber.close()


class RemoteReader(Subscriber):
    """Reads from the writer's TCP socket, and acknowledges each message. Not thread-safe."""

    def __init__(self, handle: QueueHandle, rank: int) -> None:
        endpoint = handle.remote_endpoint or ""
        if not endpoint.startswith("tcp://"):
            raise HandleError(
                f"the handle has remote readers, and {endpoint!r} for them to connect to; "
                "it is damaged"
            )
        super().__init__(endpoint, REMOTE, rank)
        self._next = 0

    def next_message(self, policy: Callable[[], WaitPolicy]) -> Parts:
        """Return body and buffers of the next message, valid until `release`."""
        return self.receive(self._next, policy())

    def check_member(self) -> None:
        """Do nothing: a message from the socket lies in this process's memory."""

    def release(self) -> None:
        """Release the current message and acknowledge it."""
        self._next += 1
        self.acknowledge(self._next)

    def interrupt(self) -> None:
        """Do nothing: a wait for the socket polls every quarter of a second."""


Reader = LocalReader | RemoteReader


def open_reader(handle: QueueHandle, rank: int) -> Reader:
    """Return the reading end of `rank`, local or remote. Raises ConfigError for other ranks."""
    if rank in handle.local_reader_ranks:
        return LocalReader(handle, rank)
    if rank in handle.remote_reader_ranks:
        return RemoteReader(handle, rank)
    raise ConfigError(
        f"rank {rank} is no reader of this queue; on the writer's host are "
        f"{list(handle.local_reader_ranks)}, elsewhere {list(handle.remote_reader_ranks)}"
    )


__all__ = ["MessageCodec", "MessageQueue", "QueueHandle"]

MAX_CHUNK_BYTES = 24 << 20
MAX_CHUNKS = 10


class MessageQueue:
    """One end of a broadcast queue: the constructor makes a writer, `create_from_handle` a reader.

    `n_local_reader` of the `n_reader` readers run on this host; their ranks are
    `local_reader_ranks`, by default the first ones. The others, `remote_reader_ranks`, connect to
    `connect_ip`, an IPv4 or IPv6 address of this host. Its default is the address on the route to
    `MASTER_ADDR`, or else to other networks. Messages up to `max_chunk_bytes` pass through
    `max_chunks` slots of shared memory, larger messages through a socket. After a reader died,
    `enqueue` raises PeerLostError, or excludes the reader with `drop_dead_readers`. `spin_s` is
    how long a reader polls before it sleeps. Raises ConfigError, and SegmentError when `/dev/shm`
    has no room for the slots.
    """

    def __init__(  # noqa: PLR0913  # users know these names
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        max_chunks: int = MAX_CHUNKS,
        connect_ip: str | None = None,
        *,
        remote_reader_ranks: Sequence[int] | None = None,
        codec: MessageCodec | None = None,
        drop_dead_readers: bool = False,
        writer_rank: int | None = None,
        spin_s: float = SPIN_S,
    ) -> None:
        local, remote = _ranks(n_reader, n_local_reader, local_reader_ranks, remote_reader_ranks)
        settings = QueueHandle(
            local_reader_ranks=local,
            remote_reader_ranks=remote,
            writer_rank=writer_rank,
            slots=max_chunks,
            slot_nbytes=max_chunk_bytes,
            spin_s=spin_s,
        )
        self._codec = codec or MessageCodec()
        self._writer: Writer | None = Writer(
            settings, connect_ip=connect_ip, drop_dead_readers=drop_dead_readers
        )
        self._reader: Reader | None = None
        self._handle = self._writer.handle
        self._lock = self._writer.lock
        self._reading = False

    @classmethod
    def create_from_handle(
        cls, handle: QueueHandle, rank: int, *, codec: MessageCodec | None = None
    ) -> Self:
        """Open the reading end of `rank`. Raises HandleError or SegmentError when that fails.

        A reader on the writer's host may open late: messages stay in the ring. The writer waits for
        readers on other hosts before it sends. With `wait_until_ready` both sides wait for all.
        """
        queue = cls.__new__(cls)
        queue._codec = codec or MessageCodec()
        queue._writer = None
        queue._reader = reader = open_reader(handle, rank)
        queue._handle = handle
        queue._lock = ClosableLock("message queue", wake=reader.interrupt, release=reader.close)
        queue._reading = False
        return queue

    @classmethod
    def create_from_process_group(  # noqa: PLR0913  # users know these names
        cls,
        pg: dist.ProcessGroup | StoreGroup,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        max_chunks: int = MAX_CHUNKS,
        writer_rank: int = 0,
        external_writer_handle: QueueHandle | None = None,
        blocking: bool = True,  # users know this order
        *,
        connect_ip: str | None = None,
        codec: MessageCodec | None = None,
        drop_dead_readers: bool = False,
    ) -> Self:
        """Return this rank's end of one queue from `writer_rank` to all other ranks. All call it.

        `writer_rank` is a rank in the group. `external_writer_handle`, needed on `writer_rank`
        only, is the handle of an existing queue: then all ranks are its readers. Waits for all
        ranks (`wait_until_ready`) unless `blocking` is False. Raises ConfigError for a rank outside
        of the group. If the queue cannot be made, `writer_rank` raises the error and the other
        ranks raise TransferError.
        """
        # Imported here and below because queues made from a handle need no torch.
        from weightsync.queues.group import Group, split_by_host  # noqa: PLC0415 - above

        group = Group(pg)
        group.check_rank("writer_rank", writer_rank)
        writer: Self | None = None

        def make() -> QueueHandle:
            nonlocal writer
            if external_writer_handle is not None:
                return external_writer_handle
            local, remote = split_by_host(hosts, writer_rank)
            writer = cls(
                group.size - 1,
                len(local),
                local,
                remote_reader_ranks=remote,
                max_chunk_bytes=max_chunk_bytes,
                max_chunks=max_chunks,
                connect_ip=(connect_ip or group.address()) if remote else None,
                codec=codec,
                drop_dead_readers=drop_dead_readers,
                writer_rank=writer_rank,
            )
            return writer.export_handle()

        hosts = group.everybodys_host()
        handle = group.share(make if group.rank == writer_rank else None)[writer_rank]
        if handle is None:
            raise ConfigError(f"writer_rank {writer_rank} differs from rank to rank")
        queue = writer or cls.create_from_handle(handle, group.rank, codec=codec)
        if blocking:
            queue.wait_until_ready()
        return queue

    @classmethod
    def create_from_process_group_single_reader(
        cls,
        pg: dist.ProcessGroup | StoreGroup,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        max_chunks: int = MAX_CHUNKS,
        reader_rank: int = 0,
        blocking: bool = False,  # users know this order
        *,
        connect_ip: str | None = None,
        codec: MessageCodec | None = None,
    ) -> tuple[Self | None, dict[int, Self]]:
        """Return this rank's writing end, and on the reader the reading ends by the writer's rank.

        Every other rank has its own queue to `reader_rank`: a global rank, as in vLLM, so in a
        group of the ranks 1 and 3 it is 1 or 3. (A group that has only a store has only ranks of
        its own.) The writers' ranks are those in the group. All ranks call this. With `blocking` it
        returns when the reader has opened all queues. Raises ConfigError for a rank outside of the
        group.
        """
        from weightsync.queues.group import Group  # noqa: PLC0415 - as above

        group = Group(pg)
        reader_rank = group.rank_of(reader_rank)
        hosts = group.everybodys_host()
        writer: Self | None = None

        def make() -> QueueHandle:
            nonlocal writer
            here = hosts[group.rank] == hosts[reader_rank]
            writer = cls(
                1,
                int(here),
                [reader_rank] if here else [],
                remote_reader_ranks=[] if here else [reader_rank],
                max_chunk_bytes=max_chunk_bytes,
                max_chunks=max_chunks,
                connect_ip=None if here else connect_ip or group.address(),
                codec=codec,
                writer_rank=group.rank,
            )
            return writer.export_handle()

        handles = group.share(None if group.rank == reader_rank else make)
        readers: dict[int, Self] = {}
        if writer is None:
            for rank, handle in enumerate(handles):
                if handle is not None:
                    readers[rank] = cls.create_from_handle(handle, reader_rank, codec=codec)
        if blocking:
            for queue in [writer] if writer else readers.values():
                queue.wait_until_ready()
        return writer, readers

    @property
    def is_writer(self) -> bool:
        """True for the writing end."""
        return self._writer is not None

    def export_handle(self) -> QueueHandle:
        """Return the handle for `create_from_handle`, in any process on any host."""
        return self._handle

    def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Return when the writer and all readers have opened their ends. Every end calls it.

        Raises PeerLostError, and TransferTimeout naming the missing readers.
        """
        if self._writer is not None:
            self._writer.wait_until_ready(timeout_s)
        else:
            reader = self._require_reader()
            condition = "the writer to see all readers"
            with self._lock:
                reader.wait_ready(self._wait_policy(lambda: condition, timeout_s))

    def enqueue(
        self,
        obj: object,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Send `obj` to all readers; the caller may change `obj` as soon as this returns.

        `timeout` is the name that users of vLLM's queue know for `timeout_s`. Waits while the
        slots are full. If it raises, no reader gets the message: ConfigError for an object that
        cannot be encoded, TransferTimeout naming the readers that are behind, PeerLostError for a
        reader that died, TransferCancelled when `cancel` is set or the queue is closed. Several
        threads may call it.
        """
        timeout_s = _either(timeout_s, timeout)
        self._require_writer("enqueues").send(self._codec.encode(obj), timeout_s, cancel)

    def dequeue(
        self,
        timeout_s: float | None = None,
        cancel: Cancel | bool | None = None,
        indefinite: bool = False,  # users know this order
        *,
        timeout: float | None = None,
    ) -> Any:
        """Return the next message, copied out of the queue. Called by one thread.

        `timeout` is the name that users of vLLM's queue know for `timeout_s`; a bool in the place
        of `cancel` is `indefinite`, which is second in newer versions of that queue.

        Raises TransferTimeout after `timeout_s`, TransferCancelled when `cancel` is set or this end
        is closed, and PeerLostError when the writer is gone and all its messages were read. A
        message with a type that is not registered here raises ProtocolError and is consumed. A long
        wait is logged periodically unless it is `indefinite`.
        """
        reader = self._require_reader()
        timeout_s = _either(timeout_s, timeout)
        cancel, indefinite = _swapped(cancel, indefinite)
        with self._lock:
            body, buffers = self._take(reader, timeout_s, cancel, indefinite)
            try:
                return self._decoded(reader, body, buffers, None)
            finally:
                reader.release()

    @contextmanager
    def read(
        self,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
        *,
        indefinite: bool = False,
    ) -> Iterator[Any]:
        """Yield the next message in place, read-only, without a copy.

        Views of bytes end with the block (a later use is a ValueError). Tensors and arrays would
        show later messages, so do not keep them. Raises the same errors as `dequeue`. The end of
        the block raises TransferError if the writer dropped this reader meanwhile, and
        TransferCancelled if this end was closed: the message may have been overwritten.
        """
        views: list[memoryview] = []
        reader = self._require_reader()
        with self._lock:
            body, buffers = self._take(reader, timeout_s, cancel, indefinite)
            self._reading = True
        try:
            with self._lock:
                message = self._decoded(reader, body, buffers, views)
            yield message
            with self._lock:
                reader.check_member()
        finally:
            for view in views:
                with suppress(BufferError):
                    view.release()
            self._reading = False
            with suppress(TransferCancelled), self._lock:
                reader.release()

    def acquire_read(
        self,
        timeout_s: float | None = None,
        cancel: Cancel | bool | None = None,
        indefinite: bool = False,  # users know this order
        *,
        timeout: float | None = None,
    ) -> AbstractContextManager[Any]:
        """Enter with the next message in place: `read` under the name of vLLM's queue.

        The message of an `acquire_write` is a memoryview of its bytes, without a byte of the
        queue's own. The arguments are those of `dequeue`.
        """
        cancel, indefinite = _swapped(cancel, indefinite)
        return self.read(_either(timeout_s, timeout), cancel, indefinite=indefinite)

    def acquire_write(
        self,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
        *,
        nbytes: int | None = None,
        timeout: float | None = None,
    ) -> AbstractContextManager[memoryview]:
        """Enter with `nbytes` writable bytes of a slot, sent as one message when the block ends.

        Readers get bytes (`read`: a view). The default of `nbytes` is the capacity of a slot,
        `max_chunk_bytes` minus 64. A block that raises sends nothing. The view ends with the block;
        messages and `close` of other threads wait for its end. Raises the same errors as `enqueue`,
        and ConfigError for more bytes than a slot takes.
        """
        timeout_s = _either(timeout_s, timeout)
        return self._require_writer("writes").write_in_place(nbytes, timeout_s, cancel)

    def broadcast_object(self, obj: object = None, timeout_s: float | None = None) -> Any:
        """On the writer, send `obj` and return it; on a reader, return the object sent."""
        if self._writer is None:
            return self.dequeue(timeout_s)
        self.enqueue(obj, timeout_s)
        return obj

    def drop_reader(self, rank: int) -> None:
        """Exclude a reader that is stuck. Called on the writer.

        If the reader continues, it gets a TransferError: the message that it reads at that moment
        may be overwritten.
        """
        self._require_writer("drops readers").drop_reader(rank)

    def close(self) -> None:
        """Leave the queue, from any thread. Idempotent. Readers still get the messages sent before.

        Waiting calls of this end in other threads, and later calls, raise TransferCancelled.
        """
        self._lock.close()

    def shutdown(self) -> None:
        """Leave the queue: `close` under the name of vLLM's queue."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(
        self,
        reader: Reader,
        timeout_s: float | None,
        cancel: Cancel | None,
        indefinite: bool,
    ) -> tuple[memoryview, list[memoryview]]:
        if self._reading:
            raise ConfigError("the previous message is still being read; end its block first")

        policy = partial(
            self._wait_policy, self._pending_condition, timeout_s, cancel, indefinite=indefinite
        )
        if not reader.available:
            reader.wait(policy())
        return reader.next_message(policy)

    def _wait_policy(
        self,
        condition: Callable[[], str],
        timeout_s: float | None,
        cancel: Cancel | None = None,
        *,
        indefinite: bool = False,
    ) -> WaitPolicy:
        return WaitPolicy(
            condition,
            self._check_writer,
            timeout_s=timeout_s,
            cancel=cancel,
            closing=self._lock,
            indefinite=indefinite,
        )

    def _decoded(
        self,
        reader: Reader,
        body: memoryview,
        buffers: list[memoryview],
        views: list[memoryview] | None,
    ) -> Any:
        try:
            message = self._codec.decode(body, buffers, views)
        except ProtocolError:
            reader.check_member()  # an overwritten message looks damaged, but is a TransferError
            raise
        reader.check_member()
        return message

    def _pending_condition(self) -> str:
        rank = self._handle.writer_rank
        return "a message of the writer" + ("" if rank is None else f", rank {rank}")

    def _check_writer(self) -> None:
        evidence = self._require_reader().writer_lost()
        if evidence is not None:
            cleanup_stale()
            rank = self._handle.writer_rank
            writer = "the writer" if rank is None else f"the writer, rank {rank},"
            raise PeerLostError(
                f"{writer} is gone: {evidence}; no more messages will come",
                ranks=() if rank is None else (rank,),
            )

    def _require_writer(self, does: str) -> Writer:
        if self._writer is None:
            raise ConfigError(f"this is a reader's end of the queue; only the writer {does}")
        return self._writer

    def _require_reader(self) -> Reader:
        if self._reader is None:
            raise ConfigError("this is the writer's end of the queue; only readers dequeue")
        return self._reader


def _either(timeout_s: float | None, timeout: float | None) -> float | None:
    """Return the timeout that was given. Raises ConfigError for both."""
    if timeout_s is not None and timeout is not None:
        raise ConfigError("timeout and timeout_s are both given; they are one argument")
    return timeout if timeout_s is None else timeout_s


def _swapped(cancel: Cancel | bool | None, indefinite: bool) -> tuple[Cancel | None, bool]:
    """Return `cancel` and `indefinite`, where the latter may be in the place of the former."""
    return (None, cancel) if isinstance(cancel, bool) else (cancel, indefinite)


def _ranks(
    n_reader: int,
    n_local_reader: int,
    local: Sequence[int] | None,
    remote: Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks on this host and on others. Raises ConfigError when the counts differ."""
    if not 0 <= n_local_reader <= n_reader:
        raise ConfigError(f"{n_local_reader} of {n_reader} readers cannot be on this host")
    if local is None:
        local = range(n_local_reader)
    if remote is None:
        remote = [rank for rank in range(n_reader) if rank not in local]
        remote = remote[: n_reader - n_local_reader]
    if (len(local), len(remote)) != (n_local_reader, n_reader - n_local_reader):
        raise ConfigError(
            f"ranks {list(local)} here and {list(remote)} elsewhere are not {n_local_reader} and "
            f"{n_reader - n_local_reader}; give local_reader_ranks and remote_reader_ranks"
        )
    return tuple(local), tuple(remote)
