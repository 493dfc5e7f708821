"""Faults in fleets over several hosts: who dies, who is cut off, and what the next update does."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

import weightsync as ws
from tests.e2e import processes, several_hosts
from tests.e2e.processes import Remote, wait_until
from tests.e2e.several_hosts import Trainer, port_of, segments, told
from tests.hosts.fixtures import network
from tests.hosts.namespaces import HostNetwork
from weightsync.shm.segment import cleanup_stale

__all__ = ["network"]

A, B, C = range(3)
SHORT_S = 2.0
ROOM_S = 8 * SHORT_S
"""A fault is told after a few times the timeout; the rest is for slow machines."""
SMALL = 16 << 10
SLOW: dict[str, Any] = {"sink": "hook", "apply": "in_place"}
"""A receiver that `begin_to_load` finds in the middle of an update."""


@dataclass
class Scene:
    """A trainer on A, and processes of receivers that may die."""

    network: HostNetwork
    lasting: Sequence[processes.Host]
    stack: ExitStack
    served: dict[str, processes.Host] = field(default_factory=dict)

    def trainer(self, host: int = A) -> Trainer:
        return self.stack.enter_context(several_hosts.trainer(self.network.hosts[host]))

    def receiver(self, host: int, **place: object) -> Remote:
        """A receiver in its host's process, which lasts."""
        return self.lasting[host].receiver("http", **{"model": "plain", **place})

    def mortal(self, host: int, *, port: int = 0, **place: object) -> Remote:
        """A receiver in a process of its own, which may be killed."""
        on = self.network.hosts[host]
        process = self.stack.enter_context(several_hosts.receivers(on, port=port))
        remote = process.receiver("http", **{"model": "plain", **place})
        self.served[remote.url] = process
        return remote

    def kill(self, remote: Remote) -> None:
        self.served[remote.url].kill()

    def restart(self, remote: Remote, host: int, **place: object) -> Remote:
        again = self.mortal(host, port=port_of(remote), **place)
        assert again.url == remote.url
        return again


@pytest.fixture(scope="module")
def lasting(network: HostNetwork) -> Iterator[list[processes.Host]]:
    with ExitStack() as stack:
        yield [stack.enter_context(several_hosts.receivers(host)) for host in network.hosts]


@pytest.fixture
def scene(network: HostNetwork, lasting: list[processes.Host]) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(network, lasting, stack)
    for process in lasting:
        process.forget()
    for host in network.hosts:
        host.call(cleanup_stale)  # what killed processes left; the others leave nothing
        assert segments(host) == []


def connect(trainer: Trainer, fleet: Sequence[Remote], **options: object) -> None:
    given = {"timeout_s": SHORT_S, "bucket_nbytes": SMALL, **options}
    trainer.do("connect", [remote.url for remote in fleet], **given)


def check_all_hold(trainer: Trainer, version: int, fleet: Sequence[Remote]) -> None:
    wanted = trainer.do("digests")
    for remote in fleet:
        assert remote.digests() == wanted, remote.url
        assert remote.reading() == version, remote.url


def begin_to_load(trainer: Trainer, seed: int, slow: Remote) -> None:
    """Send, until the receiver is in the middle of it, where it stays for seconds."""
    slow.hinder(delay_s=0.4)
    trainer.begin("send", seed)
    wait_until(lambda: not slow.status()["may_generate"], "the update to begin")
    time.sleep(0.1)


def failure(trainer: Trainer) -> ws.WeightSyncError:
    """What the update raised, in time."""
    started = time.monotonic()
    with pytest.raises(ws.WeightSyncError) as raised:
        trainer.end()
    assert time.monotonic() - started < ROOM_S
    return raised.value


def stay_on(version: int, held: Sequence[dict[str, str]], fleet: Sequence[Remote]) -> None:
    assert [remote.digests() for remote in fleet] == list(held)
    assert [remote.reading() for remote in fleet] == [version] * len(fleet)
    assert all(remote.status()["state"] == "READY" for remote in fleet)


def test_the_member_of_a_host_is_killed_in_the_middle(scene: Scene) -> None:
    trainer = scene.trainer()
    here, third = scene.receiver(A), scene.receiver(C)
    victim = scene.mortal(B, **SLOW)
    fleet = [here, victim, third]
    connect(trainer, fleet)
    trainer.send(seed=1)
    held = [here.digests(), third.digests()]
    begin_to_load(trainer, 2, victim)
    scene.kill(victim)
    error = failure(trainer)
    assert isinstance(error, ws.TransportError | ws.TransferError)
    assert victim.url in told(error)
    stay_on(1, held, [here, third])
    before = [remote.status()["instance"] for remote in (here, third)]
    fleet[1] = scene.restart(victim, B)
    assert trainer.send(seed=3).version == 2
    check_all_hold(trainer, 2, fleet)
    assert [remote.status()["instance"] for remote in (here, third)] == before


