from __future__ import annotations

import hashlib
import json
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs

from tests.queues import message_peers as told
from tests.queues.message_peers import SMALL_SLOT, WAIT_S, Peer, end_spare_peers, peers
from weightsync.errors import (
    ConfigError,
    HandleError,
    PeerLostError,
    ProtocolError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from weightsync.queues.message_queue import MessageCodec, MessageQueue, QueueHandle
from weightsync.queues.message_ring import RECORDS, MessageRingWriter
from weightsync.shm import wait
from weightsync.shm.segment import find_leftovers, socket_path

pytestmark = pytest.mark.usefixtures("shm_clean")


@pytest.fixture(scope="module", autouse=True)
def no_process_stays() -> Iterator[None]:
    yield
    end_spare_peers()


DEAD = "the lock on its segment is free, so its process is dead"
OVERSIZE = 4 * SMALL_SLOT


def small_queue(readers: int, **options: Any) -> MessageQueue:
    return MessageQueue(readers, readers, max_chunk_bytes=SMALL_SLOT, max_chunks=3, **options)


@contextmanager
def with_readers(count: int, **options: Any) -> Iterator[tuple[MessageQueue, list[Peer]]]:
    """A writer here and readers elsewhere, all of them there."""
    with small_queue(count, **options) as queue, peers(count) as readers:
        for rank, reader in enumerate(readers):
            reader.start(told.attach, queue.export_handle(), rank)
        for reader in readers:
            reader.answer()
            reader.start(told.ready)
        queue.wait_until_ready(WAIT_S)
        for reader in readers:
            reader.answer()
        yield queue, readers


@contextmanager
def pair(**options: Any) -> Iterator[tuple[MessageQueue, MessageQueue]]:
    """Both ends in this process."""
    with (
        small_queue(1, **options) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
    ):
        yield writer, reader


def enqueue_all(queue: MessageQueue, messages: Iterable[object]) -> None:
    for message in messages:
        queue.enqueue(message, WAIT_S)


def noise(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).bytes(nbytes)


def test_every_reader_gets_every_message_as_it_was_sent() -> None:
    messages = [{"step": 1, "pair": (1, b"x")}, None, torch.arange(5), "last"]
    with with_readers(2) as (queue, readers):
        for message in messages:
            queue.enqueue(message)
        for reader in readers:
            got = [reader.call(told.dequeue) for _ in messages]
            assert torch.equal(got.pop(2), torch.arange(5))
            assert got == [{"step": 1, "pair": (1, b"x")}, None, "last"]


def test_a_hundred_thousand_messages_arrive_in_order() -> None:
    count = 100_000
    with with_readers(2) as (queue, readers):
        for reader in readers:
            reader.start(told.count_in_order, count)
        for number in range(count):
            queue.enqueue(number, WAIT_S)
        assert [reader.answer() for reader in readers] == [count, count]


@pytest.mark.parametrize(
    "nbytes", [0, 1, 900, 1024, SMALL_SLOT - 512, SMALL_SLOT, SMALL_SLOT + 1, OVERSIZE]
)
def test_messages_of_every_size_arrive_whole(nbytes: int) -> None:
    data = noise(nbytes)
    with with_readers(2) as (queue, readers):
        for _ in range(5):  # more than there are slots
            for reader in readers:
                reader.start(told.digest_in_place)
            queue.enqueue(data, WAIT_S)
            want = hashlib.sha256(data).hexdigest()
            assert [reader.answer() for reader in readers] == [want, want]


def test_sizes_mixed_keep_their_order() -> None:
    with with_readers(1) as (queue, (reader,)):
        sizes = [10, OVERSIZE, 2000, OVERSIZE + 1, 20, 3000, 30]
        writing = threading.Thread(target=enqueue_all, args=(queue, map(bytes, sizes)))
        writing.start()
        got = [len(reader.call(told.dequeue)) for _ in sizes]
        writing.join(WAIT_S)
        assert got == sizes


def test_a_long_mixed_stream_is_read_right_in_place_and_copied() -> None:
    rng = np.random.default_rng(0)
    choice = [0, 5, 500, 1000, 3000, SMALL_SLOT - 100, SMALL_SLOT, OVERSIZE]
    sizes = [int(size) for size in rng.choice(choice, 2000)]
    with with_readers(2) as (queue, readers):
        for reader in readers:
            reader.start(told.check_stream, sizes)
        for number, size in enumerate(sizes):
            queue.enqueue((number, bytes([number % 251]) * size), WAIT_S)
        assert [reader.answer() for reader in readers] == [len(sizes)] * 2


def test_the_sender_may_change_what_it_sent_at_once() -> None:
    with pair() as (writer, reader):
        for count in (10, 1000, OVERSIZE):
            data = torch.zeros(count)
            writer.enqueue(data)
            data.fill_(1)
            assert not reader.dequeue(WAIT_S).any()


def test_a_view_lies_in_shared_memory_and_ends_with_its_block() -> None:
    with pair() as (writer, reader):
        for nbytes in (10, 10_000):
            writer.enqueue({"data": noise(nbytes), "tensor": torch.ones(nbytes)})
            with reader.read(WAIT_S) as message:
                view, tensor = message["data"], message["tensor"]
                assert view.readonly
                assert bytes(view) == noise(nbytes)
                maps = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
                (area,) = (m for m in maps if contains(m, tensor.data_ptr()))
                assert area.split()[1] == "r--s"
            with pytest.raises(ValueError, match="released memoryview"):
                bytes(view)
            del message, view, tensor


def contains(area: str, address: int) -> bool:
    start, end = (int(word, 16) for word in area.split(maxsplit=1)[0].split("-"))
    return start <= address < end


def test_what_was_dequeued_stays_when_its_slot_is_used_again() -> None:
    with pair() as (writer, reader):
        writer.enqueue(torch.ones(5000))
        first = reader.dequeue(WAIT_S)
        for _ in range(5):
            writer.enqueue(torch.zeros(5000))
            reader.dequeue(WAIT_S)
        assert first.all()


def test_a_block_that_raises_gives_its_message_back() -> None:
    with pair() as (writer, reader):
        for number in range(10):
            writer.enqueue([number, bytes(SMALL_SLOT // 2)], WAIT_S)
            with suppress(KeyError), reader.read(WAIT_S) as message:
                assert message[0] == number
                raise KeyError


def test_a_second_read_inside_a_block_is_refused() -> None:
    with pair() as (writer, reader):
        writer.enqueue(1)
        with reader.read(WAIT_S), pytest.raises(ConfigError, match="still being read"):
            reader.dequeue(0)


def test_a_message_of_an_unknown_type_is_spent() -> None:
    codec = MessageCodec()
    codec.register(complex, encode=lambda z: [z.real, z.imag], decode=lambda z: complex(*z))
    with pair(codec=codec) as (writer, reader):
        writer.enqueue(1j)
        writer.enqueue("next")
        with pytest.raises(ProtocolError, match="'complex', which is not registered"):
            reader.dequeue(WAIT_S)
        assert reader.dequeue(WAIT_S) == "next"


def test_nothing_is_sent_of_what_cannot_be_encoded() -> None:
    with pair() as (writer, reader):
        with pytest.raises(ConfigError, match=r"\$\[0\]"):
            writer.enqueue([object()])
        writer.enqueue("next")
        assert reader.dequeue(WAIT_S) == "next"


def test_broadcast_object_gives_all_the_same() -> None:
    with pair() as (writer, reader):
        assert writer.broadcast_object({"a": 1}) == {"a": 1}
        assert reader.broadcast_object() == {"a": 1}


def test_readers_may_have_any_ranks() -> None:
    with MessageQueue(2, 2, [7, 3], max_chunk_bytes=SMALL_SLOT) as writer:
        handle = writer.export_handle()
        with (
            MessageQueue.create_from_handle(handle, 3) as three,
            MessageQueue.create_from_handle(handle, 7) as seven,
        ):
            writer.enqueue("all")
            assert (three.dequeue(WAIT_S), seven.dequeue(WAIT_S)) == ("all", "all")
        with pytest.raises(ConfigError, match=r"rank 0 is no reader of this queue.*\[7, 3\]"):
            MessageQueue.create_from_handle(handle, 0)


def test_a_handle_is_plain_data() -> None:
    with small_queue(1, writer_rank=4) as writer:
        handle = writer.export_handle()
        for wire in (msgspec.json, msgspec.msgpack):
            copy = wire.decode(wire.encode(handle), type=QueueHandle)
            assert copy == handle
        with MessageQueue.create_from_handle(copy, 0) as reader:
            writer.enqueue(1)
            assert reader.dequeue(WAIT_S) == 1
            with pytest.raises(HandleError, match="is or was taken"):
                MessageQueue.create_from_handle(copy, 0)


@pytest.mark.parametrize(
    ("arguments", "options", "why"),
    [
        ((0, 0), {}, "give one or more"),
        ((1, 2), {}, "2 of 1 readers"),
        ((2, 2, [1, 1]), {}, "each once"),
        ((2, 2, [1]), {}, "are not 2 and 0"),
        ((2, 1), {"connect_ip": "0.0.0.0"}, "means every address"),
        ((2, 1), {"connect_ip": "localhost"}, "give an IPv4 or IPv6 address"),
        ((1, 1), {"max_chunks": 0}, "make no queue"),
    ],
)
def test_arguments_that_make_no_queue_are_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        MessageQueue(*arguments, **{"max_chunk_bytes": SMALL_SLOT, **options})


def test_each_end_refuses_what_is_the_others() -> None:
    with pair() as (writer, reader):
        with pytest.raises(ConfigError, match="only the writer enqueues"):
            reader.enqueue(1)
        with pytest.raises(ConfigError, match="only readers dequeue"):
            writer.dequeue()
        writer.close()
        with pytest.raises(TransferCancelled, match="closed"):
            writer.enqueue(1)
        reader.close()
        with pytest.raises(TransferCancelled, match="closed"):
            reader.dequeue()


# Waiting.


def test_a_reader_that_comes_late_gets_everything() -> None:
    with small_queue(1) as writer:
        for number in range(RECORDS):
            writer.enqueue(number, WAIT_S)
        with pytest.raises(TransferTimeout, match="reader 0 to open this queue"):
            writer.enqueue("one too many", 0.05)
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            assert [reader.dequeue(WAIT_S) for _ in range(RECORDS)] == list(range(RECORDS))


def test_a_message_too_large_for_a_slot_waits_for_the_subscription() -> None:
    with small_queue(1) as writer:
        with pytest.raises(TransferTimeout, match="reader 0 to open this queue"):
            writer.enqueue(bytes(OVERSIZE), 0.05)
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            writer.enqueue(bytes(OVERSIZE), WAIT_S)
            assert len(reader.dequeue(WAIT_S)) == OVERSIZE


def test_wait_until_ready_names_who_is_missing() -> None:
    with small_queue(3) as writer:
        handle = writer.export_handle()
        with MessageQueue.create_from_handle(handle, 1) as reader:
            with pytest.raises(TransferTimeout, match="reader 0, 2 to open this queue"):
                writer.wait_until_ready(0.1)
            with pytest.raises(TransferTimeout, match="the writer to see all readers"):
                reader.wait_until_ready(0.1)


def test_a_full_queue_names_who_is_behind_and_sends_nothing() -> None:
    with with_readers(2) as (queue, readers):
        for number in range(3):
            queue.enqueue([number, bytes(SMALL_SLOT // 2)])
        for _ in range(3):
            readers[0].call(told.dequeue)
        with pytest.raises(TransferTimeout, match="reader 1 to read the last messages"):
            queue.enqueue(["lost", bytes(SMALL_SLOT // 2)], 0.1)
        readers[1].call(told.dequeue)
        queue.enqueue("after", WAIT_S)
        assert readers[0].call(told.dequeue) == "after"


def test_an_empty_queue_times_out_and_goes_on() -> None:
    with pair() as (writer, reader):
        for timeout_s in (0, 0.05):
            with pytest.raises(TransferTimeout, match="a message of the writer"):
                reader.dequeue(timeout_s)
        writer.enqueue(1)
        assert reader.dequeue(0) == 1


def test_a_long_spin_ends_like_any_wait() -> None:
    with pair(spin_s=WAIT_S) as (writer, reader):
        started = time.monotonic()
        with pytest.raises(TransferTimeout, match="a message of the writer"):
            reader.dequeue(0.05)
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(TransferCancelled, match="cancelled while waiting"):
            reader.dequeue(cancel=cancel)
        writer.close()
        with pytest.raises(PeerLostError, match="it closed the queue"):
            reader.dequeue()
        assert time.monotonic() - started < WAIT_S / 2


def test_a_wait_can_be_called_off() -> None:
    with pair() as (writer, reader):
        cancel = threading.Event()
        timer = threading.Timer(0.1, cancel.set)
        timer.start()
        with pytest.raises(TransferCancelled, match="cancelled"):
            reader.dequeue(None, cancel)
        timer.join()
        writer.enqueue(1)
        assert reader.dequeue(WAIT_S, cancel) == 1


def test_a_long_wait_is_logged_unless_it_is_expected(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        wait.WaitPolicy.__init__,
        "__kwdefaults__",
        {
            **(wait.WaitPolicy.__init__.__kwdefaults__ or {}),
            "warn_s": 0.01,
        },
    )
    caplog.set_level(logging.WARNING)
    with pair(writer_rank=5) as (_, reader):
        with pytest.raises(TransferTimeout):
            reader.dequeue(0.3, threading.Event(), indefinite=True)
        assert not caplog.records
        with pytest.raises(TransferTimeout):
            reader.dequeue(0.3, threading.Event())
    assert "waiting for a message of the writer, rank 5 for" in caplog.text
    assert len(caplog.records) > 1


def test_an_idle_reader_sleeps_and_is_woken() -> None:
    with with_readers(1) as (queue, (reader,)):
        assert reader.call(told.processor_seconds, 1.0) < 0.5
        reader.start(told.dequeue)
        time.sleep(0.3)
        queue.enqueue("wake up")
        assert reader.answer() == "wake up"


def test_several_threads_may_enqueue() -> None:
    with with_readers(1) as (queue, (reader,)):
        threads = [
            threading.Thread(target=enqueue_all, args=(queue, [(n, i) for i in range(200)]))
            for n in range(3)
        ]
        for thread in threads:
            thread.start()
        got = [reader.call(told.dequeue) for _ in range(600)]
        for thread in threads:
            thread.join(WAIT_S)
        for n in range(3):
            assert [i for m, i in got if m == n] == list(range(200))


# Death.


def fill_until_lost(queue: MessageQueue) -> PeerLostError:
    with pytest.raises(PeerLostError) as caught:
        fill(queue)
    return caught.value


def fill(queue: MessageQueue) -> None:
    for _ in range(RECORDS + 2):
        queue.enqueue(1, WAIT_S)


def test_a_reader_that_died_asleep_is_named() -> None:
    with with_readers(2) as (queue, readers):
        readers[1].start(told.dequeue, None)
        readers[0].start(told.take_until_lost)
        time.sleep(0.2)
        readers[1].kill()
        lost = fill_until_lost(queue)
        assert lost.ranks == (1,)
        assert f"reader 1 is gone: {DEAD}" in str(lost)
        queue.close()
        readers[0].answer()


def test_a_reader_that_died_inside_a_slot_is_named_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for drop in (False, True):
        with with_readers(2, drop_dead_readers=drop) as (queue, readers):
            queue.enqueue(bytes(SMALL_SLOT // 2))
            readers[1].start(told.hold_next, str(tmp_path / "never"))
            readers[0].call(told.dequeue)
            time.sleep(0.3)
            readers[1].kill()
            if not drop:
                assert fill_until_lost(queue).ranks == (1,)
                continue
            count = 2 * RECORDS
            readers[0].start(told.count_in_order, count)
            for number in range(count):
                queue.enqueue(number, WAIT_S)
            assert readers[0].answer() == count
            assert "reader 1 is gone" in caplog.text


def test_a_reader_that_closed_is_told_from_a_dead_one() -> None:
    with with_readers(1) as (queue, (reader,)):
        reader.call(told.close)
        assert str(fill_until_lost(queue)).startswith("reader 0 is gone: it closed its end")


def test_a_dead_reader_is_noticed_by_a_writer_that_never_waits() -> None:
    with with_readers(1) as (queue, (reader,)):
        reader.kill()
        with pytest.raises(PeerLostError, match=DEAD):
            trickle(queue)


def trickle(queue: MessageQueue) -> None:
    for _ in range(RECORDS // 2):
        queue.enqueue(1)
        time.sleep(0.02)


def test_without_any_reader_left_the_writer_stops() -> None:
    with with_readers(1, drop_dead_readers=True) as (queue, (reader,)):
        reader.kill()
        with pytest.raises(PeerLostError, match="no reader is left"):
            fill(queue)
        with pytest.raises(PeerLostError, match="no reader is left"):
            queue.enqueue("to no reader")
        with pytest.raises(PeerLostError, match="no reader is left"), queue.acquire_write(nbytes=8):
            pass


def test_a_writer_that_died_is_named_after_its_last_message() -> None:
    with peers(3) as (writer, *readers):
        handle = writer.call(told.make, 2, 2)
        for rank, reader in enumerate(readers):
            reader.call(told.attach, handle, rank)
        for peer in (writer, *readers):
            peer.start(told.ready)
        for peer in (writer, *readers):
            peer.answer()
        readers[0].start(told.take_until_lost)
        writer.call(told.enqueue, 1, bytes(SMALL_SLOT // 2), 3)
        writer.kill()
        readers[1].start(told.take_until_lost)
        for reader in readers:
            found, why = reader.answer()
            assert [len(m) if isinstance(m, bytes) else m for m in found] == [1, SMALL_SLOT // 2, 3]
            assert f"the writer is gone: {DEAD}" in why


def test_a_writer_that_died_before_all_were_there_is_noticed() -> None:
    with peers(2) as (writer, reader):
        handle = writer.call(told.make, 2, 2)
        reader.call(told.attach, handle, 0)
        reader.start(told.ready)
        writer.kill()
        assert DEAD in reader.failure().message


def test_a_writer_that_closed_is_told_from_a_dead_one() -> None:
    with with_readers(1, writer_rank=3) as (queue, (reader,)):
        queue.enqueue("last")
        queue.close()
        found, why = reader.call(told.take_until_lost)
        assert found == ["last"]
        assert why.startswith("(3,) the writer, rank 3, is gone: it closed the queue")


def test_a_queue_that_closes_has_nothing_of_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    close = MessageRingWriter.close

    def looked_at(ring: MessageRingWriter) -> None:
        close(ring)
        seen.append({leftover.name for leftover in find_leftovers()})

    monkeypatch.setattr(MessageRingWriter, "close", looked_at)
    with pair() as (writer, reader):
        own = str(writer.export_handle().control)
        assert socket_path(own).exists()
        writer.enqueue(bytes(SMALL_SLOT * 8), WAIT_S)  # by the socket
        assert reader.dequeue(WAIT_S) == bytes(SMALL_SLOT * 8)
    (left,) = seen
    assert left.isdisjoint({own, socket_path(own).name})
    assert not socket_path(own).exists()


def test_a_writer_that_died_with_a_message_on_its_socket_is_noticed() -> None:
    with peers(2) as (writer, reader):
        reader.call(told.attach, writer.call(told.make, 1, 1), 0)
        reader.start(told.take_until_lost)
        writer.start(told.enqueue, "before")
        writer.answer()
        writer.start(told.die_while_sending)
        found, why = reader.answer()
        assert found == ["before"]
        assert DEAD in why


def test_a_handle_that_was_damaged_is_refused() -> None:
    good = QueueHandle(local_reader_ranks=(0,), remote_reader_ranks=(1,), slots=1, slot_nbytes=9)
    for handle, rank, why in (
        (good, 0, "no segments"),
        (good, 1, "connect to"),
        (structs.replace(good, control="../etc", data="x"), 0, "is not the name of a segment"),
    ):
        with pytest.raises(HandleError, match=why):
            MessageQueue.create_from_handle(handle, rank)


def test_a_stopped_reader_is_waited_for_until_the_timeout_and_can_be_dropped() -> None:
    with with_readers(2) as (queue, readers):
        readers[1].start(told.dequeue, None)
        time.sleep(0.2)
        readers[1].signal(signal.SIGSTOP)
        try:
            for number in range(RECORDS):
                queue.enqueue(number)
                assert readers[0].call(told.dequeue) == number
            with pytest.raises(TransferTimeout, match="reader 1 to read"):
                queue.enqueue("x", 0.2)
            queue.drop_reader(1)
            queue.enqueue("x", WAIT_S)
            assert readers[0].call(told.dequeue) == "x"
        finally:
            readers[1].signal(signal.SIGCONT)
        failure = readers[1].failure()
        assert failure.kind == "TransferError"
        assert re.search(rf"dropped reader place 1 at message {RECORDS}", failure.message)


def test_a_reader_dropped_while_inside_a_slot_is_told(tmp_path: Path) -> None:
    release = tmp_path / "release"
    with with_readers(2) as (queue, readers):
        queue.enqueue(b"a" * (SMALL_SLOT // 2))
        readers[1].start(told.hold_next, str(release))
        readers[0].call(told.dequeue)
        time.sleep(0.2)
        queue.drop_reader(1)
        for _ in range(5):
            queue.enqueue(b"b" * (SMALL_SLOT // 2), WAIT_S)
            readers[0].call(told.dequeue)
        release.touch()
        failure = readers[1].failure()
        assert failure.kind == "TransferError"
        assert "may be overwritten" in failure.message


def test_nobody_drops_a_reader_that_is_none() -> None:
    with pair() as (writer, reader):
        with pytest.raises(ConfigError, match=r"rank 5 is not among the readers, \[0\]"):
            writer.drop_reader(5)
        with pytest.raises(ConfigError, match="only the writer drops"):
            reader.drop_reader(0)


# What is kept.


def test_memory_and_descriptors_stay_where_they_were() -> None:
    message = {"a": torch.ones(10_000), "b": noise(2000), "c": (1, "x")}
    with peers(2) as (writer, reader):  # this process is the other tests' too
        reader.call(told.attach, writer.call(told.make, 1, 1), 0)

        def rounds(what: Callable[..., None], *args: Any, count: int) -> None:
            reader.start(told.dequeue_times, count)
            writer.call(what, *args)
            reader.answer()

        rounds(told.enqueue_times, 100, message, count=100)
        rounds(told.enqueue_times, 1, bytes(OVERSIZE), count=1)
        # The first look at a reader opens what its life is told by: two descriptors.
        rounds(told.look_at_readers, message, count=1)
        before = [peer.call(told.resources) for peer in (writer, reader)]
        rounds(told.enqueue_times, 1000, message, count=1000)
        rounds(told.enqueue_times, 1, bytes(OVERSIZE), count=1)
        rounds(told.look_at_readers, message, count=1)
        after = [peer.call(told.resources) for peer in (writer, reader)]
        for (fds, nbytes), (fds_now, nbytes_now) in zip(before, after, strict=True):
            assert fds_now == fds
            assert nbytes_now - nbytes < 20 << 20


def test_queues_made_and_closed_leave_nothing_open() -> None:
    with peers(1) as (alone,):
        counts = alone.call(told.descriptors_of_queues, 10)
    assert counts[1:] == counts[:-1]


def test_a_queue_that_cannot_have_its_memory_says_so_and_leaves_nothing() -> None:
    with pytest.raises(TransferError, match="bytes free"):
        MessageQueue(1, 1, max_chunk_bytes=1 << 40)


@pytest.mark.soak
def test_the_benchmark_runs_and_prints_both_rates() -> None:
    sizes = ["--json", "--small=200", "--large=2", "--runs=1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.message_queue", *sizes],
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for readers in (1, 2):
        assert found[f"ours, {readers}"]["small_us"] > 0
        assert found[f"ours, {readers}"]["large_read_gbps"] > 0


# What users of the queue taken over write.


def test_what_is_written_in_a_slot_is_one_message_of_bytes() -> None:
    with pair() as (writer, reader):
        with writer.acquire_write(nbytes=5000) as view:
            view[:] = noise(5000)
        with writer.acquire_write(WAIT_S) as view:
            most = len(view)
            assert SMALL_SLOT - 64 <= most <= SMALL_SLOT
            view[-3:] = b"end"
        with writer.acquire_write(nbytes=0):
            pass
        assert reader.dequeue(WAIT_S) == noise(5000)
        with reader.read(WAIT_S) as got:
            assert isinstance(got, memoryview)
            assert (len(got), bytes(got[-3:])) == (most, b"end")
        assert reader.dequeue(WAIT_S) == b""
        with pytest.raises(ValueError, match="released"):
            view[0] = 1


def test_a_block_of_writing_that_raises_sends_nothing() -> None:
    with pair() as (writer, reader):
        with suppress(KeyError), writer.acquire_write():
            raise KeyError
        writer.enqueue("next")
        assert reader.dequeue(WAIT_S) == "next"
        with pytest.raises(ConfigError, match=f"{SMALL_SLOT} bytes do not fit into a slot"):
            writer.acquire_write(nbytes=SMALL_SLOT).__enter__()
        with pytest.raises(ConfigError, match="only the writer writes"):
            reader.acquire_write().__enter__()


def test_readers_elsewhere_get_what_was_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with (
        MessageQueue(2, 1, [0], SMALL_SLOT, 3) as writer,  # no connect_ip: it is found
        MessageQueue.create_from_handle(writer.export_handle(), 0) as here,
        MessageQueue.create_from_handle(writer.export_handle(), 1) as elsewhere,
    ):
        assert str(writer.export_handle().remote_endpoint).startswith("tcp://127.0.0.1:")
        with writer.acquire_write(WAIT_S, nbytes=3) as view:
            view[:] = b"abc"
        assert [here.dequeue(WAIT_S), elsewhere.dequeue(WAIT_S)] == [b"abc", b"abc"]
        with (
            MessageQueue(1, 0, None, SMALL_SLOT, 3, "127.0.0.1") as alone,
            MessageQueue.create_from_handle(alone.export_handle(), 0) as remote,
        ):
            with alone.acquire_write(WAIT_S, nbytes=3) as view:
                view[:] = b"xyz"
            assert remote.dequeue(WAIT_S) == b"xyz"


def test_the_arguments_and_names_of_vllms_queue() -> None:
    with small_queue(1) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        for message in range(4):
            writer.enqueue(message, timeout=WAIT_S)
            got: object = None
            if message == 0:
                got = reader.dequeue(timeout=WAIT_S)
            elif message == 1:
                got = reader.dequeue(WAIT_S, True)  # newer: (timeout, indefinite)
            elif message == 2:
                got = reader.dequeue(WAIT_S, None, True)  # older: (timeout, cancel, indefinite)
            else:
                got = reader.dequeue(WAIT_S, indefinite=True)
            assert got == message
        with writer.acquire_write(timeout=WAIT_S, nbytes=3) as room:
            room[:] = b"raw"
        with reader.acquire_read(timeout=WAIT_S) as view:
            assert isinstance(view, memoryview)
            assert bytes(view) == b"raw"
        with pytest.raises(ConfigError, match="timeout and timeout_s are both given"):
            writer.enqueue(1, timeout_s=1.0, timeout=1.0)
        with pytest.raises(ConfigError, match="timeout and timeout_s are both given"):
            reader.dequeue(timeout_s=1.0, timeout=1.0)
        reader.shutdown()
        with pytest.raises(TransferCancelled):
            reader.dequeue()


def test_a_reader_that_has_opened_its_end_is_late_and_not_missing() -> None:
    with small_queue(1) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        for number in range(RECORDS):
            writer.enqueue(number, WAIT_S)
        with pytest.raises(TransferTimeout, match="reader 0 to read the last messages"):
            writer.enqueue("one too many", 1.0)
        reader.close()
