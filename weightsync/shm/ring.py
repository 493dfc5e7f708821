"""The counter ring: the handshake between one writer and several readers for each chunk."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightsync.errors import HandleError, TransferError, TransferTimeout
from weightsync.shm.segment import Segment
from weightsync.shm.store_order import order_stores

_MAGIC = 0x7773_7269_6E67_0002
_LINE_WORDS = 8
_LINE_NBYTES = 64
_FIXED_LINES = 5
_TAKES_EVENTS = 1
"""The word of a reader's `released` line that says so; without it the writer waits on the host."""
_HEADER, _EPOCH, _WRITER_BEAT, _TABLE, _OFFERED = range(_FIXED_LINES)

SPIN_S = 0.002
"""How long a wait spins before it sleeps: about one large chunk."""
PATIENCE = 30
"""A peer that beats but makes no progress is waited for this many times as long as a silent one."""
_STANDSTILL_S = 0.25
"""Longer than any step of a wait takes while its process runs."""
_LONG_NAP_S = 1e-3
_HURRIED_SLOTS = 3
"""With fewer slots readers run out of chunks while the writer naps."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How a wait passes its time: it spins for `spin_s`, then naps for `nap_s` at a time."""

    spin_s: float
    nap_s: float


LOCAL = Backoff(SPIN_S, 50e-6)
NETWORK = Backoff(0.0, 500e-6)
"""Between chunks that travel: whoever spins takes the processor from the threads that move them."""

Check = Callable[[], None]
"""Called during waits; raises when waiting has become pointless."""


class Control:
    """The control segment: its counters by name, and room for `entries` fingerprints.

    `fence` is the writer's, between bytes and counters (weightsync.shm.store_order).
    """

    def __init__(self, segment: Segment, *, slots: int, readers: int, entries: int) -> None:
        self.fence = order_stores()
        if segment.nbytes != control_nbytes(slots=slots, readers=readers, entries=entries):
            raise HandleError(
                f"control segment {segment.name} has {segment.nbytes} bytes, which does not fit "
                f"{slots} slots, {readers} readers and {entries} fingerprints"
            )
        self.segment = segment
        self.slots = slots
        self.readers = readers
        self.entries = entries
        self._words = segment.buffer.cast("Q")
        self._published = _FIXED_LINES
        self._released = self._published + slots
        self._beats = self._released + readers
        self._loaded = self._beats + readers
        self._entries = (self._loaded + readers) * _LINE_WORDS

    @classmethod
    def create(cls, *, slots: int, readers: int, entries: int) -> Control:
        """Make and own a control segment."""
        nbytes = control_nbytes(slots=slots, readers=readers, entries=entries)
        control = cls(Segment.create(nbytes), slots=slots, readers=readers, entries=entries)
        control._set(_HEADER, _MAGIC)
        return control

    @classmethod
    def open(cls, name: str, nbytes: int, *, slots: int, readers: int, entries: int) -> Control:
        """Open another process's control segment for reading and releasing. Raises HandleError."""
        expected = control_nbytes(slots=slots, readers=readers, entries=entries)
        if nbytes != expected:
            raise HandleError(f"a control segment of {expected} bytes is needed, not {nbytes}")
        segment = Segment.open(name, nbytes=nbytes, writable=True)
        control = cls(segment, slots=slots, readers=readers, entries=entries)
        if control._get(_HEADER) != _MAGIC:
            segment.close()
            raise HandleError(f"segment {name} is not a control segment of this version")
        return control

    @property
    def epoch(self) -> int:
        """The update that the counters belong to; grows with each."""
        return self._get(_EPOCH)

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._set(_EPOCH, value)

    @property
    def table_ready(self) -> int:
        """How many fingerprints of the unpacked path were written, ever."""
        return self._get(_TABLE)

    @table_ready.setter
    def table_ready(self, value: int) -> None:
        self.fence()
        self._set(_TABLE, value)

    @property
    def offered(self) -> int:
        """Number of the newest offer of this ring; the writer raises it before it is sent."""
        return self._get(_OFFERED)

    @offered.setter
    def offered(self, number: int) -> None:
        self._set(_OFFERED, number)

    @property
    def writer_beat(self) -> int:
        """Grows while the writer lives and works."""
        return self._get(_WRITER_BEAT)

    def beat_writer(self) -> None:
        """Called by the writer alone."""
        self._set(_WRITER_BEAT, self.writer_beat + 1)

    def reader_beat(self, reader: int) -> int:
        """Grows while this reader lives and works."""
        return self._get(self._beats + reader)

    def beat_reader(self, reader: int) -> None:
        """Called by this reader alone."""
        self._set(self._beats + reader, self.reader_beat(reader) + 1)

    def published(self, slot: int) -> int:
        """Sequence number of the chunk in `slot`."""
        return self._get(self._published + slot)

    def publish(self, slot: int, sequence: int) -> None:
        """Called by the writer alone, after the last byte is in place."""
        self.fence()
        self._set(self._published + slot, sequence)

    def released(self, reader: int) -> int:
        """Sequence number up to which `reader` is done."""
        return self._get(self._released + reader)

    def release(self, reader: int, sequence: int) -> None:
        """Called by this reader alone."""
        self._set(self._released + reader, sequence)

    def takes_events(self, reader: int) -> int:
        """Return the number of the offer whose ready events `reader` waits for; or 0."""
        return self._words[(self._released + reader) * _LINE_WORDS + _TAKES_EVENTS]

    def take_events(self, reader: int, number: int) -> None:
        """Called by this reader alone, when it has opened the events of offer `number`; else 0."""
        self._words[(self._released + reader) * _LINE_WORDS + _TAKES_EVENTS] = number

    def loaded(self, reader: int) -> int:
        """Bytes of registered memory that `reader` has copied, ever; for whoever looks on."""
        return self._get(self._loaded + reader)

    def load(self, reader: int, nbytes: int) -> None:
        """Called by this reader alone, with a number that grows."""
        self._set(self._loaded + reader, nbytes)

    def signs(self, reader: int) -> int:
        """Return what grows while this reader lives and works."""
        return self.reader_beat(reader) + self.released(reader) + self.loaded(reader)

    def write_fingerprints(self, at: int, values: Sequence[int]) -> None:
        """Store fingerprints from entry `at` on, before their chunk is published."""
        if at + len(values) > self.entries:
            raise TransferError(f"{len(values)} fingerprints at {at} exceed {self.entries} entries")
        for i, value in enumerate(values, self._entries + at):
            self._words[i] = value

    def fingerprints(self, at: int, count: int) -> list[int]:
        """Return `count` fingerprints from entry `at` on."""
        start = self._entries + at
        return self._words[start : start + count].tolist()

    def close(self) -> None:
        """Unmap; the owner also removes the segment. Idempotent."""
        self._words.release()
        self.segment.close()

    def _get(self, line: int) -> int:
        return self._words[line * _LINE_WORDS]

    def _set(self, line: int, value: int) -> None:
        self._words[line * _LINE_WORDS] = value