def test_a_killed_member_is_dropped_in_the_same_call(scene: Scene) -> None:
    trainer = scene.trainer()
    here, third = scene.receiver(A, apply="staged"), scene.receiver(C, apply="in_place")
    victim = scene.mortal(B, **SLOW)
    connect(trainer, [here, victim, third], on_failure="drop")
    trainer.send(seed=1)
    begin_to_load(trainer, 2, victim)
    scene.kill(victim)
    report = trainer.end()
    assert list(report.dropped) == [victim.url]
    assert report.version == 2
    check_all_hold(trainer, 2, [here, third])
    again = scene.restart(victim, B)
    trainer.do("call", "add", again.url)
    check_all_hold(trainer, 2, [here, again, third])
    assert trainer.send(seed=3).dropped == {}
    check_all_hold(trainer, 3, [here, again, third])


def test_a_member_that_raises_is_dropped_without_those_that_it_feeds(scene: Scene) -> None:
    trainer = scene.trainer()
    bad, beside, third = scene.receiver(B), scene.mortal(B), scene.receiver(C)
    connect(trainer, [bad, beside, third], on_failure="drop")
    trainer.send(seed=1)
    bad.sabotage("load", "raise")
    report = trainer.send(seed=2)
    assert list(report.dropped) == [bad.url]
    check_all_hold(trainer, 2, [beside, third])
    trainer.do("call", "add", bad.url)
    assert trainer.send(seed=3).dropped == {}
    check_all_hold(trainer, 3, [bad, beside, third])


def test_a_host_is_cut_off_in_the_middle(scene: Scene) -> None:
    trainer = scene.trainer()
    here, third = scene.receiver(A), scene.receiver(C)
    lost = scene.receiver(B, **SLOW)
    fleet = [here, lost, third]
    connect(trainer, fleet)
    trainer.send(seed=1)
    held = [here.digests(), third.digests()]
    begin_to_load(trainer, 2, lost)
    scene.network.hosts[B].cut()
    try:
        error = failure(trainer)
    finally:
        scene.network.hosts[B].heal()
    assert isinstance(error, ws.TransferError | ws.TransportTimeout)
    assert lost.url in told(error)
    stay_on(1, held, [here, third])
    lost.hinder()
    assert trainer.send(seed=3).version == 2
    check_all_hold(trainer, 2, fleet)


def test_a_host_that_is_cut_off_is_dropped(scene: Scene) -> None:
    trainer = scene.trainer()
    here, third = scene.receiver(A), scene.receiver(C)
    lost = scene.receiver(B, **SLOW)
    connect(trainer, [here, lost, third], on_failure="drop")
    trainer.send(seed=1)
    begin_to_load(trainer, 2, lost)
    scene.network.hosts[B].cut()
    try:
        report = trainer.end()
    finally:
        scene.network.hosts[B].heal()
    assert list(report.dropped) == [lost.url]
    check_all_hold(trainer, 2, [here, third])


def test_the_second_worker_of_a_host_is_killed(scene: Scene) -> None:
    trainer = scene.trainer()
    here, leader = scene.receiver(A), scene.receiver(C)
    second = scene.mortal(C, **SLOW)
    fleet = [here, leader, second]
    connect(trainer, fleet)
    trainer.send(seed=1)
    held = [here.digests(), leader.digests()]
    begin_to_load(trainer, 2, second)
    scene.kill(second)
    error = failure(trainer)
    assert second.url in told(error)
    stay_on(1, held, [here, leader])
    fleet[2] = scene.restart(second, C)
    assert trainer.send(seed=3).version == 2
    check_all_hold(trainer, 2, fleet)


