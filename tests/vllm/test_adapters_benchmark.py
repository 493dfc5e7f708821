"""`python -m benchmarks.adapters` on a tiny model: the table, and versions in a row."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.vllm.grpo import ROOT

pytestmark = pytest.mark.timeout(400)


def test_the_benchmark_of_adapters() -> None:
    words = ["--tiny", "--turns", "1", "--versions", "10"]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.adapters", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    tensors = int(re.findall(r"tensors in float32: (\d+) bytes", ended.stdout)[0])
    rows = re.findall(r"^\| (the [^|]+) \| (\d+) \| (\d+) \|", ended.stdout, re.MULTILINE)
    nbytes = {name: int(sent) for name, sent, _ in rows}
    assert tensors < nbytes["the adapter, float32"] < 1.02 * tensors
    assert 0.5 * tensors < nbytes["the adapter, bfloat16"] < 0.52 * tensors
    assert {name: int(messages) for name, _, messages in rows}["the adapter, float32"] <= 3
    assert ended.stdout.count(" versions: ") == 10
    assert re.search(
        r"after 10 versions: \d+ kB, \d+ open files, \d+ threads, [23] versions listed",
        ended.stdout,
    )
