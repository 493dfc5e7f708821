"""examples/two_hosts.sh, run as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.isolation import TOOL_PATH
from tests.hosts.namespaces import netns_problem

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "two_hosts.sh"
WHOLE_S = 200.0
END_S = 60.0
START_LINE = "weightsync serve: listening on http://10.83.7.2:8000\n"


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "WEIGHTSYNC_TOKEN"}
    return kept | {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PATH": TOOL_PATH,
    }


def named_hosts(pid: int) -> str:
    listed = subprocess.run(
        ["ip", "netns", "list"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=END_S,
        check=True,
    )
    return "\n".join(line for line in listed.stdout.splitlines() if f"-{pid}" in line)


@pytest.fixture
def script(shm_clean: None) -> Iterator[subprocess.Popen[str]]:
    problem = netns_problem()
    if problem is not None:
        pytest.skip(f"hosts cannot be made here: {problem}")
    process = subprocess.Popen(
        [SCRIPT],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=END_S)
        assert named_hosts(process.pid) == ""
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)


def test_three_updates_arrive_on_the_other_host(script: subprocess.Popen[str]) -> None:
    stdout, stderr = script.communicate(timeout=WHOLE_S)
    assert script.returncode == 0, stderr
    lines = stdout.splitlines()
    assert [line.partition(" in ")[0] for line in lines if " MB in " in line] == [
        "version 1",
        "version 2",
        "version 3",
    ]
    assert "path tcp" in lines
    for worker in range(2):  # each reads its shards from both ranks
        assert f"http://10.83.7.2:8000/workers/{worker} read from ranks [0, 1]" in lines
    assert lines[-1] == "the server holds version 3 and is READY"


@pytest.mark.soak
def test_it_cleans_up_when_it_is_stopped(script: subprocess.Popen[str]) -> None:
    assert script.stdout is not None
    assert START_LINE in iter(script.stdout.readline, "")  # other packages may print before
    assert named_hosts(script.pid).count("weightsync-") == 2
    script.send_signal(signal.SIGINT)
    script.communicate(timeout=END_S)
    assert script.returncode == 128 + signal.SIGINT
