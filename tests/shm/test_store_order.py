"""Where the processor does not order stores, the writer's membarrier(2) does.

x86-64 orders them, and an emulator of aarch64 on x86-64 does too, so no run here can show a store
out of order. These tests show that the writer calls its fence at each place that the argument in
weightsync.shm.store_order needs, that both ends register, and that everything works with the system
call in it.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import weightsync as ws
from tests.e2e import models
from weightsync.errors import BackendUnavailableError
from weightsync.queues import message_ring
from weightsync.queues.message_ring import MessageRingLayout, MessageRingReader, MessageRingWriter
from weightsync.queues.pool import SegmentPool
from weightsync.shm import ring as ring_module
from weightsync.shm import store_order
from weightsync.shm.ring import Control, RingReader, RingWriter
from weightsync.shm.wait import WaitPolicy
from weightsync.update.lifecycle import ApplyChoice

SHAPE = {"slots": 2, "readers": 1, "entries": 4}
REGISTER, FENCE = 1 << 2, 1 << 1


def nothing() -> None:
    pass


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The membarrier commands of this process, which are carried out."""
    made: list[int] = []
    real = store_order._membarrier

    def membarrier(number: int, command: int, flags: int, cpu: int) -> int:
        made.append(command)
        return int(real(number, command, flags, cpu))

    monkeypatch.setenv(store_order.VARIABLE, "1")
    monkeypatch.setattr(store_order, "_membarrier", membarrier)
    return made


def test_a_processor_that_orders_stores_needs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(store_order.VARIABLE, raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(store_order, "_membarrier", lambda *_: pytest.fail("called"))
    with Control.create(**SHAPE).segment as segment:
        assert segment.owner
    assert store_order.order_stores() is store_order.nothing


def test_another_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(BackendUnavailableError, match=r"x86-64 and aarch64; this machine is riscv"):
        store_order.order_stores()


def test_a_kernel_that_refuses_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store_order.VARIABLE, "1")
    monkeypatch.setitem(store_order._MEMBARRIER_OF, platform.machine(), 9999)  # is no system call
    with pytest.raises(BackendUnavailableError, match=r"membarrier\(2\) failed: Function not impl"):
        store_order.order_stores()


def test_both_ends_of_a_ring_register(calls: list[int]) -> None:
    control = Control.create(**SHAPE)
    try:
        assert calls == [REGISTER]
        segment = control.segment
        Control.open(segment.name, segment.nbytes, **SHAPE).close()
        assert calls == [REGISTER, REGISTER]
    finally:
        control.close()


class Watched:
    """A ring whose fences note what its counters were when they were called."""

    def __init__(self, look: Callable[[], object]) -> None:
        self.seen: list[object] = []
        self._look = look

    def __call__(self) -> None:
        self.seen.append(self._look())


@contextmanager
def ring() -> Iterator[tuple[Control, Watched]]:
    control = Control.create(**SHAPE)
    watched = Watched(lambda: (control.epoch, control.published, control.released(0)))
    control.fence = watched
    try:
        yield control, watched
    finally:
        control.close()


def test_the_fence_comes_before_each_counter_and_before_each_overwritten_bucket() -> None:
    with ring() as (control, watched):
        writer = RingWriter(control)
        writer.begin([0], 3)
        reader = RingReader(control, 0, epoch=1, base=0)
        for chunk in range(2):
            writer.acquire(chunk, check=nothing, timeout_s=1)
            writer.publish(chunk)
        # Epoch, what was published and released: the epoch is stored before the first bucket.
        assert watched.seen == [(0, 0, 0), (1, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 0)]
        watched.seen.clear()
        reader.release(0)
        writer.acquire(2, check=nothing, timeout_s=1)
        assert watched.seen == [(1, 2, 1)]  # after the release, and not before it
        writer.publish(2)
        assert watched.seen == [(1, 2, 1)] * 2
        assert control.published == 3


def test_the_fence_comes_before_the_counter_of_fingerprints() -> None:
    with ring() as (control, watched):
        ready = Watched(lambda: (control.fingerprints(0, 2), control.table_ready))
        control.fence = ready
        control.write_fingerprints(0, [7, 8])
        control.table_ready += 2
        assert ready.seen == [([7, 8], 0)]
        assert not watched.seen


