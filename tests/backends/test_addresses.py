"""Where receivers on other hosts find this one."""

from __future__ import annotations

import socket

import pytest

from weightsync.backends.base import Reader
from weightsync.backends.tcp.trainer import ADDRESS_VARIABLE, address_for, addresses_for
from weightsync.shm.addresses import is_assigned
from weightsync.shm.host_keys import host_key


def to(target: str, local_address: str | None, host: str = "") -> Reader:
    """Who is reached so, and from where."""
    keys = [host] if host else []
    return Reader(index=0, target="r", keys=keys, route=target, local_address=local_address)


@pytest.mark.parametrize(
    ("target", "local_address", "expected"),
    [
        ("Actor Rollout 0a1b", "198.51.100.7", "198.51.100.7"),
        ("http://127.0.0.1:8000", "198.51.100.7", "127.0.0.1"),
        ("http://[::1]:8000", None, "::1"),
    ],
)
def test_the_way_to_the_target_is_known(
    monkeypatch: pytest.MonkeyPatch, target: str, local_address: str | None, expected: str
) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    assert address_for(to(target, local_address)) == expected
    monkeypatch.setenv(ADDRESS_VARIABLE, "203.0.113.5")
    assert address_for(to(target, local_address)) == "203.0.113.5"


def test_a_loopback_address_is_of_no_use_to_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    monkeypatch.setattr("weightsync.backends.tcp.trainer.source_address", lambda _: "198.51.100.8")
    assert address_for(to("Actor Rollout 0a1b", "127.0.0.1")) == "198.51.100.8"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("Actor Rollout 0a1b", "127.0.0.1"),
        ("http://127.0.0.1:8000", "127.0.0.1"),
        ("http://[::1]:8000", "127.0.0.1"),
        ("http://localhost:8000", "127.0.0.1"),
        ("http://198.51.100.9:8000", "198.51.100.8"),  # memory is shared, the network is not
    ],
)
def test_loopback_serves_this_host_alone(
    monkeypatch: pytest.MonkeyPatch, target: str, expected: str
) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    sources = {"198.51.100.9": "198.51.100.8"}
    for module in ("weightsync.backends.tcp.trainer", "weightsync.shm.addresses"):
        monkeypatch.setattr(f"{module}.source_address", lambda host: sources.get(host, host))
    assert address_for(to(target, "198.51.100.7", host_key())) == expected
    monkeypatch.setenv(ADDRESS_VARIABLE, "203.0.113.5")
    assert address_for(to(target, None, host_key())) == "203.0.113.5"


def test_of_several_addresses_the_first_that_reaches_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that this host does not have, or that the target does not answer, is passed over."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        target = f"http://127.0.0.1:{listening.getsockname()[1]}"
        for listed in ("203.0.113.5, 127.0.0.3,127.0.0.4", "::1,127.0.0.3"):
            monkeypatch.setenv(ADDRESS_VARIABLE, listed)
            assert address_for(to(target, None)) == "127.0.0.3"
            assert addresses_for([to(target, None)] * 3) == ["127.0.0.3"] * 3
        monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.3,127.0.0.4")
        assert address_for(to("Actor Rollout 0a1b", None)) == "127.0.0.3"
    # An error of the connection names the first one then.
    monkeypatch.setenv(ADDRESS_VARIABLE, "203.0.113.5,127.0.0.3")
    assert address_for(to(target, None)) == "203.0.113.5"


def test_an_address_is_assigned_to_this_host_or_not() -> None:
    assert is_assigned("127.0.0.1")
    assert not is_assigned("203.0.113.5")
