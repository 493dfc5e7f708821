"""The benchmark runs, at toy size, and says which bars are met."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import UNMET, Result, Row
from benchmarks.gpu_table import bars_of, table

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 110.0
RING_NBYTES = 512 << 20


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.soak), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.usefixtures("shm_clean")
def test_the_benchmark_ends_with_its_bars(device: str, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", device, "--preset", "toy"]
    done = subprocess.run(
        [*command, "--updates", "1", "--strict", "--json", str(results)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode in {0, UNMET}, done.stderr
    (found,) = json.loads(results.read_text(encoding="utf-8"))["results"]
    assert (done.returncode == UNMET) == any(not bar["met"] for bar in found["bars"])
    last = done.stdout.splitlines()[-len(found["bars"]) :]
    assert [line.split("  ")[0] for line in last] == [bar["name"] for bar in found["bars"]]
    assert [line.endswith("NOT MET") for line in last] == [not bar["met"] for bar in found["bars"]]
    assert found["tensors"] == 40
    ways = [(row["way"], row["verified"] != "none") for row in found["rows"]]
    assert ways[:-1] == list(itertools.product(["unpacked", "packed"], [True, False]))
    assert ways[-1] == ("unpacked, written", True)
    assert all(0 < row["data_s"] <= row["total_s"] for row in found["rows"])
    assert all((row["slots"] > 0) is (row["way"] == "packed") for row in found["rows"])
    assert found["rival_s"] > 0
    if device == "cuda":
        assert found["fused"]
        assert {row["clock"] for row in found["rows"]} == {"events"}
        assert 0 < found["event_handles"] <= found["handles"]


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.soak), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.usefixtures("shm_clean")
def test_the_benchmark_of_hosts_measures_every_way(device: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_hosts", "--device", device, "--mib", "8"]
    done = subprocess.run(
        [*command, "--updates", "1", "--backends", "ipc,tcp"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|")]
    places = 2 if device == "cuda" else 1
    ways = ["shared memory"] * 2 + ["tcp"] * 2 * places + ["tcp, delta of 1 %"]
    assert [row for row in rows if row in ways] == ways


def row_of(way: str, verified: str, of_copy_rate: float, control_s: float) -> Row:
    data_s = 0.1 / of_copy_rate
    return Row(
        way=way,
        path="cuda_ipc",
        verified=verified,
        data_s=data_s,
        total_s=data_s + control_s,
        clock="events",
        of_copy_rate=of_copy_rate,
        sender_pass_s=0.05,
        slots=60 if way == "packed" else 0,
        trainer_extra=RING_NBYTES,
        receiver_extra=0,
    )


def good() -> Result:
    """Every figure a little better than its bar."""
    return Result(
        title="a model",
        nbytes=1 << 34,
        tensors=399,
        copy_s=0.1,
        rival_s=1.0,
        kernels={
            "one launch, copy": 0.1,
            "one launch, copy and fingerprint": 0.109,
            "one launch, fingerprint only": 0.059,
        },
        fused=True,
        handles=4,
        event_handles=4,
        largest_group=1 << 28,
        rows=[
            row_of("unpacked", "held", 0.86, 0.009),
            row_of("unpacked", "none", 0.86, 0.009),
            row_of("packed", "held", 0.36, 0.009),
            row_of("packed", "none", 0.36, 0.009),
        ],
    )


def test_bars_that_are_met() -> None:
    assert all(bar.met for bar in bars_of(good(), ring_nbytes=RING_NBYTES))
    assert "NOT MET" not in table(good(), ring_nbytes=RING_NBYTES)


def test_bars_that_are_not() -> None:
    bad = replace(
        good(),
        rival_s=0.8,
        kernels={
            "one launch, copy": 0.1,
            "one launch, copy and fingerprint": 0.111,
            "one launch, fingerprint only": 0.061,
        },
        rows=[
            replace(
                row_of(row.way, row.verified, row.of_copy_rate - 0.02, 0.011), trainer_extra=1 << 30
            )
            for row in good().rows
        ],
    )
    assert not [bar.name for bar in bars_of(bad, ring_nbytes=RING_NBYTES) if bar.met]
    assert table(bad, ring_nbytes=RING_NBYTES).count("NOT MET") == 10
