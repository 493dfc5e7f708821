"""Fleets over several hosts: paths, membership, addresses, and what is left afterwards."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

import weightsync as ws
from tests.e2e import processes, several_hosts
from tests.e2e.processes import Apply, Remote, Sink, wait_until
from tests.e2e.several_hosts import Trainer, listening, segments, told
from tests.hosts.fixtures import network
from tests.hosts.namespaces import Host, HostNetwork

__all__ = ["network"]

A, B, C = range(3)
CHANGES = 20


@dataclass
class Site:
    """Three hosts: a trainer on A, and processes of receivers, of which C has two."""

    hosts: tuple[Host, ...]
    trainer: Trainer
    served: list[list[processes.Host]]
    made: list[Remote] = field(default_factory=list)

    def receiver(self, host: int, process: int = 0, **place: object) -> Remote:
        self.made.append(self.served[host][process].receiver("http", **{"model": "plain", **place}))
        return self.made[-1]

    def connect(self, *to: Remote, **options: object) -> str:
        return str(self.trainer.do("connect", [remote.url for remote in to], **options))

    def check_all_hold(self, version: int, *, on: list[Remote] | None = None) -> None:
        wanted = self.trainer.do("digests")
        for remote in self.made if on is None else on:
            assert remote.digests() == wanted, remote.url
            assert remote.reading() == version, remote.url

    def left(self) -> list[str]:
        return [name for host in self.hosts for name in segments(host)]

    def footprints(self) -> list[Mapping[str, int]]:
        served = [process.footprint() for each in self.served for process in each]
        return [self.trainer.do("footprint"), *served]


@pytest.fixture(scope="module")
def started_site(network: HostNetwork) -> Iterator[Site]:
    a, b, c = network.hosts
    with ExitStack() as stack:
        trainer = stack.enter_context(several_hosts.trainer(a))
        served = [[stack.enter_context(several_hosts.receivers(host))] for host in (a, b, c)]
        served[C].append(stack.enter_context(several_hosts.receivers(c)))
        yield Site(network.hosts, trainer, served)


@pytest.fixture
def site(started_site: Site) -> Iterator[Site]:
    """The site without receivers and sender; nothing may be left in any host's /dev/shm."""
    started_site.made.clear()
    yield started_site
    started_site.trainer.do("end_sender")
    for process in (process for each in started_site.served for process in each):
        process.forget()
    assert started_site.left() == []


@pytest.mark.parametrize(("sink", "apply"), [("module", "staged"), ("hook", "in_place")])
def test_each_receiver_gets_the_fastest_path_that_works(
    site: Site, sink: Sink, apply: Apply
) -> None:
    model = "everything"
    places = [(A, 0), (B, 0), (C, 0), (C, 1)]
    at = [site.receiver(*where, sink=sink, apply=apply, model=model) for where in places]
    assert site.connect(*at, model=model) == "shared_memory+tcp"
    for version in (1, 2, 3):
        report = site.trainer.send(seed=version)
        wanted = site.trainer.do("digests")
        if sink == "hook":
            del wanted["head.weight"]
        for remote in at:
            assert remote.digests() == wanted
            assert remote.reading() == version
        paths = [receiver.path for receiver in report.receivers]
        assert paths == ["shared_memory", "tcp", "tcp", "tcp"]
        assert [receiver.target for receiver in report.receivers] == [r.url for r in at]
        assert [set(receiver.skipped_paths) for receiver in report.receivers] == [
            set(),
            {"shared_memory"},
            {"shared_memory"},
            {"shared_memory"},
        ]
        assert "HOST-" in report.skipped_paths["shared_memory"]
        assert report.path == "shared_memory+tcp"
        assert (report.packed, report.apply) == (True, apply)
        assert report.verified == ("held" if sink == "module" else "arrived")
        assert report.control_messages == 2 * len(at)
        # Once, for four receivers on three hosts: what lies between tensors is never written.
        assert report.nbytes <= report.written_nbytes < 1.1 * report.nbytes


def test_the_trainer_packs_once_however_many_hosts_there_are(site: Site) -> None:
    one = site.receiver(B)
    site.connect(one)
    alone = site.trainer.send(seed=1)
    site.trainer.do("end_sender")
    site.connect(one, site.receiver(A), site.receiver(C), site.receiver(C, 1))
    assert site.trainer.send(seed=2).written_nbytes == alone.written_nbytes
    site.check_all_hold(2)


