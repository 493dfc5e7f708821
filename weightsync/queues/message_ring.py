"""Shared-memory ring of a message queue: one writer, several readers, counters that only grow."""

from __future__ import annotations

import os
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

from weightsync.errors import HandleError, PeerLostError, SegmentError, TransferError
from weightsync.shm.segment import Segment
from weightsync.shm.store_order import nothing, order_stores
from weightsync.shm.wait import WaitPolicy, fence, sleep_on, wake

RECORDS = 256
RECORD_NBYTES = 1024
INLINE, SLOT, SOCKET = 1, 2, 3
"""Place of a message: inside its record, in a slot, or sent through the socket."""

MAGIC = 0x7773_6D71_7565_0001
PAGE = 4096
LINE = 8
RECORD = struct.Struct("<QQQQ")  # number, place, bytes, slot
INLINE_OFFSET = 64
INLINE_NBYTES = RECORD_NBYTES - INLINE_OFFSET
HEADER = 0
# Words of the writer's line.
WRITER = LINE
PUBLISHED, CLOSED, WANTED, READY = range(WRITER, WRITER + 4)
# Words of a reader's line.
READERS = 2 * LINE
RELEASED, JOINED, ID_HIGH, ID_LOW, ASLEEP, LEFT = range(6)


@dataclass(frozen=True)
class MessageRingLayout:
    """Sizes and offsets of a message ring's two segments."""

    slots: int
    slot_nbytes: int
    readers: int

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return -(-self.slot_nbytes // PAGE) * PAGE

    @property
    def data_nbytes(self) -> int:
        """Bytes of the data segment."""
        return RECORDS * RECORD_NBYTES + self.slots * self.stride

    @property
    def control_nbytes(self) -> int:
        """Bytes of the control segment; the words of evicted readers come last."""
        return 8 * (self.evicted(self.readers))

    def evicted(self, reader: int) -> int:
        """Return the index of the word that the writer sets when it evicts `reader`."""
        return READERS + (self.readers + 1) * LINE + reader

    def slot_at(self, slot: int) -> int:
        """Return the offset of a slot in the data segment."""
        return RECORDS * RECORD_NBYTES + slot * self.stride


def line_of(reader: int) -> int:
    """Return the index of the first word of a reader's line: the number of messages released."""
    return READERS + reader * LINE


_SPINS = 32
SPIN_S = 0.0001
"""How long a wait polls with sched_yield before it sleeps: the cost of two or three wake-ups."""


class MessageRingWriter:
    """The writing end, which owns both segments. Readers have the places 0 to `readers - 1`."""

    def __init__(self, layout: MessageRingLayout, *, spin_s: float = SPIN_S) -> None:
        self._fence = order_stores()
        self._full_fence = fence if self._fence is nothing else self._fence
        self.layout = layout
        self._spin_s = spin_s
        self.control = Segment.create(layout.control_nbytes)
        try:
            self.data = Segment.create(layout.data_nbytes)
        except BaseException:
            self.control.close()
            raise
        self._words = self.control.buffer.cast("Q")
        self._buffer = self.data.buffer
        self._words[HEADER] = MAGIC
        self.active: tuple[int, ...] = tuple(range(layout.readers))
        self._published = 0
        self._floor = 0
        self._used: list[int] = [0] * layout.slots
        self._posted = 0
        self._peers: dict[int, Segment] = {}
        self._sleeps_on = [self.control.address + 8 * line_of(r) for r in range(layout.readers)]

    @property
    def published(self) -> int:
        """Number of messages published."""
        return self._published

    def joined(self, reader: int) -> bool:
        """Return whether a reader has ever taken this place."""
        return bool(self._words[line_of(reader) + JOINED])

    def announce_ready(self) -> None:
        """Release the readers from `wait_ready`."""
        self._words[READY] = 1
        wake(self.control.address + 8 * READY)

    def behind(self, number: int) -> list[int]:
        """Return the active readers that have not released `number` messages."""
        return [r for r in self.active if self._words[line_of(r)] < number]

    def evict(self, reader: int) -> None:
        """Exclude this reader permanently; it raises TransferError at its next check."""
        self._words[self.layout.evicted(reader)] = self._published + 1
        self.active = tuple(r for r in self.active if r != reader)
        if peer := self._peers.pop(reader, None):
            peer.close()

    def lost(self) -> dict[int, str]:
        """Return the active readers that died or left, with the evidence."""
        found = {}
        for reader in self.active:
            line = line_of(reader)
            if self._words[line + LEFT]:
                found[reader] = "it closed its end"
            elif self._words[line + JOINED] and not self._alive(reader):
                found[reader] = "the lock on its segment is free, so its process is dead"
        return found

    @property
    def record_free(self) -> bool:
        """True if the next message's record is known to be free."""
        return self._published + 1 - RECORDS <= self._floor

    def wait_record(self, policy: WaitPolicy) -> None:
        """Return when the next message's record is free."""
        needed = self._published + 1 - RECORDS
        # A writer this far ahead of its readers is woken once for many messages, not for each.
        self._wait_released(needed, needed + RECORDS // 2, policy)

    def wait_slot(self, policy: WaitPolicy) -> int:
        """Return a free slot: the first one, whose memory is most likely in the cache."""
        if self._floor < self._published:
            self._floor = self._lowest_released()
        while True:
            for slot, number in enumerate(self._used):
                if number <= self._floor:
                    return slot
            oldest = min(self._used)
            self._wait_released(oldest, oldest, policy)

    def wait_post(self, policy: WaitPolicy) -> None:
        """Return when the last message sent by socket was read, so that at most one is queued."""
        self._wait_released(self._posted, self._posted, policy)

    def slot(self, slot: int, nbytes: int) -> memoryview:
        """Return the writable bytes of a slot."""
        self._fence()
        start = self.layout.slot_at(slot)
        return self._buffer[start : start + nbytes]

    def inline(self, nbytes: int) -> memoryview:
        """Return the writable bytes of the next message's record."""
        self._fence()
        start = self._published % RECORDS * RECORD_NBYTES + INLINE_OFFSET
        return self._buffer[start : start + nbytes]

    def publish(self, place: int, nbytes: int, slot: int = 0) -> None:
        """Publish the next message, whose bytes must be in place."""
        number = self._published
        if place == SOCKET:  # `slot` and `inline` have called the fence for the other places
            self._fence()
        RECORD.pack_into(
            self._buffer, number % RECORDS * RECORD_NBYTES, number + 1, place, nbytes, slot
        )
        self._published = number = number + 1
        if place == SLOT:
            self._used[slot] = number
        elif place == SOCKET:
            self._posted = number
        self._fence()
        self._words[PUBLISHED] = number
        self._wake_readers()

    def interrupt(self) -> None:
        """Wake this writer's own waits. Any thread may call it, also after `close`."""
        for address in self._sleeps_on:
            wake(address)

    def close(self) -> None:
        """Mark the queue closed and free the segments. Readers may read to the end. Idempotent."""
        if not self._words.nbytes:
            return
        self._words[CLOSED] = 1
        self._wake_readers()
        wake(self.control.address + 8 * PUBLISHED)
        for peer in self._peers.values():
            peer.close()
        self._words.release()
        self._words = memoryview(b"").cast("Q")
        self._buffer.release()
        self.data.close()
        self.control.close()

    def _wake_readers(self) -> None:
        self._full_fence()
        words = self._words
        for reader in self.active:
            if words[READERS + reader * LINE + ASLEEP]:
                wake(self.control.address + 8 * PUBLISHED)
                return

    def _lowest_released(self) -> int:
        words = self._words
        return min((words[line_of(r)] for r in self.active), default=self._published)

    def _wait_released(self, needed: int, wanted: int, policy: WaitPolicy) -> None:
        """Return when all readers have released `needed`; a sleeping wait is woken at `wanted`."""
        self._floor = self._lowest_released()
        spin_until = time.monotonic() + self._spin_s
        while self._floor < needed and time.monotonic() < spin_until:
            os.sched_yield()
            self._floor = self._lowest_released()
        if self._floor >= needed:
            return
        words = self._words
        words[WANTED] = min(wanted, self._published)
        self._fence()
        try:
            while self._floor < needed:
                self._sleep_on_slowest(words[WANTED], policy.nap_s)
                self._floor = self._lowest_released()
                if self._floor < needed:
                    policy.look()
        finally:
            words[WANTED] = 0

    def _sleep_on_slowest(self, wanted: int, nap_s: float) -> None:
        if not self.active:
            return
        slowest = min(self.active, key=lambda reader: self._words[line_of(reader)])
        value = self._words[line_of(slowest)]
        if value < wanted:
            sleep_on(self._sleeps_on[slowest], value, nap_s)

    def _alive(self, reader: int) -> bool:
        """Check the lock of the segment that the reader created and named when it joined."""
        line = line_of(reader)
        if reader not in self._peers:
            high, low = self._words[line + ID_HIGH], self._words[line + ID_LOW]
            try:
                peer = Segment.open(f"weightsync-{high:016x}{low:016x}", nbytes=PAGE)
            except SegmentError as exc:
                if isinstance(exc.__cause__, FileNotFoundError):
                    return False  # the name of a living owner is never removed
                raise
            self._peers[reader] = peer
        return self._peers[reader].owner_alive()


class MessageRingReader:
    """The reading end of place `reader`. Used by one thread."""

    def __init__(
        self,
        layout: MessageRingLayout,
        control: str,
        data: str,
        reader: int,
        *,
        spin_s: float = SPIN_S,
    ) -> None:
        """Open the ring. Raises SegmentError, or HandleError if the place is taken."""
        self._fence = order_stores()
        self.layout = layout
        self._reader = reader
        self._spin_s = spin_s
        self._line = line_of(reader)
        self._control = Segment.open(control, nbytes=layout.control_nbytes, writable=True)
        self._words = self._control.buffer.cast("Q")
        self._address = self._control.address
        self._own: Segment | None = None
        self._joined = False
        self._data: Segment | None = None
        self._next = 0
        self._buffer = memoryview(b"")
        try:
            if self._words[HEADER] != MAGIC:
                raise HandleError(f"segment {control} is not a message queue of this version")
            if self._words[self._line + JOINED]:
                raise HandleError(f"reader place {reader} of this queue is or was taken")
            self._data = Segment.open(data, nbytes=layout.data_nbytes)
            self._buffer = self._data.buffer
            self._own = Segment.create(PAGE)
        except BaseException:
            self.close()
            raise

    def join(self) -> None:
        """Publish the name of this reader's lock to the writer. Called when the reader is ready."""
        assert self._own is not None
        identity = self._own.name.removeprefix("weightsync-")
        self._words[self._line + ID_HIGH] = int(identity[:16], 16)
        self._words[self._line + ID_LOW] = int(identity[16:], 16)
        self._fence()
        self._words[self._line + JOINED] = 1
        self._joined = True

    def wait_ready(self, policy: WaitPolicy) -> None:
        """Return when the writer has announced that all readers joined."""
        while not self._words[READY]:
            sleep_on(self._address + 8 * READY, 0, policy.nap_s)
            if not self._words[READY]:
                policy.look(closed=bool(self._words[CLOSED]))

    def writer_lost(self) -> str | None:
        """Return why no more messages will come, or None while the writer lives."""
        if self._words[CLOSED]:
            return "it closed the queue"
        if not self._control.owner_alive():
            return "the lock on its segment is free, so its process is dead"
        return None

    @property
    def available(self) -> bool:
        """True if the next message is published."""
        return self._words[PUBLISHED] > self._next

    def take(self) -> tuple[int, int, memoryview]:
        """Return number, place and bytes of the next message (no bytes for place SOCKET)."""
        self.check_member()
        start = self._next % RECORDS * RECORD_NBYTES
        number, place, nbytes, slot = RECORD.unpack_from(self._buffer, start)
        if place == INLINE:
            start += INLINE_OFFSET
        elif place == SLOT and slot < self.layout.slots and nbytes <= self.layout.slot_nbytes:
            start = self.layout.slot_at(slot)
        elif place == SOCKET:
            nbytes = 0
        else:
            number = 0
        if number != self._next + 1:
            self.check_member()
            raise TransferError(f"record of message {self._next} is damaged")
        return self._next, place, self._buffer[start : start + nbytes]

    def check_member(self) -> None:
        """Raise TransferError if the writer evicted this reader; else all bytes read are intact.

        Called after the bytes were read and before they are trusted.
        """
        evicted = self._words[self.layout.evicted(self._reader)]
        if evicted:
            raise TransferError(
                f"the writer dropped reader place {self._reader} at message {evicted - 1}, while "
                f"the reader was at message {self._next}; what it read since may be overwritten"
            )

    def release(self) -> None:
        """Release the current message and advance to the next."""
        self._next += 1
        words = self._words
        words[self._line] = self._next
        fence()
        wanted = words[WANTED]
        if wanted and self._next >= wanted:
            wake(self._address + 8 * self._line)

    def interrupt(self) -> None:
        """Wake this reader's own waits. Any thread may call it, also after `close`."""
        wake(self._address + 8 * PUBLISHED)
        wake(self._address + 8 * READY)

    def close(self) -> None:
        """Mark this reader as gone and unmap. Views still in use stay readable. Idempotent."""
        if not self._words.nbytes:
            return
        if self._joined:
            self._words[self._line + LEFT] = 1
            wake(self._address + 8 * self._line)
        with suppress(BufferError):
            self._buffer.release()
        self._words.release()
        self._words = memoryview(b"").cast("Q")
        for segment in (self._own, self._data, self._control):
            if segment is not None:
                segment.close()

    def wait(self, policy: WaitPolicy) -> None:
        """Return when the next message is published."""
        words, next_number = self._words, self._next
        for _ in range(_SPINS):
            if words[PUBLISHED] > next_number:
                return
        spin_until = time.monotonic() + self._spin_s
        while time.monotonic() < spin_until:
            os.sched_yield()
            if words[PUBLISHED] > next_number:
                return
        words[self._line + ASLEEP] = 1
        try:
            while words[PUBLISHED] <= next_number:
                sleep_on(self._address + 8 * PUBLISHED, next_number, policy.nap_s)
                if words[PUBLISHED] <= next_number:
                    self._look(policy)
        finally:
            words[self._line + ASLEEP] = 0

    def _look(self, policy: WaitPolicy) -> None:
        self.check_member()
        try:
            policy.look(closed=bool(self._words[CLOSED]))
        except PeerLostError:
            # Messages that the writer published before its end can still be read.
            if self._words[PUBLISHED] <= self._next:
                raise
