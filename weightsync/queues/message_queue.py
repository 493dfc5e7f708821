"""A broadcast queue: one writer, many readers, over shared memory on one host, TCP beyond it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from weightsync.errors import (
    ConfigError,
    HandleError,
    PeerLostError,
    ProtocolError,
    TransferCancelled,
)
from weightsync.queues.message_codec import (
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
    SPIN_S,
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
    socket_path,
)
from weightsync.shm.segment import cleanup_stale
from weightsync.shm.wait import Cancel, ClosableLock, WaitPolicy

if TYPE_CHECKING:
    import torch.distributed as dist

    from weightsync.queues.group import StoreGroup


logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often a writer that never waits looks whether its readers live."""


class QueueHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a reader needs to open a queue: plain data, to be sent by any way there is."""

    local_reader_ranks: tuple[int, ...] = ()
    remote_reader_ranks: tuple[int, ...] = ()
    writer_rank: int | None = None
    control: str | None = None
    data: str | None = None
    slots: int = 0
    slot_nbytes: int = 0
    remote_endpoint: str | None = None
    spin_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WriterTerms:
    """What a queue is made for; see `MessageQueue`."""

    local_ranks: tuple[int, ...]
    remote_ranks: tuple[int, ...]
    slots: int
    slot_nbytes: int
    connect_ip: str | None
    writer_rank: int | None
    drop_dead_readers: bool
    spin_s: float

    def __post_init__(self) -> None:
        """Raise ConfigError for what cannot be."""
        ranks = (*self.local_ranks, *self.remote_ranks)
        if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
            raise ConfigError(
                f"the readers have ranks {list(ranks)}; give one or more, each once, none negative"
            )
        if self.slots < 1 or self.slot_nbytes < 1:
            raise ConfigError(f"{self.slots} slots of {self.slot_nbytes} bytes make no queue")


class Writer:
    """Owns the segments and the socket. Safe to use from several threads.

    `lock.close()` ends the calls that wait, lets readers read to the end, and releases everything.
    """

    def __init__(self, terms: WriterTerms) -> None:
        self.terms = terms
        self._count = 0
        self._looked = time.monotonic()
        self._all_there = False
        self._ring: MessageRingWriter | None = None
        cleanup_stale()
        if terms.local_ranks:
            layout = MessageRingLayout(terms.slots, terms.slot_nbytes, len(terms.local_ranks))
            self._ring = MessageRingWriter(layout, spin_s=terms.spin_s)
        try:
            self._publisher = Publisher(
                path=socket_path(self._ring.control.name) if self._ring else None,
                connect_ip=(terms.connect_ip or own_address()) if terms.remote_ranks else None,
                window_nbytes=terms.slots * terms.slot_nbytes,
            )
        except BaseException:
            if self._ring:
                self._ring.close()
            raise
        self._publisher.remote = terms.remote_ranks
        self.lock = ClosableLock(
            "message queue",
            wake=self._ring.interrupt if self._ring else lambda: None,
            release=partial(_release, self._publisher, self._ring),
        )

    def handle(self) -> QueueHandle:
        """Return what readers open."""
        return QueueHandle(
            local_reader_ranks=self.terms.local_ranks,
            remote_reader_ranks=self.terms.remote_ranks,
            writer_rank=self.terms.writer_rank,
            control=self._ring.control.name if self._ring else None,
            data=self._ring.data.name if self._ring else None,
            slots=self.terms.slots,
            slot_nbytes=self.terms.slot_nbytes,
            remote_endpoint=self._publisher.tcp_endpoint,
            spin_s=self.terms.spin_s,
        )

    def send(self, message: Encoded, timeout_s: float | None, cancel: Cancel | None) -> None:
        """Send one message to all, or, when this raises, to none."""
        timeout_s = self._enter(timeout_s, cancel)
        try:
            patience = self._ready_for(message.nbytes, timeout_s, cancel)
            if self._ring is not None:
                self._put(self._ring, message, patience)
            if self._publisher.remote:
                self._publisher.send(REMOTE, self._count, message)
            self._count += 1
        finally:
            self.lock.leave()

    @contextmanager
    def write_in_place(
        self, nbytes: int | None, timeout_s: float | None, cancel: Cancel | None
    ) -> Iterator[memoryview]:
        """Yield `nbytes` writable bytes, by default all that a slot takes; sent at the end."""
        most = self.terms.slot_nbytes - buffer_offset(BYTES_BODY)
        nbytes = most if nbytes is None else nbytes
        if not 0 <= nbytes <= most:
            raise ConfigError(f"{nbytes} bytes are to be written in a slot, which takes {most}")
        whole = buffer_offset(BYTES_BODY) + nbytes
        timeout_s = self._enter(timeout_s, cancel)
        try:
            patience = self._ready_for(whole, timeout_s, cancel)
            if self._ring is None:
                view = write_around(memoryview(bytearray(whole)), BYTES_BODY)
                yield view
            else:
                if not self._ring.record_free:
                    self._ring.wait_record(patience())
                slot = self._ring.wait_slot(patience())
                view = write_around(self._ring.slot(slot, whole), BYTES_BODY)
                yield view
                self._ring.publish(SLOT, whole, slot)
            if self._publisher.remote:
                self._publisher.send(REMOTE, self._count, Encoded(BYTES_BODY, [view], []))
            self._count += 1
        finally:
            self.lock.leave()

    def wait_until_ready(self, timeout_s: float | None) -> None:
        """Return when every reader has opened its end; then theirs return too."""
        timeout_s = self._enter(timeout_s, None)
        try:
            self._wait_joined(self._patience(self._missing, timeout_s)())
            if self._ring is not None:
                self._ring.announce_ready()
            if self._publisher.remote:
                self._publisher.announce(READY)
        finally:
            self.lock.leave()

    def drop_reader(self, rank: int) -> None:
        """Go on without a reader; it will find out. Raises ConfigError when there is none."""
        with self.lock:
            if rank not in self._readers():
                raise ConfigError(f"rank {rank} is none of the readers, {self._readers()}")
            self._drop(rank)

    def _enter(self, timeout_s: float | None, cancel: Cancel | None) -> float | None:
        """Go inside the lock, which another thread may hold; return what is left of the time."""
        if self.lock.acquire(0):
            return timeout_s
        started = time.monotonic()
        patience = WaitPolicy(
            lambda: "another thread's message to be sent",
            lambda: None,
            timeout_s=timeout_s,
            cancel=cancel,
            closing=self.lock,
        )
        while not self.lock.acquire(patience.nap_s):
            patience.look()
        return None if timeout_s is None else max(0.0, started + timeout_s - time.monotonic())

    def _ready_for(
        self, nbytes: int, timeout_s: float | None, cancel: Cancel | None
    ) -> Callable[[], WaitPolicy]:
        """Wait until readers elsewhere can be sent `nbytes`; return the call's patience."""
        if time.monotonic() - self._looked > LOOK_S:
            self._look_at_readers()
        patience = self._patience(self._awaited, timeout_s, cancel)
        if self._publisher.remote:
            self._wait_joined(patience())
            self._publisher.wait_window(nbytes, patience())
        return patience

    def _put(
        self, ring: MessageRingWriter, message: Encoded, patience: Callable[[], WaitPolicy]
    ) -> None:
        if not ring.record_free:
            ring.wait_record(patience())
        nbytes = message.nbytes
        if nbytes <= INLINE_NBYTES:
            message.write(ring.inline(nbytes))
            ring.publish(INLINE, nbytes)
        elif nbytes <= self.terms.slot_nbytes:
            slot = ring.wait_slot(patience())
            message.write(ring.slot(slot, nbytes))
            ring.publish(SLOT, nbytes, slot)
        else:
            self._wait_joined(patience())
            ring.wait_post(patience())
            self._publisher.send(LOCAL, self._count, message)
            ring.publish(SOCKET, nbytes)

    def _patience(
        self, doing: Callable[[], str], timeout_s: float | None, cancel: Cancel | None = None
    ) -> Callable[[], WaitPolicy]:
        """Return what makes the patience of one call, once it is needed."""
        made: list[WaitPolicy] = []

        def get() -> WaitPolicy:
            if not made:
                made.append(
                    WaitPolicy(
                        doing,
                        self._look_at_readers,
                        timeout_s=timeout_s,
                        cancel=cancel,
                        closing=self.lock,
                    )
                )
            return made[0]

        return get

    def _wait_joined(self, patience: WaitPolicy) -> None:
        if self._all_there:
            return
        self._publisher.wait_joined(self._expected, patience)
        self._all_there = True

    def _expected(self) -> set[tuple[bytes, int]]:
        """Return the subscriptions of the readers that were not dropped."""
        local = {(LOCAL, rank) for rank in self._local()}
        return local | {(REMOTE, rank) for rank in self._publisher.remote}

    def _local(self) -> list[int]:
        return [self.terms.local_ranks[place] for place in self._ring.active] if self._ring else []

    def _readers(self) -> list[int]:
        return [*self._local(), *self._publisher.remote]

    def _missing(self) -> str:
        gone = self._expected() - self._publisher.joined
        return f"reader {_listed(rank for _, rank in gone)} to open this queue"

    def _awaited(self) -> str:
        if self._expected() - self._publisher.joined and not self._all_there:
            return self._missing()
        behind = list(self._publisher.behind())
        if self._ring is not None:
            behind += [self.terms.local_ranks[p] for p in self._ring.behind(self._count)]
        return f"reader {_listed(behind)} to read what was sent"

    def _look_at_readers(self) -> None:
        """Raise PeerLostError naming the readers that are gone, or go on without them."""
        self._looked = time.monotonic()
        self._publisher.pump()
        lost = dict(self._publisher.lost)
        if self._ring is not None:
            lost |= {self.terms.local_ranks[p]: how for p, how in self._ring.lost().items()}
        if not lost:
            return
        cleanup_stale()
        named = "; ".join(f"reader {rank} is gone: {how}" for rank, how in sorted(lost.items()))
        if not self.terms.drop_dead_readers:
            raise PeerLostError(
                f"{named}. Start the group anew, or make the queue with drop_dead_readers=True "
                "to go on without readers that are lost",
                ranks=sorted(lost),
            )
        logger.warning("%s; the message queue goes on without", named)
        for rank in lost:
            self._drop(rank)

    def _drop(self, rank: int) -> None:
        if self._ring is not None and rank in self.terms.local_ranks:
            self._ring.evict(self.terms.local_ranks.index(rank))
        else:
            self._publisher.drop(rank)
        if not self._readers():
            raise PeerLostError("no reader is left", ranks=(rank,))


