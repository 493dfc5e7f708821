"""One node of Ray for all files that a run in a sandbox names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def node() -> Iterator[None]:
    """Only within `sandbox.run`, which keeps Ray from the network and ends what it started."""
    import ray

    from tests.ray import sandbox

    sandbox.start()
    yield
    ray.shutdown()
