"""Two trainer hosts and four receiving hosts on links with delay and loss, of which some die."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import pytest

from benchmarks.links import set_congestion
from benchmarks.lossy import measure
from tests.hosts.namespaces import HostNetwork, host_network, netns_problem

pytestmark = [
    pytest.mark.skipif(bool(netns_problem()), reason="needs root"),
    pytest.mark.timeout(560),
]
FAR = {"delay_ms": 50.0, "mbit": 10.0}
NEAR = {"delay_ms": 5.0, "mbit": 100.0}
MOST_SLOWER = 1.6


@pytest.fixture(scope="module")
def network() -> Iterator[HostNetwork]:
    with host_network(6) as made:
        for host in made.hosts:
            set_congestion(host, "bbr")
        yield made


@pytest.mark.parametrize(
    ("backend", "number", "links"),
    [
        pytest.param("tcp", 1, NEAR, id="tcp"),
        pytest.param("nixl", 0, NEAR, id="nixl", marks=pytest.mark.soak),
        pytest.param("tcp", 0, FAR, id="tcp-far-0", marks=pytest.mark.soak),
        pytest.param("tcp", 1, FAR, id="tcp-far-1", marks=pytest.mark.soak),
    ],
)
def test_the_rest_commits_or_is_told(
    network: HostNetwork, backend: str, number: int, links: dict[str, float]
) -> None:
    """A receiving host dies: the others commit. A rank's host dies: none does, and all are told.

    `measure` compares every tensor after each update, and raises for anything else.
    """
    done = measure(
        network,
        number,
        Namespace(
            trainers=2,
            hosts=4,
            kill=1,
            loss=0.01,
            congestion="bbr",
            backend=backend,
            bucket_kib=128,
            buckets=32,
            **links,
        ),
    )
    assert done.lost > 0, "no packet was lost"
    assert done.told_s is not None
    if links is FAR:  # elsewhere the processor decides
        assert done.slower < MOST_SLOWER
