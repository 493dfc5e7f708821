"""Crews of ranks, one of each size for a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crew import Crew, crew


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(4) as made:
        yield made


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Crew]:
    with crew(2) as made:
        yield made
