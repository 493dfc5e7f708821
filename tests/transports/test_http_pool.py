"""Connections that are kept: which are used again, which are not, and when they are closed."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from weightsync.errors import ConnectError, ProtocolError, TransportTimeout
from weightsync.transports import http
from weightsync.transports.http import HttpTransport

WAIT_S = 60.0
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Peer:
    """Answers requests with what `answer` returns. Knows who came and who left."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self.accepted = 0
        self.left = threading.Semaphore(0)
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_S)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def transport(self) -> HttpTransport:
        return HttpTransport(f"http://127.0.0.1:{self._listener.getsockname()[1]}")

    def gone(self, count: int = 1) -> bool:
        """Whether so many connections were closed by the other side."""
        return all(self.left.acquire(timeout=WAIT_S) for _ in range(count))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(WAIT_S)
        self._listener.close()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            self._threads.append(threading.Thread(target=self._serve, args=[connection]))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(ConnectionError):
            connection.settimeout(WAIT_S)
            while request := connection.recv(1 << 16):
                connection.sendall(self._answer(request))
        self.left.release()


@contextmanager
def peer(answer: Callable[[bytes], bytes] = lambda _: OK) -> Iterator[Peer]:
    made = Peer(answer)
    try:
        yield made
    finally:
        made.close()


def get(transport: HttpTransport, timeout_s: float = WAIT_S) -> tuple[int, bytes]:
    return transport.get("", timeout_s=timeout_s, max_nbytes=100)


def test_a_connection_is_used_again_until_the_pool_is_closed() -> None:
    with peer() as there:
        transport = there.transport()
        assert [get(transport) for _ in range(3)] == [(200, b"ok")] * 3
        assert there.accepted == 1
        transport.close()
        assert there.gone()
        with pytest.raises(ConnectError, match="is closed"):
            get(transport)


def test_one_that_has_hung_up_is_not_tried() -> None:
    with peer() as there:
        transport = there.transport()
        get(transport)
        (idle,) = transport._pool._idle
        idle.sock.shutdown(socket.SHUT_WR)  # the peer hangs up in turn
        assert there.gone()
        assert get(transport) == (200, b"ok")
        assert there.accepted == 2
        assert transport.sent_messages == 2  # three, had it been tried
        transport.close()


def test_an_early_hint_is_never_taken_for_the_answer_of_another() -> None:
    with peer(lambda _: b"HTTP/1.1 103 Hint\r\n\r\n") as there:
        transport = there.transport()
        assert get(transport)[0] == 103
        get(transport)
        assert there.accepted == 2
        transport.close()


def test_no_more_are_kept_than_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "POOL_SIZE", 1)
    together = threading.Barrier(2)

    def answer(_: bytes) -> bytes:
        together.wait(WAIT_S)
        return OK

    with peer(answer) as there, ThreadPoolExecutor(2) as threads:
        transport = there.transport()
        for accepted in (2, 3):
            list(threads.map(get, [transport, transport]))
            assert there.accepted == accepted
        transport.close()


def test_one_in_use_is_closed_when_its_call_is_over() -> None:
    asked, let_go = threading.Event(), threading.Event()

    def answer(_: bytes) -> bytes:
        asked.set()
        assert let_go.wait(WAIT_S)
        return OK

    with peer(answer) as there, ThreadPoolExecutor(1) as threads:
        transport = there.transport()
        at_work = threads.submit(get, transport)
        assert asked.wait(WAIT_S)
        transport.close()
        let_go.set()
        assert at_work.result(WAIT_S) == (200, b"ok")
        assert there.gone()


@contextmanager
def two_idle() -> Iterator[tuple[Peer, HttpTransport]]:
    """A transport with two idle connections; the peer hangs up at the next request to either."""
    together = threading.Barrier(2)
    answered = threading.Semaphore(2)

    def answer(_: bytes) -> bytes:
        if answered.acquire(blocking=False):
            together.wait(WAIT_S)
            return OK
        if there.accepted == 2:
            raise ConnectionAbortedError
        return OK

    with peer(answer) as there, ThreadPoolExecutor(2) as threads:
        transport = there.transport()
        list(threads.map(get, [transport, transport]))
        assert there.accepted == 2
        yield there, transport
        transport.close()


def test_a_new_one_takes_the_place_of_all_that_were_idle() -> None:
    with two_idle() as (there, transport):
        assert get(transport) == (200, b"ok")
        assert there.gone(2)
        assert there.accepted == 3


def test_a_retry_is_on_a_new_one_though_another_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_idle() as (there, transport):
        monkeypatch.setattr(http, "_close_all", lambda _: None)
        assert get(transport) == (200, b"ok")
        assert there.accepted == 3
        monkeypatch.undo()


def test_a_pool_that_nobody_closes_closes_what_it_kept() -> None:
    with peer() as there:
        transport = there.transport()
        get(transport)
        del transport
        gc.collect()
        assert there.gone()


@pytest.mark.parametrize(
    "body",
    [
        b"content-length: 101\r\n\r\n" + b"x" * 101,
        b"content-length: 99999999999\r\n\r\n" + b"x" * 50,
        b"transfer-encoding: chunked\r\n\r\n65\r\n" + b"x" * 101 + b"\r\n0\r\n\r\n",
    ],
)
def test_an_answer_that_is_too_long_is_refused(body: bytes) -> None:
    with peer(lambda _: b"HTTP/1.1 200 OK\r\n" + body) as there:
        transport = there.transport()
        with pytest.raises(ProtocolError, match="over 100 bytes"):
            get(transport)
        assert there.gone()
        transport.close()


@pytest.mark.parametrize("size", [b"-5", b"zz"])
def test_a_chunk_of_no_size_is_a_broken_connection(size: bytes) -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    with peer(lambda _: chunked + size + b"\r\nabcde\r\n0\r\n\r\n") as there:
        transport = there.transport()
        with pytest.raises(ConnectError, match="broke during"):
            get(transport)
        transport.close()


def test_each_call_has_its_own_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECT_TIMEOUT_S", 0.2)
    let_go = threading.Event()
    slow = [lambda: let_go.wait(0.6)]

    def answer(_: bytes) -> bytes:
        if slow:
            slow.pop()()
        return OK

    with peer(answer) as there:
        transport = there.transport()
        get(transport)  # longer than a connection may take to be made
        slow.append(lambda: let_go.wait(WAIT_S))
        with pytest.raises(TransportTimeout):
            get(transport, timeout_s=0.2)  # on the connection that had more
        let_go.set()
        assert there.accepted == 1
        transport.close()


@pytest.mark.parametrize("rest", [b"", b"content-length: 90\r\n\r\n"], ids=["head", "body"])
def test_a_peer_that_trickles_wins_no_time(rest: bytes) -> None:
    """Each byte comes in time; all of them would not."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            there, _ = listener.accept()
            with there, suppress(OSError):
                there.sendall(b"HTTP/1.1 200 OK\r\n" + rest)
                while not ended.wait(0.05):
                    there.sendall(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        transport = HttpTransport(f"http://127.0.0.1:{listener.getsockname()[1]}")
        try:
            with pytest.raises(TransportTimeout):
                get(transport, timeout_s=0.5)
        finally:
            ended.set()
            thread.join(WAIT_S)
        transport.close()
