"""One process of receivers for each file, and nothing left in /dev/shm after any test."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.e2e import processes
from tests.e2e.processes import Host
from weightsync.samehost.segment import find_leftovers, live_segments

GRACE_S = 5.0


@pytest.fixture(scope="module")
def host_process() -> Iterator[Host]:
    with processes.host() as made:
        yield made


@pytest.fixture
def shm_clean() -> Iterator[None]:
    """Fail the test if it leaves segments, its own or a dead process's.

    Unlike the fixture that this one overrides, it does not mind what another living program on
    the machine makes meanwhile.
    """
    own, dead = set(live_segments()), set(find_leftovers())
    yield
    assert not set(live_segments()) - own
    deadline = time.monotonic() + GRACE_S
    while (left := set(find_leftovers()) - dead) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"the test left {sorted(leftover.name for leftover in left)}"


@pytest.fixture
def host(host_process: Host, shm_clean: None) -> Iterator[Host]:
    """The file's receivers; all are closed after each test."""
    yield host_process
    host_process.forget()
