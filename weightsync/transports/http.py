"""A Transport over HTTP, on kept-alive connections of the standard library's client."""

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

from weightsync.errors import (
    AuthError,
    ConfigError,
    ConnectError,
    ProtocolError,
    RemoteError,
    TransportTimeout,
    WeightSyncError,
)
from weightsync.shm.addresses import ResolveTimeout, resolve
from weightsync.transports.base import BaseTransport
from weightsync.transports.tokens import (
    TOKEN_VARIABLE,
    check_token_text,
    check_token_type,
    token_from_environment,
)
from weightsync.wire import codec
from weightsync.wire.messages import (
    CALL_OF,
    UNLOAD_CALL,
    AbortRequest,
    Reply,
    Request,
    StatusRequest,
)
from weightsync.wire.problem import decode_problem, error_of

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
POOL_SIZE = 4
MAX_REPLY_NBYTES = 256 << 20

_HOST = re.compile(rb"[-.:%~\w]+")
_TRUST_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


class _Connection(http.client.HTTPConnection):
    """A connection, with TLS where `tls` is given, that sends header and body in one segment.

    Of two small segments, Nagle's algorithm would hold the second until a delayed ACK.
    """

    auto_open = 0
    _held: list[Any] | None = None
    stale = False
    """Whether it was idle before this request, and nothing of the answer has arrived yet."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        super().__init__(host, port)
        self._tls = tls
        if tls is not None:  # the port that is left out of the Host header
            self.default_port = http.client.HTTPS_PORT

    def open(self, deadline: float) -> None:
        """Connect before `deadline`, the look-up of the name and the TLS handshake included."""
        self.sock = _connected(self.host, self.port, deadline)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            self.sock.settimeout(_left_s(deadline))
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)

    def request(self, *args: Any, **kwargs: Any) -> None:
        held: list[Any] = []
        self._held = held
        try:
            super().request(*args, **kwargs)
        finally:
            self._held = None
        # A server that refuses a long body replies and closes the connection before it has read all
        # of the body.
        with suppress(BrokenPipeError, ConnectionResetError):
            super().send(b"".join(held))

    def send(self, data: Any) -> None:
        if self._held is None:
            super().send(data)
        else:
            self._held.append(data)

    def exchange(
        self,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        *,
        deadline: float,
        max_nbytes: int,
    ) -> tuple[int, bytes]:
        """Send one request; return the status and the body of its answer."""
        self.response_class = partial(_Response, deadline)  # type: ignore[assignment]  # makes one
        self.request("GET" if body is None else "POST", path, body=body, headers=dict(headers))
        with self.getresponse() as response:
            self.stale = False
            return response.status, _read(response, path, max_nbytes)

    def has_hung_up(self) -> bool:
        """Whether the peer closed this idle connection, or sent unrequested bytes on it."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(0))


def _connected(host: str, port: int, deadline: float) -> socket.socket:
    """Return a socket that is connected to one of the addresses of `host`.

    Raises ResolveTimeout, and the first OSError where no address can be reached.
    """
    addresses = resolve(host, port, timeout_s=_left_s(deadline))
    errors: list[OSError] = []
    for tried, (family, address) in enumerate(addresses):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # An address that does not answer leaves the others their share of the time.
            sock.settimeout(_left_s(deadline) / (len(addresses) - tried))
            sock.connect(address)
        except OSError as exc:
            sock.close()
            errors.append(exc)
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise errors[0]


