"""No reader ever takes a chunk for another one, however writer and readers interleave.

The real counters, in a real control segment; the bytes of a slot are two words that are written and
read one at a time, so that every step of writer and readers may come between any two of the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.protocol.sizes import SOAK_TIMEOUT_S, at_length, quick
from weightsync.errors import TransferError, TransferTimeout
from weightsync.shm.ring import Control, RingReader, RingWriter

NOT_AT_ALL = -1.0
PLACES = 3
Words = list[int]


def nothing() -> None:
    pass


class Announced(NamedTuple):
    """What the message of an update tells one reader."""

    place: int
    epoch: int
    base: int
    chunks: int


class Filling(Enum):
    """How far the writer is with its slot."""

    BEFORE = auto()
    ACQUIRED = auto()
    HALF = auto()
    FULL = auto()


class Reading(Enum):
    """How far a reader is with its chunk."""

    BEFORE = auto()
    ARRIVED = auto()
    HALF = auto()
    WHOLE = auto()


class Ring:
    """One control segment with its slots, the writer that made it, and what it published."""

    def __init__(self, slots: int) -> None:
        self.control = Control.create(slots=slots, readers=PLACES, entries=slots)
        self.slots: list[Words] = [[0, 0] for _ in range(slots)]
        self.writer = RingWriter(self.control, spin_s=0.0)
        self.alive = True
        self.announced: list[Announced] = []
        self.published: dict[tuple[int, int], Words] = {}
        self.accepted: set[tuple[int, int, int]] = set()
        self.active: list[int] = []
        self.chunks = 0
        self.next = 0
        self.phase = Filling.BEFORE
        self.slot = 0

    @property
    def epoch(self) -> int:
        return self.control.epoch

    def begin(self, places: set[int], chunks: int, skip: int | None) -> None:
        """Start an update, whatever became of the one before; `skip` numbers it as another host."""
        self.active = sorted(places)
        if skip is None:
            self.writer.begin(self.active, chunks)
        else:
            base = self.writer._sequence + skip
            self.writer.follow(self.active, chunks, epoch=self.epoch + 1 + skip, base=base)
        self.chunks, self.next, self.phase = chunks, 0, Filling.BEFORE
        base = self.writer.base
        self.announced += [Announced(place, self.epoch, base, chunks) for place in self.active]

    def step(self, value: int) -> None:
        """Do the writer's next step, if it can be done."""
        if not self.alive or self.next >= self.chunks:
            return
        if self.phase is Filling.BEFORE:
            self._acquire()
        elif self.phase is Filling.ACQUIRED:
            self.slots[self.slot][0] = value
            self.phase = Filling.HALF
        elif self.phase is Filling.HALF:
            self.slots[self.slot][1] = value
            self.control.write_fingerprints(self.slot, [value])
            self.phase = Filling.FULL
        else:
            self.published[self.epoch, self.next] = list(self.slots[self.slot])
            self.writer.publish(self.next)
            self.next += 1
            self.phase = Filling.BEFORE

    def _acquire(self) -> None:
        try:
            self.slot = self.writer.acquire(self.next, check=nothing, timeout_s=NOT_AT_ALL)
        except TransferTimeout:
            return
        self.phase = Filling.ACQUIRED
        before = self.next - self.control.slots
        if before >= 0:
            for place in self.active:
                assert (place, self.epoch, before) in self.accepted, "overwritten while in use"

    def drain(self) -> None:
        """Whoever is waited for has taken everything."""
        if not self.alive or not self.chunks or self.next < self.chunks:
            return
        try:
            self.writer.drain(self.chunks, check=nothing, timeout_s=NOT_AT_ALL)
        except TransferTimeout:
            return
        taken = {(p, self.epoch, j) for p in self.active for j in range(self.chunks)}
        assert taken <= self.accepted

    def counters(self) -> list[int]:
        control = self.control
        released = [control.released(place) for place in range(PLACES)]
        return [control.epoch, control.published, *released]


@dataclass
class Reader:
    """A loader at its place, in the middle of one update; it may sleep for as long as it likes."""

    ring: Ring
    told: Announced
    chunk: int = 0
    slot: int = 0
    phase: Reading = Reading.BEFORE
    gave_up: bool = False
    got: Words = field(default_factory=list)

    def __post_init__(self) -> None:
        place, epoch, base, _ = self.told
        self.end = RingReader(self.ring.control, place, epoch=epoch, base=base, spin_s=0.0)

    @property
    def over(self) -> bool:
        return self.gave_up or self.chunk >= self.told.chunks

    def step(self) -> None:
        """Do the reader's next step, if it can be done."""
        if self.over:
            return
        if self.phase is Reading.BEFORE:
            self._wait()
        elif self.phase is Reading.ARRIVED:
            self.got = [self.ring.slots[self.slot][0]]
            self.phase = Reading.HALF
        elif self.phase is Reading.HALF:
            self.got += [self.ring.slots[self.slot][1]]
            self.got += self.ring.control.fingerprints(self.slot, 1)
            self.phase = Reading.WHOLE
        else:
            self._release()

    def _wait(self) -> None:
        try:
            self.slot = self.end.wait(self.chunk, check=nothing, timeout_s=NOT_AT_ALL)
        except TransferTimeout:
            return
        except TransferError:
            self.gave_up = True
            return
        self.phase = Reading.ARRIVED

    def _release(self) -> None:
        place, epoch = self.told.place, self.told.epoch
        before = self.ring.counters()
        try:
            self.end.release(self.chunk)
        except TransferError:
            assert self.ring.counters() == before, "it released what it did not see"
            assert self.ring.epoch != epoch, "it was waited for, and overtaken all the same"
            self.gave_up = True
            return
        assert self.ring.epoch == epoch
        words = self.ring.published[epoch, self.chunk]
        assert self.got == [*words, words[1]]
        self.ring.accepted.add((place, epoch, self.chunk))
        self.chunk += 1
        self.phase = Reading.BEFORE


