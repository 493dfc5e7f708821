"""The per-chunk handshake: order, slow readers, aborted updates, and two real processes."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from tests.shm.processes import line_of, python, running
from weightsync.errors import (
    HandleError,
    SegmentError,
    TransferError,
    TransferTimeout,
)
from weightsync.shm.ring import (
    Control,
    RingReader,
    RingWriter,
    control_nbytes,
)
from weightsync.shm.segment import DIRECTORY, Segment
from weightsync.shm.wait import PeerProgress, wait

WAIT_S = 60.0
SHORT_S = 0.05
SHAPE = {"slots": 2, "readers": 3, "entries": 10}


def nothing() -> None:
    pass


def wait_for_peer(
    ready: Callable[[], bool],
    *,
    timeout_s: float,
    check: Callable[[], None] = nothing,
    counters: Callable[[], tuple[int, int]] = lambda: (0, 0),
) -> None:
    """Wait for what one peer does, which makes progress and beats as `counters` says."""
    peer = PeerProgress(lambda: {0: counters()}, lambda _: "late", check=check, timeout_s=timeout_s)
    wait(ready, peer.poll, sleep=lambda _: time.sleep(0.001))


@pytest.fixture
def control() -> Iterator[Control]:
    made = Control.create(**SHAPE)
    yield made
    made.close()


@pytest.fixture
def writer(control: Control) -> RingWriter:
    return RingWriter(control)


def reader(control: Control, writer: RingWriter, place: int = 0) -> RingReader:
    return RingReader(control, place, epoch=control.epoch, base=writer.base)


def counters(control: Control) -> list[int]:
    return control.words[: control.first_entry].tolist()


class TestHandshake:
    def test_a_chunk_is_seen_when_it_is_published(
        self, control: Control, writer: RingWriter
    ) -> None:
        writer.begin([0], 3)
        mine = reader(control, writer)
        with pytest.raises(TransferTimeout, match="published no chunk 1 of this update"):
            mine.wait(0, check=nothing, timeout_s=SHORT_S)
        assert writer.acquire(0, check=nothing, timeout_s=WAIT_S) == 0
        writer.publish(0)
        assert mine.wait(0, check=nothing, timeout_s=WAIT_S) == 0

    def test_a_slot_is_free_when_every_reader_has_released_it(
        self, control: Control, writer: RingWriter
    ) -> None:
        writer.begin([0, 2], 3)
        readers = {place: reader(control, writer, place) for place in (0, 2)}
        for chunk in (0, 1):
            writer.acquire(chunk, check=nothing, timeout_s=WAIT_S)
            writer.publish(chunk)
        readers[0].release(0)
        with pytest.raises(TransferTimeout, match="waiting for reader 2 to release chunk 1"):
            writer.acquire(2, check=nothing, timeout_s=SHORT_S)
        assert control.behind(1) == [2]
        readers[2].release(0)
        assert writer.acquire(2, check=nothing, timeout_s=WAIT_S) == 0

    def test_a_timeout_names_every_late_reader(self, control: Control, writer: RingWriter) -> None:
        writer.begin([0, 1, 2], 1)
        writer.publish(0)
        reader(control, writer, 1).release(0)
        with pytest.raises(TransferTimeout, match="waiting for reader 0, 2 to release chunk 1"):
            writer.drain(1, check=nothing, timeout_s=SHORT_S)

    def test_no_counter_ever_falls(self, control: Control, writer: RingWriter) -> None:
        before = counters(control)
        for chunks in (5, 1, 4):
            writer.begin([0], chunks)
            mine = reader(control, writer)
            for chunk in range(chunks):
                slot = writer.acquire(chunk, check=nothing, timeout_s=WAIT_S)
                writer.publish(chunk)
                assert mine.wait(chunk, check=nothing, timeout_s=WAIT_S) == slot
                mine.release(chunk)
                now = counters(control)
                assert all(new >= old for new, old in zip(now, before, strict=True))
                assert now != before
                before = now
            writer.drain(chunks, check=nothing, timeout_s=WAIT_S)
        assert control.released(0) == 10

    def test_a_check_ends_a_wait(self, control: Control, writer: RingWriter) -> None:
        def stop() -> None:
            raise TransferError("aborted")

        writer.begin([0], 1)
        with pytest.raises(TransferError, match="aborted"):
            reader(control, writer).wait(0, check=stop, timeout_s=WAIT_S)
        with pytest.raises(TransferError, match="aborted"):
            writer.drain(1, check=stop, timeout_s=WAIT_S)

    def test_an_update_numbered_elsewhere_goes_by_those_numbers(
        self, control: Control, writer: RingWriter
    ) -> None:
        writer.follow([0], 3, epoch=40, base=900)
        mine = RingReader(control, 0, epoch=40, base=900)
        for chunk in range(3):
            writer.acquire(chunk, check=nothing, timeout_s=WAIT_S)
            writer.publish(chunk)
            mine.wait(chunk, check=nothing, timeout_s=WAIT_S)
            mine.release(chunk)
        writer.drain(3, check=nothing, timeout_s=WAIT_S)
        assert control.released(0) == 903
        with pytest.raises(TransferError, match="epoch 40 comes after that of epoch 40"):
            writer.follow([0], 1, epoch=40, base=903)


class TestDelayedReader:
    """A reader that slept must not release, or believe, what it never saw."""

    def test_over_an_abort_and_the_slots_reuse(self, control: Control, writer: RingWriter) -> None:
        writer.begin([0], 2)
        late = reader(control, writer)
        writer.publish(0)
        assert late.wait(0, check=nothing, timeout_s=WAIT_S) == 0
        writer.begin([0], 2)  # the first update was aborted
        writer.publish(0)
        with pytest.raises(TransferError, match=r"chunk 1 .* was overwritten .*epoch 1, now 2"):
            late.release(0)
        assert control.released(0) == 0
        with pytest.raises(TransferTimeout):
            writer.drain(1, check=nothing, timeout_s=SHORT_S)

    def test_over_an_abort_alone(self, control: Control, writer: RingWriter) -> None:
        writer.begin([0], 2)
        late = reader(control, writer)
        writer.publish(0)
        writer.begin([0], 2)
        with pytest.raises(TransferError):
            late.release(0)
        with pytest.raises(TransferError):
            late.wait(0, check=nothing, timeout_s=WAIT_S)
        assert control.released(0) == 0

    def test_over_a_slots_reuse_in_one_update(self, control: Control, writer: RingWriter) -> None:
        writer.begin([1], 3)
        late = reader(control, writer, 0)
        writer.publish(0)
        late.wait(0, check=nothing, timeout_s=WAIT_S)
        writer.publish(2)
        with pytest.raises(TransferError, match="the sender dropped this reader"):
            late.check_current(0)

    def test_a_chunk_of_the_update_before_is_not_this_one(
        self, control: Control, writer: RingWriter
    ) -> None:
        writer.begin([0], 2)
        for chunk in (0, 1):
            writer.publish(chunk)
        writer.begin([0], 2)
        with pytest.raises(TransferTimeout):
            reader(control, writer).wait(0, check=nothing, timeout_s=SHORT_S)


class TestWaiting:
    def test_progress_renews_the_time(self) -> None:
        steps = iter(range(10_000))
        ends = threading.Timer(4 * SHORT_S, nothing)
        ends.start()
        wait_for_peer(
            lambda: not ends.is_alive(), timeout_s=SHORT_S, counters=lambda: (next(steps), 0)
        )

    def test_heartbeats_alone_are_waited_for_longer_but_not_for_ever(self) -> None:
        beats = iter(range(1_000_000))
        started = time.monotonic()
        with pytest.raises(TransferTimeout, match="late"):
            wait_for_peer(lambda: False, timeout_s=SHORT_S, counters=lambda: (0, next(beats)))
        assert time.monotonic() - started > 2 * SHORT_S

    def test_without_progress_it_ends(self) -> None:
        with pytest.raises(TransferTimeout, match="late"):
            wait_for_peer(lambda: False, timeout_s=SHORT_S)

    def test_what_is_ready_needs_no_time(self) -> None:
        def never() -> None:
            raise AssertionError

        wait_for_peer(lambda: True, check=never, timeout_s=0)


class TestControl:
    def test_another_view_of_it_sees_the_same(self, control: Control) -> None:
        other = Control.open(control.segment.name, control.segment.nbytes, **SHAPE)
        control.write_fingerprints(7, [1, 2, (1 << 64) - 1])
        assert other.fingerprints(7, 3) == [1, 2, (1 << 64) - 1]
        other.beat_reader(2)
        control.beat_writer()
        assert (control.reader_beat(2), control.reader_beat(1), other.writer_beat) == (1, 0, 1)
        other.release(1, 5)
        assert [control.released(place) for place in range(3)] == [0, 5, 0]
        other.close()
        assert control.segment.owner_alive()

    def test_lines_do_not_overlap(self, control: Control) -> None:
        control.published = 2
        for place in range(3):
            control.release(place, 10 + place)
            control.beat_reader(place)
            control.load(place, 20 + place)
        control.epoch = 4
        control.table_ready = 5
        control.write_fingerprints(0, list(range(10)))
        found = [control.published, *(control.released(r) for r in range(3))]
        for counter in (control.reader_beat, control.loaded):
            found += [counter(r) for r in range(3)]
        assert found == [2, 10, 11, 12, 1, 1, 1, 20, 21, 22]
        assert (control.epoch, control.table_ready) == (4, 5)
        assert control.fingerprints(0, 10) == list(range(10))

    def test_room_is_bounded(self, control: Control) -> None:
        with pytest.raises(TransferError, match="3 fingerprints at 8 exceed 10 entries"):
            control.write_fingerprints(8, [1, 2, 3])

    def test_what_does_not_fit_is_refused(self, control: Control) -> None:
        name, nbytes = control.segment.name, control.segment.nbytes
        with pytest.raises(HandleError, match="is needed, not"):
            Control.open(name, nbytes + 64, **SHAPE)
        with pytest.raises(HandleError, match="is needed, not"):
            Control.open(name, nbytes, slots=2, readers=4, entries=10)
        with pytest.raises(HandleError, match="has 2 slots, 3 readers and 10 entries, not 3,"):
            Control.open(name, nbytes, slots=3, readers=3, entries=10)
        wanted = control_nbytes(readers=9, entries=10)
        with pytest.raises(SegmentError):
            Control.open(name, wanted, slots=2, readers=9, entries=10)

    def test_any_other_segment_is_refused(self) -> None:
        with (
            Segment.create(control_nbytes(readers=3, entries=10)) as segment,
            pytest.raises(HandleError, match="is not a control segment"),
        ):
            Control.open(segment.name, segment.nbytes, **SHAPE)


READER = """
import time
from weightsync.shm.ring import Control, RingReader
control_name, control_nbytes, data_name, place, chunks, nap_s = args
control = Control.open(control_name, int(control_nbytes), slots=2, readers=3, entries=10)
data = Segment.open(data_name, nbytes=2 * 4096)
print("open", flush=True)
for update in range(2):
    epoch, base = map(int, sys.stdin.readline().split())
    mine = RingReader(control, int(place), epoch=epoch, base=base)
    for chunk in range(int(chunks)):
        slot = mine.wait(chunk, check=lambda: None, timeout_s=20)
        wanted = [(base + chunk) % 251] * 4096
        time.sleep(float(nap_s) if chunk % 16 == 0 else 0)
        found = data.tensor(slot * 4096, 4096).tolist()
        assert found == wanted, (chunk, found[0], wanted[0])
        assert control.fingerprints(slot, 1) == [base + chunk]
        mine.release(chunk)
    print("done", flush=True)
