"""A sharded trainer whose ranks are on two hosts and gather, and receivers on three."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

import weightsync as ws
from tests.e2e import processes, several_hosts
from tests.e2e.processes import Remote
from tests.e2e.several_hosts import Trainer, segments, together, told
from tests.hosts.fixtures import network
from tests.hosts.namespaces import HostNetwork

__all__ = ["network"]

A, B, C = range(3)
TIMEOUT_S = 5.0


@dataclass
class Sharded:
    """Rank 0 on A, rank 1 on B, and receivers on A, B (two), and C."""

    ranks: list[Trainer]
    fleet: list[Remote]

    def connect(self, **options: object) -> None:
        urls = [remote.url for remote in self.fleet]
        outcomes = together(self.ranks, "connect", urls, timeout_s=TIMEOUT_S, **options)
        assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)]

    def check_all_hold(self, version: int) -> None:
        wanted = self.ranks[0].do("digests")
        for remote in self.fleet:
            assert remote.digests() == wanted, remote.url
            assert remote.reading() == version


@pytest.fixture(scope="module")
def served(network: HostNetwork) -> Iterator[list[processes.Host]]:
    with ExitStack() as stack:
        yield [stack.enter_context(several_hosts.receivers(host)) for host in network.hosts]


@pytest.fixture
def sharded(network: HostNetwork, served: list[processes.Host]) -> Iterator[Sharded]:
    a, b, _ = network.hosts
    places = [served[host].receiver("http", model="plain") for host in (A, B, B, C)]
    with several_hosts.ranks(a, b) as crew:
        together(crew, "gather")
        yield Sharded(crew, places)
    for process in served:
        process.forget()


def test_each_rank_feeds_its_own_host_and_rank_0_the_others(
    network: HostNetwork, sharded: Sharded
) -> None:
    sharded.connect()
    messages = []
    for version in (1, 2, 3):
        first, second = together(sharded.ranks, "send", version)
        assert first == second
        paths = [receiver.path for receiver in first.receivers]
        assert paths == ["shared_memory", "shared_memory", "shared_memory", "tcp"]
        assert [receiver.target for receiver in first.receivers] == [r.url for r in sharded.fleet]
        assert first.verified == "held"
        messages.append(first.control_messages)
        # Each rank packs the model once: one for A and C, the other for B.
        assert 2 * first.nbytes <= first.written_nbytes < 2.2 * first.nbytes
        sharded.check_all_hold(version)
    # A receiver that replies late, on a busy machine, is also asked for its status.
    assert min(messages) == 2 * len(sharded.fleet)
    added = together(sharded.ranks, "call", "remove", sharded.fleet[-1].url)
    assert not [outcome for outcome in added if isinstance(outcome, Exception)]
    gone = sharded.fleet.pop()
    assert {report.path for report in together(sharded.ranks, "send", 4)} == {"shared_memory"}
    sharded.check_all_hold(4)
    assert gone.reading() == 3
    together(sharded.ranks, "end_sender")
    assert [name for host in network.hosts for name in segments(host)] == []


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_slow_receivers_that_cannot_answer_beside_their_work_are_waited_for(
    sharded: Sharded, served: list[processes.Host], apply: str
) -> None:
    """On the host of rank 1, and on one that no rank is on; while they load and while they finish.

    No rank's buckets are waited for meanwhile: the model fits one.
    """
    slow: dict[str, Any] = {"sink": "hook", "apply": apply, "model": "plain", "delay_s": 4.4}
    sharded.fleet[:] = [served[host].receiver("http", **slow) for host in (B, C)]
    urls = [remote.url for remote in sharded.fleet]
    given = {"timeout_s": 2.0, "bucket_nbytes": 16 << 20}
    assert together(sharded.ranks, "connect_one_at_a_time", urls, **given) == [None, None]
    for report in together(sharded.ranks, "send", 1):
        assert [receiver.path for receiver in report.receivers] == ["shared_memory", "tcp"]
        slept = [max(receiver.seconds.values()) for receiver in report.receivers]
        assert min(slept) > 4.0
    sharded.check_all_hold(1)


def test_a_rank_on_another_host_dies(sharded: Sharded) -> None:
    sharded.connect()
    together(sharded.ranks, "send", 1)
    held = [remote.digests() for remote in sharded.fleet]
    first, second = sharded.ranks
    second.kill()
    started = time.monotonic()
    first.begin("send", 2)
    with pytest.raises(ws.TransferError, match="rank 1") as lost:
        first.end()
    assert time.monotonic() - started < processes.WAIT_S / 2, told(lost.value)
    assert [remote.digests() for remote in sharded.fleet] == held
    assert [remote.reading() for remote in sharded.fleet] == [1] * len(held)


def test_a_rank_on_another_host_dies_in_the_middle(
    sharded: Sharded, served: list[processes.Host]
) -> None:
    slow = served[B].receiver("http", sink="hook", apply="in_place", model="plain", delay_s=0.1)
    sharded.fleet.append(slow)
    sharded.connect()
    together(sharded.ranks, "send", 1)
    staged = sharded.fleet[:-1]
    held = [remote.digests() for remote in staged]
    first, second = sharded.ranks
    for rank in sharded.ranks:
        rank.begin("send", 2)
    processes.wait_until(lambda: not slow.status()["may_generate"], "the update to begin")
    second.kill()
    started = time.monotonic()
    with pytest.raises(ws.TransferError, match="rank 1"):
        first.end()
    assert time.monotonic() - started < processes.WAIT_S / 2
    processes.wait_until(
        lambda: all(remote.status()["state"] == "READY" for remote in staged), "the update's end"
    )
    assert [remote.digests() for remote in staged] == held
