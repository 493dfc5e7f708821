"""Hosts that serve each other: one that dies or stands still in the middle costs only itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e import processes, several_hosts
from tests.e2e.processes import Remote
from tests.e2e.several_hosts import Trainer, sent_again_nbytes, sent_nbytes
from tests.e2e.test_hosts_faults import check_all_hold
from tests.hosts.namespaces import HostNetwork, host_network, limit_problem
from weightsync.shm.segment import cleanup_stale

pytestmark = [
    pytest.mark.skipif(bool(limit_problem()), reason="needs root, and tc"),
    pytest.mark.timeout(120),
]
TIMEOUT_S = 8.0
BUCKET_NBYTES = 128 << 10
RATE = "100mbit"
"""The 16.8 MB of the model take 1.3 s on a link."""
MIDDLE_S = 0.4
backends = pytest.mark.parametrize("backend", ["tcp", "nixl"])


@pytest.fixture(scope="module")
def network() -> Iterator[HostNetwork]:
    with host_network(4) as made:
        yield made


class Chain:
    """A trainer on the first host, and a receiver on each other one, which may die."""

    def __init__(self, network: HostNetwork, stack: ExitStack, *, count: int = 3) -> None:
        self.network, self._stack = network, stack
        self.trainer: Trainer = stack.enter_context(several_hosts.trainer(network.hosts[0]))
        self.hosts: list[processes.Host] = []
        self.receivers: list[Remote] = []
        for host in network.hosts[1 : 1 + count]:
            self.hosts.append(stack.enter_context(several_hosts.receivers(host)))
            self.receivers.append(self.hosts[-1].receiver("http", model="wide"))

    def connect(self, **options: object) -> None:
        given = {
            "timeout_s": TIMEOUT_S,
            "bucket_nbytes": BUCKET_NBYTES,
            "model": "wide",
            "backend": "tcp",
            "on_failure": "drop",
            **options,
        }
        self.trainer.do("connect", [remote.url for remote in self.receivers], **given)

    def begin(self, seed: int) -> None:
        """Send over slow links, and return in the middle."""
        self.network.limit(RATE)
        self.trainer.begin("send", seed)
        time.sleep(MIDDLE_S)


@pytest.fixture
def chain(network: HostNetwork) -> Iterator[Chain]:
    with ExitStack() as stack:
        yield Chain(network, stack)
        network.unlimit()
    for host in network.hosts:
        host.call(cleanup_stale)


@pytest.mark.parametrize(
    ("backend", "victims"),
    [("tcp", [0]), ("tcp", [1]), ("tcp", [2]), ("tcp", [0, 1]), ("nixl", [0]), ("nixl", [1])],
    ids=str,
)
def test_hosts_that_are_killed_cost_only_themselves(
    chain: Chain, backend: str, victims: list[int]
) -> None:
    # Rings that hold more than connections buffer: else the sender is asked for the rest.
    chain.connect(backend=backend, num_buckets=32)
    chain.trainer.send(seed=1)
    before = sent_nbytes(chain.network.hosts[0])
    chain.begin(2)
    for victim in victims:
        chain.hosts[victim].kill()
    report = chain.trainer.end()
    sent = sent_nbytes(chain.network.hosts[0]) - before
    assert list(report.dropped) == [chain.receivers[victim].url for victim in victims]
    assert report.version == 2
    assert sent < 1.3 * report.nbytes, "no other host starts again"
    rest = [remote for i, remote in enumerate(chain.receivers) if i not in victims]
    check_all_hold(chain.trainer, 2, rest)
    chain.network.unlimit()
    chain.trainer.send(seed=3)
    check_all_hold(chain.trainer, 3, rest)


def test_hosts_that_are_killed_side_by_side_are_not_waited_for(chain: Chain) -> None:
    """The host before them holds chunks for a follower that may come: 180 s here."""
    chain.connect(timeout_s=240.0)
    chain.trainer.send(seed=1)
    chain.begin(2)
    for victim in (1, 2):
        chain.hosts[victim].kill()
    report = chain.trainer.end()
    assert list(report.dropped) == [remote.url for remote in chain.receivers[1:]]
    check_all_hold(chain.trainer, 2, chain.receivers[:1])


def test_a_host_that_stands_still_is_gone_round(chain: Chain) -> None:
    chain.connect()
    chain.trainer.send(seed=1)
    chain.begin(2)
    with stopped(chain.hosts[1]):
        report = chain.trainer.end()
    assert list(report.dropped) == [chain.receivers[1].url]
    rest = [chain.receivers[0], chain.receivers[2]]
    check_all_hold(chain.trainer, 2, rest)


@contextmanager
def stopped(host: processes.Host) -> Iterator[None]:
    """Stop the process of receivers, which is a child of the one that entered its host."""
    pid = host.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    processes.stop(int(child))
    try:
        yield
    finally:
        os.kill(int(child), signal.SIGCONT)


def test_one_that_joins_disturbs_nobody(network: HostNetwork) -> None:
    """Nobody else hears of it: no new connection, no new memory."""
    with ExitStack() as stack:
        chain = Chain(network, stack)
        *present, joining = chain.receivers
        chain.receivers = present
        chain.connect()
        chain.trainer.send(seed=1)
        before = [remote.status()["senders"] for remote in present]
        chain.trainer.do("call", "add", joining.url)
        check_all_hold(chain.trainer, 1, [*present, joining])
        chain.trainer.send(seed=2)
        check_all_hold(chain.trainer, 2, [*present, joining])
        assert [remote.status()["senders"] for remote in present] == before
        chain.trainer.do("call", "remove", present[0].url)
        chain.trainer.send(seed=3)
        check_all_hold(chain.trainer, 3, [present[1], joining])
    for host in network.hosts:
        host.call(cleanup_stale)


@pytest.mark.parametrize(
    "count", [1, 3, *(pytest.param(count, marks=pytest.mark.soak) for count in (2, 4, 8))]
)
@backends
def test_the_bytes_leave_the_trainer_once(network: HostNetwork, backend: str, count: int) -> None:
    with ExitStack() as stack:
        if count >= len(network.hosts):
            network = stack.enter_context(host_network(count + 1))
        chain = Chain(network, stack, count=count)
        chain.connect(backend=backend)
        chain.trainer.send(seed=1)
        before, again = sent_nbytes(network.hosts[0]), sent_again_nbytes(network.hosts[0])
        report = chain.trainer.send(seed=2)
        sent = sent_nbytes(network.hosts[0]) - before
        sent -= sent_again_nbytes(network.hosts[0]) - again
        print(f"{backend}, {count} hosts: {sent / report.nbytes:.4f} x the model left the trainer")
        assert report.nbytes < sent < 1.02 * report.nbytes
        check_all_hold(chain.trainer, 2, chain.receivers)
