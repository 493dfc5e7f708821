"""Fleets over several hosts: roads, membership, and what listens where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

import weightsync as ws
from tests.e2e import models, several_hosts
from tests.e2e.processes import Apply, Remote
from tests.e2e.several_hosts import Trainer
from tests.hosts.namespaces import HostNetwork, host_network, netns_problem


@pytest.fixture(scope="module")
def network() -> Iterator[HostNetwork]:
    problem = netns_problem()
    if problem is not None:
        pytest.skip(f"hosts cannot be made here: {problem}")
    with host_network(3) as made:
        yield made


@dataclass
class Fleet:
    """A trainer on the first host, and on each host a process of receivers."""

    trainer: Trainer
    workers: list[list[Remote]]

    @property
    def urls(self) -> list[str]:
        return [worker.url for workers in self.workers for worker in workers]

    @property
    def all(self) -> list[Remote]:
        return [worker for workers in self.workers for worker in workers]


def test_start(network: HostNetwork) -> None:
    import time
    t = time.monotonic()
    with ExitStack() as stack:
        a, b, c = network.hosts
        tr = stack.enter_context(several_hosts.trainer(a))
        hs = [stack.enter_context(several_hosts.receivers(h)) for h in (a, b, c)]
        print(time.monotonic() - t)
        rs = [hs[0].receiver("http", model="plain"), hs[1].receiver("http", model="plain"), hs[2].receiver("http", model="plain"), hs[2].receiver("http", model="plain")]
        print(time.monotonic() - t)
        print(tr.do("connect", [r.url for r in rs]))
        for seed in (1, 2):
            report = tr.send(seed)
            print(report, report.receivers, report.control_messages)
            wanted = tr.do("digests")
            assert all(r.digests() == wanted for r in rs)
        print(several_hosts.listening(a), several_hosts.listening(b))
        print(time.monotonic() - t)
        tr.do("call", "close")
    print(time.monotonic() - t)
