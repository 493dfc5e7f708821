"""Hosts as a fixture; a conftest.py or test file imports the name from here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.hosts.namespaces import SHM_NBYTES, HostNetwork, host_network, netns_problem

MakeNetwork = Callable[..., HostNetwork]


@pytest.fixture
def make_network() -> Iterator[MakeNetwork]:
    """A function that makes a network of hosts for one test; skips where hosts cannot be made."""
    problem = netns_problem()
    if problem is not None:
        pytest.skip(f"hosts cannot be made here: {problem}")
    with ExitStack() as stack:

        def make(count: int, *, shm_nbytes: int = SHM_NBYTES) -> HostNetwork:
            return stack.enter_context(host_network(count, shm_nbytes=shm_nbytes))

        yield make


@pytest.fixture(scope="module")
def network() -> Iterator[HostNetwork]:
    """Three hosts for all tests of a file; skips where hosts cannot be made."""
    problem = netns_problem()
    if problem is not None:
        pytest.skip(f"hosts cannot be made here: {problem}")
    with host_network(3) as made:
        yield made