class RingMachine(RuleBasedStateMachine):
    """Rings follow one another as trainers do; readers of dead ones go on for as long as they like.

    Each announcement is taken up once: a receiver knows what it has begun already.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rings: list[Ring] = []
        self.readers: list[Reader] = []
        self.before: list[list[int]] = []
        self.values = 0

    @initialize(slots=st.integers(1, 3), places=st.sets(st.integers(0, PLACES - 1), min_size=1))
    def first(self, slots: int, places: set[int]) -> None:
        self._add(slots)
        self.rings[-1].begin(places, 2 * slots + 1, None)

    @rule(
        places=st.sets(st.integers(0, PLACES - 1), min_size=1),
        chunks=st.integers(1, 7),
        skip=st.none() | st.integers(0, 2),
    )
    def begin(self, places: set[int], chunks: int, skip: int | None) -> None:
        """The next update; one that is not over was aborted."""
        if self.rings[-1].alive:
            self.rings[-1].begin(places, chunks, skip)

    @rule(steps=st.integers(1, 9))
    def write(self, steps: int) -> None:
        for _ in range(steps):
            self.values += 1
            self.rings[-1].step(self.values)

    @rule()
    def drain(self) -> None:
        self.rings[-1].drain()

    @rule(which=st.integers(0, 5))
    def take_up(self, which: int) -> None:
        """A message arrives, late perhaps: of any update that was announced."""
        ring = self.rings[-1 if which % 2 == 0 else 0]
        if ring.announced:
            told = ring.announced.pop(-1 - which // 2 % len(ring.announced))
            self.readers.append(Reader(ring, told))

    @rule(which=st.integers(0, 7), steps=st.integers(1, 9))
    def read(self, which: int, steps: int) -> None:
        going = [reader for reader in self.readers if not reader.over]
        if going:
            reader = going[-1 - which % len(going)]
            for _ in range(steps):
                reader.step()

    @rule()
    def all_go_on(self) -> None:
        """Everybody takes turns for a while."""
        for _ in range(6):
            self.write(1)
            for reader in self.readers:
                reader.step()

    @rule(
        asleep=st.integers(1, 12),
        places=st.sets(st.integers(0, PLACES - 1), min_size=1),
        chunks=st.integers(1, 7),
        written=st.integers(0, 20),
        steps=st.integers(1, 5),
    )
    def one_sleeps_over_an_abort(
        self, asleep: int, places: set[int], chunks: int, written: int, steps: int
    ) -> None:
        """A reader stops anywhere in its update, and goes on when the slot may be another's."""
        ring = self.rings[-1]
        if not ring.announced or not ring.alive:
            return
        late = Reader(ring, ring.announced.pop())
        self.readers.append(late)
        for _ in range(asleep):
            self.write(1)
            late.step()
        ring.begin(places, chunks, None)
        self.write(written)
        for _ in range(steps):
            late.step()

    @rule(slots=st.integers(1, 3), dice=st.integers(0, 5))
    def crash(self, slots: int, dice: int) -> None:
        """The writer dies, in the middle of a slot perhaps, and another one starts."""
        if dice == 5:
            self.rings[-1].alive = False
            self._add(slots)

    @invariant()
    def no_counter_falls(self) -> None:
        now = [ring.counters() for ring in self.rings]
        for old, new in zip(self.before, now, strict=False):
            assert all(b >= a for a, b in zip(old, new, strict=True))
        self.before = now

    def teardown(self) -> None:
        """Left alone, an update that nobody aborts ends with every reader having everything."""
        try:
            ring = self.rings[-1] if self.rings else None
            if ring is not None and ring.chunks:
                self._bring_to_its_end(ring)
        finally:
            for ring in self.rings:
                ring.control.close()

    def _bring_to_its_end(self, ring: Ring) -> None:
        waiting = [told for told in ring.announced if told.epoch == ring.epoch]
        self.readers += [Reader(ring, told) for told in waiting]
        for _ in range(8 * (ring.chunks + 1) * (PLACES + 1)):
            self.write(1)
            for reader in self.readers:
                reader.step()
        assert {
            (p, ring.epoch, j) for p in ring.active for j in range(ring.chunks)
        } <= ring.accepted

    def _add(self, slots: int) -> None:
        self.rings.append(Ring(slots))


class RingAtLength(RingMachine):
    """The same model, for longer."""


TestRing = RingMachine.TestCase
TestRing.settings = quick(120, 40)
TestRingAtLength = pytest.mark.soak(pytest.mark.timeout(SOAK_TIMEOUT_S)(RingAtLength.TestCase))
TestRingAtLength.settings = at_length(5000, 150)
