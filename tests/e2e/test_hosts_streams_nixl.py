"""Ranks that each send what they hold by NIXL, to receivers on other hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import weightsync as ws
from tests.e2e import processes, several_hosts
from tests.e2e.several_hosts import segments, sent_nbytes, together, told
from tests.e2e.test_hosts_streams import check_all_hold, connect, send
from tests.hosts.fixtures import network
from tests.hosts.namespaces import HostNetwork, host_network
from weightsync.backends.nixl import backend as backend_module
from weightsync.backends.nixl import carrier as carrier_module

__all__ = ["network"]

pytest.importorskip("nixl", reason="the package nixl, which `make venv` installs")

A, B, C = range(3)


@pytest.fixture(scope="module")
def served(network: HostNetwork) -> Iterator[list[processes.Host]]:
    with ExitStack() as stack:
        yield [stack.enter_context(several_hosts.receivers(host)) for host in network.hosts]


@pytest.mark.parametrize(
    ("ranks", "places"), [((A, A), (B,)), ((A, B), (A, B, B, C)), ((A, B, C), (C, A, C))]
)
def test_shards_are_read_where_they_lie(
    network: HostNetwork, served: list[processes.Host], ranks: tuple[int], places: tuple[int]
) -> None:
    fleet = [served[host].receiver("http", model="plain") for host in places]
    with several_hosts.ranks(*(network.hosts[host] for host in ranks)) as crew:
        connect(crew, fleet, backend="nixl")
        for version in (1, 2):
            report = send(crew, version)
            assert (report.gathered, report.verified) == ({}, "held")
            assert report.summed == (report.tensors if version == 1 else 0)
            assert report.written_nbytes == 0
            for receiver in report.receivers:
                assert receiver.path == "nixl"
                assert set(receiver.sources) == set(range(len(ranks)))
                assert sum(receiver.sources.values()) == report.nbytes
            check_all_hold(crew, fleet, version)
        together(crew, "end_sender")
    for process in served:
        process.forget()
    assert [name for host in network.hosts for name in segments(host)] == []


@pytest.fixture(scope="module")
def four() -> Iterator[HostNetwork]:
    with host_network(4) as made:
        yield made


@pytest.mark.parametrize(("workers", "verify"), [(1, False), (2, True)])
def test_only_what_a_host_loads_leaves_each_rank(
    four: HostNetwork, workers: int, verify: bool
) -> None:
    """Two ranks with rows, and workers with columns: half of the model lies in short runs."""
    shards = [(k, 2 * workers) for k in range(2 * workers)]
    hosts = four.hosts
    with ExitStack() as stack:
        fleet = []
        for number, shard in enumerate(shards):
            on = stack.enter_context(several_hosts.receivers(hosts[2 + number // workers]))
            fleet.append(on.receiver("http", model="broad", shard=shard))
        crew = stack.enter_context(several_hosts.ranks(*hosts[:2], model="broad"))
        connect(crew, fleet, delta="off", verify=verify, backend="nixl")
        for version in (1, 2):
            before = [sent_nbytes(host) for host in hosts]
            report = send(crew, version)
            sent = [sent_nbytes(host) - was for host, was in zip(hosts, before, strict=True)]
            assert (report.gathered, report.verified) == ({}, "held" if verify else "none")
            assert report.written_nbytes == report.nbytes / 2
            for remote, shard in zip(fleet, shards, strict=True):
                assert remote.digests() == crew[0].do("digests", shard), remote.url
                assert remote.reading() == version
            half = report.nbytes / 2
            assert all(half < nbytes < 1.03 * half for nbytes in sent[:2]), (sent, half)
            assert all(nbytes < 0.03 * half for nbytes in sent[2:]), (sent, half)


def test_deltas_parts_copies_and_casts(network: HostNetwork, served: list[processes.Host]) -> None:
    """What is not the source itself comes through the rank's ring."""
    fleet = [served[B].receiver("http", model="plain", sink="hook", apply="staged")]
    fleet.append(served[C].receiver("http", model="plain"))
    part = ["layers.3.weight", "large"]
    with several_hosts.ranks(network.hosts[A], network.hosts[B]) as crew:
        connect(crew, fleet, backend="nixl", delta="always")
        send(crew, 1)
        together(crew, "touch", 2)
        report = send(crew, None)
        assert report.delta is not None
        assert report.delta.sent, report.delta.reason
        assert report.gathered == {}
        check_all_hold(crew, fleet, 2)
        reports = together(crew, "send_part", 3, part)
        assert [report.version for report in reports] == [3, 3], reports
        reports = together(crew, "send_copy", 4)
        assert [report.version for report in reports] == [4, 4], reports
        check_all_hold(crew, fleet, 4)
        assert send(crew, 5).gathered == {}
        check_all_hold(crew, fleet, 5)


