"""Forked children let go of the sender's store: one that outlives the sender must not hide its end.

torch opens these sockets itself and says nothing of their descriptors, so they are known by the
port at which the store listens. Gloo's own stay open in such a child.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

_ports: set[int] = set()


def keep_from_children(port: int) -> None:
    """Children forked from now on have no socket at this local TCP port."""
    _ports.add(port)


def let_children_have(port: int) -> None:
    """The port is no longer ours. Idempotent."""
    _ports.discard(port)


def _close_in_child() -> None:
    if not _ports:
        return
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if _local_port(fd) in _ports:
            # Not closed: torch would later close whatever got the number.
            os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)
    _ports.clear()


def _local_port(fd: int) -> int | None:
    with suppress(OSError):
        if not Path(f"/proc/self/fd/{fd}").readlink().name.startswith("socket:"):
            return None
        ours = socket.socket(fileno=fd)
        try:
            if ours.family in (socket.AF_INET, socket.AF_INET6) and ours.type == socket.SOCK_STREAM:
                return int(ours.getsockname()[1])
        finally:
            ours.detach()
    return None


os.register_at_fork(after_in_child=_close_in_child)
