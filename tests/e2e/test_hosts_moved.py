"""Ranks that come back on another host, and ranks whose host gets another address."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

import weightsync as ws
from tests.e2e import processes, several_hosts
from tests.e2e.processes import Remote, wait_until
from tests.e2e.several_hosts import (
    Trainer,
    data_address,
    join,
    listening,
    segments,
    sent_nbytes,
    together,
    told,
)
from tests.hosts.namespaces import HostNetwork, host_network, netns_problem
from weightsync.shm.segment import cleanup_stale

pytestmark = [
    pytest.mark.skipif(bool(netns_problem()), reason="needs root"),
    pytest.mark.timeout(300),
]
TIMEOUT_S = 8.0
MODEL = "squares"
backends = pytest.mark.parametrize("backend", ["tcp", pytest.param("nixl", marks=pytest.mark.soak)])


@pytest.fixture(scope="module")
def network() -> Iterator[HostNetwork]:
    with host_network(4) as made:
        yield made


class Site:
    """Ranks on the first two hosts, and a receiver on each of the two others."""

    def __init__(self, network: HostNetwork, stack: ExitStack) -> None:
        self.network, self._stack = network, stack
        self.served = [stack.enter_context(several_hosts.receivers(h)) for h in network.hosts[2:]]
        self.fleet = [served.receiver("http", model=MODEL) for served in self.served]
        self.crew = stack.enter_context(several_hosts.ranks(*network.hosts[:2], model=MODEL))

    def start(self, host: int) -> Trainer:
        """Start a process of a trainer, which is no rank yet."""
        return self._stack.enter_context(several_hosts.trainer(self.network.hosts[host]))

    def connect(self, **options: object) -> None:
        given = {"timeout_s": TIMEOUT_S, "delta": "off", **options}
        outcomes = together(self.crew, "connect", [remote.url for remote in self.fleet], **given)
        assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)], outcomes

    def send(self, seed: int) -> ws.SyncReport:
        """Send an update that all receivers have to hold, each rank its own part."""
        reports = together(self.crew, "send", seed)
        assert not [report for report in reports if isinstance(report, Exception)], reports
        report: ws.SyncReport = reports[0]
        assert (report.gathered, report.verified, report.dropped) == ({}, "held", {})
        wanted = self.crew[0].do("digests")
        for remote in self.fleet:
            assert remote.digests() == wanted, remote.url
            assert remote.reading() == report.version
        return report

    def held(self) -> list[tuple[int, dict[str, str]]]:
        return [(remote.reading(), remote.digests()) for remote in self.fleet]


@pytest.fixture
def site(network: HostNetwork) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(network, stack)
    for host in network.hosts:
        host.call(cleanup_stale)


@backends
def test_an_address_that_changes(site: Site, backend: str) -> None:
    """Before the first update, and between two: the receivers are told the new one at once."""
    first, second, *receiving = site.network.hosts
    with data_address(second, first, *receiving) as data:
        site.crew[1].do("environ", "WEIGHTSYNC_ADDRESS", data.address)
        site.connect(backend=backend)
        attempts = 0
        for seed in (1, 2):
            site.crew[1].do("environ", "WEIGHTSYNC_ADDRESS", data.change())
            report = site.send(seed)
            assert report.version == 2 * seed - 1
            assert report.connect_seconds
            # The first one ends before a receiver is told of it.
            assert attempts_of(report) - attempts == 2
            assert data.address in {place.address for place in listening(second)}
            report = site.send(seed)
            assert report.connect_seconds == {}
            attempts = attempts_of(report)


def test_an_address_that_is_gone_while_it_is_set(site: Site) -> None:
    """It is named, nothing changes, and the update after it is set anew is sent."""
    first, second, *receiving = site.network.hosts
    with data_address(second, first, *receiving) as data:
        gone = data.address
        site.crew[1].do("environ", "WEIGHTSYNC_ADDRESS", gone)
        site.connect()
        site.send(1)
        before = site.held()
        new = data.change()
        for error in together(site.crew, "send", 2):
            assert isinstance(error, ws.ConnectError), error
            assert gone in told(error)
            assert "give an address of this host" in told(error)
        assert site.held() == before
        site.crew[1].do("environ", "WEIGHTSYNC_ADDRESS", new)
        assert site.send(3).version == 2


def test_an_address_that_is_reached_no_more(site: Site) -> None:
    """The host keeps it. What cannot be read there is read at another one in the same update."""
    first, second, *receiving = site.network.hosts
    with data_address(second, first, *receiving) as data:
        site.crew[1].do("environ", "WEIGHTSYNC_ADDRESS", data.address)
        site.connect()
        attempts = attempts_of(site.send(1))
        data.lose_route()
        site.crew[1].do("environ", "WEIGHTSYNC_ADDRESS", "")
        report = site.send(2)
        assert report.version == 2
        # The source may have been lost for once; after the second time all is connected anew.
        assert attempts_of(report) - attempts == 3


def test_an_address_that_is_reached_no_more_while_it_is_set(site: Site) -> None:
    """Rank 0 sends for all, for a reason that names it."""
    first, second, *receiving = site.network.hosts
    with data_address(second, first, *receiving) as data:
        site.crew[1].do("environ", "WEIGHTSYNC_ADDRESS", data.address)
        site.connect()
        site.send(1)
        data.lose_route()
        report, _ = together(site.crew, "send", 2)
        assert not isinstance(report, Exception), report
        assert report.version == 2
        assert f"rank 1: the sender cannot be reached: {data.address}" in str(report.gathered)
        wanted = site.crew[0].do("digests")
        assert site.held() == [(2, wanted)] * 2


@pytest.mark.parametrize("sent", [False, True], ids=["connected", "sent"])
def test_a_rank_that_comes_back_on_another_host(site: Site, *, sent: bool) -> None:
    """Rank 0 stays, and makes a group with it. The host that it left sends no more."""
    version = 0
    site.connect()
    if sent:
        version = site.send(1).version
    before = site.held()
    stays, lost = site.crew
    lost.kill()
    stays.begin("send", 2)
    with pytest.raises(ws.WeightSyncError) as raised:
        stays.end(timeout_s=processes.WAIT_S)
    assert "rank 1" in told(raised.value)
    assert site.held() == before
    wait_until(lambda: are_ready(site.fleet), "the update's end")
    comes = site.start(2)
    stays.do("leave")
    site.crew = [stays, comes]
    join(site.crew, MODEL)
    site.connect()
    left = sent_nbytes(site.network.hosts[1])
    report = site.send(3)
    assert report.version == version + 1
    assert sent_nbytes(site.network.hosts[1]) - left < 0.02 * report.nbytes


def test_all_ranks_come_back_and_one_of_them_elsewhere(site: Site) -> None:
    """As where an agent starts all processes of a trainer again. Rank 0 was killed, too."""
    site.connect()
    site.send(1)
    for rank in site.crew:
        rank.kill()
    site.crew = [site.start(0), site.start(3)]
    join(site.crew, MODEL)
    site.connect()
    assert site.send(2).version == 2
    assert site.send(3).version == 3
    together(site.crew, "end_sender")
    for served in site.served:
        served.forget()
    for host in site.network.hosts:
        host.call(cleanup_stale)
    assert [name for host in site.network.hosts for name in segments(host)] == []


def attempts_of(report: ws.SyncReport) -> int:
    """Return how often the sender has begun an update: each attempt has the next number."""
    return int(report.update_id.rpartition("-")[2])


def are_ready(fleet: Sequence[Remote]) -> bool:
    return all(remote.status()["state"] == "READY" for remote in fleet)
