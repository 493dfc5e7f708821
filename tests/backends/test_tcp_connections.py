"""Connections between hosts: what strangers, silent peers and peers that lie can do, and cannot."""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from weightsync.backends.tcp import connection as connection_module
from weightsync.backends.tcp import server as server_module
from weightsync.backends.tcp.connection import Connection, Frame, FrameKind, Request, nothing
from weightsync.backends.tcp.server import ChunkServer, family_of
from weightsync.backends.tcp.window import ChunkWindow
from weightsync.errors import (
    ConnectError,
    ProtocolError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)

SECRET = bytes(range(16))
PATIENCE_S = 2.0
WAIT_S = 30.0
BYTES = memoryview(bytes(range(200)))


@contextmanager
def serving(
    address: str = "127.0.0.1",
    *,
    patience_s: float = PATIENCE_S,
    slots: int = 4,
    tells_lost: bool = False,
) -> Iterator[tuple[ChunkServer, ChunkWindow]]:
    window = ChunkWindow(slots, patience_s)
    server = ChunkServer(address, SECRET, window, patience_s, tells_lost=tells_lost)
    try:
        yield server, window
    finally:
        window.close()
        server.close()
        wait_until(lambda: not server._connections)


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def connected(
    server: ChunkServer, address: str = "127.0.0.1", *, place: int = 0, patience_s: float = WAIT_S
) -> Iterator[Connection]:
    made = Connection.open(address, server.port, SECRET, place, patience_s)
    try:
        yield made
    finally:
        made.close()


def read_chunk(connection: Connection) -> tuple[Frame, list[int], bytes]:
    while (frame := connection.next_frame(nothing)).kind is FrameKind.WAITING:
        connection.send_heartbeat()
    into = bytearray(frame.nbytes)
    fingerprints = connection.read_fingerprints(frame, nothing)
    connection.read_data(memoryview(into), nothing)
    return frame, fingerprints, bytes(into)


def ends(sock: socket.socket) -> bool:
    """Whether the other end closes the connection."""
    sock.settimeout(WAIT_S)
    with suppress(ConnectionError):
        return sock.recv(1) == b""
    return True


def check_serves(server: ChunkServer, window: ChunkWindow, epoch: int = 1) -> None:
    window.begin(epoch, 1, [[0]])
    window.offer(0, BYTES, [3, 4])
    with connected(server) as reader:
        reader.send_request(Request(epoch, 0, is_next=False))
        frame, fingerprints, data = read_chunk(reader)
    assert (frame.epoch, frame.chunk, frame.chunks) == (epoch, 0, 1)
    assert (fingerprints, data) == ([3, 4], bytes(BYTES))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_a_chunk_arrives(address: str) -> None:
    with serving(address) as (server, window):
        window.begin(1, 1, [[0]])
        window.offer(0, BYTES, [1])
        with connected(server, address) as reader:
            reader.send_request(Request(1, 0, is_next=False))
            assert read_chunk(reader)[2] == bytes(BYTES)


def test_the_family_of_an_address() -> None:
    assert family_of("::1") == socket.AF_INET6
    assert family_of("192.0.2.1") == family_of("a-name") == socket.AF_INET


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    with pytest.raises(ConnectError, match=r"cannot listen on 192\.0\.2\.1"):
        ChunkServer("192.0.2.1", SECRET, ChunkWindow(1, 1.0), 1.0)


def test_each_address_is_as_safe_as_the_first() -> None:
    """Without the secret no byte comes; strangers of all of them make room for each other."""
    with serving() as (server, window):
        port = server.listen("127.0.0.2")
        assert server.listen("127.0.0.2") == port
        assert server.listen("127.0.0.1") == server.port
        with pytest.raises(TransferError, match="closed"):
            Connection.open("127.0.0.2", port, bytes(16), 0, WAIT_S)
        with socket.create_connection(("127.0.0.2", port)) as stranger:
            stranger.sendall(bytes(64))
            assert ends(stranger)
        for address in ("127.0.0.1", "127.0.0.3"):  # of this host, and not listened on
            with pytest.raises(TransferError, match="cannot be reached"):
                Connection.open(address, port, SECRET, 0, WAIT_S)
        window.begin(1, 1, [[0], [1]])
        window.offer(0, BYTES, [1])
        for place, at in ((0, ("127.0.0.1", server.port)), (1, ("127.0.0.2", port))):
            with closing(Connection.open(*at, SECRET, place, WAIT_S)) as reader:
                reader.send_request(Request(1, 0, is_next=False))
                assert read_chunk(reader)[2] == bytes(BYTES)


