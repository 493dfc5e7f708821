"""Every benchmark still runs, at a size that says nothing about speed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.namespaces import limit_problem, netns_problem

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120.0

TOYS: dict[str, list[str]] = {
    "distributed": ["--mib", "4", "--tensors", "8", "--rounds", "1"],
    "fleet": ["--mbytes", "4", "--receivers", "2", "--rounds", "1"],
    "scaling": [
        "--mib",
        "4",
        "--tensors",
        "8",
        "--rounds",
        "1",
        "--rates",
        "1gbit",
        "--hosts",
        "2",
    ],
}
SAID = {"distributed": "broadcast", "fleet": "packed", "scaling": "1000 Mbit/s"}


@pytest.mark.parametrize("name", TOYS)
def test_a_benchmark_runs(name: str, shm_clean: None) -> None:
    if name == "scaling" and (problem := netns_problem() or limit_problem()):
        pytest.skip(f"hosts cannot be made here: {problem}")
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *TOYS[name]],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert SAID[name] in done.stdout
