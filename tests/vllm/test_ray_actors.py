"""Ray actors that hold vLLM's engines, in a network and a process tree of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray import sandbox


@pytest.mark.timeout(1500)
def test_actors_that_are_engines() -> None:
    path = Path(__file__).with_name("ray_actors.py")
    options = ("-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-o", "timeout=300")
    said = sandbox.run("-m", "pytest", *options, path, timeout_s=1440)
    assert "7 passed" in said, said[-5000:]
