"""`close` from any thread ends every call of its end that waits, with TransferCancelled."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from weightsync.errors import ConfigError, PeerLostError, TransferCancelled, TransferTimeout
from weightsync.queues.message_queue import MessageQueue
from weightsync.queues.message_ring import RECORDS

pytestmark = pytest.mark.usefixtures("shm_clean")

WAIT_S = 60.0
SLOT_NBYTES = 64 << 10


@contextmanager
def ends(*, remote: bool = False) -> Iterator[tuple[MessageQueue, MessageQueue]]:
    """Both ends in this process; the reader by TCP if it is `remote`."""
    options: dict[str, Any] = {"connect_ip": "127.0.0.1"} if remote else {}
    with (
        MessageQueue(
            1, int(not remote), max_chunk_bytes=SLOT_NBYTES, max_chunks=3, **options
        ) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
    ):
        yield writer, reader


def read(reader: MessageQueue) -> object:
    with reader.read() as message:
        return message


@contextmanager
def waiting(*calls: Callable[[], object]) -> Iterator[list[Future[object]]]:
    """Calls in threads of their own, all of them under way."""
    with ThreadPoolExecutor(len(calls)) as pool:
        under_way = threading.Barrier(len(calls) + 1)

        def run(call: Callable[[], object]) -> object:
            under_way.wait(WAIT_S)
            return call()

        futures = [pool.submit(run, call) for call in calls]
        under_way.wait(WAIT_S)
        yield futures


def fill(writer: MessageQueue) -> None:
    for _ in range(RECORDS):
        writer.enqueue(1, WAIT_S)
    with pytest.raises(TransferTimeout):
        writer.enqueue(1, 0)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("take", [MessageQueue.dequeue, read, MessageQueue.wait_until_ready])
def test_a_reader_that_waits_is_woken(take: Callable[[MessageQueue], object], remote: bool) -> None:
    with ends(remote=remote) as (_, reader), waiting(lambda: take(reader)) as (waits,):
        threading.Event().wait(0.05)
        reader.close()
        with pytest.raises(TransferCancelled, match="closed in this process"):
            waits.result(WAIT_S)


@pytest.mark.parametrize("remote", [False, True])
def test_writers_that_wait_are_woken(remote: bool) -> None:
    with ends(remote=remote) as (writer, _):
        fill(writer)
        enqueue = [lambda: writer.enqueue(bytes(100))] * 3
        with waiting(*enqueue) as waits:
            threading.Event().wait(0.05)
            writer.close()
            for one in waits:
                with pytest.raises(TransferCancelled):
                    one.result(WAIT_S)


def test_a_writer_that_waits_for_readers_is_woken() -> None:
    with MessageQueue(1, 1, max_chunk_bytes=SLOT_NBYTES) as writer:
        oversize = bytes(2 * SLOT_NBYTES)
        with waiting(writer.wait_until_ready, lambda: writer.enqueue(oversize)) as waits:
            threading.Event().wait(0.05)
            writer.close()
            for one in waits:
                with pytest.raises(TransferCancelled):
                    one.result(WAIT_S)


def test_calls_of_a_closed_end_raise_the_same_error() -> None:
    with ends() as (writer, reader):
        writer.enqueue("sent before")
        reader.close()
        writer.close()
        for call in (
            reader.dequeue,
            lambda: read(reader),
            reader.wait_until_ready,
            lambda: writer.enqueue(1),
            writer.wait_until_ready,
            lambda: writer.drop_reader(0),
        ):
            with pytest.raises(TransferCancelled, match="closed in this process; open another"):
                call()


@pytest.mark.parametrize(("remote", "times"), [(False, 8), (True, 4)])
def test_closes_at_random_moments_raise_nothing_else(remote: bool, times: int) -> None:
    rng = random.Random(1)
    for _ in range(times):
        with ends(remote=remote) as (writer, reader):

            def take(reader: MessageQueue = reader) -> None:
                while True:
                    reader.dequeue()
                    read(reader)

            def send(writer: MessageQueue = writer) -> None:
                while True:
                    writer.enqueue(bytes(rng.choice([10, 2000, SLOT_NBYTES])))

            with waiting(take, send) as (takes, sends):
                threading.Event().wait(rng.random() * 0.01)
                first, second = rng.sample([writer, reader], 2)
                first.close()
                second.close()
                by_close = takes if first is reader else sends
                assert isinstance(by_close.exception(WAIT_S), TransferCancelled)
                for one in (takes, sends):  # the end that was closed second may see the first go
                    assert isinstance(one.exception(WAIT_S), TransferCancelled | PeerLostError)


def test_enqueue_can_be_called_off() -> None:
    with ends() as (writer, _):
        fill(writer)
        cancel = threading.Event()
        with waiting(lambda: writer.enqueue(1, cancel=cancel)) as (waits,):
            cancel.set()
            with pytest.raises(TransferCancelled, match="cancelled while waiting for reader 0"):
                waits.result(WAIT_S)


def test_a_writer_behind_another_thread_has_its_own_time_and_cancel() -> None:
    with ends() as (writer, reader):
        fill(writer)
        cancel = threading.Event()
        inside = threading.Thread(target=writer.enqueue, args=("first",))
        inside.start()
        while not writer._lock._inside:
            threading.Event().wait(0.001)
        with pytest.raises(TransferTimeout, match="another thread's message"):
            writer.enqueue(1, 0.05)
        cancel.set()
        with pytest.raises(TransferCancelled, match="another thread's message"):
            writer.enqueue(1, cancel=cancel)
        while reader.dequeue(WAIT_S) != "first":
            pass
        inside.join(WAIT_S)
        assert not inside.is_alive()


def test_a_block_whose_queue_is_closed_ends_with_the_error() -> None:
    with ends() as (writer, reader):
        writer.enqueue(bytes(2000))
        block = reader.read(WAIT_S)
        view = block.__enter__()
        reader.close()
        assert bytes(view) == bytes(2000)  # its memory stays until it is let go of
        with pytest.raises(TransferCancelled):
            block.__exit__(None, None, None)
        with pytest.raises(ValueError, match="released"):
            bytes(view)


def test_an_error_of_a_block_is_not_hidden_by_a_close() -> None:
    with ends() as (writer, reader):
        writer.enqueue(1)
        block = reader.read(WAIT_S)
        block.__enter__()
        reader.close()
        error = KeyError()
        assert not block.__exit__(KeyError, error, None)


@pytest.mark.parametrize("end", ["writer", "reader"])
def test_a_signal_handler_may_close_what_its_thread_waits_in(end: str) -> None:
    with ends() as (writer, reader):
        fill(writer)
        queue, wait = reader, reader.dequeue
        if end == "writer":
            queue, wait = writer, partial(writer.enqueue, 1)
        else:
            while reader.dequeue(1) == 1 and reader._reader and reader._reader.available:
                pass
        before = signal.signal(signal.SIGALRM, lambda *_: queue.close())
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(TransferCancelled):
                wait()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def test_a_call_inside_another_of_its_thread_is_refused() -> None:
    with ends() as (writer, reader):

        class Eager:
            def is_set(self) -> bool:
                with pytest.raises(ConfigError, match="inside another call"):
                    reader.dequeue(0)
                return True

        with pytest.raises(TransferCancelled):
            reader.dequeue(cancel=Eager())
        writer.enqueue(1)
        assert reader.dequeue(WAIT_S) == 1
