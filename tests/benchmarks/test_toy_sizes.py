"""Every benchmark still runs, at a size that says nothing about speed: in `make soak`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.namespaces import limit_problem, netns_problem

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.soak
WAIT_S = 500.0  # a server is several processes, and a busy machine starts them slowly

TOYS: dict[str, list[str]] = {
    "shards": ["--mib", "4", "--rounds", "1", "--only", "fsdp2", "tp2", "gather"],
    "profile_update": ["--mib", "4", "--tensors", "8", "--rounds", "1"],
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
    "quantized": ["--mib", "8", "--rounds", "1"],
    "sleep": ["--model", "tiny", "--rounds", "1"],
    "lossy": ["--hosts", "2", "--kill", "1", "--delay-ms", "2", "--mbit", "100", "--rounds", "1"],
}
SAID = {
    "fleet": "packed",
    "profile_update": "| copy | ",
    "quantized": "Over 1gbit",
    "shards": "Two workers take",
    "scaling": "1000 Mbit/s",
    "lossy": "| medians |",
    "sleep": "x the update alone",
}
SERVING = ["--mbytes", "2", "--rounds", "1", "--repeats", "1", "--seconds", "1", "--side", "64"]
FOUND = {
    "updates": {"stall, 2 MB", "tokens"},
    "latency": {"tiny", "2 MB"},
    "health": {"per_s_of_one", "per_s_of_two", "ratio", "ratio_the_cores_allow"},
    "images": {"latency_ratio", "rate_ratio"},
}


@pytest.mark.timeout(560)
@pytest.mark.parametrize("name", TOYS)
def test_a_benchmark_runs(name: str, shm_clean: None) -> None:
    if name in ("scaling", "lossy", "quantized") and (
        problem := netns_problem() or limit_problem()
    ):
        pytest.skip(f"hosts cannot be made here: {problem}")
    assert SAID[name] in run(name, *TOYS[name])


@pytest.mark.timeout(560)
@pytest.mark.parametrize("part", FOUND)
def test_each_part_of_the_benchmark_of_serving_runs(part: str, shm_clean: None) -> None:
    found = json.loads(run("serving", "--parts", part, *SERVING, "--json").splitlines()[-1])[part]
    assert set(found) >= FOUND[part]
    assert all(value > 0 for name, value in numbers_of(found) if is_of_a_quantity(name))


def is_of_a_quantity(name: str) -> bool:
    """Whether it cannot be negative, as the difference of two requests can."""
    return ("ratio" in name or "per_s" in name) and name != "tokens_per_s"


def numbers_of(found: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from numbers_of(value)
        elif isinstance(value, int | float):
            yield name, value


def run(name: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
