"""A connection between two hosts: frames one way, requests and signs of life the other way.

The reading host says which chunks it wants; the serving host sends them as they come, each as a
frame of a head, fingerprints and bytes. Both sides show that they live while they have nothing to
send, so that a host that waits is told from one that is dead.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple
from weakref import WeakSet

from weightsync.errors import ProtocolError, TransferError, TransferTimeout

_HEAD = struct.Struct("<IIQQQQQ")
_FRAME_MAGIC = 0x7773_6601
_REQUEST = struct.Struct("<IIQQ")
_REQUEST_MAGIC = 0x7773_7201
_HELLO = struct.Struct("<I16sq")
_HELLO_MAGIC = 0x7773_6801
_HEARTBEAT, _GET, _GET_NEXT, _LIVENESS, _ACK = range(5)
"""Kinds of what a reading host sends."""
_MAX_READERS = 4096
_PEEK = socket.MSG_PEEK | socket.MSG_DONTWAIT
_TICK_S = 0.2
"""How long a call of the kernel blocks at most; then the caller's check runs."""
_CONNECT_S = 5.0
_MAX_FINGERPRINTS = 1 << 20
KEEPALIVE_S = 5

_open: WeakSet[socket.socket] = WeakSet()


def close_in_children(sock: socket.socket) -> None:
    """Have forked children close a socket, or the connection or port would outlive this process."""
    _open.add(sock)


def _close_in_child() -> None:
    for sock in list(_open):
        sock.close()


os.register_at_fork(after_in_child=_close_in_child)


class FrameKind(IntEnum):
    """The kinds of frames that a serving host sends."""

    CHUNK = 1
    WAITING = 2
    ABORTED = 3
    FAILED = 4
    GONE = 5
    DESCRIBES = 6
    LOST = 7
    READER_LOST = 8


class Frame(NamedTuple):
    """The head of a frame; `chunk` of `chunks`, `nbytes` after `num_fingerprints`.

    In a frame LOST `chunk` is the place of a host that the sender lost, in READER_LOST a reader of
    this host's ring that failed in update `epoch`.
    """

    kind: FrameKind
    epoch: int = 0
    chunk: int = 0
    chunks: int = 0
    nbytes: int = 0
    num_fingerprints: int = 0


class Request(NamedTuple):
    """Chunks that the reading host wants: those of update `epoch` from `first` on.

    With `is_next` those of the first update after `epoch` in which it takes part.
    """

    epoch: int
    first: int
    is_next: bool


Check = Callable[[], None]


def nothing() -> None:
    """Check nothing."""


