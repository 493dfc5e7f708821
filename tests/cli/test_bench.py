"""`weightsync bench`: its figures, how it ends, and that nothing of it stays behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.running import answer_of, weightsync
from tests.shm.processes import environment
from weightsync.shm.usage import list_segments

WAIT_S = 60

pytestmark = pytest.mark.usefixtures("segments_closed", "shm_clean")

TINY = ("bench", "--nbytes", "64K", "--tensors", "4", "--rounds", "1")


def test_the_figures_are_one_object_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = weightsync(*TINY, "--json", "--out", file)
    figures = answer_of(result)
    assert result.stderr == ""
    assert (figures["nbytes"], figures["tensors"], figures["path"]) == (65536, 4, "shared_memory")
    assert (figures["verified"], len(figures["rounds"]["plain"])) == ("held", 1)
    assert json.loads(file.read_text()) == figures


def test_a_receiving_process_that_fails_says_why_in_one_line() -> None:
    result = weightsync("bench", "--nbytes", "900000000G", "--json")
    error = answer_of(result, 2)["error"]
    assert error["message"].startswith("the receiving process failed: no memory for 966367641")
    assert result.stderr.count("\n") == 1


def children_with_segments(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait until another process has opened a segment of `process`; return all its children."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None
        mine = [found.mapped_by for found in list_segments() if found.owner_alive]
        if any(len(by) > 1 and f"({process.pid})" in " ".join(by) for by in mine):
            return psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    raise TimeoutError("no segment was opened by two processes")


def test_a_bench_that_is_ended_leaves_no_process() -> None:
    line = [sys.executable, "-m", "weightsync", *TINY[:-1], "1000000"]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment())
    others: list[psutil.Process] = []
    try:
        others = children_with_segments(process)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=WAIT_S)
        assert (process.returncode, said) == (143, "")
        _, alive = psutil.wait_procs(others, timeout=WAIT_S)
        assert alive == []
    finally:
        process.kill()
        process.wait(WAIT_S)
        for other in others:
            if other.is_running():
                other.kill()
