"""Listening sockets of a server, which opens them before it starts anything else."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import resource
import socket
import ssl
import time
from contextlib import suppress
from typing import Any

from weightsync.errors import ConfigError
from weightsync.shm import addresses

logger = logging.getLogger(__name__)

_NAP_S = 0.05
_REST_S = 0.5
_WARN_EVERY_S = 60.0


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` and `port`; port 0 takes any free port.

    Raises ConfigError where the address is unknown, or already in use.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"{host!r} is no address to listen on: {exc}") from exc
    # With protocol 0 asyncio does not set TCP_NODELAY on its connections. A response whose header
    # and body are two segments would then wait 40 ms for the client's delayed ACK.
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {exc}; give another --port, or 0 for any"
        ) from exc
    return listener


class _OutOfDescriptors(OSError):
    """Makes asyncio retry a listener one second later, as it does for this errno."""


class SparingListener(socket.socket):
    """A listening socket that closes new connections while this process is out of descriptors.

    asyncio would log a traceback for each failed accept, thousands per second. A reserved
    descriptor lets such a connection be accepted and closed, so that its client notices.
    A socket that is shared with other servers leaves the connection to them and pauses for a
    second; the event loop's exception handler must be `ignore_logged_errors` then.
    """

    @classmethod
    def taking(cls, listener: socket.socket, *, shared: bool = False) -> SparingListener:
        """Take over the descriptor of a listening socket; `listener` is closed afterwards."""
        sparing = cls(fileno=listener.detach())
        sparing._shared = shared
        if not shared:
            sparing._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return sparing

    _reserve: int | None = None
    _shared = False
    _rests_until = -math.inf
    _closed = 0
    _warned_at = -math.inf

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises BlockingIOError where there is none, or one was closed."""
        if time.monotonic() < self._rests_until:  # asyncio accepts a whole backlog at once
            raise BlockingIOError(errno.EAGAIN, "left to other servers for want of descriptors")
        try:
            return super().accept()
        except OSError as exc:
            if exc.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            if self._shared:
                self._rests_until = time.monotonic() + _REST_S
                self._warn("new connections are left to the other servers of this socket")
                raise _OutOfDescriptors(exc.errno, exc.strerror) from exc
            self._close_one()
            raise BlockingIOError(errno.EAGAIN, "one was closed for want of descriptors") from exc

    def close(self) -> None:
        """Close the socket and the reserved descriptor."""
        super().close()
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _close_one(self) -> None:
        if self._reserve is None:
            self._reserve = self._reserved()
        if self._reserve is None:
            time.sleep(_NAP_S)  # no descriptor is to be had: the backlog waits
            return
        os.close(self._reserve)
        self._reserve = None
        with suppress(OSError):
            super().accept()[0].close()
            self._closed += 1
        self._reserve = self._reserved()
        self._warn(f"{self._closed} connections were closed so far")

    def _warn(self, what: str) -> None:
        if time.monotonic() - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = time.monotonic()
            logger.warning(
                "no descriptor is left (the limit is %d): %s; raise ulimit -n, or have clients "
                "open fewer",
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                what,
            )

    @staticmethod
    def _reserved() -> int | None:
        with suppress(OSError):
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return None


def ignore_logged_errors(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exception handler of an event loop: ignores what a SparingListener has already logged."""
    if not isinstance(context.get("exception"), _OutOfDescriptors):
        loop.default_exception_handler(context)


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_tls_files(certfile: str | None, keyfile: str | None) -> None:
    """Raise ConfigError unless a server can use these TLS files. Called before processes start."""
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("a TLS key without a certificate; give the certificate, too")
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certfile, keyfile, password=_no_passphrase)
    except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"no TLS with certificate {certfile} and key {keyfile or 'in the same file'}: {exc}; "
            "both are PEM files, and the key has no passphrase"
        ) from exc


def _no_passphrase() -> str:
    """Passphrase callback, without which OpenSSL would ask the terminal for a passphrase."""
    return ""


def is_loopback(listener: socket.socket) -> bool:
    """Whether a socket listens on a loopback address, which only this host can reach."""
    return addresses.is_loopback(listener.getsockname()[0])
