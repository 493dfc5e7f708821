"""Ranks that each send what they hold, to receivers on other hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import weightsync as ws
from tests.e2e import processes, several_hosts
from tests.e2e.processes import Remote
from tests.e2e.several_hosts import Trainer, segments, sent_nbytes, together
from tests.hosts.fixtures import network
from tests.hosts.namespaces import HostNetwork, host_network
from weightsync.weights.lines.memory import LINE

__all__ = ["network"]

A, B, C = range(3)
TIMEOUT_S = 10.0


@pytest.fixture(scope="module")
def served(network: HostNetwork) -> Iterator[list[processes.Host]]:
    with ExitStack() as stack:
        yield [stack.enter_context(several_hosts.receivers(host)) for host in network.hosts]


def connect(crew: list[Trainer], fleet: list[Remote], **options: object) -> None:
    urls = [remote.url for remote in fleet]
    given = {"timeout_s": TIMEOUT_S, **options}
    outcomes = together(crew, "connect", urls, **given)
    assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)], outcomes


def send(crew: list[Trainer], seed: int | None) -> ws.SyncReport:
    first, *others = together(crew, "send", seed)
    assert not isinstance(first, Exception), first
    assert all(other == first for other in others)
    report: ws.SyncReport = first
    return report


def check_all_hold(crew: list[Trainer], fleet: list[Remote], version: int) -> None:
    wanted = crew[0].do("digests")
    for remote in fleet:
        assert remote.digests() == wanted, remote.url
        assert remote.reading() == version


PLACES = [
    ((A, A), (B,)),
    ((A, B), (C,)),
    ((A, A), (A, B)),
    ((A, B), (A, B, B, C)),
    ((A, B, C), (C, A, C)),
]


@pytest.mark.parametrize(("ranks", "places"), PLACES)
def test_nothing_is_gathered(
    network: HostNetwork, served: list[processes.Host], ranks: tuple[int], places: tuple[int]
) -> None:
    """Each rank sends its boxes to every host, whatever the host of either."""
    fleet = [served[host].receiver("http", model="plain") for host in places]
    with several_hosts.ranks(*(network.hosts[host] for host in ranks)) as crew:
        connect(crew, fleet)
        for version in (1, 2, 3):
            report = send(crew, version)
            assert (report.gathered, report.verified) == ({}, "held")
            assert report.summed == (report.tensors if version == 1 else 0)
            paths = ["shared_memory" if {*ranks} == {host} else "tcp" for host in places]
            assert [receiver.path for receiver in report.receivers] == paths
            for receiver in report.receivers:
                assert set(receiver.sources) == set(range(len(ranks)))
                assert sum(receiver.sources.values()) == report.nbytes
            assert report.written_nbytes < 1.1 * report.nbytes
            check_all_hold(crew, fleet, version)
        together(crew, "end_sender")
    for process in served:
        process.forget()
    assert [name for host in network.hosts for name in segments(host)] == []


@pytest.fixture
def four() -> Iterator[HostNetwork]:
    with host_network(4) as made:
        yield made


def test_only_what_a_host_loads_leaves_each_rank(four: HostNetwork) -> None:
    """Two ranks with rows on two hosts, and two workers with columns on two others."""
    shards = [(0, 2), (1, 2)]
    hosts = four.hosts
    with ExitStack() as stack:
        served = [stack.enter_context(several_hosts.receivers(host)) for host in hosts[2:]]
        fleet = [
            each.receiver("http", model="squares", shard=shard)
            for each, shard in zip(served, shards, strict=True)
        ]
        crew = stack.enter_context(several_hosts.ranks(*hosts[:2], model="squares"))
        connect(crew, fleet, delta="off")
        for version in (1, 2):
            before = [sent_nbytes(host) for host in hosts]
            report = send(crew, version)
            sent = [sent_nbytes(host) - was for host, was in zip(hosts, before, strict=True)]
            assert (report.gathered, report.verified) == ({}, "held")
            for remote, shard in zip(fleet, shards, strict=True):
                assert remote.digests() == crew[0].do("digests", shard), remote.url
                assert remote.reading() == version
            half = report.nbytes / 2
            assert all(half < nbytes < 1.05 * half for nbytes in sent[:2]), (sent, half)
            assert all(nbytes < 0.05 * half for nbytes in sent[2:]), (sent, half)


@pytest.mark.parametrize(("ranks", "places"), [((A, B), (C,)), ((A, A), (A, B))])
def test_deltas_cross_as_values(
    network: HostNetwork, served: list[processes.Host], ranks: tuple[int], places: tuple[int]
) -> None:
    """Each rank codes the values of its own boxes that changed."""
    fleet = [served[host].receiver("http", model="plain") for host in places]
    with several_hosts.ranks(*(network.hosts[host] for host in ranks)) as crew:
        connect(crew, fleet, delta="always")
        send(crew, 1)
        for version in (2, 3, 4):
            together(crew, "touch", version)
            report = send(crew, None)
            check_all_hold(crew, fleet, version)
            assert report.gathered == {}
            assert report.delta is not None
            assert report.delta.sent, report.delta.reason
            assert report.delta.nbytes < report.delta.lines * LINE / 4
