"""Processes at the ends of message queues, which execute one command after another."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.children import CONTEXT
from weightsync.errors import PeerLostError, TransferTimeout
from weightsync.queues.message_queue import CHECK_S, MessageQueue, QueueHandle
from weightsync.queues.message_ring import SOCKET

WAIT_S = 60.0
SMALL_SLOT = 64 << 10


class Failure(Exception):
    """The error of another process: its type's name, message and ranks."""

    def __init__(self, kind: str, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.ranks = ranks


class Peer:
    """A process that runs commands: `call` waits for the reply, `start` does not."""

    def __init__(self, process: ForkServerProcess, pipe: Connection) -> None:
        self._process = process
        self._pipe = pipe
        self._asked = 0

    def start(self, what: Callable[..., Any], *args: Any) -> None:
        self._asked += 1
        self._pipe.send((what, args))

    def answer(self) -> Any:
        assert self._pipe.poll(WAIT_S), "the process did not reply in time"
        done, value = self._pipe.recv()
        self._asked -= 1
        if not done:
            raise Failure(*value)
        return value

    def call(self, what: Callable[..., Any], *args: Any) -> Any:
        self.start(what, *args)
        return self.answer()

    def failure(self) -> Failure:
        """Return its next error."""
        try:
            value = self.answer()
        except Failure as exc:
            return exc
        raise AssertionError(f"nothing was raised; {value!r} came back")

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(WAIT_S)

    def reusable(self) -> bool:
        """Close its queues; return whether another test may use it."""
        if self._asked or not self._process.is_alive():
            return False
        self.call(close)
        return True

    def end(self) -> None:
        self._pipe.close()
        self._process.join(0.5)  # it exits by itself, and removes its segments
        self._process.kill()
        self._process.join(WAIT_S)


# Starting a process costs more than most tests, so those that are not killed are used again.
_spare: list[Peer] = []


@contextmanager
def peers(count: int) -> Iterator[list[Peer]]:
    found = [_spare.pop() if _spare else _started() for _ in range(count)]
    try:
        yield found
        _spare.extend(peer for peer in found if peer.reusable())
    finally:
        for peer in found:
            if peer not in _spare:
                peer.end()


def end_spare_peers() -> None:
    while _spare:
        _spare.pop().end()


def _started() -> Peer:
    mine, its = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_obey, args=(its,), daemon=True)
    process.start()
    its.close()
    return Peer(process, mine)


_queues: dict[str, MessageQueue] = {}


def _obey(pipe: Connection) -> None:
    try:
        while True:
            what, args = pipe.recv()
            try:
                pipe.send((True, what(*args)))
            except Exception as exc:  # noqa: BLE001  # the test raises it
                ranks = exc.ranks if isinstance(exc, PeerLostError) else ()
                pipe.send((False, (type(exc).__name__, str(exc), ranks)))
    except (EOFError, OSError):
        close()


# The commands of a peer.


def make(*args: Any, **options: Any) -> QueueHandle:
    _queues["q"] = MessageQueue(*args, **{"max_chunk_bytes": SMALL_SLOT, **options})
    return _queues["q"].export_handle()


def attach(handle: QueueHandle, rank: int) -> None:
    _queues["q"] = MessageQueue.create_from_handle(handle, rank)


def ready(timeout_s: float = WAIT_S) -> None:
    _queues["q"].wait_until_ready(timeout_s)


def enqueue(*messages: Any) -> None:
    for message in messages:
        _queues["q"].enqueue(message, WAIT_S)


def dequeue(timeout_s: float | None = WAIT_S) -> Any:
    return _queues["q"].dequeue(timeout_s)


def digest_in_place() -> str:
    with _queues["q"].read(WAIT_S) as view:
        return hashlib.sha256(view).hexdigest()


def count_in_order(count: int) -> int:
    for wanted in range(count):
        got = _queues["q"].dequeue(WAIT_S)
        assert got == wanted, f"{got} came in place of {wanted}"
    return count


def take_until_lost() -> tuple[list[Any], str]:
    found = []
    try:
        while True:
            found.append(_queues["q"].dequeue(WAIT_S))
    except PeerLostError as exc:
        return found, f"{exc.ranks} {exc}"


def hold_next(release: str) -> bytes:
    """Stay inside a read until a file appears; return the content of the view then."""
    with _queues["q"].read(WAIT_S) as view:
        deadline = time.monotonic() + WAIT_S
        while not Path(release).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return bytes(view[:1])


def dequeue_called_off(after_s: float) -> None:
    cancel = threading.Event()
    timer = threading.Timer(after_s, cancel.set)
    timer.start()
    try:
        _queues["q"].dequeue(None, cancel)
    finally:
        timer.join()


def processor_seconds(idle_s: float) -> float:
    started = time.process_time()
    with suppress(TransferTimeout):
        _queues["q"].dequeue(idle_s)
    return time.process_time() - started


def close() -> None:
    if "q" in _queues:
        _queues.pop("q").close()


def resources() -> tuple[int, int]:
    """Return open descriptors and resident bytes."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    fds = list(Path("/proc/self/fd").iterdir())
    return len(fds), pages * os.sysconf("SC_PAGE_SIZE")


def enqueue_times(count: int, message: Any) -> None:
    for _ in range(count):
        _queues["q"].enqueue(message, WAIT_S)


def dequeue_times(count: int) -> None:
    for _ in range(count):
        _queues["q"].dequeue(WAIT_S)


def look_at_readers(message: Any) -> None:
    """Enqueue late enough after the last message for the writer to check its readers."""
    time.sleep(1.1 * CHECK_S)
    _queues["q"].enqueue(message, WAIT_S)


def descriptors_of_queues(times: int) -> list[int]:
    """Make and close both ends of a queue again and again; return open descriptors after each."""
    counts = []
    for _ in range(times):
        writer = MessageQueue(1, 1, max_chunk_bytes=SMALL_SLOT, max_chunks=3)
        with writer, MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            writer.enqueue(bytes(4 * SMALL_SLOT), WAIT_S)
            reader.dequeue(WAIT_S)
        del writer, reader
        counts.append(resources()[0])
    return counts


def make_remote(address: str) -> QueueHandle:
    """Make a queue to one reader elsewhere."""
    _queues["q"] = MessageQueue(1, 0, max_chunk_bytes=SMALL_SLOT, connect_ip=address)
    return _queues["q"].export_handle()


def die() -> None:
    time.sleep(0.5)  # the messages have left this process
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_sending() -> None:
    """Publish a message for the socket, and be killed before its first byte is sent."""

    def killed(*_: object) -> None:
        writer = _queues["q"]._writer
        assert writer is not None
        assert writer._ring is not None
        writer._ring.publish(SOCKET, 1 << 20)
        os.kill(os.getpid(), signal.SIGKILL)

    writer = _queues["q"]._writer
    assert writer is not None
    vars(writer._publisher)["send"] = killed
    _queues["q"].enqueue(bytes(4 * SMALL_SLOT))


def check_stream(sizes: list[int]) -> int:
    """Read `(number, fill)` by turns in place and copied; return how many were right."""
    for number, size in enumerate(sizes):
        want = (number, bytes([number % 251]) * size)
        if number % 2:
            with _queues["q"].read(WAIT_S) as got:
                assert (got[0], bytes(got[1])) == want
        else:
            assert _queues["q"].dequeue(WAIT_S) == want
    return len(sizes)