@pytest.fixture
def messages(calls: list[int]) -> Iterator[tuple[MessageRingWriter, MessageRingReader, list[int]]]:
    layout = MessageRingLayout(slots=2, slot_nbytes=4096, readers=1)
    writer = MessageRingWriter(layout)
    reader = MessageRingReader(layout, writer.control.segment.name, writer.data.name, 0)
    try:
        yield writer, reader, calls
    finally:
        reader.close()
        writer.close()


def policy() -> WaitPolicy:
    return WaitPolicy(lambda: "a test", nothing, timeout_s=10)


@pytest.mark.parametrize("place", [message_ring.INLINE, message_ring.SLOT, message_ring.SOCKET])
def test_a_message_has_a_fence_before_its_bytes_and_before_its_number(
    messages: tuple[MessageRingWriter, MessageRingReader, list[int]], place: int
) -> None:
    writer, reader, calls = messages
    reader.join()
    calls.clear()
    writer.wait_record(policy())
    if place == message_ring.INLINE:
        writer.inline(8)[:] = b"somebody"
    elif place == message_ring.SLOT:
        writer.slot(writer.wait_slot(policy()), 8)[:] = b"somebody"
    writer.publish(place, 0 if place == message_ring.SOCKET else 8)
    assert calls == [FENCE] * 2
    reader.wait(policy())
    number, found, data = reader.take()
    assert (number, found) == (0, place)
    assert bytes(data) == (b"" if place == message_ring.SOCKET else b"somebody")
    reader.release()
    assert calls == [FENCE] * 2  # the reader calls nothing


def test_a_reader_that_joins_puts_a_fence_between_its_name_and_its_word(
    messages: tuple[MessageRingWriter, MessageRingReader, list[int]],
) -> None:
    writer, reader, calls = messages
    calls.clear()
    reader.join()
    assert calls == [FENCE]
    assert writer.joined(0)


def test_the_kernel_is_told_of_each_number_where_the_look_for_sleepers_would_need_a_fence(
    messages: tuple[MessageRingWriter, MessageRingReader, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It orders the number before its own look, so no reader's mark is read."""
    writer, _, _ = messages
    woken: list[int] = []
    monkeypatch.setattr(ring_module, "wake", woken.append)
    writer.inline(1)
    writer.publish(message_ring.INLINE, 1)
    assert woken == [writer.control.address_of(ring_module.PUBLISHED)]


def test_a_writer_that_sleeps_is_woken(
    messages: tuple[MessageRingWriter, MessageRingReader, list[int]],
) -> None:
    """Its word is stored, then its fence, then the reader's counter is looked at."""
    writer, reader, calls = messages
    reader.join()
    for _ in range(message_ring.RECORDS):
        writer.inline(1)
        writer.publish(message_ring.INLINE, 1)
    calls.clear()

    def read_on() -> None:
        for _ in range(message_ring.RECORDS):
            reader.take()
            reader.release()

    thread = threading.Timer(0.2, read_on)
    thread.start()
    writer.wait_record(policy())
    thread.join()
    assert set(calls) == {FENCE}  # one before each sleep


def test_a_block_of_the_pool_is_lent_again_after_a_fence(calls: list[int]) -> None:
    pool = SegmentPool(max_nbytes=1 << 20)
    try:
        assert calls == [REGISTER]
        block = pool.take(100, timeout_s=1)
        calls.clear()
        pool.give_back(block)
        assert pool.take(100, timeout_s=1).slab is block.slab
        assert calls == [FENCE]
    finally:
        pool.close()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_updates_arrive_with_the_system_call_in_them(
    calls: list[int], packed: bool, apply: ApplyChoice
) -> None:
    source, target = models.make("plain", seed=1), models.make("plain", seed=2)
    receiver = ws.WeightReceiver(target, apply=apply)
    with ws.connect(source, to=receiver.handle, packed=packed) as sender:
        for step in range(3):
            models.fill(source, seed=step)
            calls.clear()
            assert sender.send_weights().verified == "held"
            assert FENCE in calls
            assert models.digests(target) == models.digests(source)
    receiver.close()