def test_a_part_of_the_model(site: Site) -> None:
    for where in ((A, 0), (B, 0), (C, 0), (C, 1)):
        site.receiver(*where)
    site.connect(*site.made)
    site.trainer.send(seed=1)
    before = site.trainer.do("digests")
    names = ["layers.3.weight", "large"]
    report = site.trainer.do("send_part", 2, names)
    after = site.trainer.do("digests")
    wanted = {**before, **{name: after[name] for name in names}}
    assert wanted != after
    for remote in site.made:
        assert remote.digests() == wanted
        assert remote.reading() == 2 == report.version
    assert site.trainer.send().version == 3
    site.check_all_hold(3)


def test_ipc_does_not_leave_its_host(site: Site) -> None:
    here, there = site.receiver(A), site.receiver(B)
    with pytest.raises(ws.BackendUnavailableError) as refused:
        site.connect(here, there, backend="ipc")
    assert there.url in str(refused.value)
    assert "shared_memory: the receiver is on host HOST-" in str(refused.value)
    assert here.url not in str(refused.value)
    assert site.left() == []
    site.connect(here, there)
    site.trainer.send(seed=1)
    site.check_all_hold(1)


def test_distributed_on_the_trainers_own_host_when_asked_for(site: Site) -> None:
    for where in ((A, 0), (A, 0), (B, 0)):
        site.receiver(*where)
    assert site.connect(*site.made, backend="tcp") == "tcp"
    for version in (1, 2):
        report = site.trainer.send(seed=version)
        assert {receiver.path for receiver in report.receivers} == {"tcp"}
        site.check_all_hold(version)


def test_distributed_streams(site: Site) -> None:
    remote = site.receiver(B)
    with pytest.raises(ws.ConfigError, match="packed"):
        site.connect(remote, backend="tcp", packed=False)
    assert remote.status()["state"] == "READY"


def test_an_unpacked_fleet_becomes_packed_for_a_remote_member(site: Site) -> None:
    here = site.receiver(A)
    site.connect(here)
    before = listening(site.hosts[A])
    assert not site.trainer.send(seed=1).packed
    there = site.receiver(B)
    added = site.trainer.do("call", "add", there.url)
    assert [receiver.target for receiver in added.receivers] == [there.url]
    site.check_all_hold(1)
    report = site.trainer.send(seed=2)
    assert report.packed
    assert report.control_messages == 4
    site.check_all_hold(2)
    assert listening(site.hosts[A]) != before
    site.trainer.do("call", "remove", there.url)
    assert listening(site.hosts[A]) == before
    assert site.trainer.send(seed=3).path == "shared_memory"
    site.check_all_hold(3, on=[here])
    assert there.reading() == 2
    assert segments(site.hosts[B]) == []


def test_another_worker_leads_when_the_member_of_its_host_is_removed(site: Site) -> None:
    here, first, second = site.receiver(A), site.receiver(C), site.receiver(C, 1)
    site.connect(here, first, second)
    site.trainer.send(seed=1)
    site.trainer.do("call", "remove", first.url)
    report = site.trainer.send(seed=2)
    assert [receiver.target for receiver in report.receivers] == [here.url, second.url]
    site.check_all_hold(2, on=[here, second])
    assert first.reading() == 1
    site.trainer.do("call", "add", first.url)
    site.check_all_hold(2)
    site.trainer.send(seed=3)
    site.check_all_hold(3)


def test_what_is_outside_of_the_present_group_is_talked_to_as_before(site: Site) -> None:
    first, second = site.receiver(B), site.receiver(C)
    site.connect(first, second)
    site.trainer.send(seed=1)
    site.trainer.do("call", "resync", first.url)  # a group of this one alone
    site.trainer.do("call", "remove", second.url)
    assert second.status()["state"] == "READY"
    site.trainer.do("call", "add", second.url)
    site.trainer.send(seed=2)
    site.check_all_hold(2)
    site.trainer.do("call", "resync", first.url)
    site.trainer.do("end_sender")


@pytest.mark.parametrize("backend", ["tcp", "nixl"])
def test_any_receiver_of_a_host_is_sent_to_by_itself(site: Site, backend: str) -> None:
    """Also one that does not feed its host, which the member does not read with."""
    fleet = [site.receiver(B), site.receiver(C), site.receiver(C, 1), site.receiver(C, 1)]
    site.connect(*fleet, backend=backend)
    site.trainer.send(seed=1)
    used = len(segments(site.hosts[C]))
    for remote in (*reversed(fleet), fleet[2], fleet[3]):
        report = site.trainer.do("call", "resync", remote.url)
        assert [(at.target, at.verified) for at in report.receivers] == [(remote.url, "held")]
        site.check_all_hold(1)
    names = ["layers.3.weight", "large"]
    assert site.trainer.do("send_part", 2, names).version == 2
    parts = [remote.digests() for remote in fleet]
    assert parts == [parts[0]] * len(fleet)
    assert [remote.reading() for remote in fleet] == [2] * len(fleet)
    assert len(segments(site.hosts[C])) == used, "one ring of the host, as before"
    site.trainer.send(seed=3)
    site.check_all_hold(3)