control.close(); data.close()
"""
CHUNKS = 300


def test_other_processes_read_every_chunk_whole(control: Control) -> None:
    """One reader is quick and one sleeps; neither ever sees a slot that was overwritten."""
    with (
        Segment.create(2 * 4096) as data,
        running_reader(control, data, 0, 0.0) as quick,
        running_reader(control, data, 2, 0.01) as slow,
    ):
        assert line_of(quick) == line_of(slow) == "open"
        writer = RingWriter(control)
        for _ in range(2):
            epoch = writer.begin([0, 2], CHUNKS)
            for process in (quick, slow):
                assert process.stdin is not None
                print(epoch, writer.base, file=process.stdin, flush=True)
            for chunk in range(CHUNKS):
                slot = writer.acquire(chunk, check=nothing, timeout_s=WAIT_S)
                data.tensor(slot * 4096, 4096).fill_((writer.base + chunk) % 251)
                control.write_fingerprints(slot, [writer.base + chunk])
                writer.publish(chunk)
            writer.drain(CHUNKS, check=nothing, timeout_s=WAIT_S)
            assert line_of(quick) == line_of(slow) == "done"


def running_reader(
    control: Control, data: Segment, place: int, nap_s: float
) -> AbstractContextManager[subprocess.Popen[str]]:
    name, nbytes = control.segment.name, control.segment.nbytes
    return running(python(READER, DIRECTORY, name, nbytes, data.name, place, CHUNKS, nap_s))


def test_a_writer_and_a_reader_at_full_speed(control: Control, writer: RingWriter) -> None:
    order: list[int] = []
    chunks = 500
    writer.begin([1], chunks)
    mine = reader(control, writer, 1)

    def read() -> None:
        for chunk in range(chunks):
            mine.wait(chunk, check=nothing, timeout_s=WAIT_S)
            order.append(chunk)
            mine.release(chunk)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(read)
        for chunk in range(chunks):
            writer.acquire(chunk, check=nothing, timeout_s=WAIT_S)
            assert len(order) >= chunk - 2
            writer.publish(chunk)
        writer.drain(chunks, check=nothing, timeout_s=WAIT_S)
        done.result(WAIT_S)
    assert order == list(range(chunks))


def test_a_wait_does_not_count_what_its_own_process_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended machine, or SIGSTOP: nobody else could do anything in that time either."""
    looks = 0
    stood = 0.0
    clock = time.monotonic

    def look() -> bool:
        nonlocal looks, stood
        looks += 1
        if looks == 20:
            stood = 1000.0
        return looks > 200

    monkeypatch.setattr(time, "monotonic", lambda: clock() + stood)
    wait_for_peer(look, timeout_s=5.0)
    looks = -(10**9)
    begun = clock()
    with pytest.raises(TransferTimeout):
        wait_for_peer(look, timeout_s=0.3)
    assert clock() - begun >= 0.3
