"""The run of all that needs a GPU: limits, what is run again, the summary; its steps on a CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks import gpu_day
from benchmarks.gpu_day import SUMMARY, Step

TABLE = 'print("of a test"); print("| a |"); print("|---|"); print("| 1 |")'


def step(name: str, code: str, *, limit_s: float = 60.0, packages: tuple[str, ...] = ()) -> Step:
    words = ("-c", code)
    return Step(
        name=name, title=f"step {name}", words=words, toy=words, limit_s=limit_s, packages=packages
    )


def day(folder: Path, *steps: Step, more: tuple[str, ...] = ()) -> tuple[int, dict[str, str]]:
    """Run steps, and return the status and the verdicts."""
    code = gpu_day.main(["--device", "cpu", "--out", str(folder), *more], steps)
    said = json.loads((folder / gpu_day.STATE).read_text(encoding="utf-8"))
    return code, {one["name"]: one["verdict"] for one in said["outcomes"]}


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day, "KILL_S", 0.5)


def test_every_step_has_a_verdict_and_the_summary_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = (
        step("good", TABLE),
        step("bad", 'import sys; print("why"); sys.exit(3)'),
        step("wants", "", packages=("a_package_that_is_not_there",)),
        Step(name="gpu", title="step gpu", words=("-c", ""), limit_s=1, packages=()),
    )
    monkeypatch.setattr(gpu_day, "STEPS", steps)
    code, verdicts = day(tmp_path, *steps)
    assert code == 1
    assert verdicts == {"good": "passed", "bad": "failed", "wants": "left out", "gpu": "left out"}
    summary = (tmp_path / SUMMARY).read_text(encoding="utf-8")
    assert "step bad: status 3: why" in summary
    assert "step wants: needs a_package_that_is_not_there" in summary
    assert "step gpu: needs a GPU" in summary
    assert "## step good\n\nof a test\n\n| a |\n|---|\n| 1 |\n" in summary
    assert "## step bad\n\n```text\nwhy\n```\n" in summary


def test_what_passed_is_not_run_again_and_what_failed_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = tmp_path / "count"
    counts = f"open({str(count)!r}, 'a').write('x')"
    flag = tmp_path / "mended"
    steps = (
        step("good", counts),
        step("bad", f"import os, sys; sys.exit(not os.path.exists({str(flag)!r}))"),
    )
    monkeypatch.setattr(gpu_day, "STEPS", steps)
    assert day(tmp_path, *steps) == (1, {"good": "passed", "bad": "failed"})
    flag.touch()
    assert day(tmp_path, *steps) == (0, {"good": "passed", "bad": "passed"})
    assert count.read_text() == "x"
    day(tmp_path, *steps, more=("--again", "--only", "good"))
    assert count.read_text() == "xx"


def test_a_step_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "print('begun', flush=True)\n"
        "time.sleep(600)"
    )
    steps = (step("hangs", code, limit_s=8.0),)
    monkeypatch.setattr(gpu_day, "STEPS", steps)
    assert day(tmp_path, *steps, more=("--patience", "1")) == (1, {"hangs": "late"})
    assert "begun" in (tmp_path / "hangs.txt").read_text(encoding="utf-8")
    deadline = time.monotonic() + 30
    while _lives(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(int(pid.read_text()))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_no_step_begins_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = (step("first", "pass"),)
    monkeypatch.setattr(gpu_day, "STEPS", steps)
    assert day(tmp_path, *steps, more=("--budget-s", "0")) == (0, {"first": "left out"})


def test_another_machine_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (step("first", "pass"),)
    monkeypatch.setattr(gpu_day, "STEPS", steps)
    day(tmp_path, *steps)
    state = tmp_path / gpu_day.STATE
    said = json.loads(state.read_text(encoding="utf-8"))
    state.write_text(json.dumps(said | {"about": "another GPU"}), encoding="utf-8")
    assert gpu_day.Day.begin(tmp_path, gpu_day.about("cpu")).outcomes == {}


@pytest.mark.soak
def test_the_steps_run_on_a_host(tmp_path: Path) -> None:
    code, verdicts = day(tmp_path, *gpu_day.STEPS)
    assert code == 0
    assert [name for name, verdict in verdicts.items() if verdict == "passed"] == [
        one.name for one in gpu_day.STEPS if one.toy is not None
    ]


def test_the_limits_of_one_gpu_add_up_to_the_budget() -> None:
    assert sum(one.limit_s for one in gpu_day.STEPS if one.gpus == 1) <= gpu_day.BUDGET_S


def test_a_host_has_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (step("slow", "import time; time.sleep(1.5)", limit_s=0.5),)
    monkeypatch.setattr(gpu_day, "STEPS", steps)
    assert day(tmp_path, *steps, more=("--patience", "1")) == (1, {"slow": "late"})
    assert day(tmp_path, *steps, more=("--patience", "100")) == (0, {"slow": "passed"})


def test_all_steps_name_modules_that_exist() -> None:
    for one in gpu_day.STEPS:
        module = one.words[1]
        found = Path(gpu_day.ROOT, *module.split("."))
        assert module == "pytest" or found.with_suffix(".py").exists() or found.is_dir()