def _release(publisher: Publisher, ring: MessageRingWriter | None) -> None:
    publisher.hide()  # a socket without its segment would be a dead owner's
    if ring is not None:
        ring.close()
    publisher.close()


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks)) or "(none)"


Parts = tuple[memoryview, list[memoryview]]


class Reader(Protocol):
    """One reading end; one thread at a time uses it. Messages: `take` one, then `release` it."""

    @property
    def available(self) -> bool:
        """Say whether `take` may be called at once."""
        ...

    def wait(self, patience: WaitPolicy) -> None:
        """Return when `take` may be called."""
        ...

    def take(self, patience: Callable[[], WaitPolicy]) -> Parts:
        """Return body and buffers of the next message, valid until `release`."""
        ...

    def check(self) -> None:
        """Raise TransferError unless all that was read of this message is what was sent."""
        ...

    def release(self) -> None:
        """Give the message back."""
        ...

    def wait_ready(self, patience: WaitPolicy) -> None:
        """Return when the writer has seen all readers."""
        ...

    def writer_lost(self) -> str | None:
        """Say how it is known that no more messages will come, None while they may."""
        ...

    def interrupt(self) -> None:
        """Wake the thread that waits; from any thread, also after `close`."""
        ...

    def close(self) -> None:
        """Leave; idempotent."""
        ...


