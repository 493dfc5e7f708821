"""A broadcast queue: one writer, many readers, over shared memory on one host, TCP beyond it.

    queue = MessageQueue(n_reader=2, n_local_reader=2)             # the writer
    queue.enqueue({"step": 1, "tokens": torch.arange(1000)})

    queue = MessageQueue.create_from_handle(handle, rank)          # a reader; handle is plain data
    message = queue.dequeue(timeout_s=10)                          # a copy, or:
    with queue.read() as message:                                  # in place, until the block ends
        ...

Every reader gets every message, in order. docs/message-queue.md says what happens when somebody is
slow, dies, or comes late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from weightsync.errors import ConfigError, PeerLostError, ProtocolError, TransferCancelled
from weightsync.samehost.closable_lock import ClosableLock
from weightsync.samehost.janitor import cleanup_stale
from weightsync.samehost.message_codec import MessageCodec
from weightsync.samehost.message_reader import Reader, open_reader
from weightsync.samehost.message_ring import SPIN_S
from weightsync.samehost.message_writer import QueueHandle, Writer, WriterTerms
from weightsync.samehost.patience import Cancel, WaitPolicy

if TYPE_CHECKING:
    import torch.distributed as dist

    from weightsync.samehost.message_group import StoreGroup

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
        from weightsync.samehost.message_group import Group, split_by_host  # noqa: PLC0415 - above

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
        from weightsync.samehost.message_group import Group  # noqa: PLC0415 - as above

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
