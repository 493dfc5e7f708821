"""One tiny model for all tests of the rollout package."""

from __future__ import annotations

import pytest

from weightsync.serve.model import LoadedModel, make_tiny_model


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    """A tiny model that tests share and do not change."""
    return make_tiny_model()
