"""The counter ring: the handshake between one writer and several readers, in shared memory.

`CounterRing` is the control segment: words that only grow, each written by one side. The writer
publishes a sequence number when its bytes are in place; readers release it when they have read
them. A wait spins briefly, then sleeps on the counter's word (futex), for a bounded time, and polls
between sleeps: a lost wake-up costs one such sleep. `Control`, `RingWriter` and `RingReader` are
the ring that carries weights; weightsync.queues.message_ring has the one of messages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import ClassVar, Self

from weightsync.errors import HandleError, TransferError
from weightsync.shm.segment import Segment
from weightsync.shm.store_order import nothing, order_stores
from weightsync.shm.wait import SPIN_S, Check, PeerProgress, Poll, fence, sleep_on, wait, wake

_WORD_NBYTES = struct.calcsize("Q")
LINE = 8
"""Words of a cache line. Line 0 describes the ring, line 1 is the writer's, then one per reader."""
_SHAPE = slice(0, 4)
_EVERYTHING = (1 << 64) - 1
_MIN_SLOTS_TO_SLEEP = 3
"""With fewer slots, readers run out of chunks while the writer sleeps."""
PUBLISHED = LINE
"""The writer's word of the last sequence number published."""
WANTED = LINE + 1
"""The writer's word of the sequence number that wakes it when it sleeps, 0 while it is awake."""
WRITER_WORDS = LINE + 2
"""The first of up to six further words of the writer, which the ring's user defines."""
RELEASED, ASLEEP = 0, 1
"""A reader's words, in its line: the sequence number up to which it has released, and whether it
sleeps on a word of the writer."""
READER_WORDS = 2
"""The first of up to six further words in a reader's line, which the ring's user defines."""


def line_of(reader: int) -> int:
    """Return the index of the first word of a reader's line."""
    return (2 + reader) * LINE


