"""Shared-memory ring of a message queue: numbered records, and slots for larger messages."""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import dataclass

from weightsync.errors import HandleError, PeerLostError, SegmentError, TransferError
from weightsync.shm.ring import (
    PUBLISHED,
    READER_WORDS,
    WRITER_WORDS,
    CounterRing,
    WriterWord,
    control_nbytes,
    line_of,
)
from weightsync.shm.segment import Segment
from weightsync.shm.wait import SPIN_S, WaitPolicy, wake

RECORDS = 256
RECORD_NBYTES = 1024
INLINE, SLOT, SOCKET = 1, 2, 3
"""Place of a message: inside its record, in a slot, or sent through the socket."""

PAGE = 4096
RECORD = struct.Struct("<QQQQ")  # number, place, bytes, slot
INLINE_OFFSET = 64
INLINE_NBYTES = RECORD_NBYTES - INLINE_OFFSET
_CLOSED, _READY = range(WRITER_WORDS, WRITER_WORDS + 2)
_JOINED, _ID_HIGH, _ID_LOW, _LEFT = range(READER_WORDS, READER_WORDS + 4)


@dataclass(frozen=True)
class MessageRingLayout:
    """Sizes of a message ring: its records, then its slots, in the data segment."""

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

    def slot_at(self, slot: int) -> int:
        """Return the offset of a slot in the data segment."""
        return RECORDS * RECORD_NBYTES + slot * self.stride


class MessageControl(CounterRing):
    """The control segment of messages. Its entries are the marks of evicted readers.

    A mark is 0, or 1 + the number of the message at which the reader was evicted. `closed` is 1
    once the writer has closed the queue, `ready` once all readers have joined.
    """

    magic = 0x7773_6D71_7565_0002
    closed = WriterWord(_CLOSED)
    ready = WriterWord(_READY)

    def reader_word(self, reader: int, word: int) -> int:
        """Return one of a reader's own words."""
        return self.words[line_of(reader) + word]


