"""Who may change weights: a bearer token, looked at before the body of a request is read."""

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
    """A token; `made` is True when nobody gave it, so that somebody has to be told."""

    text: str = field(repr=False)
    made: bool = False


def resolve_token(
    token: str | None = None, *, token_file: str | os.PathLike[str] | None = None
) -> Token:
    """Return the token given, else that of the file, else the environment's, else one at random.

    The environment names it in WEIGHTSYNC_TOKEN, or its file in WEIGHTSYNC_TOKEN_FILE. Raises
    ConfigError for a token that cannot stand in a header, for a file that others may read, and
    where two are given at once.
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

    Compares in constant time. Looks at headers alone, so it can run before the body is read.
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
    """Whether a request needs the token: all but reading, `/generate` and `/v1/…`.

    Those two generate and change nothing; whatever else is added later is protected unasked.
    """
    generates = path == "/generate" or path.startswith("/v1/")
    return method not in _READING_METHODS and not generates


class TokenAuth:
    """ASGI middleware over a whole app: answers 401 or 403 before the body is read.

    Websockets are refused without the token, too. Raises ConfigError for a bad token.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = check_token_text(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass. Called by the ASGI server."""
        try:
            self._check(scope)
        except AuthError as exc:
            await _refuse(scope, send, exc)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        kind = scope["type"]
        if kind == "websocket" or (kind == "http" and is_protected(scope["method"], scope["path"])):
            check_authorization(scope, self._token)


class LocalOnly:
    """ASGI middleware for an app without a token: what changes something has to come from here.

    A web page that this host's browser shows can send requests, too: they carry its Origin, or,
    where its name was made to point here, its Host. Such requests, and websockets, get 403.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass. Called by the ASGI server."""
        try:
            if scope["type"] == "websocket" or scope.get("method", "GET") not in _READING_METHODS:
                check_local(scope)
        except AuthError as exc:
            await _refuse(scope, send, exc)
        else:
            await self._app(scope, receive, send)


def check_local(scope: Scope) -> None:
    """Raise AuthError (403) unless Host is a loopback one and Origin, where there is one, it."""
    if scope["type"] not in ("http", "websocket"):
        return
    headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
    host = headers.get(b"host", "")
    if not _names_loopback(host):
        raise AuthError(
            f"a server without a token takes calls to 127.0.0.1, [::1] or localhost, not to "
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
    body = problem.encode_problem(problem.to_problem(exc))
    headers = [
        (b"content-type", problem.MEDIA_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),  # or the body that was not looked at would be read after all
        *challenge(exc),
    ]
    await send({"type": "http.response.start", "status": exc.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def challenge(exc: AuthError) -> list[tuple[bytes, bytes]]:
    """Return the header that a 401 must have."""
    return [(b"www-authenticate", b"Bearer")] if exc.status == 401 else []
