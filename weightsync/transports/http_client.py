"""Messages over HTTP, on kept-alive connections."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import SplitResult, urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import (
    ClosedPoolError,
    ConnectTimeoutError,
    HTTPError,
    LocationParseError,
    NewConnectionError,
    ReadTimeoutError,
    SSLError,
)

from weightsync.errors import (
    AuthError,
    ConfigError,
    ConnectError,
    ProtocolError,
    RemoteError,
    TransportTimeout,
)
from weightsync.transports.counting import CountingTransport
from weightsync.wire import codec, problem
from weightsync.wire.bearer_token import TOKEN_VARIABLE, check_token_text, token_from_environment
from weightsync.wire.messages import CALL_OF, Reply, Request

POOL_SIZE = 4
MAX_REPLY_NBYTES = 256 << 20
CONNECT_TIMEOUT_S = 10.0

_TRUST_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")

_GET_CALLS = frozenset(
    {"weight_info", "is_paused", "version", "get_world_size", "server_info?config_format=json"}
    | {"model_info", "get_model_info", "server_info", "get_server_info"}
)


class _StaleConnectionError(Exception):
    """A connection that had served before was closed by the peer, and nothing was answered."""


class _OneSegment:
    """Sends header and body of a request in one piece, and knows whether it answered before.

    Two small segments would wait for each other where Nagle's algorithm meets delayed ACKs.
    """

    _held: list[Any] | None = None
    _answered = False

    def request(self, *args: Any, **kwargs: Any) -> None:
        held: list[Any] = []
        self._held = held
        try:
            super().request(*args, **kwargs)  # type: ignore[misc]  # of the class mixed with
        finally:
            self._held = None
        super().send(b"".join(held))  # type: ignore[misc]  # same

    def send(self, data: Any) -> None:
        if self._held is None:
            super().send(data)  # type: ignore[misc]  # same
        else:
            self._held.append(data)

    def getresponse(self) -> Any:
        try:
            response = super().getresponse()  # type: ignore[misc]  # same
        except ConnectionError as exc:  # RemoteDisconnected, too
            if self._answered:
                raise _StaleConnectionError(str(exc)) from exc
            raise
        self._answered = True
        return response

    def connect(self) -> None:
        self._answered = False
        super().connect()  # type: ignore[misc]  # same


class _HttpConnection(_OneSegment, HTTPConnection):
    pass


class _HttpsConnection(_OneSegment, HTTPSConnection):
    pass


class _HttpPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _HttpConnection


class _HttpsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _HttpsConnection


class HttpTransport(CountingTransport):
    """A Transport to the server at `url`; each call is `POST {url}/{call}`, `weight_info` a GET.

    `token` is sent as a bearer token; None takes that of WEIGHTSYNC_TOKEN or of the file
    WEIGHTSYNC_TOKEN_FILE, "" sends none. `verify_tls` may be the path of a file or directory with
    certificates to trust; True trusts those of REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE (as requests
    does) or else the system; False trusts anyone.
    Connections are kept alive and shared by threads. Proxies that the environment names are not
    used, redirects are not followed. Raises ConfigError for anything but an http or https URL.
    What `expand` returns shares connections, and is closed one by one.
    """

    def __init__(
        self, url: str, token: str | None = None, *, verify_tls: bool | str = True
    ) -> None:
        super().__init__(url.rstrip("/"))
        self._parts = _split(self._target)
        self._path = self._parts.path
        self._verify_tls = verify_tls
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

    def expand(self, paths: Sequence[str]) -> list[HttpTransport]:
        """Return transports to receivers below this URL, with its token and trust in servers."""
        made = [
            HttpTransport(f"{self._target}/{path}", "", verify_tls=self._verify_tls)
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

    def _make_pool(self, size: int = POOL_SIZE) -> urllib3.HTTPConnectionPool:
        host, port = self._parts.hostname or "", self._parts.port
        try:
            if self._parts.scheme == "http":
                return _HttpPool(host, port or 80, maxsize=size)
            return _HttpsPool(host, port or 443, maxsize=size, **tls_settings(self._verify_tls))
        except LocationParseError as exc:
            raise ConfigError(
                f"{self._target} names no host; give http://host:port or https://host:port"
            ) from exc

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

    def _exchange(self, call: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        try:
            try:
                if self._closed:
                    raise ClosedPoolError(self._pool, "closed")
                return self._send(self._pool, call, body, timeout_s)
            except _StaleConnectionError:
                # Its own pool, since other idle connections may be as stale as this one was.
                with self._make_pool() as fresh:
                    return self._send(fresh, call, body, timeout_s)
        except ClosedPoolError as exc:
            raise ConnectError(f"{self._target}: this transport is closed; connect again") from exc
        except (NewConnectionError, ConnectTimeoutError) as exc:
            raise ConnectError(
                f"{self._target} cannot be reached for {call}: {exc.__cause__ or exc}; "
                "is the server running?"
            ) from exc
        except ReadTimeoutError as exc:
            raise TransportTimeout(
                f"{self._target} did not answer {call} within {timeout_s:g} s; "
                "send it again, or give more time with timeout_s="
            ) from exc
        except SSLError as exc:
            plain = "WRONG_VERSION_NUMBER" in str(exc) or "RECORD_LAYER_FAILURE" in str(exc)
            advice = (
                "what listens there speaks no TLS; give an http:// URL"
                if plain
                else "name the certificates to trust with verify_tls= or REQUESTS_CA_BUNDLE"
            )
            raise ConnectError(f"no TLS with {self._target} for {call}: {exc}; {advice}") from exc
        except (HTTPError, OSError) as exc:
            raise ConnectError(
                f"the connection to {self._target} broke during {call}: {exc}; try again (or is "
                "it a server of another kind, https:// for instance?)"
            ) from exc

    def _send(
        self, pool: urllib3.HTTPConnectionPool, call: str, body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        reads = call in _GET_CALLS
        self._count(0 if reads else len(body))
        response = pool.urlopen(
            "GET" if reads else "POST",
            f"{self._path}/{call}",
            body=None if reads else body,
            headers=self._headers,
            timeout=urllib3.Timeout(connect=min(timeout_s, CONNECT_TIMEOUT_S), read=timeout_s),
            retries=False,
            redirect=False,
            preload_content=False,
        )
        try:
            answer = response.read(MAX_REPLY_NBYTES + 1)
            if len(answer) > MAX_REPLY_NBYTES:
                raise ProtocolError(
                    f"{self._target} answered {call} with over {MAX_REPLY_NBYTES} bytes"
                )
        except BaseException:
            response.close()
            raise
        if response.status >= 500:
            response.close()
        response.release_conn()
        return response.status, answer


def tls_settings(verify_tls: bool | str = True) -> dict[str, Any]:
    """Return urllib3's settings for whom to trust; see HttpTransport.

    Raises ConfigError for a file of certificates that is not there.
    """
    if not verify_tls:
        return {"cert_reqs": "CERT_NONE"}
    named = verify_tls if isinstance(verify_tls, str) else None
    trusted = named or next(filter(None, map(os.environ.get, _TRUST_VARIABLES)), None)
    if trusted is None:
        return {"cert_reqs": "CERT_REQUIRED"}
    if not os.access(trusted, os.R_OK):
        raise ConfigError(f"the certificates to trust, {trusted}, cannot be read")
    kind = "ca_cert_dir" if Path(trusted).is_dir() else "ca_certs"
    return {"cert_reqs": "CERT_REQUIRED", kind: trusted}


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
