"""verl's manager and workers in a network and a process tree of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray import sandbox


@pytest.mark.timeout(900)
def test_verls_manager_moves_weights_by_our_engine() -> None:
    path = Path(__file__).with_name("managed.py")
    options = ("-v", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-o", "timeout=300")
    said = sandbox.run("-m", "pytest", *options, path, timeout_s=860)
    assert "9 passed" in said, said[-5000:]
    print(said[-3000:])
