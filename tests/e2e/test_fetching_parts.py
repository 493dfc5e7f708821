"""Processes that hold parts of tensors, from which others fetch over HTTP; some die meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.crew import Crew, Died, crew
from tests.e2e import several_hosts
from tests.e2e import shard_servers as servers
from tests.e2e.models import digests
from tests.e2e.several_hosts import sent_nbytes
from tests.hosts.namespaces import HostNetwork, host_network, limit_problem
from weightsync.shm.segment import cleanup_stale

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def three() -> Iterator[Crew]:
    with crew(3) as made:
        yield made


@pytest.fixture(scope="module")
def two() -> Iterator[Crew]:
    with crew(2) as made:
        yield made


def trained(kind: str, seed: int) -> nn.Module:
    module = servers.build(kind)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    return module


def zeros(kind: str) -> nn.Module:
    module = servers.build(kind)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module


def full_of(module: nn.Module) -> dict[str, str]:
    return digests(module.state_dict().items())


@pytest.mark.parametrize("backend", ["auto", "tcp"])
def test_from_three_to_a_whole_module_and_to_two(three: Crew, two: Crew, backend: str) -> None:
    """Uneven rows and columns of 3 ranks to those of 2, and to a module with all."""
    urls = three.run(servers.serve, "odd")
    two.run(servers.serve, "odd")
    trainer = trained("odd", 1)
    try:
        with ws.connect(trainer, to=urls) as sender:
            sender.send_weights(5)
        module = zeros("odd")
        report = ws.fetch(module, urls, backend=backend)
        assert full_of(module) == full_of(trainer)
        (receiver,) = report.receivers
        assert (report.version, report.verified, report.summed) == (5, "held", report.tensors)
        assert sorted(receiver.peers) == sorted(urls)
        assert sum(receiver.peers.values()) == report.nbytes
        for one in two.run(servers.fetch, urls, backend):
            assert (one["version"], one["verified"]) == (5, "held")
            assert set(one["receivers"][0]["peers"]) <= set(urls)
        for held, _ in two.run(servers.held):
            assert held == full_of(trainer)
    finally:
        three.run(servers.end)
        two.run(servers.end)


@pytest.mark.parametrize("copies", [1, 2])
def test_a_peer_that_dies_in_the_middle(copies: int) -> None:
    """With a replica of its part the others give all; else it is an error, and nothing changed."""
    trainer, module = trained("wide", 1), zeros("wide")
    receiver = ws.WeightReceiver(module)
    with crew(2 * copies) as peers:
        urls = peers.run(servers.serve, "wide", "auto", copies)
        with ws.connect(trainer, to=urls) as sender:
            sender.send_weights(5)
        peers.run(servers.die_in_transfer, 1)
        if copies == 1:
            with pytest.raises(ws.WeightSyncError, match=urls[1]):
                ws.fetch(receiver, urls, timeout_s=5)
            assert full_of(module) == full_of(zeros("wide"))
            status = receiver.status()
            assert (status.version, status.state, status.senders) == (0, "READY", {})
        else:
            report = ws.fetch(receiver, urls, timeout_s=5)
            assert full_of(module) == full_of(trainer)
            assert urls[1] not in report.receivers[0].peers
            assert sum(report.receivers[0].peers.values()) == report.nbytes
        assert peers.alive() == [rank for rank in range(2 * copies) if rank != 1]
    with ws.connect(trained("wide", 2), to=receiver) as sender:
        sender.send_weights(6)
    assert full_of(module) == full_of(trained("wide", 2))
    receiver.close()


@pytest.mark.parametrize("kind", ["whole", "parts"])
def test_a_joiner_of_a_fleet(three: Crew, two: Crew, kind: str) -> None:
    """It gets what the fleet holds, from all of it, whatever the source has become since."""
    urls = three.run(servers.serve, "odd")
    joining = two.run(servers.serve, "odd")
    trainer, module = trained("odd", 1), zeros("odd")
    receiver = ws.WeightReceiver(module)
    try:
        with ws.connect(trainer, to=urls) as sender:
            sender.send_weights(5)
            sent = full_of(trainer)
            with torch.no_grad():
                for parameter in trainer.parameters():
                    parameter.add_(1)
            targets: list[Any] = [receiver] if kind == "whole" else joining
            for target in targets:
                report = sender.add(target)
                assert report is not None
                assert (report.version, report.verified) == (5, "held")
                assert set(report.receivers[0].peers) <= {*urls, *joining}
                assert len(report.receivers[0].peers) > 1
            held = [full_of(module)] if kind == "whole" else [d for d, _ in two.run(servers.held)]
            assert held == [sent] * len(held)
            sender.send_weights()
            held = [full_of(module)] if kind == "whole" else [d for d, _ in two.run(servers.held)]
            assert held == [full_of(trainer)] * len(held)
    finally:
        receiver.close()
        three.run(servers.end)
        two.run(servers.end)


def test_a_peer_that_is_stopped_is_named_and_serves_again() -> None:
    trainer, module = trained("wide", 1), zeros("wide")
    receiver = ws.WeightReceiver(module)
    with crew(2) as peers:
        urls = peers.run(servers.serve, "wide")
        with ws.connect(trainer, to=urls) as sender:
            sender.send_weights(5)
        peers.run(servers.die_in_transfer, 1, "SIGSTOP")
        with pytest.raises(ws.TransportTimeout, match=f"{urls[1]} sent nothing"):
            ws.fetch(receiver, urls, timeout_s=3)
        assert full_of(module) == full_of(zeros("wide"))
        assert receiver.status().state == "READY"
        peers.wake(1)
        assert ws.fetch(receiver, urls, timeout_s=20).version == 5
        assert full_of(module) == full_of(trainer)
    receiver.close()


def test_a_joiner_that_dies_costs_the_peers_nothing(two: Crew) -> None:
    urls = two.run(servers.serve, "wide")
    trainer = trained("wide", 1)
    try:
        with ws.connect(trainer, to=urls) as sender:
            sender.send_weights(5)
            with crew(1) as joining:
                joining.run(servers.serve, "wide")
                joining.run(servers.die_when_loading)
                (died,) = joining.run(servers.fetch, urls)
                assert isinstance(died, Died)
            sender.send_weights(6)
        module = zeros("wide")
        assert ws.fetch(module, urls).version == 6
        assert full_of(module) == full_of(trainer)
    finally:
        two.run(servers.end)


@pytest.fixture(scope="module")
def network() -> Iterator[HostNetwork]:
    with host_network(5) as made:
        yield made


@pytest.mark.skipif(bool(limit_problem()), reason="needs root, and tc")
@pytest.mark.parametrize("victim", [None, 1])
def test_from_other_hosts_that_share_the_work(network: HostNetwork, victim: int | None) -> None:
    """Two pairs of hosts with halves of the columns; one host is killed in the middle."""
    first, *others = network.hosts
    with ExitStack() as stack:
        stack.callback(network.unlimit)
        trainer = stack.enter_context(several_hosts.trainer(first))
        joining = stack.enter_context(several_hosts.receivers(first))
        hosts = [stack.enter_context(several_hosts.receivers(host)) for host in others]
        peers = [
            host.receiver("http", model="squares", shard=(i % 2, 2)) for i, host in enumerate(hosts)
        ]
        urls = [peer.url for peer in peers]
        trainer.do("connect", urls, model="squares", backend="tcp", delta="off")
        trainer.send(seed=1)
        trainer.do("end_sender")
        module = joining.receiver("http", model="squares")
        before = [sent_nbytes(host) for host in others]
        if victim is not None:
            network.limit("50mbit")  # 17 MB, of which each link has a quarter
            killer = threading.Timer(0.6, hosts[victim].kill)
            killer.start()
            stack.callback(killer.join)
        report = module.fetch(urls, timeout_s=8.0)
        sent = [sent_nbytes(host) - nbytes for host, nbytes in zip(others, before, strict=True)]
        assert (report["path"], report["verified"], report["version"]) == ("tcp", "held", 1)
        assert module.digests() == trainer.do("digests")
        given = report["receivers"][0]["peers"]
        assert sum(given.values()) == report["nbytes"]
        if victim is None:
            assert len(given) == 4
            assert max(sent) < 1.1 * report["nbytes"] / 4
        else:
            assert set(given) == {*urls} - {urls[victim]}
    for host in network.hosts:
        host.call(cleanup_stale)