def control_nbytes(*, slots: int, readers: int, entries: int) -> int:
    """Bytes of a control segment."""
    lines = _FIXED_LINES + slots + 3 * readers
    return lines * _LINE_NBYTES + -(-entries * struct.calcsize("Q") // _LINE_NBYTES) * _LINE_NBYTES


class RingWriter:
    """The writing end. Updates follow one another: `begin`, then per chunk `acquire`, `publish`.

    `late` are the readers for which the last wait that failed was in vain.
    """

    def __init__(self, control: Control, *, pace: Backoff = LOCAL) -> None:
        self.control = control
        self.pace = pace
        self._sequence = 0
        self._base = 0
        self._active: tuple[int, ...] = ()
        self._acquired = 0.0
        self.late: list[int] = []

    @property
    def base(self) -> int:
        """Sequence number before the first chunk of this update."""
        return self._base

    def begin(self, readers: Iterable[int], chunks: int) -> int:
        """Start an update of `chunks` chunks for these readers; return its epoch."""
        self._active = tuple(readers)
        self.late = []
        self._base = self._sequence
        self._sequence += chunks
        self.control.epoch += 1
        return self.control.epoch

    def follow(self, readers: Iterable[int], chunks: int, *, epoch: int, base: int) -> None:
        """Start an update that was numbered elsewhere: by the ring of another host."""
        if epoch <= self.control.epoch:
            raise TransferError(
                f"the update of epoch {epoch} comes after that of epoch {self.control.epoch}; "
                "epochs grow"
            )
        self._active = tuple(readers)
        self._base = base
        self._sequence = base + chunks
        self.control.epoch = epoch

    def acquire(self, chunk: int, *, check: Check, timeout_s: float) -> int:
        """Return the slot of `chunk` once every reader has released what was in it.

        Raises TransferTimeout naming the readers that were waited for.
        """
        if chunk >= self.control.slots:
            wanted = self._base + chunk - self.control.slots + 1
            self._wait_released(wanted, check=check, timeout_s=timeout_s, pace=self._unhurried())
        self.control.fence()  # also before the first chunks: readers of the last update may linger
        return chunk % self.control.slots

    def publish(self, chunk: int) -> None:
        """Give `chunk` to the readers; its bytes and fingerprints are in place."""
        self.control.publish(chunk % self.control.slots, self._base + chunk + 1)

    def drain(self, chunks: int, *, check: Check, timeout_s: float) -> None:
        """Return when every reader has released all `chunks`."""
        self._wait_released(self._base + chunks, check=check, timeout_s=timeout_s, pace=self.pace)

    def _unhurried(self) -> Backoff:
        """Nap for as long as a chunk takes: readers have the other slots' chunks meanwhile."""
        now = time.monotonic()
        period_s, self._acquired = now - self._acquired, now
        if self.control.slots < _HURRIED_SLOTS:
            return self.pace
        return Backoff(0.0, min(max(period_s, self.pace.nap_s), _LONG_NAP_S))

    def waiting_for(self, sequence: int) -> list[int]:
        """Readers that have not released `sequence`."""
        return [r for r in self._active if self.control.released(r) < sequence]

    def _wait_released(
        self, sequence: int, *, check: Check, timeout_s: float, pace: Backoff
    ) -> None:
        released, beat = self.control.released, self.control.reader_beat
        active = self._active

        def ready() -> bool:
            return all(released(reader) >= sequence for reader in active)

        def signs() -> dict[int, tuple[int, int]]:
            return {r: (released(r), beat(r)) for r in self.waiting_for(sequence)}

        self.late = wait_for_peers(ready, signs, check=check, timeout_s=timeout_s, pace=pace)
        if self.late:
            late = ", ".join(str(reader) for reader in self.late)
            raise TransferTimeout(
                f"no progress for {timeout_s:g} s while waiting for reader {late} to release chunk "
                f"{sequence - self._base} of this update; the update is aborted"
            )


class RingReader:
    """The reading end of reader place `reader`, for one update."""

    def __init__(
        self, control: Control, reader: int, *, epoch: int, base: int, pace: Backoff = LOCAL
    ) -> None:
        self._control = control
        self._pace = pace
        self._reader = reader
        self._epoch = epoch
        self._base = base

    def wait(self, chunk: int, *, check: Check, timeout_s: float) -> int:
        """Return the slot of `chunk` once it is published. Raises TransferTimeout."""
        slot = chunk % self._control.slots
        sequence = self._base + chunk + 1
        published = self._control.published

        def ready() -> bool:
            return published(slot) >= sequence

        def progress() -> tuple[int, int]:
            return 0, self._control.writer_beat

        if not wait_until(
            ready, check=check, timeout_s=timeout_s, progress=progress, pace=self._pace
        ):
            raise TransferTimeout(
                f"the sender published no chunk {chunk + 1} of this update for {timeout_s:g} s; "
                "the update is given up"
            )
        self.check_current(chunk)
        return slot

    def release(self, chunk: int) -> None:
        """Give the slot back, if what was read is still what was published."""
        self.check_current(chunk)
        self._control.release(self._reader, self._base + chunk + 1)

    def check_current(self, chunk: int) -> None:
        """Raise TransferError when the slot was reused or the update replaced meanwhile."""
        sequence = self._control.published(chunk % self._control.slots)
        if sequence != self._base + chunk + 1 or self._control.epoch != self._epoch:
            raise TransferError(
                f"chunk {chunk + 1} of this update was overwritten while it was read (epoch "
                f"{self._epoch}, now {self._control.epoch}); its sender went on without this reader"
            )


def wait_until(
    ready: Callable[[], bool],
    *,
    check: Check,
    timeout_s: float,
    progress: Callable[[], tuple[int, int]] = lambda: (0, 0),
    pace: Backoff = LOCAL,
) -> bool:
    """Wait for `ready`, which one peer brings about. Return False when it is not to be expected.

    `progress` returns what was done, and the heartbeats; see `wait_for_peers`.
    """
    return not wait_for_peers(
        ready, lambda: {0: progress()}, check=check, timeout_s=timeout_s, pace=pace
    )


def wait_for_peers(
    ready: Callable[[], bool],
    signs: Callable[[], Mapping[int, tuple[int, int]]],
    *,
    check: Check,
    timeout_s: float,
    pace: Backoff = LOCAL,
) -> list[int]:
    """Wait for `ready`: spin briefly, then sleep. Return the peers that keep it waiting in vain.

    `signs` returns, for each peer that is waited for, what was done and its heartbeats: one without
    either for `timeout_s`, or with heartbeats alone for `PATIENCE` times as long, ends the wait,
    whatever the others do. `check` is called on the way and ends the wait by raising. Time in which
    this process itself stood still (SIGSTOP, a suspended machine) is not held against the others.
    """
    if ready():
        return []
    looked = time.monotonic()
    now = moved = 0.0
    peers: dict[int, _Signs] = {}
    while not ready():
        here = time.monotonic()
        now += min(here - looked, _STANDSTILL_S)
        looked = here
        if now < pace.spin_s:
            time.sleep(0)
            continue
        check()
        seen = signs()
        for peer, (done, beats) in seen.items():
            known = peers.setdefault(peer, _Signs())
            if done != known.done:
                known.moved = known.beaten = moved = now
            elif beats != known.beats:
                known.beaten = now
            known.done, known.beats = done, beats
        if any(now - peers[peer].beaten > timeout_s for peer in seen):
            # Those that fell silent together are late together.
            return [peer for peer in seen if now - peers[peer].beaten > timeout_s / 2]
        if idle := [peer for peer in seen if now - peers[peer].moved > PATIENCE * timeout_s]:
            return idle
        time.sleep(pace.nap_s if now - moved < 20 * SPIN_S else _LONG_NAP_S)
    return []


@dataclass(slots=True)
class _Signs:
    """What one peer showed last, and when something new came."""

    done: int = -1
    beats: int = -1
    moved: float = 0.0
    beaten: float = 0.0
