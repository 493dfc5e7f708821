"""One process of receivers and crews of ranks for each file; nothing left in /dev/shm by a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crew import Crew, crew
from tests.e2e import processes
from tests.e2e import ranks_at_work as work
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


@pytest.fixture(scope="module")
def crews() -> Iterator[dict[int, Crew]]:
    with crew(2) as two, crew(4) as four:
        yield {2: two, 4: four}


@pytest.fixture
def ranks(request: pytest.FixtureRequest, crews: dict[int, Crew]) -> Iterator[Crew]:
    """Two, or as many as the test's parameter says."""
    made = crews[getattr(request, "param", 2)]
    yield made
    made.run(work.close)
