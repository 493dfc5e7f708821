"""The counter ring: the per-chunk handshake between one writer and several readers."""

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
"""Word of a reader's `released` line: the generation whose ready events the reader waits for. While
it is 0, the writer synchronises on the host."""
_HEADER, _EPOCH, _WRITER_BEAT, _TABLE, _OFFERED = range(_FIXED_LINES)

SPIN_S = 0.002
"""How long a wait spins before it sleeps: about the time of one large chunk."""
PATIENCE = 30
"""Factor on the timeout for a peer that sends heartbeats but makes no progress."""
_MAX_STEP_S = 0.25
"""Longest step of a wait that counts in full. A longer one means that this process was stopped."""
_LONG_NAP_S = 1e-3
_MIN_SLOTS_TO_NAP = 3
"""With fewer slots, readers run out of chunks while the writer sleeps."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How a wait polls: it spins for `spin_s`, then sleeps for `nap_s` between polls."""

    spin_s: float
    nap_s: float


LOCAL = Backoff(SPIN_S, 50e-6)
NETWORK = Backoff(0.0, 500e-6)
"""For chunks that cross the network: a spinning wait would slow down the threads that move them."""

Check = Callable[[], None]
"""Called during a wait; raises to end it."""


class Control:
    """The control segment: named counters, and a table of `entries` fingerprints.

    `fence` orders the writer's bytes before its counters (weightsync.shm.store_order).
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
        """Create a control segment, owned by this process."""
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
        """Number of the update that the counters belong to; grows with each update."""
        return self._get(_EPOCH)

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._set(_EPOCH, value)

    @property
    def table_ready(self) -> int:
        """Total number of fingerprints of the unpacked path that were written."""
        return self._get(_TABLE)

    @table_ready.setter
    def table_ready(self, value: int) -> None:
        self.fence()
        self._set(_TABLE, value)

    @property
    def offered(self) -> int:
        """Generation of the newest init message; raised before the writer sends it."""
        return self._get(_OFFERED)

    @offered.setter
    def offered(self, number: int) -> None:
        self._set(_OFFERED, number)

    @property
    def writer_beat(self) -> int:
        """The writer's heartbeat; grows while the writer works."""
        return self._get(_WRITER_BEAT)

    def beat_writer(self) -> None:
        """Raise the writer's heartbeat. Called by the writer only."""
        self._set(_WRITER_BEAT, self.writer_beat + 1)

    def reader_beat(self, reader: int) -> int:
        """Return a reader's heartbeat, which grows while the reader works."""
        return self._get(self._beats + reader)

    def beat_reader(self, reader: int) -> None:
        """Raise the reader's heartbeat. Called by this reader only."""
        self._set(self._beats + reader, self.reader_beat(reader) + 1)

    def published(self, slot: int) -> int:
        """Return the sequence number of the chunk in `slot`."""
        return self._get(self._published + slot)

    def publish(self, slot: int, sequence: int) -> None:
        """Publish a chunk. Called by the writer only, after the last byte is in place."""
        self.fence()
        self._set(self._published + slot, sequence)

    def released(self, reader: int) -> int:
        """Return the sequence number up to which `reader` has released chunks."""
        return self._get(self._released + reader)

    def release(self, reader: int, sequence: int) -> None:
        """Release all chunks up to `sequence`. Called by this reader only."""
        self._set(self._released + reader, sequence)

    def takes_events(self, reader: int) -> int:
        """Return the generation whose ready events `reader` waits for, or 0."""
        return self._words[(self._released + reader) * _LINE_WORDS + _TAKES_EVENTS]

    def take_events(self, reader: int, number: int) -> None:
        """Set the generation whose ready events this reader has opened, or 0. Reader only."""
        self._words[(self._released + reader) * _LINE_WORDS + _TAKES_EVENTS] = number

    def loaded(self, reader: int) -> int:
        """Return the total bytes of registered memory that `reader` has copied; for observers."""
        return self._get(self._loaded + reader)

    def load(self, reader: int, nbytes: int) -> None:
        """Set the total bytes copied, a number that grows. Called by this reader only."""
        self._set(self._loaded + reader, nbytes)

    def signs(self, reader: int) -> int:
        """Return a sum of counters that grows while this reader works."""
        return self.reader_beat(reader) + self.released(reader) + self.loaded(reader)

    def write_fingerprints(self, at: int, values: Sequence[int]) -> None:
        """Store fingerprints from entry `at` on. Called before their chunk is published."""
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
    """Return the size of a control segment in bytes."""
    lines = _FIXED_LINES + slots + 3 * readers
    return lines * _LINE_NBYTES + -(-entries * struct.calcsize("Q") // _LINE_NBYTES) * _LINE_NBYTES


class RingWriter:
    """The writing end. For each update: `begin`, then `acquire` and `publish` for each chunk.

    `late` are the readers that made the last wait time out.
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
        """Start an update with the epoch and base of the ring of another host."""
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
        """Return the slot of `chunk` when every reader has released the slot's previous chunk.

        Raises TransferTimeout naming the readers that did not release it.
        """
        if chunk >= self.control.slots:
            wanted = self._base + chunk - self.control.slots + 1
            backoff = self._acquire_backoff()
            self._wait_released(wanted, check=check, timeout_s=timeout_s, pace=backoff)
        # Before the first chunks too: readers of the last update may still read.
        self.control.fence()
        return chunk % self.control.slots

    def publish(self, chunk: int) -> None:
        """Publish `chunk` to the readers. Its bytes and fingerprints must be in place."""
        self.control.publish(chunk % self.control.slots, self._base + chunk + 1)

    def drain(self, chunks: int, *, check: Check, timeout_s: float) -> None:
        """Return when every reader has released all `chunks`."""
        self._wait_released(self._base + chunks, check=check, timeout_s=timeout_s, pace=self.pace)

    def _acquire_backoff(self) -> Backoff:
        """Sleep for the time of one chunk: readers have the chunks of the other slots meanwhile."""
        now = time.monotonic()
        period_s, self._acquired = now - self._acquired, now
        if self.control.slots < _MIN_SLOTS_TO_NAP:
            return self.pace
        return Backoff(0.0, min(max(period_s, self.pace.nap_s), _LONG_NAP_S))

    def waiting_for(self, sequence: int) -> list[int]:
        """Return the readers that have not released `sequence`."""
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
    """The reading end of one reader, for one update. `reader` is the reader's index."""

    def __init__(
        self, control: Control, reader: int, *, epoch: int, base: int, pace: Backoff = LOCAL
    ) -> None:
        self._control = control
        self._pace = pace
        self._reader = reader
        self._epoch = epoch
        self._base = base

    def wait(self, chunk: int, *, check: Check, timeout_s: float) -> int:
        """Return the slot of `chunk` when it is published. Raises TransferTimeout."""
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
                "the update is aborted"
            )
        self.check_current(chunk)
        return slot

    def release(self, chunk: int) -> None:
        """Release the slot. Raises TransferError when the chunk was overwritten meanwhile."""
        self.check_current(chunk)
        self._control.release(self._reader, self._base + chunk + 1)

    def check_current(self, chunk: int) -> None:
        """Raise TransferError when the slot was reused or a new update began meanwhile."""
        sequence = self._control.published(chunk % self._control.slots)
        if sequence != self._base + chunk + 1 or self._control.epoch != self._epoch:
            raise TransferError(
                f"chunk {chunk + 1} of this update was overwritten while it was read (epoch "
                f"{self._epoch}, now {self._control.epoch}); the sender dropped this reader"
            )