class Connection:
    """One end of a connection. Each direction has one thread; `close` ends both from any thread.

    A peer that gives no sign of life for `patience_s` is lost: TransferTimeout. Other errors are
    TransferErrors; neither names the peer.
    """

    def __init__(self, sock: socket.socket, patience_s: float) -> None:
        self.liveness: list[int] = []
        """The counters of the other host's readers as it sent them last, on the serving side."""
        self._socket = sock
        self._patience_s = patience_s
        self._heard_at = time.monotonic()
        self._unread = b""
        self._asked: Request | None = None
        self._acks = 0
        self._sends = threading.Lock()
        self._polls = threading.Lock()
        close_in_children(sock)
        tick = struct.pack("ll", 0, int(_TICK_S * 1e6))
        sock.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, tick)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)

    @classmethod
    def open(
        cls,
        address: str,
        port: int,
        secret: bytes,
        place: int,
        patience_s: float,
        check: Check = nothing,
    ) -> Connection:
        """Connect to a serving host, as the host of `place`, and wait for its welcome.

        Raises TransferError where nothing is reached, and ProtocolError where it is something else.
        """
        try:
            sock = socket.create_connection((address, port), min(_CONNECT_S, patience_s))
        except OSError as exc:
            raise TransferError(f"{address}:{port} cannot be reached: {exc}") from exc
        try:
            made = cls(sock, patience_s)
            made._limit_unanswered()
            made._send(_HELLO.pack(_HELLO_MAGIC, secret, place))
            if made.next_frame(check).kind is not FrameKind.WAITING:
                raise ProtocolError(f"{address}:{port} does not welcome this host")
        except BaseException as exc:
            sock.close()
            if isinstance(exc, OSError) and not isinstance(exc, TransferError):
                raise TransferError(f"the connection broke: {exc}") from exc
            raise
        return made

    def _limit_unanswered(self) -> None:
        """Have the kernel give up soon what a host that is gone does not acknowledge.

        Not on the serving side: the kernel counts a reader that takes its time as gone, too.
        """
        limit_ms = 4 * KEEPALIVE_S * 1000
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)

    @property
    def patience_s(self) -> float:
        """How long the other end may show no sign of life."""
        return self._patience_s

    @property
    def heard_at(self) -> float:
        """When the other end showed its last sign of life."""
        return self._heard_at

    @property
    def is_open(self) -> bool:
        """Whether the peer has not closed the connection, as far as is known; never blocks.

        Any thread may ask.
        """
        with self._polls:
            try:
                return bool(self._socket.recv(1, _PEEK))
            except BlockingIOError:
                return True
            except OSError:
                return False

    def receive_hello(self, secret: bytes, within_s: float) -> int | None:
        """Return the place of the host that connected; None unless it knows the secret."""
        hello = bytearray(_HELLO.size)
        deadline = time.monotonic() + within_s
        self._receive(memoryview(hello), nothing, deadline)
        magic, given, place = _HELLO.unpack(hello)
        if magic != _HELLO_MAGIC or not hmac.compare_digest(given, secret):
            return None
        return int(place)

    def send_welcome(self) -> None:
        """Tell the host that connected that it is served."""
        self.send_frame(Frame(FrameKind.WAITING), (), memoryview(b""))

    # The reading host

    def send_request(self, request: Request) -> None:
        """Send a request."""
        kind = _GET_NEXT if request.is_next else _GET
        self._send(_REQUEST.pack(_REQUEST_MAGIC, kind, request.epoch, request.first))

    def send_heartbeat(self) -> None:
        """Show that this process lives. Any thread may call it; never blocks, never raises."""
        self._send_at_once(_REQUEST.pack(_REQUEST_MAGIC, _HEARTBEAT, 0, 0))

    def send_liveness(self, counters: Sequence[int]) -> None:
        """Send the liveness counters of this host's readers, in order; as `send_heartbeat`."""
        head = _REQUEST.pack(_REQUEST_MAGIC, _LIVENESS, len(counters), 0)
        self._send_at_once(head + array("Q", counters).tobytes())

    def _send_at_once(self, data: bytes) -> None:
        """Send a small message if there is room; one that is cut ends the connection."""
        if self._sends.acquire(blocking=False):
            try:
                sent = self._socket.send(data, socket.MSG_DONTWAIT)
                if sent < len(data):
                    self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the next call finds out
            finally:
                self._sends.release()

    def next_frame(self, check: Check) -> Frame:
        """Wait for the head of the next frame. `check` raises to end the wait."""
        head = bytearray(_HEAD.size)
        self._receive(memoryview(head), check)
        return self._frame_of(head)

    def poll_frame(self) -> Frame | None:
        """Return the head of a frame that has arrived, None without one; never blocks.

        A connection that broke has none. Any one thread may ask while another one closes it. Raises
        ProtocolError.
        """
        with self._polls:
            try:
                if len(self._socket.recv(_HEAD.size, _PEEK)) < _HEAD.size:
                    return None
                return self._frame_of(self._socket.recv(_HEAD.size))
            except OSError:
                return None

    def _frame_of(self, head: bytes | bytearray) -> Frame:
        magic, kind, *numbers = _HEAD.unpack(head)
        if magic != _FRAME_MAGIC or kind not in FrameKind._value2member_map_:
            raise ProtocolError("the connection carries something else than chunks")
        frame = Frame(FrameKind(kind), *numbers)
        if frame.num_fingerprints > _MAX_FINGERPRINTS:
            raise ProtocolError(f"a chunk has {frame.num_fingerprints} fingerprints")
        return frame

    def read_fingerprints(self, frame: Frame, check: Check) -> list[int]:
        """Read the fingerprints of a frame."""
        found = array("Q", bytes(8 * frame.num_fingerprints))
        self._receive(memoryview(found).cast("B"), check)
        return found.tolist()

    def read_data(self, into: memoryview, check: Check) -> None:
        """Read the bytes of a frame: as many as `into` has."""
        self._receive(into, check)

    def skip(self, nbytes: int, check: Check) -> None:
        """Read bytes, and drop them."""
        scratch = memoryview(bytearray(min(1 << 20, nbytes)))
        while nbytes:
            part = scratch[: min(nbytes, len(scratch))]
            self._receive(part, check)
            nbytes -= len(part)

    def send_ack(self) -> None:
        """Say that a chunk was taken whose bytes did not come in this stream."""
        self._send(_REQUEST.pack(_REQUEST_MAGIC, _ACK, 0, 0))

    # The serving host

    def poll_request(self, *, is_idle: bool = False) -> Request | None:
        """Return a request that has arrived, None without one; never blocks.

        Raises TransferError where the reading host is gone, or silent unless it `is_idle`.
        """
        self._hear(is_idle=is_idle)
        return self._parsed()

    def wait_for_request(self, is_over: Callable[[], bool]) -> Request | None:
        """Wait for a request, however long; None when `is_over`. Raises TransferError."""
        while not is_over():
            if (found := self._parsed()) is not None:
                return found
            self._hear(is_idle=True, flags=0)
        return None

    def take_ack(self) -> bool:
        """Take an acknowledgement that has arrived; False without one. Never blocks.

        Raises TransferError where the reading host is gone or silent.
        """
        if not self._acks:
            self._hear()
        if not self._acks:
            if self._asked is not None:
                raise ProtocolError("a host that takes a chunk asks for others")
            return False
        self._acks -= 1
        return True

    def wait_readable(self, within_s: float) -> None:
        """Wait until the reading host has sent something, or for `within_s`."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll(within_s * 1000)

    def send_frame(self, frame: Frame, fingerprints: Sequence[int], data: memoryview) -> None:
        """Send a frame and what belongs to it, as long as the reading host shows that it lives."""
        head = _HEAD.pack(_FRAME_MAGIC, *frame) + array("Q", fingerprints).tobytes()
        parts = [memoryview(head), data]
        while parts:
            try:
                sent = self._socket.sendmsg(parts)
            except BlockingIOError:
                sent = 0
            except OSError as exc:
                raise TransferError(f"the connection broke: {exc}") from exc
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
                self._hear()

    def cut(self) -> None:
        """End the connection: calls in other threads fail. Idempotent."""
        with suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Called when no other thread reads or sends frames. Idempotent."""
        self.cut()
        # No heartbeat may go to a descriptor that is opened again, and no poll may read from it.
        with self._sends, self._polls:
            self._socket.close()

    def _hear(self, *, is_idle: bool = False, flags: int = socket.MSG_DONTWAIT) -> None:
        """Read what the reading host has sent. Raises TransferError where it is gone or silent."""
        try:
            got = self._socket.recv(4096, flags)
        except BlockingIOError:
            silent = time.monotonic() - self._heard_at
            if is_idle:
                self._heard_at = time.monotonic()
            elif silent > self._patience_s:
                raise TransferTimeout(f"no sign of life for {silent:.3g} s") from None
            return
        except OSError as exc:
            raise TransferError(f"the connection broke: {exc}") from exc
        if not got:
            raise TransferError("the connection was closed")
        self._heard_at = time.monotonic()
        self._unread += got
        self._parse()

    def _parsed(self) -> Request | None:
        """Return the newest request among what was read, once."""
        found, self._asked = self._asked, None
        return found

    def _parse(self) -> None:
        """Take note of what was read, as far as it is complete."""
        while len(self._unread) >= _REQUEST.size:
            magic, kind, epoch, first = _REQUEST.unpack_from(self._unread)
            if (
                magic != _REQUEST_MAGIC
                or kind > _ACK
                or (kind == _LIVENESS and epoch > _MAX_READERS)
            ):
                raise ProtocolError("the connection carries something else than requests")
            end = _REQUEST.size + (8 * epoch if kind == _LIVENESS else 0)
            if len(self._unread) < end:
                return
            if kind == _LIVENESS:
                self.liveness = array("Q", self._unread[_REQUEST.size : end]).tolist()
            self._unread = self._unread[end:]
            self._acks += kind == _ACK
            if kind in (_GET, _GET_NEXT):
                self._asked = Request(epoch, first, kind == _GET_NEXT)

    def _send(self, data: bytes) -> None:
        with self._sends:
            try:
                self._socket.sendall(data, socket.MSG_NOSIGNAL)
            except OSError as exc:
                raise TransferError(f"the connection broke: {exc}") from exc

    def _receive(self, view: memoryview, check: Check, deadline: float | None = None) -> None:
        begun = time.monotonic()
        self._heard_at = max(self._heard_at, begun)
        while len(view):
            try:
                got = self._socket.recv_into(view, len(view), socket.MSG_WAITALL)
            except BlockingIOError:
                got = -1
            except OSError as exc:
                raise TransferError(f"the connection broke: {exc}") from exc
            now = time.monotonic()
            if got == 0:
                raise TransferError("the connection was closed")
            if got > 0:
                self._heard_at = now
                view = view[got:]
            elif now - self._heard_at > self._patience_s or (deadline and now > deadline):
                raise TransferTimeout(f"no sign of life for {now - self._heard_at:.3g} s")
            if len(view):
                check()


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel find out that the other host is gone, within some 20 s."""
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_S),
        (socket.TCP_KEEPCNT, 3),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