def open_reader(handle: QueueHandle, rank: int) -> Reader:
    """Return the end of `rank`, local or remote. Raises ConfigError when it is no reader."""
    if rank in handle.local_reader_ranks:
        return LocalReader(handle, rank)
    if rank in handle.remote_reader_ranks:
        return RemoteReader(handle, rank)
    raise ConfigError(
        f"rank {rank} is no reader of this queue; on the writer's host are "
        f"{list(handle.local_reader_ranks)}, elsewhere {list(handle.remote_reader_ranks)}"
    )


class LocalReader:
    """Reads the ring, and from the local socket what did not fit it."""

    def __init__(self, handle: QueueHandle, rank: int) -> None:
        if handle.control is None or handle.data is None:
            raise HandleError("the handle has local readers but no segments; it is damaged")
        place = handle.local_reader_ranks.index(rank)
        layout = MessageRingLayout(handle.slots, handle.slot_nbytes, len(handle.local_reader_ranks))
        self._ring = MessageRingReader(
            layout, handle.control, handle.data, place, spin_s=handle.spin_s
        )
        try:
            path = socket_path(handle.control)
            self._subscriber = Subscriber(f"ipc://{path}", LOCAL, rank)
        except BaseException:
            self._ring.close()
            raise
        self._ring.join()

    @property
    def available(self) -> bool:
        return self._ring.available

    def wait(self, patience: WaitPolicy) -> None:
        self._ring.wait(patience)

    def take(self, patience: Callable[[], WaitPolicy]) -> Parts:
        number, place, view = self._ring.take()
        if place == SOCKET:
            return self._subscriber.receive(number, patience())
        return split(view)

    def check(self) -> None:
        self._ring.check_member()

    def release(self) -> None:
        self._ring.release()

    def wait_ready(self, patience: WaitPolicy) -> None:
        self._ring.wait_ready(patience)

    def writer_lost(self) -> str | None:
        return self._ring.writer_lost()

    def interrupt(self) -> None:
        self._ring.interrupt()

    def close(self) -> None:
        self._ring.close()
        self._subscriber.close()