def wait_until(
    ready: Callable[[], bool],
    *,
    check: Check,
    timeout_s: float,
    progress: Callable[[], tuple[int, int]] = lambda: (0, 0),
    pace: Backoff = LOCAL,
) -> bool:
    """Wait for `ready`, which one peer makes true. Return False when that peer is late.

    `progress` returns the peer's progress and heartbeat counters; see `wait_for_peers`.
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
    """Wait for `ready`: spin briefly, then sleep. Return the late peers, or [] when ready.

    `signs` returns the progress and heartbeat counters of each peer that the wait depends on. A
    peer is late after `timeout_s` without a change of either counter, or after `PATIENCE` times
    `timeout_s` with heartbeats only. One late peer ends the wait. `check` is called during the wait
    and ends it by raising. Time in which this process itself was stopped (SIGSTOP, a suspended
    machine) does not count.
    """
    if ready():
        return []
    last_poll = time.monotonic()
    now = progressed_at = 0.0
    peers: dict[int, _PeerState] = {}
    while not ready():
        clock = time.monotonic()
        now += min(clock - last_poll, _MAX_STEP_S)
        last_poll = clock
        if now < pace.spin_s:
            time.sleep(0)
            continue
        check()
        current = signs()
        for peer, (done, beats) in current.items():
            known = peers.setdefault(peer, _PeerState())
            if done != known.done:
                known.progressed_at = known.beat_at = progressed_at = now
            elif beats != known.beats:
                known.beat_at = now
            known.done, known.beats = done, beats
        if any(now - peers[peer].beat_at > timeout_s for peer in current):
            # Peers that stopped at about the same time are reported together.
            return [peer for peer in current if now - peers[peer].beat_at > timeout_s / 2]
        if idle := [
            peer for peer in current if now - peers[peer].progressed_at > PATIENCE * timeout_s
        ]:
            return idle
        time.sleep(pace.nap_s if now - progressed_at < 20 * SPIN_S else _LONG_NAP_S)
    return []


@dataclass(slots=True)
class _PeerState:
    """The last counters of one peer, and the times of their last changes."""

    done: int = -1
    beats: int = -1
    progressed_at: float = 0.0
    beat_at: float = 0.0
