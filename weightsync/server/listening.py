"""Sockets that a server listens on, opened before anything else is."""

from __future__ import annotations

import ipaddress
import socket
import ssl

from weightsync.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` and `port`; port 0 takes any free one.

    Raises ConfigError when the address is unknown or taken.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"{host!r} is no address to listen on: {exc}") from exc
    # With protocol 0 asyncio would not set TCP_NODELAY on its connections, and an answer whose
    # header and body leave apart would wait 40 ms for the client's delayed ACK.
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


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_tls_files(certfile: str | None, keyfile: str | None) -> None:
    """Raise ConfigError unless a server can speak TLS with these, before any process starts."""
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
    """Answer OpenSSL, which would ask the terminal for the passphrase of a key that has one."""
    return ""


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this host can reach a listening socket."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
