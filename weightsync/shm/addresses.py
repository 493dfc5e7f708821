"""Network addresses: of a host's name, of a route of this host, and of loopback."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

LOOPBACK = "127.0.0.1"
_DISCARD_PORT = 9
RESOLVE_S = 10.0
"""How long a name is looked up where a caller has no limit of its own."""

_Found = list[tuple[int, tuple[Any, ...]]]
"""Families, and what `connect` of a socket takes: host and port, and more for IPv6."""
_lookups: dict[tuple[int, str, int], Future[_Found]] = {}
"""The lookups in progress, by process, host and port. A later caller joins one that is slow."""


class ResolveTimeout(TimeoutError):
    """A name server did not answer in time."""


def resolve(host: str, port: int = 0, *, timeout_s: float = RESOLVE_S) -> _Found:
    """Return family and address of each TCP address of `host`, after `timeout_s` at the latest.

    Raises ResolveTimeout after that time, OSError where `host` is unknown. The system's resolver
    has no limit that a caller can set, so it runs in a thread, which is left when it is late.
    """
    with suppress(socket.gaierror):
        return _look_up(host, port, socket.AI_NUMERICHOST)
    key = os.getpid(), host, port
    own: Future[_Found] = Future()
    lookup = _lookups.setdefault(key, own)
    if lookup is own:

        def run() -> None:
            try:
                found = _look_up(host, port)
            except BaseException as exc:  # noqa: BLE001  # raised by the future
                _lookups.pop(key, None)
                own.set_exception(exc)
            else:
                _lookups.pop(key, None)
                own.set_result(found)

        try:
            threading.Thread(target=run, name="weightsync-resolve", daemon=True).start()
        except RuntimeError as exc:  # at interpreter exit, from Python 3.12
            _lookups.pop(key, None)
            raise OSError(f"{host} cannot be looked up any more: {exc}") from exc
    try:
        return lookup.result(timeout_s)
    except TimeoutError as exc:
        if lookup.done():  # an error of the lookup itself
            raise
        raise ResolveTimeout(
            f"the name {host} was not resolved within {timeout_s:g} s; look at this host's name "
            "servers, or give an IP address"
        ) from exc


def _look_up(host: str, port: int, flags: int = 0) -> _Found:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]


def source_address(host: str, *, family: int = socket.AF_UNSPEC) -> str:
    """Return the address of this host from which packets to `host` leave; sends none.

    Raises OSError where `host` is unknown or has no route.
    """
    found = resolve(host, _DISCARD_PORT)
    fitting = [each for each in found if family in (each[0], socket.AF_UNSPEC)]
    if not fitting:
        raise OSError(f"{host} has no address of the family {socket.AddressFamily(family).name}")
    family, address = fitting[0]
    # Connecting a datagram socket makes the kernel choose a route, and sends nothing.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_own(host: str) -> bool:
    """Whether `host`, a name or an address, is this host itself, as far as its routes show."""
    try:
        address = str(resolve(host)[0][1][0])
        return is_loopback(address) or source_address(address) == address
    except OSError:
        return False


def is_assigned(address: str) -> bool:
    """Whether an IP address is one of this host's interfaces now, whatever its routes.

    Also for one of a form that cannot be checked.
    """
    try:
        found = _look_up(address, 0, socket.AI_NUMERICHOST)
        for family, place in found:
            # The kernel takes only addresses that it has; nothing is sent.
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(place)
    except OSError as exc:
        return exc.errno != errno.EADDRNOTAVAIL
    return True


def is_loopback(address: str) -> bool:
    """Whether `address` is an IP address of the loopback interface; a name is not."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
