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


KINDS: list[dict[str, object]] = [
    {"sink": "hook", "apply": "in_place"},
    {"sink": "hook", "apply": "staged"},
    {"sink": "module", "apply": "in_place"},
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_receiver_and_of_update(
    network: HostNetwork, served: list[processes.Host], kind: dict[str, object]
) -> None:
    """Beside a staged module: whole models, parts, copies, and models again."""
    fleet = [served[B].receiver("http", model="plain", **kind)]
    fleet.append(served[C].receiver("http", model="plain"))
    part = ["layers.3.weight", "large"]
    with several_hosts.ranks(network.hosts[A], network.hosts[B]) as crew:
        connect(crew, fleet)
        send(crew, 1)
        check_all_hold(crew, fleet, 1)
        reports = together(crew, "send_part", 2, part)
        assert [report.version for report in reports] == [2, 2], reports
        wanted = crew[0].do("digests")
        for remote in fleet:
            held = remote.digests()
            assert {name: held[name] for name in part} == {name: wanted[name] for name in part}
        reports = together(crew, "send_copy", 3)
        assert [report.version for report in reports] == [3, 3], reports
        assert reports[0].gathered == {}
        check_all_hold(crew, fleet, 3)
        send(crew, 4)
        check_all_hold(crew, fleet, 4)


def test_a_slow_receiver_that_cannot_answer_beside_its_work_is_waited_for(
    network: HostNetwork, served: list[processes.Host]
) -> None:
    slow = {"sink": "hook", "apply": "in_place", "model": "plain", "delay_s": 4.4}
    fleet = [served[C].receiver("http", **slow), served[C].receiver("http", model="plain")]
    urls = [remote.url for remote in fleet]
    with several_hosts.ranks(network.hosts[A], network.hosts[B]) as crew:
        given = {"timeout_s": 2.0, "bucket_nbytes": 1 << 20}
        assert together(crew, "connect_one_at_a_time", urls, **given) == [None, None]
        report = send(crew, 1)
        assert report.gathered == {}
        assert max(report.receivers[0].seconds.values()) > 4.0
        check_all_hold(crew, fleet, 1)


@pytest.fixture
def four() -> Iterator[HostNetwork]:
    with host_network(4) as made:
        yield made


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_only_what_a_host_loads_leaves_each_rank(
    four: HostNetwork, workers: int, verify: bool
) -> None:
    """Two ranks with rows on two hosts, and workers with columns on two others."""
    shards = [(k, 2 * workers) for k in range(2 * workers)]
    hosts = four.hosts
    with ExitStack() as stack:
        fleet = []
        for number, shard in enumerate(shards):
            on = stack.enter_context(several_hosts.receivers(hosts[2 + number // workers]))
            fleet.append(on.receiver("http", model="squares", shard=shard))
        crew = stack.enter_context(several_hosts.ranks(*hosts[:2], model="squares"))
        connect(crew, fleet, delta="off", verify=verify)
        for version in (1, 2):
            before = [sent_nbytes(host) for host in hosts]
            report = send(crew, version)
            sent = [sent_nbytes(host) - was for host, was in zip(hosts, before, strict=True)]
            assert (report.gathered, report.verified) == ({}, "held" if verify else "none")
            for remote, shard in zip(fleet, shards, strict=True):
                assert remote.digests() == crew[0].do("digests", shard), remote.url
                assert remote.reading() == version
            half = report.nbytes / 2
            assert all(half < nbytes < 1.05 * half for nbytes in sent[:2]), (sent, half)
            assert all(nbytes < 0.05 * half for nbytes in sent[2:]), (sent, half)


@pytest.mark.parametrize("places", [(2, 3), (2, 2)])
def test_shards_take_deltas_after_updates_that_crossed_whole(
    four: HostNetwork, places: tuple[int, int]
) -> None:
    """A receiver of shards adds up all of a stream, which a host gets while a delta may follow."""
    hosts = four.hosts
    with ExitStack() as stack:
        fleet = []
        for place, shard in zip(places, [(0, 2), (1, 2)], strict=True):
            on = stack.enter_context(several_hosts.receivers(hosts[place]))
            fleet.append((on.receiver("http", model="squares", shard=shard), shard))
        crew = stack.enter_context(several_hosts.ranks(*hosts[:2], model="squares"))
        connect(crew, [remote for remote, _ in fleet], delta="always")
        send(crew, 1)
        for version in (2, 3):
            together(crew, "touch", version)
            report = send(crew, None)
            assert report.delta is not None
            assert report.delta.sent, report.delta.reason
            for remote, shard in fleet:
                assert remote.digests() == crew[0].do("digests", shard), remote.url


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
