"""The reading ends of a message queue: through shared memory, or from another host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from weightsync.errors import ConfigError, HandleError
from weightsync.samehost.message_layout import SOCKET, MessageRingLayout
from weightsync.samehost.message_parts import split
from weightsync.samehost.message_ring import MessageRingReader
from weightsync.samehost.message_sockets import LOCAL, REMOTE, Subscriber, socket_path
from weightsync.samehost.message_writer import QueueHandle
from weightsync.samehost.patience import WaitPolicy

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