@pytest.mark.parametrize("which", [1, 2], ids=["member", "second"])
def test_a_receiver_of_a_host_that_was_sent_to_alone_leaves_and_comes(
    site: Site, which: int
) -> None:
    fleet = [site.receiver(B), site.receiver(C), site.receiver(C, 1)]
    site.connect(*fleet, backend="tcp")
    site.trainer.send(seed=1)
    rest = [remote for i, remote in enumerate(fleet) if i != which]
    for version in (1, 3):
        site.trainer.do("call", "resync", fleet[2].url)
        site.trainer.do("call", "remove", fleet[which].url)
        site.trainer.do("call", "resync", rest[-1].url)
        site.check_all_hold(version, on=fleet)
        site.trainer.send(seed=version + 1)
        site.check_all_hold(version + 1, on=rest)
        site.trainer.do("call", "add", fleet[which].url)
        site.check_all_hold(version + 1)
        site.trainer.do("call", "resync", fleet[which].url)
        site.trainer.send(seed=version + 2)
        site.check_all_hold(version + 2)


def test_a_late_joiner_on_a_third_host_disturbs_nobody(site: Site) -> None:
    here, there = site.receiver(A), site.receiver(B)
    site.connect(here, there)
    site.trainer.send(seed=1)
    before = [remote.status() for remote in (here, there)]
    late = site.receiver(C)
    report = site.trainer.do("call", "add", late.url)
    assert [receiver.target for receiver in report.receivers] == [late.url]
    site.check_all_hold(1)
    for status, remote in zip(before, (here, there), strict=True):
        now = remote.status()
        assert now["last_finished"] == status["last_finished"]
        assert now["state"] == "READY"
    again = site.trainer.do("call", "resync", late.url)
    assert [receiver.target for receiver in again.receivers] == [late.url]
    assert again.control_messages == 2
    site.trainer.send(seed=2)
    site.check_all_hold(2)


def test_targets_with_ipv6_addresses(network: HostNetwork) -> None:
    a, b, _ = network.hosts
    if a.address6 is None:
        pytest.skip("this kernel has no IPv6")
    before = listening(a)
    with (
        several_hosts.trainer(a) as trainer,
        several_hosts.receivers(a, address=a.address6) as near,
        several_hosts.receivers(b, address=b.address6) as far,
    ):
        fleet = [each.receiver("http", model="plain") for each in (near, far, far)]
        assert fleet[1].url.startswith(f"http://[{b.address6}]:")
        trainer.do("connect", [remote.url for remote in fleet])
        for version in (1, 2):
            trainer.send(seed=version)
            wanted = trainer.do("digests")
            assert all(remote.digests() == wanted for remote in fleet)
        assert {place.address for place in listening(a) - before} == {a.address6}
        trainer.do("end_sender")


def test_an_address_that_was_said(network: HostNetwork) -> None:
    a, b, _ = network.hosts
    said = a.address6 or a.address
    before = listening(a)
    with several_hosts.trainer(a) as trainer, several_hosts.receivers(b) as far:
        remote = far.receiver("http", model="plain")
        trainer.do("environ", "WEIGHTSYNC_ADDRESS", b.address)
        with pytest.raises(ws.ConnectError, match="give an address of this host") as refused:
            trainer.do("connect", [remote.url])
        assert b.address in told(refused.value)
        trainer.do("environ", "WEIGHTSYNC_ADDRESS", said)
        trainer.do("connect", [remote.url])
        trainer.send(seed=1)
        assert remote.digests() == trainer.do("digests")
        assert {place.address for place in listening(a) - before} == {said}
        trainer.do("end_sender")
        assert listening(a) == before


