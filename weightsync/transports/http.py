"""Messages over HTTP, on kept-alive connections of the standard library's client."""

from __future__ import annotations

import http.client
import io
import logging
import os
import re
import select
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import SplitResult, quote, urlsplit

from weightsync.errors import (
    AuthError,
    ConfigError,
    ConnectError,
    ProtocolError,
    RemoteError,
    TransportTimeout,
)
from weightsync.transports.base import CountingTransport
from weightsync.transports.tokens import TOKEN_VARIABLE, check_token_text, token_from_environment
from weightsync.wire import codec, problem
from weightsync.wire.messages import CALL_OF, Reply, Request

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


logger = logging.getLogger(__name__)

POOL_SIZE = 4
MAX_REPLY_NBYTES = 256 << 20

_TRUST_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")

_GET_CALLS = frozenset(
    {"weight_info", "is_paused", "version", "get_world_size", "server_info?config_format=json"}
    | {"model_info", "get_model_info", "server_info", "get_server_info"}
)


class HttpTransport(CountingTransport):
    """A Transport to the server at `url`; each call is `POST {url}/{call}`, `weight_info` a GET.

    `token` is sent as a bearer token; None takes that of WEIGHTSYNC_TOKEN or of the file
    WEIGHTSYNC_TOKEN_FILE, "" sends none. `verify_tls` may be the path of a file or directory with
    certificates to trust; True trusts those of REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE (as requests
    does) or else the system; False trusts anyone, and a line of the log says so; an SSLContext is
    taken as it is.
    Connections are kept alive and shared by threads. Proxies that the environment names are not
    used, redirects are not followed. Raises ConfigError for anything but an http or https URL.
    What `expand` returns shares connections, and is closed one by one.
    """

    def __init__(
        self, url: str, token: str | None = None, *, verify_tls: bool | str | ssl.SSLContext = True
    ) -> None:
        super().__init__(url.rstrip("/"))
        self._parts = _split(self._target)
        self._path = quote(self._parts.path, safe="/%:@!$&'()*+,;=~")
        self._tls = self._context(verify_tls)
        self._pool = self._make_pool()
        self._sharers: set[HttpTransport] = {self}
        self._closed = False
        self._headers = _headers(token_from_environment() if token is None else token)

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Send one request and return its reply; see Transport.call."""
        call = CALL_OF[type(request)]
        status, answer = self._exchange(call, codec.encode(request), timeout_s)
        if status != 200:
            self._refuse(call, status, answer)
        try:
            return codec.decode_reply(call, answer)
        except ProtocolError as exc:
            raise ProtocolError(
                f"{self._target} answered {call} with something else than its reply ({exc}); "
                "is this a weightsync server of the same version?"
            ) from exc

    def deliver(self, request: Request, *, timeout_s: float) -> None:
        """Send one request to a server of any kind; of its answer the status counts, no more.

        Raises as `call` does, RemoteError with the reason that a foreign server gives.
        """
        call = CALL_OF[type(request)]
        status, answer = self._exchange(call, codec.encode(request), timeout_s)
        if not 200 <= status < 300:
            self._refuse(call, status, answer)

    def get(self, path: str, *, timeout_s: float, max_nbytes: int) -> tuple[int, bytes]:
        """Return the status and the body of `GET {url}/{path}`. Raises as `call` does."""
        return self._exchange(path, None, timeout_s, max_nbytes)

    def expand(self, paths: Sequence[str]) -> list[HttpTransport]:
        """Return transports to receivers below this URL, with its token and trust in servers."""
        made = [
            HttpTransport(f"{self._target}/{path}", "", verify_tls=self._tls or True)
            for path in paths
        ]
        pool = self._make_pool(POOL_SIZE * len(made))
        sharers = set(made)
        for transport in made:
            transport._pool, transport._sharers = pool, sharers
            transport._headers = self._headers
        return made

    def close(self) -> None:
        """Close the connections that are not in use; those in use close after their call."""
        self._closed = True
        self._sharers.discard(self)
        if not self._sharers:
            self._pool.close()

    def _context(self, verify_tls: bool | str | ssl.SSLContext) -> ssl.SSLContext | None:
        if self._parts.scheme == "http":
            return None
        if isinstance(verify_tls, ssl.SSLContext):
            return verify_tls
        if not verify_tls:
            logger.warning("verify_tls=False: %s may be anybody", self._target)
        return tls_context(verify_tls)

    def _make_pool(self, size: int = POOL_SIZE) -> HttpPool:
        port = self._parts.port or (443 if self._tls else 80)
        return HttpPool(self._parts.hostname or "", port, self._tls, size=size)

    def _refuse(self, call: str, status: int, answer: bytes) -> NoReturn:
        try:
            problem.raise_problem(answer, status=status, peer=f"{self._target}: {call}")
        except RemoteError as exc:
            if status in (401, 403):
                raise AuthError(
                    f"{self._target} refused {call} with {status}; give its token as token= or "
                    f"in {TOKEN_VARIABLE}",
                    status=status,
                ) from exc
            raise
        raise AssertionError("raise_problem returned")

    def _exchange(
        self,
        call: str,
        body: bytes | None,
        timeout_s: float,
        max_nbytes: int = MAX_REPLY_NBYTES,
    ) -> tuple[int, bytes]:
        try:
            try:
                return self._send(call, body, timeout_s, max_nbytes)
            except StaleConnectionError:
                return self._send(call, body, timeout_s, max_nbytes, fresh=True)
        except PoolClosedError as exc:
            raise ConnectError(f"{self._target}: this transport is closed; connect again") from exc
        except UnreachableError as exc:
            raise ConnectError(
                f"{self._target} cannot be reached for {call}: {exc}; is the server running?"
            ) from exc
        except TimeoutError as exc:
            raise TransportTimeout(
                f"{self._target} did not answer {call} within {timeout_s:g} s; "
                "send it again, or give more time with timeout_s="
            ) from exc
        except ssl.SSLError as exc:
            plain = "WRONG_VERSION_NUMBER" in str(exc) or "RECORD_LAYER_FAILURE" in str(exc)
            advice = (
                "what listens there speaks no TLS; give an http:// URL"
                if plain
                else "name the certificates to trust with verify_tls= or REQUESTS_CA_BUNDLE"
            )
            raise ConnectError(f"no TLS with {self._target} for {call}: {exc}; {advice}") from exc
        except (http.client.HTTPException, OSError) as exc:
            raise ConnectError(
                f"the connection to {self._target} broke during {call}: {exc}; try again (or is "
                "it a server of another kind, https:// for instance?)"
            ) from exc

    def _send(
        self,
        call: str,
        body: bytes | None,
        timeout_s: float,
        max_nbytes: int,
        *,
        fresh: bool = False,
    ) -> tuple[int, bytes]:
        if self._closed:
            raise PoolClosedError
        if call in _GET_CALLS:
            body = None
        self._count(len(body or b""))
        method = "GET" if body is None else "POST"
        path = f"{self._path}/{call}"
        return self._pool.exchange(
            Call(method, path, body, self._headers, timeout_s, max_nbytes), fresh=fresh
        )


def tls_context(verify_tls: bool | str = True) -> ssl.SSLContext:
    """Return whom to trust; see HttpTransport.

    Raises ConfigError for a file of certificates that is not there, or holds none.
    """
    if not verify_tls:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    named = verify_tls if isinstance(verify_tls, str) else None
    trusted = named or next(filter(None, map(os.environ.get, _TRUST_VARIABLES)), None)
    if trusted is None:
        return ssl.create_default_context()
    try:
        if Path(trusted).is_dir():
            return ssl.create_default_context(capath=trusted)
        return ssl.create_default_context(cafile=trusted)
    except OSError as exc:
        raise ConfigError(f"the certificates to trust, {trusted}, cannot be read: {exc}") from exc


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        # What is wrong with it may stand in a password, so neither is repeated, nor is the cause.
        raise ConfigError(
            "the URL of a target cannot be read; give http://host:port or https://host:port"
        ) from None
    if "://" not in url and "@" not in url:
        raise ConfigError(f"{url} is no URL; give http://host:port or https://host:port")
    if not valid or parts.query or parts.fragment or parts.username is not None:
        # What stands before an @ may be a password, and is not repeated.
        raise ConfigError(
            f"{parts.scheme}://{parts.netloc.rpartition('@')[2]} cannot be a target; give "
            "http://host:port or https://host:port, without user, query and fragment, and the "
            "token as token="
        )
    return parts


def _headers(token: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {check_token_text(token)}"
    return headers
