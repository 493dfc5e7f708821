"""Addresses of this host."""

from __future__ import annotations

import socket

import pytest

from weightsync.shm.addresses import is_loopback, source_address


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("::1%lo", True),
        ("192.0.2.1", False),
        ("fe80::1%eth0", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_loopback_addresses(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_the_way_to_this_host_is_loopback() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert source_address("localhost", family=socket.AF_INET) == "127.0.0.1"


def test_a_host_that_is_not_known_has_no_route() -> None:
    with pytest.raises(OSError, match=r"known|resolution"):
        source_address("no-such-host.invalid")
