"""The shared memory of a message queue: one writer, several readers, no flag ever cleared."""

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
"""Where a message lies: in its record, in a slot, or on the way through a socket."""

MAGIC = 0x7773_6D71_7565_0001
PAGE = 4096
LINE = 8
RECORD = struct.Struct("<QQQQ")  # number, place, bytes, slot
INLINE_OFFSET = 64
INLINE_NBYTES = RECORD_NBYTES - INLINE_OFFSET
HEADER = 0
# The writer's line, and words of it.
WRITER = LINE
PUBLISHED, CLOSED, WANTED, READY = range(WRITER, WRITER + 4)
# A reader's line, and words of it.
READERS = 2 * LINE
RELEASED, JOINED, ID_HIGH, ID_LOW, ASLEEP, LEFT = range(6)


@dataclass(frozen=True)
class MessageRingLayout:
    """How many slots of how many bytes for how many readers."""

    slots: int
    slot_nbytes: int
    readers: int

    @property
    def stride(self) -> int:
        """Bytes from slot to slot."""
        return -(-self.slot_nbytes // PAGE) * PAGE

    @property
    def data_nbytes(self) -> int:
        """Bytes of the data segment."""
        return RECORDS * RECORD_NBYTES + self.slots * self.stride

    @property
    def control_nbytes(self) -> int:
        """Bytes of the control segment; the writer's words about readers come last."""
        return 8 * (self.evicted(self.readers))

    def evicted(self, reader: int) -> int:
        """Return the word in which the writer says that it went on without `reader`."""
        return READERS + (self.readers + 1) * LINE + reader

    def slot_at(self, slot: int) -> int:
        """Return the offset of a slot."""
        return RECORDS * RECORD_NBYTES + slot * self.stride


def line_of(reader: int) -> int:
    """Return the first word of a reader's line: what it has released."""
    return READERS + reader * LINE


_SPINS = 32
SPIN_S = 0.0001
"""How long a wait polls, giving way to others, before it sleeps: two or three wake-ups' worth."""


class MessageRingWriter:
    """The writing end, which owns both segments. Places of readers are 0 to readers - 1."""

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
        """How many messages were published."""
        return self._published

    def joined(self, reader: int) -> bool:
        """Say whether a reader has ever taken this place."""
        return bool(self._words[line_of(reader) + JOINED])

    def announce_ready(self) -> None:
        """Let the readers' `wait_ready` return."""
        self._words[READY] = 1
        wake(self.control.address + 8 * READY)

    def behind(self, number: int) -> list[int]:
        """Return the active readers that have not released `number` messages."""
        return [r for r in self.active if self._words[line_of(r)] < number]

    def evict(self, reader: int) -> None:
        """Go on without this reader, for good; it finds out as soon as it looks."""
        self._words[self.layout.evicted(reader)] = self._published + 1
        self.active = tuple(r for r in self.active if r != reader)
        if peer := self._peers.pop(reader, None):
            peer.close()

    def lost(self) -> dict[int, str]:
        """Return the active readers that died or left, and how that is known."""
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
        """Say whether the next message's record is known to be free."""
        return self._published + 1 - RECORDS <= self._floor

    def wait_record(self, patience: WaitPolicy) -> None:
        """Return when the next message's record is free."""
        needed = self._published + 1 - RECORDS
        # A writer that far ahead is woken once for many messages, not once for each.
        self._wait_released(needed, needed + RECORDS // 2, patience)

    def wait_slot(self, patience: WaitPolicy) -> int:
        """Return a free slot: the first, as its memory is the likeliest to be in the cache."""
        if self._floor < self._published:
            self._floor = self._lowest()
        while True:
            for slot, number in enumerate(self._used):
                if number <= self._floor:
                    return slot
            oldest = min(self._used)
            self._wait_released(oldest, oldest, patience)

    def wait_post(self, patience: WaitPolicy) -> None:
        """Return when the last message that went by socket was read: they pile up nowhere."""
        self._wait_released(self._posted, self._posted, patience)

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
        """Give the next message to the readers; its bytes are in place."""
        number = self._published
        if place == SOCKET:  # the others' bytes were written after a fence
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
        """Wake this writer's own waits; from any thread, also after `close`."""
        for address in self._sleeps_on:
            wake(address)

    def close(self) -> None:
        """Tell the readers, who may read on to the last message, and let go. Idempotent."""
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

    def _lowest(self) -> int:
        words = self._words
        return min((words[line_of(r)] for r in self.active), default=self._published)

    def _wait_released(self, needed: int, wanted: int, patience: WaitPolicy) -> None:
        """Return when all have released `needed`; once asleep, rather when they did `wanted`."""
        self._floor = self._lowest()
        give_up = time.monotonic() + self._spin_s
        while self._floor < needed and time.monotonic() < give_up:
            os.sched_yield()
            self._floor = self._lowest()
        if self._floor >= needed:
            return
        words = self._words
        words[WANTED] = min(wanted, self._published)
        self._fence()
        try:
            while self._floor < needed:
                self._sleep_on_slowest(words[WANTED], patience.nap_s)
                self._floor = self._lowest()
                if self._floor < needed:
                    patience.look()
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
        """Look at the lock of the segment that the reader made and named when it joined."""
        line = line_of(reader)
        if reader not in self._peers:
            high, low = self._words[line + ID_HIGH], self._words[line + ID_LOW]
            try:
                peer = Segment.open(f"weightsync-{high:016x}{low:016x}", nbytes=PAGE)
            except SegmentError as exc:
                if isinstance(exc.__cause__, FileNotFoundError):
                    return False  # a living owner's name is never removed
                raise
            self._peers[reader] = peer
        return self._peers[reader].owner_alive()


class MessageRingReader:
    """The reading end of place `reader`. One thread uses it."""

    def __init__(
        self,
        layout: MessageRingLayout,
        control: str,
        data: str,
        reader: int,
        *,
        spin_s: float = SPIN_S,
    ) -> None:
        """Raises HandleError and SegmentError when the segments cannot be had or the place is."""
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
        """Let the writer know whose lock to watch; all that it needs of this reader is in place."""
        assert self._own is not None
        identity = self._own.name.removeprefix("weightsync-")
        self._words[self._line + ID_HIGH] = int(identity[:16], 16)
        self._words[self._line + ID_LOW] = int(identity[16:], 16)
        self._fence()
        self._words[self._line + JOINED] = 1
        self._joined = True

    def wait_ready(self, patience: WaitPolicy) -> None:
        """Return once the writer said that all are there."""
        while not self._words[READY]:
            sleep_on(self._address + 8 * READY, 0, patience.nap_s)
            if not self._words[READY]:
                patience.look(closed=bool(self._words[CLOSED]))

    def writer_lost(self) -> str | None:
        """Say how it is known that no more messages will come, None while they may."""
        if self._words[CLOSED]:
            return "it closed the queue"
        if not self._control.owner_alive():
            return "the lock on its segment is free, so its process is dead"
        return None

    @property
    def available(self) -> bool:
        """Say whether the next message is there."""
        return self._words[PUBLISHED] > self._next

    def take(self) -> tuple[int, int, memoryview]:
        """Return number, place and bytes of the next message (none of one that went by socket)."""
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
        """Raise TransferError when the writer went on without this reader; else all read is whole.

        Called after bytes were used and before they are trusted.
        """
        since = self._words[self.layout.evicted(self._reader)]
        if since:
            raise TransferError(
                f"the writer went on without reader place {self._reader} at message {since - 1}, "
                f"while it was at message {self._next}; what it read since may be overwritten"
            )

    def release(self) -> None:
        """Give the current message back and go to the next."""
        self._next += 1
        words = self._words
        words[self._line] = self._next
        fence()
        wanted = words[WANTED]
        if wanted and self._next >= wanted:
            wake(self._address + 8 * self._line)

    def interrupt(self) -> None:
        """Wake this reader's own waits; from any thread, also after `close`."""
        wake(self._address + 8 * PUBLISHED)
        wake(self._address + 8 * READY)

    def close(self) -> None:
        """Tell the writer and let go; idempotent. Views that are still about stay readable."""
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

    def wait(self, patience: WaitPolicy) -> None:
        """Return when the next message is there."""
        words, following = self._words, self._next
        for _ in range(_SPINS):
            if words[PUBLISHED] > following:
                return
        give_up = time.monotonic() + self._spin_s
        while time.monotonic() < give_up:
            os.sched_yield()
            if words[PUBLISHED] > following:
                return
        words[self._line + ASLEEP] = 1
        try:
            while words[PUBLISHED] <= following:
                sleep_on(self._address + 8 * PUBLISHED, following, patience.nap_s)
                if words[PUBLISHED] <= following:
                    self._look(patience)
        finally:
            words[self._line + ASLEEP] = 0

    def _look(self, patience: WaitPolicy) -> None:
        self.check_member()
        try:
            patience.look(closed=bool(self._words[CLOSED]))
        except PeerLostError:
            # What it published before it went is there to be read.
            if self._words[PUBLISHED] <= self._next:
                raise
