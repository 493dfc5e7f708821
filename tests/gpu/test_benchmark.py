"""The benchmark runs, at toy size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 110.0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.usefixtures("shm_clean")
def test_the_benchmark_ends_with_its_table(device: str, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    sizes = ["--nbytes", "400000", "--tensors", "25", "--updates", "2"]
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", device, *sizes]
    done = subprocess.run(
        [*command, "--json", str(results)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ways = [line.split()[0] for line in done.stdout.splitlines()[-5:]]
    assert ways == ["unpacked", "unpacked", "packed", "packed", "copy"]
    found = json.loads(results.read_text(encoding="utf-8"))
    assert found["tensors"] == 25
    assert abs(found["nbytes"] - 400_000) < 4_000
    assert [row["verified"] == "none" for row in found["rows"]] == [False, True, False, True]
    assert all(row["times_copy"] > 0 for row in found["rows"])
    assert len({row["road"] for row in found["rows"]}) == 1