def test_the_trainer_dies_in_the_middle_and_two_ranks_elsewhere_take_over(scene: Scene) -> None:
    trainer = scene.trainer()
    fleet = [scene.receiver(A), scene.receiver(B, lease_s=3.0), scene.receiver(C, lease_s=3.0)]
    slow = scene.receiver(B, lease_s=3.0, **SLOW)
    connect(trainer, [*fleet, slow])
    trainer.send(seed=1)
    held = [remote.digests() for remote in fleet]
    begin_to_load(trainer, 2, slow)
    trainer.kill()
    remote = [*fleet[1:], slow]
    wait_until(
        lambda: all(r.status()["state"] != "UPDATING" for r in remote),
        "receivers on all hosts to notice",
    )
    # Whether its bytes were all on their way is up to the kernel, which holds some megabytes.
    assert {r.status()["state"] for r in remote} <= {"READY", "PREPARED", "TORN"}
    assert [r.digests() for r in fleet] == held
    slow.hinder()
    hosts = scene.network.hosts
    crew = scene.stack.enter_context(several_hosts.ranks(hosts[C], hosts[B]))
    for outcome in several_hosts.together(crew, "connect", [r.url for r in [*fleet, slow]]):
        assert not isinstance(outcome, Exception), outcome
    reports = several_hosts.together(crew, "send", 3)
    assert [report.version for report in reports] == [2, 2]
    check_all_hold(crew[0], 2, [*fleet, slow])
    several_hosts.together(crew, "end_sender")


def test_the_trainer_dies_between_finishes(scene: Scene) -> None:
    dying, first, last = scene.trainer(), scene.receiver(B), scene.receiver(C)
    dying.do("connect_to_die", last.url, first.url)
    dying.begin("send", 1)
    dying.process.join(processes.WAIT_S)
    assert dying.process.exitcode in (-signal.SIGKILL & 0xFF, 0xFF & -signal.SIGKILL)
    wait_until(lambda: bool(last.status()["orphaned"]), "the other host to notice")
    assert (first.reading(), last.reading()) == (1, 0)
    assert last.status()["prepared_version"] == 1
    successor = scene.trainer(C)
    connect(successor, [first, last])
    assert first.digests() == last.digests()
    assert (first.reading(), last.reading()) == (1, 1)
    assert successor.send(seed=2).version == 2
    check_all_hold(successor, 2, [first, last])


def test_a_member_that_does_not_join_in_time(scene: Scene) -> None:
    trainer = scene.trainer()
    here, there, third = scene.receiver(A), scene.receiver(B), scene.receiver(C)
    a, b, c = scene.network.hosts
    with several_hosts.half_reachable(a, deaf=b, others=[c]) as address:
        trainer.do("environ", "WEIGHTSYNC_ADDRESS", address)
        started = time.monotonic()
        with pytest.raises(ws.WeightSyncError) as late:
            connect(trainer, [here, there, third])
        assert time.monotonic() - started < ROOM_S
        trainer.do("environ", "WEIGHTSYNC_ADDRESS", "")
    assert isinstance(late.value, ws.TransferTimeout | ws.ConnectError)
    assert there.url in told(late.value)
    connect(trainer, [here, there, third])
    trainer.send(seed=1)
    check_all_hold(trainer, 1, [here, there, third])


def test_a_member_of_an_old_group_does_no_harm(scene: Scene) -> None:
    """It was cut off while the group was made anew without it, and comes back."""
    trainer = scene.trainer()
    here, lost, third = scene.receiver(A), scene.receiver(B), scene.receiver(C)
    connect(trainer, [here, lost, third])
    trainer.send(seed=1)
    scene.network.hosts[B].cut()
    try:
        trainer.do("call", "remove", lost.url)
        assert trainer.send(seed=2).version == 2
    finally:
        scene.network.hosts[B].heal()
    assert trainer.send(seed=3).version == 3
    check_all_hold(trainer, 3, [here, third])
    assert lost.reading() == 1
    trainer.do("call", "add", lost.url)
    check_all_hold(trainer, 3, [here, lost, third])


@pytest.mark.slow
def test_a_trainer_whose_host_is_cut_off_is_noticed(scene: Scene) -> None:
    """Within seconds, although receivers show it all the time that they live."""
    trainer = scene.trainer()
    fleet = [scene.receiver(B), scene.receiver(C), scene.receiver(C)]
    connect(trainer, fleet)
    trainer.send(seed=1)
    assert all(remote.status()["owner"].get("alive", True) for remote in fleet)
    scene.network.hosts[A].cut()
    try:
        for remote in fleet:
            wait_until(
                lambda remote=remote: not remote.status()["owner"].get("alive", True),  # type: ignore[misc]
                f"{remote.url} to notice",
            )
    finally:
        scene.network.hosts[A].heal()
    assert trainer.send(seed=2).version == 2
    check_all_hold(trainer, 2, fleet)
