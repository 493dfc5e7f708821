"""Where the processes of a server find each other's sockets."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import tempfile
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync.errors import ConfigError, ConnectError

if TYPE_CHECKING:
    import zmq

IPC_PATH_LIMIT = 107
"""Bytes of the longest path that a Unix socket can have."""

_KEPT = 128
_kept: deque[int] = deque()
"""Descriptors that keep ports free, oldest first."""

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9.])?")


def socket_address(
    *,
    local_only: bool,
    host: str = "127.0.0.1",
    port: int = 0,
    directory: Path | None = None,
    bind: zmq.Socket[bytes] | None = None,
) -> str:
    """Return an address for a ZeroMQ socket: `ipc://…` if all its peers are local.

    Else `tcp://host:port`, IPv6 addresses in brackets; port 0 becomes a free one. With `bind`, that
    socket is bound to it. Without, a descriptor of this process keeps the port free for a ZeroMQ
    socket that any process of this host binds later, until this one ends or has told 128 more.
    IPC paths are fresh, and lie in `directory` (the temporary one by default). Raises ConfigError,
    and ConnectError when the socket cannot be bound.
    """
    if bind is None:
        if local_only:
            return ipc_address(directory)
        return tcp_address(host, port) if port else _held_address(host)
    address = ipc_address(directory) if local_only else tcp_address(host, port)
    import zmq  # noqa: PLC0415  # optional: who gives a socket of it has it

    try:
        if "[" in address:
            bind.ipv6 = True
        bind.bind(address)
        return bind.get_string(zmq.LAST_ENDPOINT)
    except zmq.ZMQError as exc:
        raise ConnectError(f"cannot bind to {address}: {exc}") from exc


def _held_address(host: str) -> str:
    asked = tcp_address(host, 0)
    bare = bracketed(host).strip("[]")
    try:
        family, kind, _, _, address = socket.getaddrinfo(bare, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as holder:
            # ZeroMQ sets it too: then both may be bound, as long as one of them alone listens.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(address)
            port = holder.getsockname()[1]
            _kept.append(holder.detach())  # so that nobody else is given the port
    except (OSError, UnicodeError) as exc:
        raise ConnectError(f"cannot bind to {asked}: {exc}; give a port") from exc
    if len(_kept) > _KEPT:
        os.close(_kept.popleft())
    return tcp_address(host, port)


def ipc_address(directory: Path | None = None) -> str:
    """Return `ipc://` and a fresh path. Raises ConfigError for paths that no socket can have."""
    path = (directory or Path(tempfile.gettempdir())) / f"weightsync-{secrets.token_hex(8)}.sock"
    if len(bytes(path.absolute())) > IPC_PATH_LIMIT:
        raise ConfigError(
            f"{path.absolute()} is longer than the {IPC_PATH_LIMIT} bytes that a socket's path "
            "may have; set TMPDIR to a shorter directory"
        )
    return f"ipc://{path.absolute()}"


def tcp_address(host: str, port: int) -> str:
    """Return `tcp://host:port`, IPv6 addresses in brackets. Raises ConfigError."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"{port} is no port; wanted 1 to 65535, or 0 for any free one")
    return f"tcp://{bracketed(host)}:{port}"


def bracketed(host: str) -> str:
    """Return a host as it stands before a port. Raises ConfigError for what is no host."""
    bare = host.removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        if _HOST_NAME.fullmatch(host) is None:
            raise ConfigError(f"{host!r} is no host name and no IP address") from None
        return host
    return f"[{bare}]" if address.version == 6 else host