@pytest.mark.parametrize("backend", ["tcp", "nixl"])
def test_hosts_on_two_networks_reach_the_trainer_each_on_its_own(
    network: HostNetwork, backend: str
) -> None:
    """They do not reach each other, so each reads from the trainer, and none waits for another."""
    a, b, c = network.hosts
    timeout_s = 60.0
    with ExitStack() as stack:
        address = stack.enter_context(several_hosts.on_two_networks(a, c))
        trainer = stack.enter_context(several_hosts.trainer(a))
        near = stack.enter_context(several_hosts.receivers(b))
        far = stack.enter_context(several_hosts.receivers(c, address=address))
        fleet = [process.receiver("http", model="plain") for process in (near, far, far)]
        before = [listening(host) for host in (a, b, c)]
        trainer.do("connect", [fleet[0].url, fleet[1].url], backend=backend, timeout_s=timeout_s)
        began = time.monotonic()
        for version in (1, 2):
            trainer.send(seed=version)
            _check(trainer, fleet[:2], version)
        # A window that waited for a host of the other network would hold three quarters of it.
        assert time.monotonic() - began < timeout_s / 3
        own = f"{address.rpartition('.')[0]}.1"
        _check_listens(backend, a, before[0], {a.address, own})
        _check_listens(backend, b, before[1], {b.address})
        _check_listens(backend, c, before[2], {address})
        trainer.do("call", "remove", fleet[0].url)
        _check_listens(backend, a, before[0], {own})
        trainer.do("call", "add", fleet[0].url)
        trainer.do("call", "add", fleet[2].url)
        trainer.send(seed=3)
        _check(trainer, fleet, 3)
        trainer.do("end_sender")
        _check_listens(backend, a, before[0], set())


@pytest.mark.parametrize("backend", ["tcp", "nixl"])
def test_a_host_elsewhere_joins_a_fleet_of_the_trainers_own_host(
    network: HostNetwork, backend: str
) -> None:
    a, b, _ = network.hosts
    with ExitStack() as stack:
        trainer = stack.enter_context(several_hosts.trainer(a))
        here = stack.enter_context(several_hosts.receivers(a, address="127.0.0.1"))
        there = stack.enter_context(several_hosts.receivers(b))
        fleet = [process.receiver("http", model="plain") for process in (here, there)]
        before = listening(a)
        trainer.do("connect", [fleet[0].url], backend=backend)
        trainer.send(seed=1)
        _check_listens(backend, a, before, {"127.0.0.1"})
        trainer.do("call", "add", fleet[1].url)
        _check(trainer, fleet, 1)
        trainer.send(seed=2)
        _check(trainer, fleet, 2)
        _check_listens(backend, a, before, {"127.0.0.1", a.address})
        trainer.do("call", "remove", fleet[1].url)
        _check_listens(backend, a, before, {"127.0.0.1"})
        trainer.send(seed=3)
        _check(trainer, fleet[:1], 3)
        trainer.do("end_sender")


def _check_listens(
    backend: str, host: Host, before: set[several_hosts.Listening], addresses: set[str]
) -> None:
    """Check at which addresses a host listens for others; UCX has ports of its own."""
    found = {at.address for at in listening(host) - before}
    assert found == addresses if backend == "tcp" else found >= addresses


def _check(trainer: Trainer, fleet: list[Remote], version: int) -> None:
    wanted = trainer.do("digests")
    for remote in fleet:
        assert remote.digests() == wanted, remote.url
        assert remote.reading() == version, remote.url


def test_everything_listens_at_the_hosts_address_alone(site: Site) -> None:
    for where in ((A, 0), (B, 0), (C, 0), (C, 1)):
        site.receiver(*where, sink="hook", apply="in_place", delay_s=0.2)
    before = [listening(host) for host in site.hosts]
    site.connect(*site.made)
    site.trainer.begin("send", 1)
    try:
        wait_until(lambda: site.made[1].status()["state"] == "UPDATING", "the update to begin")
        during = [listening(host) for host in site.hosts]
        assert site.made[1].status()["state"] == "UPDATING"
    finally:
        site.trainer.end()
    for host, old, new in zip(site.hosts, before, during, strict=True):
        assert new > old
        assert {place.address for place in new} == {host.address}
    site.trainer.do("end_sender")
    ended = "what listened to end"
    wait_until(lambda: [listening(host) for host in site.hosts] == before, ended)


def test_changes_of_membership_leave_nothing_behind(site: Site) -> None:
    here, there, third = site.receiver(A), site.receiver(B), site.receiver(C)
    site.connect(here, there)

    def changed() -> list[Mapping[str, int]]:
        site.trainer.do("call", "add", third.url)
        site.trainer.do("call", "remove", third.url)
        return site.footprints()

    site.trainer.send(seed=1)
    gc.collect()
    before = [changed() for _ in range(6)]  # connections of a fetch end a little later
    left = sorted(site.left())
    for _ in range(CHANGES):
        changed()
    after = [changed() for _ in range(4)]
    for old, new in zip(zip(*before, strict=True), zip(*after, strict=True), strict=True):
        # Pools keep as many connections and threads as calls happened to run at a time.
        for kind, spare in (("fds", CHANGES // 2), ("threads", CHANGES // 2), ("segments", 0)):
            most = max(one[kind] for one in old) + spare
            assert min(one[kind] for one in new) <= most, (kind, old, new)
    assert len(site.left()) == len(left)
    site.trainer.send(seed=2)
    site.check_all_hold(2, on=[here, there])
