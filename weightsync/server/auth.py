"""Access control of a receiver's routes: a bearer token, checked before the body is read."""

from __future__ import annotations

import hmac
import os
import secrets
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from weightsync.errors import AuthError, ConfigError
from weightsync.shm.addresses import is_loopback
from weightsync.transports.tokens import (
    TOKEN_VARIABLE,
    check_token_text,
    read_token_file,
    token_from_environment,
)
from weightsync.wire import problem

_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Token:
    """A bearer token; `made` is True where it was generated and must be shown to the user."""

    text: str = field(repr=False)
    made: bool = False


def resolve_token(
    token: str | None = None, *, token_file: str | os.PathLike[str] | None = None
) -> Token:
    """Return `token`, else that of `token_file`, else the environment's, else a random one.

    The environment gives it as WEIGHTSYNC_TOKEN, or names its file in WEIGHTSYNC_TOKEN_FILE.
    Raises ConfigError for a token that a header cannot carry, for a file that other users may
    read, and where two of them are given.
    """
    if token is not None and token_file is not None:
        raise ConfigError("a token and a token file are given; give one of them")
    given = token if token_file is None else read_token_file(token_file)
    if given is None:
        given = token_from_environment()
    if given is None:
        return Token(secrets.token_urlsafe(32), made=True)
    return Token(check_token_text(given))


def check_authorization(scope: Scope, token: str) -> None:
    """Raise AuthError unless the headers of `scope` carry `token`: 401 for none, 403 for another.

    Compares in constant time, and reads the headers only: it runs before the body is read.
    """
    values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    if not values:
        raise AuthError(
            "this call needs the server's token, and has none; send Authorization: Bearer TOKEN "
            f"(token= of the sender, or {TOKEN_VARIABLE})",
            status=401,
        )
    scheme, _, offered = values[0].partition(b" ")
    right = hmac.compare_digest(offered.strip(), token.encode())
    if len(values) > 1 or scheme.lower() != b"bearer" or not right:
        raise AuthError(
            "the token is not the server's; use the one it printed when it started, or the "
            f"{TOKEN_VARIABLE} it was given",
            status=403,
        )


def is_protected(method: str, path: str) -> bool:
    """Whether a request needs the token: every one but reads, `/generate` and `/v1/…`.

    Those two generate text and change nothing. A route that is added later is protected.
    """
    generates = path == "/generate" or path.startswith("/v1/")
    return method not in _READING_METHODS and not generates


class _Guard:
    """ASGI middleware for a whole app: refuses a request before its body is read.

    `_check` raises AuthError for a request, or a websocket, that is refused.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand an accepted request to the app. Called by the ASGI server."""
        try:
            self._check(scope)
        except AuthError as exc:
            await _refuse(scope, send, exc)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        raise NotImplementedError


class TokenAuth(_Guard):
    """ASGI middleware for a whole app: answers 401 or 403 before the body is read.

    Websockets need the token too. Raises ConfigError for a bad token.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        super().__init__(app)
        self._token = check_token_text(token)

    def _check(self, scope: Scope) -> None:
        kind = scope["type"]
        if kind == "websocket" or (kind == "http" and is_protected(scope["method"], scope["path"])):
            check_authorization(scope, self._token)


class LocalOnly(_Guard):
    """ASGI middleware for an app without a token: only local requests may change anything.

    A web page in a browser on this host can send requests too. They carry the page's Origin, or,
    after DNS rebinding, its Host. Such requests, and such websockets, get 403.
    """

    def _check(self, scope: Scope) -> None:
        if scope["type"] == "websocket" or scope.get("method", "GET") not in _READING_METHODS:
            check_local(scope)


def check_local(scope: Scope) -> None:
    """Raise AuthError (403) unless Host names loopback, and Origin, where present, is that host."""
    if scope["type"] not in ("http", "websocket"):
        return
    headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
    host = headers.get(b"host", "")
    if not _names_loopback(host):
        raise AuthError(
            f"a server without a token accepts calls to 127.0.0.1, [::1] or localhost, not to "
            f"{host!r}; use such a URL, or start it with a token"
        )
    origin = headers.get(b"origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise AuthError(
            f"a web page of {origin!r} may not call a server without a token; start it with one"
        )


def _names_loopback(host: str) -> bool:
    """Whether the value of a Host header (a name or an address, and a port) is a loopback one."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or is_loopback(name)


async def _refuse(scope: Scope, send: Send, exc: AuthError) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    body = problem.encode_error(exc)
    headers = [
        (b"content-type", problem.MEDIA_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),  # an open connection would make the server read the body
        *challenge(exc),
    ]
    await send({"type": "http.response.start", "status": exc.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def challenge(exc: AuthError) -> list[tuple[bytes, bytes]]:
    """Return the WWW-Authenticate header that a 401 must have; none for other statuses."""
    return [(b"www-authenticate", b"Bearer")] if exc.status == 401 else []
