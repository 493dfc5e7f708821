"""The demo as users start it: a server, a trainer, a proof; and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
from typer.testing import CliRunner

from examples.demo import __main__ as demo
from weightsync.errors import RemoteError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shm_clean")]

ROOT = Path(__file__).parents[2]
RUN_TIMEOUT_S = 240
END_TIMEOUT_S = 100
STEP_KEYS = {"version", "reward", "nbytes", "sync_s", "gbps", "stall_s", "path"}


def demo_command(out: Path, steps: int) -> list[str]:
    options = ["--model", "tiny", "--steps", str(steps), "--out", str(out)]
    return [sys.executable, "-m", "examples.demo", *options]


@contextmanager
def running_demo(out: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A demo in the middle of its steps, and its two children."""
    process = subprocess.Popen(
        demo_command(out, steps=1000),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step  2"):
                break
        else:
            pytest.fail("the demo ended before its second step")
        yield process, psutil.Process(process.pid).children()
    finally:
        process.kill()
        process.communicate(timeout=END_TIMEOUT_S)


def assert_ended(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=END_TIMEOUT_S)
    assert alive == []


def test_the_demo_trains_sends_and_proves(tmp_path: Path) -> None:
    ended = subprocess.run(
        [*demo_command(tmp_path, steps=10), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "verified: " in ended.stderr
    assert sum(line.startswith("step ") for line in ended.stderr.splitlines()) == 10
    report = msgspec.json.decode((tmp_path / "demo-report.json").read_bytes())
    files = {"report": str(tmp_path / "demo-report.json"), "plot": str(tmp_path / "demo.png")}
    assert msgspec.json.decode(ended.stdout) == report | {"files": files}
    assert (report["model"], report["verified"]) == ("tiny", True)
    assert report["params"] > 0
    steps = report["steps"]
    assert all(set(step) >= STEP_KEYS for step in steps)
    versions = [step["version"] for step in steps]
    assert versions == list(range(versions[0], versions[0] + 10))
    assert {step["nbytes"] for step in steps} == {4 * report["params"]}
    assert {step["verified"] for step in steps} == {"held"}
    assert max(step["logprob_gap"] for step in steps) < 1e-2
    assert steps[-1]["reward"] > 2 * steps[0]["reward"]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_ends_its_children(tmp_path: Path) -> None:
    with running_demo(tmp_path) as (process, children):
        assert len(children) == 2
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=END_TIMEOUT_S)
        assert process.returncode != 0
        assert_ended(children)


def test_a_child_that_dies_ends_the_demo_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a child's end raises is tested with children, in test_child.py."""

    def run(*_: object) -> None:
        raise RemoteError("the trainer ended with status -9: its last words")

    monkeypatch.setattr(demo, "run_demo", run)
    ended = CliRunner().invoke(demo.app, ["--model", "tiny", "--out", str(tmp_path)])
    assert ended.exit_code == 1
    assert "the demo failed: the trainer ended with status -9: its last words" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_where_no_report_can_be_written_it_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run_demo", lambda *_: pytest.fail("it was run"))
    (tmp_path / "file").touch()
    for out, why in (("file", "cannot be made a directory"), ("/proc", "cannot be written")):
        ended = CliRunner().invoke(demo.app, ["--out", str(tmp_path / out)])
        assert ended.exit_code == 2
        assert (ended.stdout, ended.stderr.count("\n")) == ("", 1)
        assert why in ended.stderr
