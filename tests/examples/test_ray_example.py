"""The Ray example, run as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray import sandbox

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_actors.py"


@pytest.mark.soak
def test_trainer_and_rollouts() -> None:
    said = sandbox.run(EXAMPLE, timeout_s=100)
    for version in (1, 2, 3):
        line = f"version {version}: the rollout's answer is the trainer's: True"
        assert said.count(line) == 2, said
    assert len(EXAMPLE.read_text().splitlines()) < 80