class RemoteReader:
    """Reads from the writer's TCP socket, and acknowledges."""

    def __init__(self, handle: QueueHandle, rank: int) -> None:
        endpoint = handle.remote_endpoint or ""
        if not endpoint.startswith("tcp://"):
            raise HandleError(
                f"the handle has remote readers, and {endpoint!r} for them to connect to; "
                "it is damaged"
            )
        self._subscriber = Subscriber(endpoint, REMOTE, rank)
        self._next = 0

    @property
    def available(self) -> bool:
        return self._subscriber.available

    def wait(self, patience: WaitPolicy) -> None:
        self._subscriber.wait(patience)

    def take(self, patience: Callable[[], WaitPolicy]) -> Parts:
        return self._subscriber.receive(self._next, patience())

    def check(self) -> None:
        """What came by socket is this process's own."""

    def release(self) -> None:
        self._next += 1
        self._subscriber.acknowledge(self._next)

    def wait_ready(self, patience: WaitPolicy) -> None:
        self._subscriber.wait_ready(patience)

    def writer_lost(self) -> str | None:
        return self._subscriber.writer_lost()

    def interrupt(self) -> None:
        """A wait for the socket looks by itself, every quarter of a second."""

    def close(self) -> None:
        self._subscriber.close()


__all__ = ["MessageCodec", "MessageQueue", "QueueHandle"]

MAX_CHUNK_BYTES = 24 << 20
MAX_CHUNKS = 10