def test_a_port_that_is_closed_leaves_the_others_and_its_connections() -> None:
    with serving() as (server, window):
        port = server.listen("127.0.0.2")
        with closing(Connection.open("127.0.0.2", port, SECRET, 0, WAIT_S)) as stays:
            server.listen_only({"127.0.0.1"})
            with pytest.raises(TransferError, match="cannot be reached"):
                Connection.open("127.0.0.2", port, SECRET, 0, WAIT_S)
            window.begin(1, 1, [[0]])
            window.offer(0, BYTES, [1])
            stays.send_request(Request(1, 0, is_next=False))
            assert read_chunk(stays)[2] == bytes(BYTES)
        check_serves(server, window, epoch=2)


def test_a_wrong_secret_is_told_at_once() -> None:
    with serving() as (server, window):
        with pytest.raises(TransferError, match="closed"):
            Connection.open("127.0.0.1", server.port, bytes(16), 0, WAIT_S)
        check_serves(server, window)


def test_something_else_that_listens_is_no_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(TransferTimeout, match="no sign of life"):
            Connection.open("127.0.0.1", port, SECRET, 0, 0.3)

        def greet() -> None:
            sock, _ = other.accept()  # the one before
            sock.close()
            sock, _ = other.accept()
            with sock:
                sock.sendall(b"220 welcome to the mail server of this host, which is not a host\n")
                sock.recv(100)

        greeting = threading.Thread(target=greet)
        greeting.start()
        with pytest.raises(ProtocolError, match="something else than chunks"):
            Connection.open("127.0.0.1", port, SECRET, 0, WAIT_S)
        greeting.join()


def test_a_wait_for_a_welcome_can_be_ended() -> None:
    def closed() -> None:
        raise TransferCancelled("closed")

    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(TransferCancelled),
    ):
        Connection.open("127.0.0.1", other.getsockname()[1], SECRET, 0, WAIT_S, closed)


@pytest.mark.parametrize(
    "said",
    [b"", b"\0" * 500, b"GET / HTTP/1.1\r\n" * 10, bytes(range(28))],
    ids=["nothing", "zeros", "http", "as long as a hello"],
)
def test_a_stranger_is_cut_off_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    with serving() as (server, window):
        with (
            monkeypatch.context() as hurried,
            socket.create_connection(("127.0.0.1", server.port)) as stranger,
        ):
            hurried.setattr(server_module, "_HELLO_S", 0.3)
            stranger.sendall(said)
            assert ends(stranger)
        check_serves(server, window)


def test_a_stranger_makes_room_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may take a while to end; until then another one has to go for the next."""
    monkeypatch.setattr(server_module, "_MAX_UNAUTHENTICATED", 3)
    monkeypatch.setattr(server_module, "_HELLO_S", WAIT_S)
    with serving(patience_s=WAIT_S) as (server, _):
        forget = server._forget

        def forget_late(connection: Connection) -> None:
            time.sleep(0.5)
            forget(connection)

        monkeypatch.setattr(server, "_forget", forget_late)
        with ExitStack() as stack:
            address = ("127.0.0.1", server.port)
            strangers = [stack.enter_context(socket.create_connection(address)) for _ in range(8)]
            assert all(map(ends, strangers[:5]))
            wait_until(lambda: len(server._connections) == 3)


def test_strangers_do_not_keep_hosts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MAX_UNAUTHENTICATED", 3)
    monkeypatch.setattr(server_module, "_HELLO_S", WAIT_S)
    with serving() as (server, window):
        strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        try:
            check_serves(server, window)
            assert ends(strangers[0])
            wait_until(lambda: len(server._connections) <= 4)
        finally:
            for stranger in strangers:
                stranger.close()


def test_as_many_hosts_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the server's threads take: a host that was welcomed is no stranger."""
    send = Connection.send_frame

    def send_slowly(self: Connection, frame: Frame, *rest: Any) -> None:
        send(self, frame, *rest)
        time.sleep(0.2)

    monkeypatch.setattr(server_module, "_MAX_UNAUTHENTICATED", 3)
    monkeypatch.setattr(Connection, "send_frame", send_slowly)
    with serving() as (server, _), ExitStack() as stack:
        hosts = [stack.enter_context(connected(server, place=place)) for place in range(20)]
        assert all(host.is_open for host in hosts)


