"""Kept-alive HTTP/1.1 connections to one server, of the standard library's client."""

from __future__ import annotations

import http.client
import io
import re
import select
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from weightsync.errors import ConfigError, ProtocolError

CONNECT_TIMEOUT_S = 10.0

_HOST = re.compile(rb"[-.:%~\w]+")


class UnreachableError(Exception):
    """No connection could be made, so nothing was sent."""


class StaleConnectionError(ConnectionError):
    """A connection that had served before was closed by the peer, and nothing was answered."""


class PoolClosedError(Exception):
    """The pool was closed before."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request: `body` None sends none. `timeout_s` bounds it, from the start to the answer."""

    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]
    timeout_s: float
    max_nbytes: int


class _OneSegment:
    """Sends header and body of a request in one piece, and knows whether it answered before.

    Two small segments would wait for each other where Nagle's algorithm meets delayed ACKs.
    """

    _held: list[Any] | None = None
    answered = False

    def request(self, *args: Any, **kwargs: Any) -> None:
        held: list[Any] = []
        self._held = held
        try:
            super().request(*args, **kwargs)  # type: ignore[misc]  # of the class mixed with
        finally:
            self._held = None
        # Who refuses a long body answers, and hangs up before it has read all.
        with suppress(BrokenPipeError, ConnectionResetError):
            super().send(b"".join(held))  # type: ignore[misc]  # same

    def send(self, data: Any) -> None:
        if self._held is None:
            super().send(data)  # type: ignore[misc]  # same
        else:
            self._held.append(data)


class _UntilDeadline(io.RawIOBase):
    """Reads what `raw` reads of `sock`, until `deadline`: no byte of a slow peer wins it time."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: float) -> None:
        self._raw = raw
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        super().close()
        self._raw.close()


class _Response(http.client.HTTPResponse):
    """An answer that is read until `deadline`."""

    def __init__(self, deadline: float, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        raw = self.fp.detach()
        self.fp = io.BufferedReader(_UntilDeadline(raw, sock, deadline))


class _Plain(_OneSegment, http.client.HTTPConnection):
    pass


class _Secure(_OneSegment, http.client.HTTPSConnection):
    pass


_Connection = _Plain | _Secure


class HttpPool:
    """Connections to `host` and `port`, safe to use from any thread; `tls` None is plain HTTP.

    At most `size` of them are kept while they are idle. Proxies that the environment names are
    not used, redirects are not followed. Raises ConfigError for what is no name of a host.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, *, size: int) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._idle: deque[_Connection] = deque()
        self._size = size
        self._closed = False
        self._closing = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)
        if not _names_a_host(host):
            raise ConfigError(f"{host} names no host; give http://host:port or https://host:port")

    def exchange(self, call: Call, *, fresh: bool = False) -> tuple[int, bytes]:
        """Send one request; return the status and the body of its answer.

        `fresh` makes a new connection, and lets go of all that were idle. Raises PoolClosedError,
        UnreachableError, StaleConnectionError, ssl.SSLError; TimeoutError when the answer does not
        come in time, OSError and http.client.HTTPException when the connection breaks, and
        ProtocolError for an answer longer than `max_nbytes`.
        """
        if fresh:
            _close_all(self._idle)
        connection = None if fresh else self._take_idle(call.timeout_s)
        connection = connection or self._connect(call.timeout_s)
        try:
            status, answer = _exchange(connection, call)
        except BaseException:
            connection.close()
            raise
        # One that is in trouble, or has more to say, is not trusted to be in step.
        self._give(connection, keep=200 <= status < 500)
        return status, answer

    def close(self) -> None:
        """Close the connections that are not in use; those in use close after their call."""
        with self._closing:
            self._closed = True
        _close_all(self._idle)

    def _take_idle(self, timeout_s: float) -> _Connection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took it
                break
            if not _has_hung_up(connection):
                connection.sock.settimeout(timeout_s)
                return connection
            connection.close()
        return None

    def _connect(self, timeout_s: float) -> _Connection:
        if self._closed:
            raise PoolClosedError
        connection = self._make(min(timeout_s, CONNECT_TIMEOUT_S))
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s)
        except BaseException as exc:
            # Who was reached, and then said nothing in a TLS handshake, did not answer in time.
            reached = connection.sock is not None and isinstance(exc, TimeoutError)
            connection.close()
            if isinstance(exc, OSError) and not isinstance(exc, ssl.SSLError) and not reached:
                raise UnreachableError(str(exc)) from exc
            raise
        return connection

    def _give(self, connection: _Connection, *, keep: bool) -> None:
        with self._closing:
            if keep and not self._closed and len(self._idle) < self._size and connection.sock:
                connection.answered = True
                self._idle.append(connection)
                return
        connection.close()

    def _make(self, timeout_s: float) -> _Connection:
        if self._tls is None:
            return _Plain(self._host, self._port, timeout=timeout_s)
        return _Secure(self._host, self._port, timeout=timeout_s, context=self._tls)


def _names_a_host(host: str) -> bool:
    """Whether a lookup of the name can be tried; how it is written says no more."""
    try:
        return _HOST.fullmatch(host.encode("idna")) is not None
    except UnicodeError:
        return False


def _close_all(connections: deque[_Connection]) -> None:
    while connections:
        try:
            connections.pop().close()
        except IndexError:  # another thread took it
            return


def _exchange(connection: _Connection, call: Call) -> tuple[int, bytes]:
    deadline = time.monotonic() + call.timeout_s
    connection.response_class = partial(_Response, deadline)  # type: ignore[assignment]  # makes one
    connection.request(call.method, call.path, body=call.body, headers=dict(call.headers))
    try:
        response = connection.getresponse()
    except ConnectionError as exc:  # RemoteDisconnected, too
        if connection.answered:
            raise StaleConnectionError(str(exc)) from exc
        raise
    with response:
        return response.status, _read(response, call)


def _read(response: http.client.HTTPResponse, call: Call) -> bytes:
    length = response.length
    try:
        if length is None:
            answer = response.read(call.max_nbytes + 1)
            length = len(answer)
        elif length <= call.max_nbytes:
            # Only a read of everything finds out that a body was cut short.
            answer = response.read()
    except ValueError as exc:  # of the size of a chunk
        raise http.client.HTTPException(str(exc)) from exc
    if length > call.max_nbytes:
        raise ProtocolError(f"{call.path} was answered with over {call.max_nbytes} bytes")
    return answer


def _has_hung_up(connection: _Connection) -> bool:
    """Whether an idle connection was closed, or has something to say that nobody asked for."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))
