"""Waits on the counters of a ring: they sleep until they are woken, and never for long in vain.

`POLL_S` bounds one sleep. Where a test makes it longer than its own timeout, only a wake-up ends
the wait; the number of polls tells how often a wait was not woken.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.shm.processes import line_of, python, running
from weightsync.errors import PeerLostError, TransferTimeout
from weightsync.queues.message_ring import (
    INLINE,
    RECORDS,
    MessageRingLayout,
    MessageRingReader,
    MessageRingWriter,
)
from weightsync.shm import ring, wait
from weightsync.shm.ring import (
    ASLEEP,
    PUBLISHED,
    RELEASED,
    WANTED,
    Control,
    RingReader,
    RingWriter,
)
from weightsync.shm.segment import DIRECTORY
from weightsync.shm.wait import WaitPolicy

WAIT_S = 60.0
SHAPE = {"slots": 2, "readers": 2, "entries": 2}
NO_SPIN = 0.0


class Polls:
    """Counts the polls of a wait, as its `check`."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def control() -> Iterator[Control]:
    made = Control.create(**SHAPE)
    yield made
    made.close()


@pytest.fixture
def only_wake_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep ends by a wake-up, or the test fails by its own timeout."""
    monkeypatch.setattr(wait, "POLL_S", 2 * WAIT_S)
    monkeypatch.setattr(wait, "LIVENESS_CHECK_S", 2 * WAIT_S)


def eventually(true: Callable[[], bool]) -> None:
    for _ in range(int(WAIT_S / 0.001)):
        if true():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it did not happen")


def asleep(control: Control, reader: int) -> bool:
    return control.words[ring.line_of(reader) + ASLEEP] == 1


@pytest.mark.usefixtures("only_wake_ups")
def test_a_sleeping_reader_is_woken_by_what_is_published(control: Control) -> None:
    writer, polls = RingWriter(control), Polls()
    writer.begin([1], 1)
    reader = RingReader(control, 1, epoch=1, base=0, spin_s=NO_SPIN)
    with ThreadPoolExecutor(1) as pool:
        slot = pool.submit(reader.wait, 0, check=polls, timeout_s=WAIT_S)
        eventually(lambda: asleep(control, 1))
        writer.publish(0)
        assert slot.result(WAIT_S) == 0
    assert polls.count == 1
    assert not asleep(control, 1)


@pytest.mark.usefixtures("only_wake_ups")
def test_a_sleeping_reader_is_woken_by_the_epoch_and_by_the_table(control: Control) -> None:
    writer, polls = RingWriter(control), Polls()
    writer.begin([0], 1)
    reader = RingReader(control, 0, epoch=2, base=0, spin_s=NO_SPIN)
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(reader.wait_epoch, check=polls, timeout_s=WAIT_S)
        eventually(lambda: asleep(control, 0))
        writer.begin([0], 0)
        begun.result(WAIT_S)
        written = pool.submit(reader.wait_table, 2, check=polls, timeout_s=WAIT_S)
        eventually(lambda: asleep(control, 0))
        control.table_ready += 2
        written.result(WAIT_S)
    assert polls.count == 2


@pytest.mark.usefixtures("only_wake_ups")
def test_a_sleeping_writer_is_woken_by_the_last_release(control: Control) -> None:
    writer, polls = RingWriter(control, spin_s=NO_SPIN), Polls()
    writer.begin([0, 1], 1)
    writer.publish(0)
    readers = [RingReader(control, place, epoch=1, base=0) for place in (0, 1)]
    with ThreadPoolExecutor(1) as pool:
        drained = pool.submit(writer.drain, 1, check=polls, timeout_s=WAIT_S)
        eventually(lambda: control.words[WANTED] == 1)
        for reader in readers:
            reader.release(0)
        drained.result(WAIT_S)
    # It sleeps on one reader after the other.
    assert polls.count <= 2
    assert control.words[WANTED] == 0


class RecordedWords:
    """The words of a ring, and the loads, stores, fences and sleeps of its ends in their order."""

    def __init__(self, control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        self._words = control.words
        self._names = {
            PUBLISHED: "published",
            WANTED: "wanted",
            ring.line_of(0) + RELEASED: "released",
            ring.line_of(0) + ASLEEP: "asleep",
        }
        monkeypatch.setattr(control, "words", self)
        monkeypatch.setattr(control, "fence", lambda: self.order.append("writer's fence"))
        monkeypatch.setattr(ring, "fence", lambda: self.order.append("fence"))
        monkeypatch.setattr(ring, "wake", lambda _: self.order.append("wake"))
        monkeypatch.setattr(ring, "sleep_on", self._sleep_on)

    def __getitem__(self, word: int) -> int:
        self.order.append(f"load {self._names[word]}")
        return self._words[word]

    def __setitem__(self, word: int, value: int) -> None:
        self.order.append(f"store {self._names[word]}")
        self._words[word] = value

    def release(self) -> None:
        self._words.release()

    def _sleep_on(self, address: int, value: int, seconds: float) -> None:
        self.order.append("sleep")
        raise TransferTimeout("enough")


def test_each_end_stores_before_it_looks(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store and load the other way round lose a wake-up; so does a load that passes its store."""
    control.active = (0,)
    control.words[ring.line_of(0) + ASLEEP] = control.words[WANTED] = 1
    recorded = RecordedWords(control, monkeypatch)
    control.store(PUBLISHED, 1)
    assert recorded.order == [
        "writer's fence",
        "store published",
        "fence",
        "load asleep",
        "wake",
    ]
    recorded.order.clear()
    control.release(0, 1)
    assert recorded.order == ["store released", "fence", "load wanted", "wake"]
    recorded.order.clear()
    with pytest.raises(TransferTimeout):
        control.wait_stored(0, PUBLISHED, 2, lambda: 1.0)
    assert recorded.order == [
        "load published",
        "store asleep",
        "load published",
        "sleep",
        "store asleep",
    ]
    recorded.order.clear()
    with pytest.raises(TransferTimeout):
        control.wait_released(2, lambda: 1.0)
    wanted = recorded.order.index("store wanted")
    assert recorded.order[wanted:] == [
        "store wanted",
        "writer's fence",
        "load released",
        "load released",
        "sleep",
        "store wanted",
    ]