class MessageQueue:
    """One end of a queue: the writer's when constructed, a reader's by `create_from_handle`.

    `n_local_reader` of the `n_reader` readers share this host; their ranks are
    `local_reader_ranks`, by default the first ones. The others, `remote_reader_ranks`, connect to
    `connect_ip`, an IPv4 or IPv6 address of this host: by default the one on the way to
    `MASTER_ADDR`, or else to other networks. Messages up to `max_chunk_bytes` pass
    through `max_chunks` slots of shared memory; larger ones through a socket. A reader that died
    makes `enqueue` raise PeerLostError, or, with `drop_dead_readers`, is left out from then on.
    `spin_s` is how long a reader polls before it sleeps. Raises ConfigError; SegmentError when
    `/dev/shm` has no room for the slots.
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
        terms = WriterTerms(
            local_ranks=local,
            remote_ranks=remote,
            slots=max_chunks,
            slot_nbytes=max_chunk_bytes,
            connect_ip=connect_ip,
            writer_rank=writer_rank,
            drop_dead_readers=drop_dead_readers,
            spin_s=spin_s,
        )
        self._codec = codec or MessageCodec()
        self._writer: Writer | None = Writer(terms)
        self._reader: Reader | None = None
        self._handle = self._writer.handle()
        self._lock = self._writer.lock
        self._reading = False

    @classmethod
    def create_from_handle(
        cls, handle: QueueHandle, rank: int, *, codec: MessageCodec | None = None
    ) -> Self:
        """Open the reading end of `rank`. Raises HandleError or SegmentError if it cannot be had.

        Messages wait for a reader on the writer's host that comes late, and the writer waits for
        the others before it sends; `wait_until_ready` makes both sides wait at once.
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
        """Return this rank's end of one queue from `writer_rank` to all the others; all call it.

        `external_writer_handle`, known to `writer_rank`, is of a queue that exists already: then
        all are its readers. Returns when all are there (`wait_until_ready`) unless `blocking` is
        off. Raises what making the queue raises, and TransferError at the other ranks.
        """
        # Here and below, since queues made of a handle need no torch.
        from weightsync.queues.group import Group, split_by_host  # noqa: PLC0415 - above

        group = Group(pg)
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
        """Return this rank's writing end, and at the reader the reading ends by writer's rank.

        Every rank but `reader_rank` has a queue of its own to it; all call this. `blocking`
        returns when the reader has opened them all.
        """
        from weightsync.queues.group import Group  # noqa: PLC0415 - as above

        group = Group(pg)
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
        """True at the writing end."""
        return self._writer is not None

    def export_handle(self) -> QueueHandle:
        """Return what `create_from_handle` takes, in any process, on any host."""
        return self._handle

    def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Return when writer and all readers are there; everybody calls it.

        Raises TransferTimeout naming the readers that are missing, PeerLostError.
        """
        if self._writer is not None:
            self._writer.wait_until_ready(timeout_s)
        else:
            reader = self._require_reader()
            doing = "the writer to see all readers"
            with self._lock:
                reader.wait_ready(self._patience(lambda: doing, timeout_s))

    def enqueue(
        self, obj: object, timeout_s: float | None = None, cancel: Cancel | None = None
    ) -> None:
        """Send `obj` to all readers; `obj` may be changed as soon as this returns.

        Waits while the slots are full. When it raises, nobody gets the message: ConfigError for an
        object that cannot travel, TransferTimeout naming the readers that are behind,
        PeerLostError for one that died, TransferCancelled once `cancel` is set or the queue is
        closed. Several threads may call it.
        """
        if self._writer is None:
            raise ConfigError("this is a reader's end of the queue; only the writer enqueues")
        self._writer.send(self._codec.encode(obj), timeout_s, cancel)

    def dequeue(
        self,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
        *,
        indefinite: bool = False,
    ) -> Any:
        """Return the next message, copied out of the queue. One thread calls it.

        Raises TransferTimeout after `timeout_s`, TransferCancelled once `cancel` is set or this
        end is closed, PeerLostError when the writer is gone and everything it sent was read,
        ProtocolError for a message with a type that is not registered here; that message is spent.
        A long wait is logged now and then unless it is expected (`indefinite`).
        """
        reader = self._require_reader()
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
        """Yield the next message in place: nothing is copied, and nothing may be written to.

        Views of bytes end with the block (using one later is a ValueError); tensors and arrays
        would show later messages, so do not keep them. Raises as `dequeue` does. At the end of the
        block, what was read may have been overwritten: TransferError if the writer went on without
        this reader meanwhile, TransferCancelled if this end was closed.
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
                reader.check()
        finally:
            for view in views:
                with suppress(BufferError):
                    view.release()
            self._reading = False
            with suppress(TransferCancelled), self._lock:
                reader.release()

    @contextmanager
    def acquire_write(
        self,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
        *,
        nbytes: int | None = None,
    ) -> Iterator[memoryview]:
        """Yield `nbytes` writable bytes of a slot, sent as one message when the block ends.

        Readers get bytes (`read`: a view). By default `nbytes` is the most that a slot takes,
        `max_chunk_bytes` less 64. A block that raises sends nothing. The view ends with the block;
        messages and a `close` of other threads wait for its end. Raises as `enqueue` does, and
        ConfigError for more bytes than a slot takes.
        """
        if self._writer is None:
            raise ConfigError("this is a reader's end of the queue; only the writer writes")
        view = None
        try:
            with self._writer.write_in_place(nbytes, timeout_s, cancel) as view:
                yield view
        finally:
            if view is not None:
                with suppress(BufferError):
                    view.release()

    def broadcast_object(self, obj: object = None, timeout_s: float | None = None) -> Any:
        """At the writer, send `obj` and return it; at a reader, return what was sent."""
        if self._writer is None:
            return self.dequeue(timeout_s)
        self.enqueue(obj, timeout_s)
        return obj

    def drop_reader(self, rank: int) -> None:
        """At the writer: go on without a reader that is stuck. It gets a TransferError if it wakes.

        What it reads at that moment may be overwritten, which that error tells it too.
        """
        if self._writer is None:
            raise ConfigError("this is a reader's end of the queue; only the writer drops readers")
        self._writer.drop_reader(rank)

    def close(self) -> None:
        """Leave the queue, from any thread; idempotent. Readers get what the writer sent before.

        Calls of this end that wait in other threads raise TransferCancelled, as later calls do.
        """
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _take(
        self,
        reader: Reader,
        timeout_s: float | None,
        cancel: Cancel | None,
        indefinite: bool,
    ) -> tuple[memoryview, list[memoryview]]:
        if self._reading:
            raise ConfigError("the message before is still being read; end its block first")

        def patience() -> WaitPolicy:
            return self._patience(self._awaited, timeout_s, cancel, indefinite=indefinite)

        if not reader.available:
            reader.wait(patience())
        return reader.take(patience)

    def _patience(
        self,
        doing: Callable[[], str],
        timeout_s: float | None,
        cancel: Cancel | None = None,
        *,
        indefinite: bool = False,
    ) -> WaitPolicy:
        return WaitPolicy(
            doing,
            self._look_at_writer,
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
            reader.check()  # what looks damaged may be overwritten, which is another error
            raise
        reader.check()
        return message

    def _awaited(self) -> str:
        rank = self._handle.writer_rank
        return "a message of the writer" + ("" if rank is None else f", rank {rank}")

    def _look_at_writer(self) -> None:
        how = self._require_reader().writer_lost()
        if how is not None:
            cleanup_stale()
            rank = self._handle.writer_rank
            who = "the writer" if rank is None else f"the writer, rank {rank},"
            raise PeerLostError(
                f"{who} is gone: {how}; no more messages will come",
                ranks=() if rank is None else (rank,),
            )

    def _require_reader(self) -> Reader:
        if self._reader is None:
            raise ConfigError("this is the writer's end of the queue; only readers dequeue")
        return self._reader


def _ranks(
    n_reader: int,
    n_local_reader: int,
    local: Sequence[int] | None,
    remote: Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks on this host and elsewhere. Raises ConfigError when they do not add up."""
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
