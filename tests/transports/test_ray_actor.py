"""The contract of transports, over real actors, in a place of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray import sandbox


@pytest.mark.slow
def test_the_contract_over_real_actors() -> None:
    assert sandbox.run_pytest(Path(__file__).parent / "ray_contract.py", timeout_s=110) > 60
