"""Ranks that each send what they hold, on hosts with several addresses or networks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import weightsync as ws
from tests.e2e import several_hosts
from tests.e2e.processes import Remote
from tests.e2e.several_hosts import (
    Trainer,
    half_reachable,
    listening,
    on_two_networks,
    sent_nbytes,
    together,
)
from tests.hosts.namespaces import HostNetwork, host_network, netns_problem
from weightsync.shm.segment import cleanup_stale

pytestmark = [
    pytest.mark.skipif(bool(netns_problem()), reason="needs root"),
    pytest.mark.timeout(300),
]
TIMEOUT_S = 10.0
MODEL = "squares"


@pytest.fixture(scope="module")
def network() -> Iterator[HostNetwork]:
    with host_network(4) as made:
        yield made
        for host in made.hosts:
            host.call(cleanup_stale)


def connect(crew: list[Trainer], fleet: list[Remote]) -> None:
    urls = [remote.url for remote in fleet]
    outcomes = together(crew, "connect", urls, timeout_s=TIMEOUT_S, delta="off", backend="tcp")
    assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)], outcomes


def send(crew: list[Trainer], fleet: list[Remote], seed: int) -> ws.SyncReport:
    """Send an update, which all receivers have to hold."""
    reports = together(crew, "send", seed)
    assert not [report for report in reports if isinstance(report, Exception)], reports
    report: ws.SyncReport = reports[0]
    assert report.verified == "held"
    wanted = crew[0].do("digests")
    for remote in fleet:
        assert (remote.reading(), remote.digests()) == (report.version, wanted), remote.url
    return report


def test_a_host_with_two_addresses_of_which_one_receiver_reaches_one(network: HostNetwork) -> None:
    """Each receiving host reads at the first address that it reaches; nothing is gathered."""
    first, second, deaf, other = network.hosts
    with ExitStack() as stack:
        served = [stack.enter_context(several_hosts.receivers(host)) for host in (deaf, other)]
        fleet = [process.receiver("http", model=MODEL) for process in served]
        address = stack.enter_context(half_reachable(second, deaf=deaf, others=[first, other]))
        crew = stack.enter_context(several_hosts.ranks(first, second, model=MODEL))
        crew[1].do("environ", "WEIGHTSYNC_ADDRESS", f"{address},{second.address}")
        before = listening(second)
        connect(crew, fleet)
        new = listening(second) - before
        assert {place.address for place in new} == {address, second.address}
        for version in (1, 2):
            nbytes = [sent_nbytes(host) for host in (first, second)]
            report = send(crew, fleet, version)
            assert report.gathered == {}
            sent = [sent_nbytes(h) - n for h, n in zip((first, second), nbytes, strict=True)]
            # Once for each address at which its host is reached.
            parts = [each / report.nbytes for each in sent]
            assert 0.45 < parts[0] < 0.65, parts
            assert 0.95 < parts[1] < 1.15, parts
        together(crew, "end_sender")


def test_all_ranks_on_both_networks(network: HostNetwork) -> None:
    """Each receiving host is reached on its own one, by every rank."""
    first, second, near, far = network.hosts
    with ExitStack() as stack:
        at = stack.enter_context(on_two_networks(first, far, second))
        crew = stack.enter_context(several_hosts.ranks(first, second, model=MODEL))
        served = [
            stack.enter_context(several_hosts.receivers(near)),
            stack.enter_context(several_hosts.receivers(far, address=at)),
        ]
        fleet = [process.receiver("http", model=MODEL) for process in served]
        before = [listening(host) for host in (first, second)]
        connect(crew, fleet)
        for host, was in zip((first, second), before, strict=True):
            found = {place.address for place in listening(host) - was}
            assert len(found) == 2, found
            assert host.address in found
        for version in (1, 2):
            assert send(crew, fleet, version).gathered == {}
        together(crew, "end_sender")


def test_a_rank_that_is_not_on_the_network_of_a_receiver(network: HostNetwork) -> None:
    """Rank 0 reaches both networks and sends for all, for a reason that names the other rank."""
    first, second, near, far = network.hosts
    with ExitStack() as stack:
        at = stack.enter_context(on_two_networks(first, far))
        crew = stack.enter_context(several_hosts.ranks(first, second, model=MODEL))
        served = [
            stack.enter_context(several_hosts.receivers(near)),
            stack.enter_context(several_hosts.receivers(far, address=at)),
        ]
        fleet = [process.receiver("http", model=MODEL) for process in served]
        connect(crew, fleet)
        for version in (1, 2):
            reason = send(crew, fleet, version).gathered["all tensors"]
            assert "rank 1" in reason
            assert fleet[1].url in reason
        together(crew, "end_sender")