def control_nbytes(*, readers: int, entries: int) -> int:
    """Return the size of a control segment in bytes."""
    lines = 2 + readers + -(-entries // LINE)
    return lines * LINE * _WORD_NBYTES


class WriterWord:
    """One of the writer's words as an attribute; the writer alone sets it."""

    def __init__(self, word: int) -> None:
        self._word = word

    def __get__(self, ring: CounterRing, owner: type[CounterRing]) -> int:
        return ring.words[self._word]

    def __set__(self, ring: CounterRing, value: int) -> None:
        ring.store(self._word, value)


class CounterRing:
    """One process's view of a control segment: lines of counters, then `entries` words.

    `published` is the last sequence number published. The writer sets `active`, the readers that it
    waits for and wakes. Its `fence` orders its bytes before its counters
    (weightsync.shm.store_order).
    """

    magic: ClassVar[int]
    published = WriterWord(PUBLISHED)

    def __init__(self, segment: Segment, *, slots: int, readers: int, entries: int) -> None:
        self.fence = order_stores()
        self._looks_at_marks = self.fence is nothing
        self.segment = segment
        self.slots = slots
        self.readers = readers
        self.entries = entries
        self.active: tuple[int, ...] = ()
        self.words = segment.buffer.cast("Q")
        self._lines = [line_of(reader) for reader in range(readers)]
        self.first_entry = line_of(readers)

    @classmethod
    def create(cls, *, slots: int, readers: int, entries: int) -> Self:
        """Create a control segment, owned by this process."""
        segment = Segment.create(control_nbytes(readers=readers, entries=entries))
        ring = cls(segment, slots=slots, readers=readers, entries=entries)
        for word, value in enumerate((cls.magic, slots, readers, entries)):
            ring.words[word] = value
        return ring

    @classmethod
    def open(cls, name: str, nbytes: int, *, slots: int, readers: int, entries: int) -> Self:
        """Open another process's control segment as a reader. Raises HandleError, SegmentError."""
        expected = control_nbytes(readers=readers, entries=entries)
        if nbytes != expected:
            raise HandleError(f"a control segment of {expected} bytes is needed, not {nbytes}")
        segment = Segment.open(name, nbytes=nbytes, writable=True)
        ring = cls(segment, slots=slots, readers=readers, entries=entries)
        magic, *shape = ring.words[_SHAPE].tolist()
        if (magic, shape) != (cls.magic, [slots, readers, entries]):
            ring.close()
            raise HandleError(
                f"segment {name} is not a control segment of this version"
                if magic != cls.magic
                else f"control segment {name} has {shape[0]} slots, {shape[1]} readers and "
                f"{shape[2]} entries, not {slots}, {readers} and {entries}"
            )
        return ring

    def store(self, word: int, value: int) -> None:
        """Store one of the writer's words after its bytes, and wake the readers that sleep on it.

        A full fence comes before the look at the readers' marks, so a reader that this process
        sees awake finds the new value before it sleeps. Where that fence would be a system call,
        the wake-up is called each time instead: the kernel looks for sleepers after the store.
        """
        self.fence()
        words = self.words
        words[word] = value
        if self._looks_at_marks:
            fence()
            for reader in self.active:
                if words[self._lines[reader] + ASLEEP]:
                    break
            else:
                return
        wake(self.address_of(word))

    def released(self, reader: int) -> int:
        """Return the sequence number up to which `reader` has released."""
        return self.words[self._lines[reader] + RELEASED]

    def release(self, reader: int, number: int) -> None:
        """Release everything up to `number`, and wake the writer. Called by this reader only."""
        words, word = self.words, self._lines[reader] + RELEASED
        words[word] = number
        fence()
        wanted = words[WANTED]
        if wanted and number >= wanted:
            wake(self.address_of(word))

    def lowest_released(self) -> int:
        """Return the sequence number that all active readers have released; huge without any."""
        return min(map(self.released, self.active), default=_EVERYTHING)

    def behind(self, number: int) -> list[int]:
        """Return the active readers that have not released `number`."""
        return [reader for reader in self.active if self.released(reader) < number]

    def wait_stored(
        self, reader: int, word: int, value: int, poll: Poll, *, spin_s: float = 0.0
    ) -> None:
        """Return when a word of the writer is at least `value`. Called by this reader only."""
        words, asleep = self.words, line_of(reader) + ASLEEP

        def sleep(seconds: float) -> None:
            words[asleep] = 1
            try:
                if (seen := words[word]) < value:
                    sleep_on(self.address_of(word), seen, seconds)
            finally:
                words[asleep] = 0

        wait(lambda: words[word] >= value, poll, spin_s=spin_s, sleep=sleep)

    def wait_released(
        self, number: int, poll: Poll, *, spin_s: float = 0.0, wake_at: int = 0
    ) -> None:
        """Return when all active readers have released `number`. Called by the writer only.

        A sleeping writer is woken when they have released `wake_at` if that is more, so that it
        wakes once for several releases.
        """
        words = self.words

        def sleep(seconds: float) -> None:
            active = self.active  # another thread may take the last reader from it
            if not active:
                return
            words[WANTED] = max(number, min(wake_at, words[PUBLISHED]))
            self.fence()
            try:
                slowest = min(active, key=self.released)
                word = line_of(slowest) + RELEASED
                if (seen := words[word]) < number:
                    sleep_on(self.address_of(word), seen, seconds)
            finally:
                words[WANTED] = 0

        wait(lambda: self.lowest_released() >= number, poll, spin_s=spin_s, sleep=sleep)

    def address_of(self, word: int) -> int:
        """Return the address of a word, on which its waits sleep."""
        return self.segment.address + _WORD_NBYTES * word

    def close(self) -> None:
        """Unmap; the owner also removes the segment. Idempotent."""
        self.words.release()
        self.segment.close()


_EPOCH, _BEAT, _TABLE, _OFFERED, _LOST = range(WRITER_WORDS, WRITER_WORDS + 5)
_READER_BEAT, _LOADED = range(READER_WORDS, READER_WORDS + 2)


class Control(CounterRing):
    """The control segment of weights: counters, and a table of `entries` fingerprints.

    `epoch` is the number of the update that the counters belong to. `offered` is the generation of
    the newest init message, raised before the writer sends it. `table_ready` counts the
    fingerprints of the unpacked path that were written, and `writer_beat` the writer's heartbeats.
    `sender_lost` is 1 while a writer that is not the sender itself has no connection to it.
    """

    magic = 0x7773_7269_6E67_0004
    epoch = WriterWord(_EPOCH)
    offered = WriterWord(_OFFERED)
    table_ready = WriterWord(_TABLE)
    writer_beat = WriterWord(_BEAT)
    sender_lost = WriterWord(_LOST)

    @property
    def room(self) -> int:
        """Entries of each slot: its fingerprints begin at entry `slot * room`."""
        return self.entries // self.slots

    def beat_writer(self) -> None:
        """Raise the writer's heartbeat. Called by the writer only."""
        self.words[_BEAT] += 1

    def reader_beat(self, reader: int) -> int:
        """Return a reader's heartbeat, which grows while the reader works."""
        return self.words[line_of(reader) + _READER_BEAT]

    def beat_reader(self, reader: int) -> None:
        """Raise the reader's heartbeat. Called by this reader only."""
        self.words[line_of(reader) + _READER_BEAT] += 1

    def loaded(self, reader: int) -> int:
        """Return the total bytes of registered memory that `reader` has copied; for observers."""
        return self.words[line_of(reader) + _LOADED]

    def load(self, reader: int, nbytes: int) -> None:
        """Set the total bytes copied, a number that grows. Called by this reader only."""
        self.words[line_of(reader) + _LOADED] = nbytes

    def liveness(self, reader: int) -> int:
        """Return a sum of counters that grows while this reader works."""
        return self.reader_beat(reader) + self.released(reader) + self.loaded(reader)

    def write_fingerprints(self, at: int, values: Sequence[int]) -> None:
        """Store fingerprints from entry `at` on. Called before their chunk is published."""
        if at + len(values) > self.entries:
            raise TransferError(f"{len(values)} fingerprints at {at} exceed {self.entries} entries")
        for i, value in enumerate(values, self.first_entry + at):
            self.words[i] = value

    def fingerprints(self, at: int, count: int) -> list[int]:
        """Return `count` fingerprints from entry `at` on."""
        start = self.first_entry + at
        return self.words[start : start + count].tolist()


class RingWriter:
    """The writing end. For each update: `begin`, then `acquire` and `publish` for each chunk.

    Chunk j lies in slot j modulo `slots`, and has the sequence number `base` + j + 1. `late` are
    the readers that made the last wait time out.
    """

    def __init__(self, control: Control, *, spin_s: float = SPIN_S) -> None:
        self.control = control
        self.spin_s = spin_s
        self.base = 0
        self.late: list[int] = []
        self._sequence = 0

    def begin(self, readers: Iterable[int], chunks: int) -> int:
        """Start an update of `chunks` chunks for these readers; return its epoch."""
        self._begin(readers, chunks, epoch=self.control.epoch + 1, base=self._sequence)
        return self.control.epoch

    def follow(self, readers: Iterable[int], chunks: int, *, epoch: int, base: int) -> None:
        """Start an update with the epoch and base of the ring of another host."""
        if epoch <= self.control.epoch:
            raise TransferError(
                f"the update of epoch {epoch} comes after that of epoch {self.control.epoch}; "
                "epochs grow"
            )
        self._begin(readers, chunks, epoch=epoch, base=base)

    def _begin(self, readers: Iterable[int], chunks: int, *, epoch: int, base: int) -> None:
        self.late = []
        self.base, self._sequence = base, base + chunks
        self.control.active = tuple(readers)
        self.control.epoch = epoch

    def acquire(self, chunk: int, *, check: Check, timeout_s: float) -> int:
        """Return the slot of `chunk` when every reader has released the slot's previous chunk.

        Raises TransferTimeout naming the readers that did not release it.
        """
        if chunk >= self.control.slots:
            # Readers have the chunks of the other slots meanwhile.
            spin_s = 0.0 if self.control.slots >= _MIN_SLOTS_TO_SLEEP else self.spin_s
            number = self.base + chunk - self.control.slots + 1
            self._wait_released(number, check, timeout_s, spin_s)
        # Before the first chunks too: readers of the last update may still read.
        self.control.fence()
        return chunk % self.control.slots

    def publish(self, chunk: int) -> None:
        """Publish `chunk` to the readers. Its bytes and fingerprints must be in place."""
        self.control.published = self.base + chunk + 1

    def drain(self, chunks: int, *, check: Check, timeout_s: float) -> None:
        """Return when every reader has released all `chunks`."""
        self._wait_released(self.base + chunks, check, timeout_s, self.spin_s)

    def _wait_released(self, number: int, check: Check, timeout_s: float, spin_s: float) -> None:
        control = self.control
        if control.lowest_released() >= number:
            return

        def counters() -> dict[int, tuple[int, int]]:
            return {
                r: (control.released(r), control.reader_beat(r)) for r in control.behind(number)
            }

        def late(readers: list[int]) -> str:
            self.late = readers
            return (
                f"no progress for {timeout_s:g} s while waiting for reader "
                f"{', '.join(map(str, readers))} to release chunk {number - self.base} of this "
                "update; the update is aborted"
            )

        progress = PeerProgress(counters, late, check=check, timeout_s=timeout_s)
        control.wait_released(number, progress.poll, spin_s=spin_s)


class RingReader:
    """The reading end of one reader, for one update. `reader` is the reader's index."""

    def __init__(
        self, control: Control, reader: int, *, epoch: int, base: int, spin_s: float = SPIN_S
    ) -> None:
        self._control = control
        self._reader = reader
        self._epoch = epoch
        self._base = base
        self._spin_s = spin_s

    def wait(self, chunk: int, *, check: Check, timeout_s: float) -> int:
        """Return the slot of `chunk` when it is published. Raises TransferTimeout."""
        number = self._base + chunk + 1
        if self._control.published < number:
            late = (
                f"the sender published no chunk {chunk + 1} of this update for {timeout_s:g} s; "
                "the update is aborted"
            )
            self._wait(PUBLISHED, number, late, check, timeout_s)
        self.check_current(chunk)
        return chunk % self._control.slots

    def wait_table(self, count: int, *, check: Check, timeout_s: float) -> None:
        """Return when this update's `count` fingerprints are written. Raises TransferTimeout."""
        late = f"the sender published no fingerprints for {timeout_s:g} s"
        self._wait(_TABLE, self._base + count, late, check, timeout_s)

    def wait_epoch(self, *, check: Check, timeout_s: float) -> None:
        """Return when the ring is at this update or a later one. Raises TransferTimeout."""
        late = f"the update of epoch {self._epoch} did not begin for {timeout_s:g} s"
        self._wait(_EPOCH, self._epoch, late, check, timeout_s)

    def release(self, chunk: int) -> None:
        """Release the slot. Raises TransferError when the chunk was overwritten meanwhile."""
        self.check_current(chunk)
        self._control.release(self._reader, self._base + chunk + 1)

    def leave(self, chunks: int) -> None:
        """Release all `chunks`, whether they were read or not: nobody waits for this reader."""
        if self._control.epoch <= self._epoch:
            self._control.release(self._reader, self._base + chunks)

    def check_current(self, chunk: int) -> None:
        """Raise TransferError when the slot was reused or a new update began meanwhile."""
        control, number = self._control, self._base + chunk + 1
        current = number <= control.published < number + control.slots
        if not current or control.epoch != self._epoch:
            raise TransferError(
                f"chunk {chunk + 1} of this update was overwritten while it was read (epoch "
                f"{self._epoch}, now {self._control.epoch}); the sender dropped this reader"
            )

    def _wait(self, word: int, value: int, late: str, check: Check, timeout_s: float) -> None:
        control = self._control

        def counters() -> dict[int, tuple[int, int]]:
            return {0: (0, control.writer_beat)}

        progress = PeerProgress(counters, lambda _: late, check=check, timeout_s=timeout_s)
        control.wait_stored(self._reader, word, value, progress.poll, spin_s=self._spin_s)