def _left_s(deadline: float) -> float:
    """Return the seconds until `deadline`. Raises TimeoutError after it."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


class _UntilDeadline(io.RawIOBase):
    """Reads `raw`, the stream of `sock`; raises TimeoutError after `deadline`, bytes or not."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: float) -> None:
        self._raw = raw
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left_s(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        super().close()
        self._raw.close()


class _Response(http.client.HTTPResponse):
    """A response whose reads end at `deadline`, in seconds of `time.monotonic()`."""

    def __init__(self, deadline: float, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        raw = self.fp.detach()
        self.fp = io.BufferedReader(_UntilDeadline(raw, sock, deadline))


class _ConnectionPool:
    """Connections to `host` and `port`, safe to use from any thread; `tls` None is plain HTTP.

    At most `size` of them are kept while they are idle. `users` transports share the pool, and
    each of them closes it once.
    """

    def __init__(
        self, host: str, port: int, tls: ssl.SSLContext | None, *, size: int, users: int
    ) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._idle: deque[_Connection] = deque()
        self._size = size
        self._users = users
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)

    def exchange(
        self,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        max_nbytes: int,
        on_try: Callable[[], None],
    ) -> tuple[int, bytes]:
        """Send one request; return the status and the body of its answer.

        A request that a stale connection did not answer is sent once more, on a new one; `on_try`
        is called before each. Raises ConnectError where no connection can be made, ssl.SSLError,
        ResolveTimeout when the name is not resolved in time, TimeoutError when the answer does not
        come in time, OSError and http.client.HTTPException when the connection breaks, and
        ProtocolError for an answer longer than `max_nbytes`.
        """
        deadline = time.monotonic() + timeout_s

        def send(connection: _Connection) -> tuple[int, bytes]:
            try:
                connection.sock.settimeout(_left_s(deadline))
                found = connection.exchange(
                    path, body, headers, deadline=deadline, max_nbytes=max_nbytes
                )
            except BaseException:
                connection.close()
                raise
            # After an informational answer another follows, and a server error may break the next.
            self._give(connection, keep=200 <= found[0] < 500)
            return found

        on_try()
        connection = self._take_idle()
        if connection is not None:
            try:
                return send(connection)
            except ConnectionError:  # RemoteDisconnected, too
                if not connection.stale:
                    raise
            _close_all(self._idle)
            on_try()
        return send(self._connect(deadline))

    def close(self) -> None:
        """With the last user: close idle connections; those in use close after their call."""
        with self._lock:
            self._users -= 1
        if self._users == 0:
            _close_all(self._idle)

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took it
                break
            if not connection.has_hung_up():
                return connection
            connection.close()
        return None

    def _connect(self, deadline: float) -> _Connection:
        connection = _Connection(self._host, self._port, self._tls)
        try:
            connection.open(min(deadline, time.monotonic() + CONNECT_TIMEOUT_S))
        except BaseException as exc:
            # A server that is connected and silent in the TLS handshake did not answer in time.
            reached = connection.sock is not None and isinstance(exc, TimeoutError)
            connection.close()
            kept = reached or isinstance(exc, ssl.SSLError | ResolveTimeout)
            if isinstance(exc, OSError) and not kept:
                raise ConnectError(str(exc)) from exc
            raise
        return connection

    def _give(self, connection: _Connection, *, keep: bool) -> None:
        with self._lock:
            if keep and self._users > 0 and len(self._idle) < self._size and connection.sock:
                connection.stale = True
                self._idle.append(connection)
                return
        connection.close()


def _close_all(connections: deque[_Connection]) -> None:
    while connections:
        try:
            connections.pop().close()
        except IndexError:  # another thread took it
            return


def _read(response: http.client.HTTPResponse, path: str, max_nbytes: int) -> bytes:
    length = response.length
    try:
        if length is None:
            answer = response.read(max_nbytes + 1)
            length = len(answer)
        elif length <= max_nbytes:
            # Only a read to the end detects a truncated body.
            answer = response.read()
    except ValueError as exc:  # of the size of a chunk
        raise http.client.HTTPException(str(exc)) from exc
    if length > max_nbytes:
        raise ProtocolError(f"{path} was answered with over {max_nbytes} bytes")
    return answer


class HttpTransport(BaseTransport):
    """A Transport to the server at `url`; each call is `POST {url}/{call}`, `weight_info` a GET.

    `token` is sent as a bearer token; None takes the token of WEIGHTSYNC_TOKEN or of the file
    WEIGHTSYNC_TOKEN_FILE, "" sends none. `verify_tls` is True (trust the certificates of
    REQUESTS_CA_BUNDLE or CURL_CA_BUNDLE, as requests does, else the system's), the path of a file
    or directory of certificates, False (trust every server, with a warning in the log), or an
    SSLContext.

    Connections are kept alive and shared by threads. Proxies of the environment are not used, and
    redirects are not followed. Transports that `expand` returns share connections; each of them is
    to be closed. Raises ConfigError for anything but an http or https URL.
    """

    auth_advice = f"give its token as token= or in {TOKEN_VARIABLE}"
    """The end of the message of an AuthError."""

    def __init__(
        self, url: str, token: str | None = None, *, verify_tls: bool | str | ssl.SSLContext = True
    ) -> None:
        super().__init__(url.rstrip("/"))
        self._parts = _split(self._target)
        self._path = quote(self._parts.path, safe="/%:@!$&'()*+,;=~")
        self._tls = self._context(verify_tls)
        self._pool = self._make_pool()
        self._headers = _headers(token_from_environment() if token is None else token)

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Send one request and return its reply; see Transport.call."""
        call = CALL_OF[type(request)]
        body = codec.encode(request)
        status, answer = self._exchange(
            call, None if isinstance(request, StatusRequest) else body, timeout_s
        )
        if status != 200:
            raise self._error(call, status, answer)
        try:
            return codec.decode_reply(call, answer)
        except codec.InvalidReplyError as exc:
            raise codec.InvalidReplyError(
                f"{self._target} answered {call} with something else than its reply ({exc}); "
                "is this a weightsync server?"
            ) from exc

    def deliver(self, request: Request, *, timeout_s: float) -> None:
        """Send one request to a server of any kind, of whose response only the status is checked.

        Raises as `call` does.
        """
        call = CALL_OF[type(request)]
        status, answer = self._exchange(call, codec.encode(request), timeout_s)
        if not 200 <= status < 300:
            raise self._error(call, status, answer)

    def check_access(self, timeout_s: float) -> None:
        """Raise AuthError where the server refuses the token; changes nothing.

        The request has a body that no call accepts, and a server checks the token before the body.
        """
        call = CALL_OF[AbortRequest]
        status, answer = self._exchange(call, b"{", timeout_s)
        if status in (401, 403):
            raise self._error(call, status, answer)

    def get(
        self, path: str, *, timeout_s: float, max_nbytes: int = MAX_REPLY_NBYTES
    ) -> tuple[int, bytes]:
        """Return the status and the body of `GET {url}/{path}`. Raises as `call` does."""
        return self._exchange(path, None, timeout_s, max_nbytes)

    def expand(self, paths: Sequence[str]) -> list[HttpTransport]:
        """Return transports to the receivers at `paths` below this URL, with its token and TLS."""
        made = [
            HttpTransport(f"{self._target}/{path}", "", verify_tls=self._tls or True)
            for path in paths
        ]
        pool = self._make_pool(users=len(made))
        for transport in made:
            transport._pool, transport._headers = pool, self._headers
        return made

    def below(self, path: str) -> HttpTransport:
        """Return the transport to the receiver at `path` below this URL; closes this one."""
        (transport,) = self.expand([path])
        self.close()
        return transport

    def twin(self) -> HttpTransport:
        """Return another transport to this URL, with connections of its own; see BaseTransport."""
        made = HttpTransport(self._target, "", verify_tls=self._tls or True)
        made._headers = self._headers
        return made

    def unload(self, timeout_s: float) -> None:
        """Have the server forget the receiver at this URL; see BaseTransport."""
        status, answer = self._exchange(UNLOAD_CALL, b"{}", timeout_s)
        if status == 404:
            super().unload(timeout_s)
        if status != 200:
            raise self._error(UNLOAD_CALL, status, answer)

    def close(self) -> None:
        """Close the connections that are not in use; those in use close after their call."""
        if not self._closed:
            super().close()
            self._pool.close()

    def _context(self, verify_tls: bool | str | ssl.SSLContext) -> ssl.SSLContext | None:
        if self._parts.scheme == "http":
            return None
        if isinstance(verify_tls, ssl.SSLContext):
            return verify_tls
        if not verify_tls:
            logger.warning("verify_tls=False: the identity of %s is not verified", self._target)
        return tls_context(verify_tls)

    def _make_pool(self, *, users: int = 1) -> _ConnectionPool:
        port = self._parts.port or (443 if self._tls else 80)
        host = self._parts.hostname or ""
        return _ConnectionPool(host, port, self._tls, size=POOL_SIZE * users, users=users)

    def _error(self, call: str, status: int, answer: bytes) -> WeightSyncError:
        """Return the error that an answer other than the reply to `call` describes."""
        document = decode_problem(answer)
        error: WeightSyncError = (
            self._foreign_error(call, status, answer)
            if document is None
            else error_of(document, peer=self._target, call=call)
        )
        if isinstance(error, RemoteError) and status in (401, 403):
            return AuthError(
                f"{self._target} refused {call} with {status}; {self.auth_advice}", status=status
            )
        return error

    def _foreign_error(self, call: str, status: int, answer: bytes) -> RemoteError:
        """Return the error of an answer that is no problem document."""
        text = answer[:300].decode("utf-8", "replace")
        return RemoteError(
            f"{self._target}: {call} answered {status}, not a problem document: {text[:80]!r}; "
            "is this the URL of a weightsync server?",
            remote_type=f"HTTP {status}",
            remote_message=text,
        )

    def _exchange(
        self,
        call: str,
        body: bytes | None,
        timeout_s: float,
        max_nbytes: int = MAX_REPLY_NBYTES,
    ) -> tuple[int, bytes]:
        self._check_open()
        try:
            return self._pool.exchange(
                f"{self._path}/{call}",
                body,
                self._headers,
                timeout_s=timeout_s,
                max_nbytes=max_nbytes,
                on_try=partial(self._count, len(body or b"")),
            )
        except ConnectError as exc:
            raise ConnectError(
                f"{self._target} cannot be reached: {exc}; is the server running?"
            ) from exc
        except ResolveTimeout as exc:
            raise TransportTimeout(f"{self._target} was not sent {call}: {exc}") from exc
        except TimeoutError as exc:
            raise TransportTimeout(
                f"{self._target} did not answer {call} within {timeout_s:g} s; "
                "send it again, or give more time with timeout_s="
            ) from exc
        except ssl.SSLError as exc:
            plain = "WRONG_VERSION_NUMBER" in str(exc) or "RECORD_LAYER_FAILURE" in str(exc)
            advice = (
                "the server speaks no TLS; give an http:// URL"
                if plain
                else "name the certificates to trust with verify_tls= or REQUESTS_CA_BUNDLE"
            )
            raise ConnectError(f"no TLS with {self._target}: {exc}; {advice}") from exc
        except (http.client.HTTPException, OSError) as exc:
            raise ConnectError(
                f"the connection to {self._target} broke during {call}: {exc}; try again (or is "
                "it a server of another kind, https:// for instance?)"
            ) from exc


def tls_context(verify_tls: bool | str = True) -> ssl.SSLContext:
    """Return the SSLContext for `verify_tls`; see HttpTransport.

    Raises ConfigError where the certificates cannot be read.
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
        # The invalid part may be a password: the message has neither the URL nor the cause.
        raise ConfigError(
            "the URL of a target cannot be read; give http://host:port or https://host:port"
        ) from None
    if "://" not in url and "@" not in url:
        raise ConfigError(f"{url} is no URL; give http://host:port or https://host:port")
    if not valid or parts.query or parts.fragment or parts.username is not None:
        # The part before an @ may be a password, and is left out.
        raise ConfigError(
            f"{parts.scheme}://{parts.netloc.rpartition('@')[2]} cannot be a target; give "
            "http://host:port or https://host:port, without user, query and fragment, and the "
            "token as token="
        )
    if not _names_host(parts.hostname or ""):
        raise ConfigError(
            f"{parts.hostname} names no host; give http://host:port or https://host:port"
        )
    return parts


def _names_host(host: str) -> bool:
    """Whether `host` is written as the name or the address of a host."""
    try:
        return _HOST.fullmatch(host.encode("idna")) is not None
    except UnicodeError:
        return False


def _headers(token: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    check_token_type(token)
    if token:
        headers["Authorization"] = f"Bearer {check_token_text(token)}"
    return headers