def test_connections_that_cannot_be_served_do_not_end_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No thread is to be had for one, and the other is gone before its first look."""
    with serving() as (server, window):
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", raiser(RuntimeError("no more threads")))
            with socket.create_connection(("127.0.0.1", server.port)) as stranger:
                assert ends(stranger)
        with monkeypatch.context() as patched:
            patched.setattr(connection_module, "keep_alive", raiser(OSError("it is gone")))
            with socket.create_connection(("127.0.0.1", server.port)) as stranger:
                assert ends(stranger)
        assert not server._connections
        check_serves(server, window)


def raiser(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    "said",
    [
        b"\0" * 24,
        struct.pack("<IIQQ", connection_module._REQUEST_MAGIC, 9, 0, 0),
        struct.pack("<IIQQ", connection_module._REQUEST_MAGIC, 3, 1 << 40, 0),
    ],
    ids=["another magic", "unknown kind", "terabytes of signs"],
)
def test_a_host_that_sends_no_request_is_cut_off(said: bytes) -> None:
    with serving() as (server, window):
        with connected(server) as reader:
            reader._send(said)
            with pytest.raises(TransferError):
                read_chunk(reader)
        check_serves(server, window)


def frame_bytes(**changes: int) -> bytes:
    said = {"magic": connection_module._FRAME_MAGIC, "kind": 1, "fingerprints": 0, **changes}
    return connection_module._HEAD.pack(
        said["magic"], said["kind"], 1, 0, 1, 64, said["fingerprints"]
    )


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        ({"magic": 7}, "something else than chunks"),
        ({"kind": 99}, "something else than chunks"),
        ({"kind": 0}, "something else than chunks"),
        ({"fingerprints": 1 << 62}, "has 4611686018427387904 fingerprints"),
    ],
)
def test_a_frame_that_lies(lie: dict[str, int], told: str) -> None:
    ours, theirs = pair()
    with theirs, closing(Connection(ours, WAIT_S)) as reader:
        theirs.sendall(frame_bytes(**lie))
        with pytest.raises(ProtocolError, match=told):
            reader.next_frame(nothing)


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    return ours, theirs


def test_a_frame_in_pieces_is_put_together() -> None:
    ours, theirs = pair()
    reader = Connection(ours, WAIT_S)

    def drip() -> None:
        for byte in frame_bytes():
            theirs.sendall(bytes([byte]))
            time.sleep(0.005)

    dripping = threading.Thread(target=drip)
    dripping.start()
    assert reader.next_frame(nothing) == Frame(FrameKind.CHUNK, 1, 0, 1, 64, 0)
    dripping.join()
    reader.close()
    theirs.close()


def test_a_host_that_never_reads_is_lost_only_when_it_is_silent() -> None:
    """The window waits for it as long as it beats, and then no longer than the patience."""
    large = memoryview(bytearray(64 << 20))
    with serving(patience_s=2.0) as (server, window), connected(server) as reader:
        window.begin(1, 1, [[0]])
        window.offer(0, large, [])
        reader.send_request(Request(1, 0, is_next=False))
        wait_until(lambda: bool(window._cursors))
        until = time.monotonic() + 4.0

        def beats() -> None:
            if time.monotonic() < until:
                reader.send_heartbeat()
                assert window._cursors

        window.complete(beats)
        assert time.monotonic() > until


def test_beats_of_a_long_update_are_not_kept() -> None:
    """Those of a host that takes hours are read while it is sent chunks, and forgotten."""
    ours, theirs = pair()
    server, reader = Connection(theirs, WAIT_S), Connection(ours, WAIT_S)
    try:
        for _ in range(6_000):
            reader.send_heartbeat()
            server._hear()
        assert len(server._unread) < 1000
        reader.send_request(Request(7, 3, is_next=True))
        wait_until(lambda: server.poll_request() == Request(7, 3, is_next=True))
    finally:
        server.close()
        reader.close()


def test_a_request_that_comes_early_is_answered() -> None:
    """The host had all there was of an update without chunks, before it was over here."""
    with serving() as (server, window), connected(server) as reader:
        window.begin(1, 0, [[0]])
        reader.send_request(Request(1, 0, is_next=False))
        wait_until(lambda: bool(window._cursors))
        reader.send_request(Request(1, 0, is_next=True))
        wait_until(lambda: not window._cursors)
        window.begin(2, 1, [[0]])
        window.offer(0, BYTES, [])
        frame, _, data = read_chunk(reader)
        assert (frame.kind, frame.epoch, data) == (FrameKind.CHUNK, 2, bytes(BYTES))


def test_an_update_that_does_not_begin_is_told_before_the_windows_elsewhere_give_up() -> None:
    with serving() as (server, _), connected(server) as reader:
        began = time.monotonic()
        reader.send_request(Request(5, 0, is_next=False))
        frame, _, _ = read_chunk(reader)
        assert (frame.kind, frame.epoch) == (FrameKind.GONE, 5)
        assert time.monotonic() - began > PATIENCE_S / 4


def test_a_peer_that_falls_silent_is_lost() -> None:
    ours, theirs = pair()
    reader = Connection(ours, 0.3)
    with pytest.raises(TransferTimeout, match="no sign of life"):
        reader.next_frame(nothing)
    reader.close()
    theirs.close()


def test_signs_of_life_arrive_by_place() -> None:
    with serving() as (server, _):
        with connected(server, place=4) as one, connected(server, place=5) as other:
            one.send_liveness([1, 2])
            other.send_liveness(list(range(64)))
            wait_until(lambda: server.liveness(4) == [1, 2])
            wait_until(lambda: server.liveness(5) == list(range(64)))
            one.send_liveness([3, 2])
            wait_until(lambda: server.liveness(4) == [3, 2])
        assert server.liveness(6) == []
        wait_until(lambda: server.liveness(4) == [])


def test_hosts_are_told_which_others_are_lost() -> None:
    with (
        serving(tells_lost=True) as (server, window),
        connected(server, place=3) as stays,
        connected(server, place=4) as reads,
    ):
        with connected(server, place=5) as leaves:
            for each in (stays, leaves):
                each.send_liveness([1])
            wait_until(lambda: {*server._connections.values()} == {3, 4, 5})
            window.begin(1, 1, [[3, 4, 5]])
            wait_until(lambda: server.liveness(5) == [1])
            assert stays.poll_frame() is None
        assert stays.next_frame(nothing) == Frame(FrameKind.LOST, epoch=1, chunk=5)
        window.begin(2, 1, [[3, 4, 5]])
        assert stays.next_frame(nothing) == Frame(FrameKind.LOST, epoch=2, chunk=5)
        assert [chain.followers for chain in window._chains] == [[3, 4]]
        window.offer(0, BYTES, [])
        reads.send_request(Request(2, 0, is_next=False))
        assert reads.next_frame(nothing).kind is FrameKind.CHUNK, "it is told nothing between"


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Slow(socket.socket):
    """A read of it begins, and goes on when `goes_on` is set."""

    reads: threading.Event
    goes_on: threading.Event

    def recv(self, *args: Any) -> bytes:
        self.reads.set()
        assert self.goes_on.wait(WAIT_S)
        return super().recv(*args)


@pytest.mark.parametrize("read", [lambda c: c.poll_frame(), lambda c: c.is_open])
def test_a_descriptor_is_not_closed_while_another_thread_reads(
    read: Callable[[Connection], object],
) -> None:
    """It could be opened again for something else in between, whose bytes the read would take."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        slow = Slow(socket.AF_INET, socket.SOCK_STREAM)
        slow.reads, slow.goes_on = threading.Event(), threading.Event()
        slow.connect(server.getsockname())
        connection = Connection(slow, WAIT_S)
        reader = threading.Thread(target=read, args=(connection,))
        closer = threading.Thread(target=connection.close)
        reader.start()
        assert slow.reads.wait(WAIT_S)
        closer.start()
        closer.join(0.3)
        assert slow.fileno() >= 0
        slow.goes_on.set()
        for thread in (reader, closer):
            thread.join(WAIT_S)
        assert slow.fileno() < 0
        assert connection.poll_frame() is None
        assert not connection.is_open