class MessageRingWriter:
    """The writing end, which owns both segments. Readers have the places 0 to `readers - 1`."""

    def __init__(self, layout: MessageRingLayout, *, spin_s: float = SPIN_S) -> None:
        self.layout = layout
        self._spin_s = spin_s
        self.control = MessageControl.create(
            slots=layout.slots, readers=layout.readers, entries=layout.readers
        )
        try:
            self.data = Segment.create(layout.data_nbytes)
        except BaseException:
            self.control.close()
            raise
        self._buffer = self.data.buffer
        self.control.active = tuple(range(layout.readers))
        self._published = 0
        self._floor = 0
        self._used: list[int] = [0] * layout.slots
        self._posted = 0
        self._peers: dict[int, Segment] = {}
        self._closed = False
        self._sleeps_on = [self.control.address_of(line_of(r)) for r in range(layout.readers)]

    def joined(self, reader: int) -> bool:
        """Return whether a reader has ever taken this place."""
        return bool(self.control.reader_word(reader, _JOINED))

    def announce_ready(self) -> None:
        """Release the readers from `wait_ready`."""
        self.control.ready = 1

    def evict(self, reader: int) -> None:
        """Exclude this reader permanently; it raises TransferError at its next check."""
        control = self.control
        control.words[control.first_entry + reader] = self._published + 1
        control.active = tuple(r for r in control.active if r != reader)
        if peer := self._peers.pop(reader, None):
            peer.close()

    def lost(self) -> dict[int, str]:
        """Return the active readers that died or left, with the evidence."""
        found = {}
        for reader in self.control.active:
            if self.control.reader_word(reader, _LEFT):
                found[reader] = "it closed its end"
            elif self.joined(reader) and not self._alive(reader):
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
        self._wait_released(needed, policy, wake_at=needed + RECORDS // 2)

    def wait_slot(self, policy: WaitPolicy) -> int:
        """Return a free slot: the first one, whose memory is most likely in the cache."""
        if self._floor < self._published:
            self._floor = self.control.lowest_released()
        while True:
            for slot, number in enumerate(self._used):
                if number <= self._floor:
                    return slot
            self._wait_released(min(self._used), policy)

    def wait_post(self, policy: WaitPolicy) -> None:
        """Return when the last message sent by socket was read, so that at most one is queued."""
        self._wait_released(self._posted, policy)

    def slot(self, slot: int, nbytes: int) -> memoryview:
        """Return the writable bytes of a slot."""
        self.control.fence()
        start = self.layout.slot_at(slot)
        return self._buffer[start : start + nbytes]

    def inline(self, nbytes: int) -> memoryview:
        """Return the writable bytes of the next message's record."""
        self.control.fence()
        start = self._published % RECORDS * RECORD_NBYTES + INLINE_OFFSET
        return self._buffer[start : start + nbytes]

    def publish(self, place: int, nbytes: int, slot: int = 0) -> None:
        """Publish the next message, whose bytes must be in place."""
        number = self._published
        if place == SOCKET:  # `slot` and `inline` have called the fence for the other places
            self.control.fence()
        RECORD.pack_into(
            self._buffer, number % RECORDS * RECORD_NBYTES, number + 1, place, nbytes, slot
        )
        self._published = number = number + 1
        if place == SLOT:
            self._used[slot] = number
        elif place == SOCKET:
            self._posted = number
        self.control.store(PUBLISHED, number)

    def interrupt(self) -> None:
        """Wake this writer's own waits. Any thread may call it, also after `close`."""
        for address in self._sleeps_on:
            wake(address)

    def close(self) -> None:
        """Mark the queue closed and free the segments. Readers may read to the end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.control.closed = 1
        wake(self.control.address_of(PUBLISHED))
        wake(self.control.address_of(_READY))
        for peer in self._peers.values():
            peer.close()
        self._buffer.release()
        self.data.close()
        self.control.close()

    def _wait_released(self, needed: int, policy: WaitPolicy, *, wake_at: int = 0) -> None:
        control = self.control
        control.wait_released(needed, policy.poll, spin_s=self._spin_s, wake_at=wake_at)
        self._floor = control.lowest_released()

    def _alive(self, reader: int) -> bool:
        """Check the lock of the segment that the reader created and named when it joined."""
        if reader not in self._peers:
            high, low = (self.control.reader_word(reader, word) for word in (_ID_HIGH, _ID_LOW))
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
        self.layout = layout
        self._reader = reader
        self._spin_s = spin_s
        shape = {"readers": layout.readers, "entries": layout.readers}
        self._control = MessageControl.open(
            control, control_nbytes(**shape), slots=layout.slots, **shape
        )
        self._words = self._control.words
        self._evicted = self._control.first_entry + reader
        self._sleeps_on = [self._control.address_of(word) for word in (PUBLISHED, _READY)]
        self._own: Segment | None = None
        self._joined = self._closed = False
        self._data: Segment | None = None
        self._next = 0
        self._buffer = memoryview(b"")
        try:
            if self._control.reader_word(reader, _JOINED):
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
        words, line = self._control.words, line_of(self._reader)
        identity = self._own.name.removeprefix("weightsync-")
        words[line + _ID_HIGH] = int(identity[:16], 16)
        words[line + _ID_LOW] = int(identity[16:], 16)
        self._control.fence()
        words[line + _JOINED] = 1
        self._joined = True

    def wait_ready(self, policy: WaitPolicy) -> None:
        """Return when the writer has announced that all readers joined."""
        control = self._control
        control.wait_stored(self._reader, _READY, 1, lambda: policy.poll(closed=control.closed > 0))

    def writer_lost(self) -> str | None:
        """Return why no more messages will come, or None while the writer lives."""
        if self._control.closed:
            return "it closed the queue"
        if not self._control.segment.owner_alive():
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
        if evicted := self._words[self._evicted]:
            raise TransferError(
                f"the writer dropped reader place {self._reader} at message {evicted - 1}, while "
                f"the reader was at message {self._next}; what it read since may be overwritten"
            )

    def release(self) -> None:
        """Release the current message and advance to the next."""
        self._next += 1
        self._control.release(self._reader, self._next)

    def interrupt(self) -> None:
        """Wake this reader's own waits. Any thread may call it, also after `close`."""
        for address in self._sleeps_on:
            wake(address)

    def close(self) -> None:
        """Mark this reader as gone and unmap. Views still in use stay readable. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._joined:
            line = line_of(self._reader)
            self._control.words[line + _LEFT] = 1
            wake(self._control.address_of(line))
        with suppress(BufferError):
            self._buffer.release()
        for owned in (self._own, self._data, self._control):
            if owned is not None:
                owned.close()

    def wait(self, policy: WaitPolicy) -> None:
        """Return when the next message is published."""

        def poll() -> float:
            self.check_member()
            try:
                return policy.poll(closed=self._control.closed > 0)
            except PeerLostError:
                # Messages that the writer published before its end can still be read.
                if self.available:
                    return 0.0
                raise

        self._control.wait_stored(
            self._reader, PUBLISHED, self._next + 1, poll, spin_s=self._spin_s
        )