@pytest.mark.usefixtures("only_wake_ups")
def test_a_signal_ends_a_sleep_and_leaves_no_mark(control: Control) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    writer = RingWriter(control, spin_s=NO_SPIN)
    writer.begin([0], 1)
    reader = RingReader(control, 0, epoch=1, base=0, spin_s=NO_SPIN)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for sleeps in (reader.wait, writer.drain):
            chunk = 0 if sleeps == reader.wait else 1
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Interrupted):
                sleeps(chunk, check=Polls(), timeout_s=WAIT_S)
            assert control.words[ring.line_of(0) + ASLEEP] == control.words[WANTED] == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_lost_wake_up_costs_one_bounded_sleep(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    sleep_on = wait.sleep_on

    def counted(address: int, value: int, seconds: float) -> None:
        slept.append(seconds)
        sleep_on(address, value, seconds)

    monkeypatch.setattr(ring, "wake", lambda _: None)
    monkeypatch.setattr(ring, "sleep_on", counted)
    writer = RingWriter(control, spin_s=NO_SPIN)
    writer.begin([0], 1)
    reader = RingReader(control, 0, epoch=1, base=0, spin_s=NO_SPIN)
    nothing = Polls()
    with ThreadPoolExecutor(1) as pool:
        slot = pool.submit(reader.wait, 0, check=nothing, timeout_s=WAIT_S)
        eventually(lambda: asleep(control, 0))
        writer.publish(0)
        at_publish = len(slept)
        assert slot.result(WAIT_S) == 0
        assert len(slept) <= at_publish + 1
        drained = pool.submit(writer.drain, 1, check=nothing, timeout_s=WAIT_S)
        eventually(lambda: control.words[WANTED] == 1)
        reader.release(0)
        at_release = len(slept)
        drained.result(WAIT_S)
        assert len(slept) <= at_release + 1
    assert max(slept) <= wait.POLL_S


def test_nobody_is_woken_who_does_not_sleep(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[int] = []
    monkeypatch.setattr(ring, "wake", woken.append)
    writer = RingWriter(control)
    writer.begin([0], 5)
    reader = RingReader(control, 0, epoch=1, base=0)
    for chunk in range(5):
        writer.acquire(chunk, check=Polls(), timeout_s=WAIT_S)
        writer.publish(chunk)
        reader.wait(chunk, check=Polls(), timeout_s=WAIT_S)
        reader.release(chunk)
    writer.drain(5, check=Polls(), timeout_s=WAIT_S)
    assert not woken


@pytest.mark.usefixtures("only_wake_ups")
def test_a_writer_far_ahead_of_its_readers_is_woken_once_for_many_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = MessageRingLayout(slots=1, slot_nbytes=4096, readers=1)
    writer = MessageRingWriter(layout, spin_s=NO_SPIN)
    reader = MessageRingReader(layout, writer.control.segment.name, writer.data.name, 0)
    reader.join()
    for _ in range(RECORDS):
        writer.inline(1)
        writer.publish(INLINE, 1)
    woken: list[int] = []
    wake = wait.wake

    def counted(address: int) -> None:
        woken.append(address)
        wake(address)

    monkeypatch.setattr(ring, "wake", counted)
    policy = WaitPolicy(lambda: "a test", lambda: None, timeout_s=WAIT_S)
    try:
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(writer.wait_record, policy)
            eventually(lambda: writer.control.words[WANTED] > 0)
            assert writer.control.words[WANTED] == 1 + RECORDS // 2
            for _ in range(RECORDS // 2):
                reader.release()
            assert not woken
            reader.release()
            waits.result(WAIT_S)
        assert len(woken) <= 1  # none, if the wait was on its way to sleep
    finally:
        reader.close()
        writer.close()


OTHER_END = """
from weightsync.shm import wait
from weightsync.shm.ring import Control, RingReader, RingWriter
name, nbytes, chunks, poll_s = args
wait.POLL_S = float(poll_s)
control = Control.open(name, int(nbytes), slots=2, readers=2, entries=2)
print("open", flush=True)
reader = RingReader(control, 0, epoch=1, base=0, spin_s=0.0)
for chunk in range(int(chunks)):
    reader.wait(chunk, check=lambda: None, timeout_s=100.0)
    reader.release(chunk)
print("done", flush=True)
"""


@pytest.mark.usefixtures("only_wake_ups")
def test_no_wake_up_is_lost_between_two_processes(control: Control) -> None:
    """Neither end spins, so that each of many waits sleeps, or decides at that moment not to."""
    chunks = 5_000
    other = python(
        OTHER_END, DIRECTORY, control.segment.name, control.segment.nbytes, chunks, 2 * WAIT_S
    )
    writer, polls = RingWriter(control, spin_s=NO_SPIN), Polls()
    with running(other) as process, ThreadPoolExecutor(1) as pool:
        assert line_of(process) == "open"
        writer.begin([0], chunks)

        def write() -> None:
            for chunk in range(chunks):
                writer.acquire(chunk, check=polls, timeout_s=WAIT_S)
                writer.publish(chunk)
            writer.drain(chunks, check=polls, timeout_s=WAIT_S)

        pool.submit(write).result(WAIT_S)
        assert line_of(process) == "done"
    assert polls.count > 0


WRITER = """
from weightsync.shm.ring import Control, RingWriter
control = Control.create(slots=2, readers=2, entries=2)
RingWriter(control).begin([0], 1)
print(control.segment.name, control.segment.nbytes, flush=True)
sys.stdin.readline()
"""


def test_a_writer_killed_while_its_reader_sleeps_is_noticed() -> None:
    with running(python(WRITER, DIRECTORY)) as process:
        name, nbytes = line_of(process).split()
        control = Control.open(name, int(nbytes), **SHAPE)
        reader = RingReader(control, 0, epoch=1, base=0, spin_s=NO_SPIN)

        def check() -> None:
            if not control.segment.owner_alive():
                raise PeerLostError("the writer is gone")

        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(reader.wait, 0, check=check, timeout_s=WAIT_S)
            eventually(lambda: asleep(control, 0))
            process.kill()
            with pytest.raises(PeerLostError, match="the writer is gone"):
                waits.result(WAIT_S)
        control.close()


def test_a_reader_killed_while_its_writer_sleeps_is_late(control: Control) -> None:
    other = python(OTHER_END, DIRECTORY, control.segment.name, control.segment.nbytes, 2, 0.01)
    writer = RingWriter(control, spin_s=NO_SPIN)
    with running(other) as process, ThreadPoolExecutor(1) as pool:
        assert line_of(process) == "open"
        writer.begin([0], 2)
        writer.publish(0)
        drained = pool.submit(writer.drain, 2, check=Polls(), timeout_s=0.5)
        eventually(lambda: control.words[WANTED] == 2)
        process.kill()
        with pytest.raises(TransferTimeout, match="waiting for reader 0 to release chunk 2"):
            drained.result(WAIT_S)
    assert writer.late == [0]