def test_a_close_ends_all_threads_and_descriptors() -> None:
    gc.collect()  # what earlier tests dropped must not go in the middle of this one
    before = descriptors()
    with ExitStack() as stack:
        with serving() as (server, window):
            hosts = [stack.enter_context(connected(server, place=place)) for place in range(5)]
            window.begin(1, 2, [[0]])
            for host in hosts[:3]:
                host.send_request(Request(1, 0, is_next=False))
        for host in hosts:
            with pytest.raises(TransferError):
                read_chunk(host)
            assert not host.is_open
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "weightsync-serve"])
    wait_until(lambda: descriptors() == before)


FORKS = """
import os, time
from weightsync.backends.tcp.connection import Connection
from weightsync.backends.tcp.server import ChunkServer
from weightsync.backends.tcp.window import ChunkWindow

server = ChunkServer("127.0.0.1", bytes(16), ChunkWindow(1, 1.0), 1.0)
connection = Connection.open("127.0.0.1", server.port, bytes(16), 0, 5.0)
child = os.fork()
if child == 0:
    time.sleep(60)
print(server.port, child, flush=True)
input()
os._exit(0)
"""


def test_a_forked_child_keeps_no_port_and_no_connection() -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        port, child = map(int, parent.stdout.readline().split())
        try:
            wait_until(lambda: not inherited(child))
            assert parent.stdin is not None
            parent.stdin.write("\n")
            parent.stdin.close()
            parent.wait(WAIT_S)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), WAIT_S).close()
        finally:
            os.kill(child, signal.SIGKILL)


def inherited(child: int) -> list[str]:
    found = []
    for link in Path(f"/proc/{child}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(link.readlink()))
    return [link for link in found if link.startswith("socket:")]