def test_fleets_of_several_paths(network: HostNetwork, served: list[processes.Host]) -> None:
    """Of the ranks' host, of another one, and of one without NIXL."""
    with several_hosts.receivers(network.hosts[C]) as process:
        process.run(lose_nixl)
        fleet = [served[host].receiver("http", model="plain") for host in (A, B)]
        fleet.append(process.receiver("http", model="plain"))
        with several_hosts.ranks(network.hosts[A], network.hosts[A]) as crew:
            connect(crew, fleet, backend=["ipc", "nixl", "tcp"])
            for version in (1, 2):
                report = send(crew, version)
                assert (report.gathered, report.verified) == ({}, "held")
                assert [one.path for one in report.receivers] == ["shared_memory", "nixl", "tcp"]
                check_all_hold(crew, fleet, version)


def lose_nixl(_: object) -> None:
    """Have NIXL not be installed in this process."""

    def endpoint(self: object, device: object) -> Any:
        raise ws.BackendUnavailableError("the package nixl is not installed")

    backend_module.NixlBackend.endpoint = endpoint  # type: ignore[method-assign]


def test_a_rank_on_which_nixl_does_not_start(
    network: HostNetwork, served: list[processes.Host]
) -> None:
    """The ranks gather, or send by another backend where there is one."""
    fleet = [served[C].receiver("http", model="plain")]
    with several_hosts.ranks(network.hosts[A], network.hosts[B]) as crew:
        crew[1].do("environ", "UCX_TLS", "no-such-transport")
        connect(crew, fleet, backend="nixl")
        report = send(crew, 1)
        assert "rank 1: NIXL failed" in report.gathered["all tensors"]
        assert report.path == "nixl"
        check_all_hold(crew, fleet, 1)
        together(crew, "end_sender")
        connect(crew, fleet, backend=["nixl", "tcp"])
        report = send(crew, 2)
        assert (report.gathered, report.path) == ({}, "tcp")
        check_all_hold(crew, fleet, 2)


def test_a_receiver_on_which_nixl_does_not_start(
    network: HostNetwork, served: list[processes.Host]
) -> None:
    with several_hosts.receivers(network.hosts[C]) as process:
        process.run(break_ucx)
        fleet = [process.receiver("http", model="plain")]
        with several_hosts.ranks(network.hosts[A], network.hosts[B]) as crew:
            errors = together(crew, "connect", [fleet[0].url], backend="nixl")
            for error in errors:
                assert isinstance(error, ws.BackendUnavailableError)
                assert f"no path works to {fleet[0].url}: nixl: " in str(error)
            connect(crew, fleet, backend=["nixl", "tcp"])
            report = send(crew, 1)
            assert (report.gathered, report.path) == ({}, "tcp")
            check_all_hold(crew, fleet, 1)


def break_ucx(_: object) -> None:
    """Have UCX find no transport in this process."""
    os.environ["UCX_TLS"] = "no-such-transport"


def test_a_byte_that_is_lost_is_found_and_sent_again(
    network: HostNetwork, served: list[processes.Host]
) -> None:
    fleet = [served[host].receiver("http", model="plain") for host in (B, C)]
    with several_hosts.ranks(network.hosts[A], network.hosts[A]) as crew:
        connect(crew, fleet, backend="nixl")
        send(crew, 1)
        held = [remote.digests() for remote in fleet]
        served[B].run(spoil)
        errors = together(crew, "send", 2)
        assert all(isinstance(error, ws.VerificationError) for error in errors), errors
        assert all("rank" in told(error) for error in errors)
        assert [remote.digests() for remote in fleet] == held
        assert [remote.reading() for remote in fleet] == [1, 1]
        assert send(crew, 3).version == 2
        check_all_hold(crew, fleet, 2)


def spoil(_: object) -> None:
    """Change a byte of the next chunk that this process reads."""
    owner: Any = carrier_module.NixlCarrier
    genuine = owner.receive

    def receive(self: Any, connection: Any, frame: Any, into: memoryview, check: Any) -> None:
        genuine(self, connection, frame, into, check)
        if len(into):
            owner.receive = genuine
            into[7] ^= 1

    owner.receive = receive
