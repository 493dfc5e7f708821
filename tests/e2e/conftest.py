"""One process of receivers for each file, and nothing left in /dev/shm after any test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e import processes
from tests.e2e.processes import Host


@pytest.fixture(scope="module")
def host_process() -> Iterator[Host]:
    with processes.host() as made:
        yield made


@pytest.fixture
def host(host_process: Host, shm_clean: None) -> Iterator[Host]:
    """The file's receivers; all are closed after each test."""
    yield host_process
    host_process.forget()
