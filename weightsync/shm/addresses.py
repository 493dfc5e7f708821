"""Network addresses of this host: the source address of a route, and loopback addresses."""

from __future__ import annotations

import ipaddress
import socket

_DISCARD_PORT = 9


def source_address(host: str, *, family: int = socket.AF_UNSPEC) -> str:
    """Return the address of this host from which packets to `host` leave; sends none.

    Raises OSError where `host` is unknown or has no route.
    """
    # Connecting a datagram socket makes the kernel choose a route, and sends nothing.
    found = socket.getaddrinfo(host, _DISCARD_PORT, family, socket.SOCK_DGRAM)
    family, kind, proto, _, address = found[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Whether `address` is an IP address of the loopback interface; a name is not."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
