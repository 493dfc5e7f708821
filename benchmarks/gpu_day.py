"""Everything here that needs a GPU, in one run of under eight minutes, ordered by worth.

    python -m benchmarks.gpu_day [--out FOLDER] [--only NAME ...] [--again]

Each step is a process of its own with a time limit, and what it prints goes to a file of its own as
it comes, so that a run that is cut off has what it found. A step that has succeeded is not run
again, unless by `--again`: call it once more after a mend. `summary.md` has the verdicts, and below
them what the steps found, with tables as docs/performance.md takes them. Steps whose packages or
devices are not there are named, with what they want. Status 1 means that a step failed.

What travels to the machine is this repository and these wheels, with what they require, beside
torch for CUDA (which brings triton, numpy and jinja2):

    msgspec xxhash                          every step
    numba                                   deltas (with llvmlite)
    pytest pytest-timeout hypothesis psutil tests
    transformers fastapi uvicorn requests   serve, demo and trl
    accelerate                              trl
    rich matplotlib                         demo
    typer                                   demo and doctor

On a machine with one GPU the limits of all steps add up to less than eight minutes; with two, what
is worth least may be left for a second call. `--device cpu` tries the steps that a host without a
GPU can run, at toy size, with `--patience` times as much time; its figures have no meaning.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 480.0
"""The limits of all steps together."""
PATIENCE = 10.0
"""Limits and budget on a host, which may share its cores, in those on a GPU's machine."""
KILL_S = 5.0
SHOWN_LINES = 30
STATE = "state.json"
SUMMARY = "summary.md"
BENCHMARKS = ("msgspec", "xxhash")
TESTS = ("pytest", "pytest_timeout", "hypothesis", "psutil")
SERVING = ("transformers", "fastapi", "uvicorn", "requests")
DELTAS = ("numba",)
TOY = ("--device", "cpu", "--preset", "toy")
_DEMO = ("--model", "tiny", "--out", tempfile.gettempdir())


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command. `toy` is its form without a GPU, None where it has none."""

    name: str
    title: str
    words: Sequence[str]
    limit_s: float
    toy: Sequence[str] | None = None
    packages: Sequence[str] = BENCHMARKS
    gpus: int = 1


STEPS = (
    Step(
        name="updates",
        title="Qwen3-8B between two processes on one GPU, packed and not, verified and not",
        words=("-m", "benchmarks.gpu", "--models", "qwen3-8b", "--updates", "7"),
        toy=("-m", "benchmarks.gpu", *TOY, "--updates", "1"),
        limit_s=75,
    ),
    Step(
        name="peer",
        title="Qwen3-8B from one GPU to another one of this machine, over NVLink or PCIe",
        words=("-m", "benchmarks.gpu", "--models", "qwen3-8b", "--peer", "--updates", "5"),
        limit_s=70,
        gpus=2,
    ),
    Step(
        name="peer-tests",
        title="the tests that need two GPUs",
        words=(
            *("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"),
            *("-k", "two_gpus or second_gpu", "tests/gpu"),
        ),
        limit_s=60,
        packages=(*BENCHMARKS, *TESTS),
        gpus=2,
    ),
    Step(
        name="rings",
        title="packed updates of Qwen3-8B by one to four buckets in 1 GiB",
        words=("-m", "benchmarks.gpu", "--models", "qwen3-8b", "--rings", "--updates", "5"),
        toy=("-m", "benchmarks.gpu", *TOY, "--rings", "--updates", "1"),
        limit_s=60,
    ),
    Step(
        name="deltas",
        title="deltas of Qwen3-8B, their passes, and send_async",
        words=("-m", "benchmarks.gpu_deltas", "--updates", "5"),
        toy=("-m", "benchmarks.gpu_deltas", *TOY),
        limit_s=65,
        packages=(*BENCHMARKS, *DELTAS),
    ),
    Step(
        name="tests",
        title="the tests that need a GPU",
        words=("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-x"),
        limit_s=100,
        packages=(*BENCHMARKS, *TESTS, *DELTAS),
    ),
    Step(
        name="serve",
        title="weightsync serve on the GPU, a Llama of 1 GB: update, sleep, wake and update",
        words=("-m", "benchmarks.sleep", "--mbytes", "1000", "--device", "cuda", "--rounds", "3"),
        toy=("-m", "benchmarks.sleep", "--mbytes", "4", "--rounds", "1", "--warm-ups", "0"),
        limit_s=45,
        packages=(*BENCHMARKS, *SERVING),
    ),
    Step(
        name="many",
        title="18,867 tensors between two processes on one GPU",
        words=("-m", "benchmarks.gpu", "--models", "qwen3-30b-a3b", "--updates", "3"),
        limit_s=45,
    ),
    Step(
        name="trl",
        title="the callback of transformers' and TRL's trainers on the GPU",
        words=("-m", "benchmarks.gpu_trl"),
        toy=("-m", "benchmarks.gpu_trl", "--device", "cpu", "--steps", "2", "--hidden", "64"),
        limit_s=25,
        packages=(*BENCHMARKS, "transformers", "accelerate"),
    ),
    Step(
        name="demo",
        title="training by reinforcement, trainer and server on one GPU",
        words=("-m", "examples.demo", *_DEMO, "--steps", "3", "--device", "cuda"),
        toy=("-m", "examples.demo", *_DEMO, "--steps", "1"),
        limit_s=30,
        packages=(*BENCHMARKS, *SERVING, "typer", "rich", "matplotlib"),
    ),
    Step(
        name="doctor",
        title="what the machine can do",
        words=("-m", "weightsync", "doctor"),
        toy=("-m", "weightsync", "doctor"),
        limit_s=15,
        packages=(*BENCHMARKS, "typer"),
    ),
    Step(
        name="hosts",
        title="from a GPU through the memory of its host",
        words=("-m", "benchmarks.gpu_hosts", "--updates", "3", "--backends", "ipc,tcp"),
        toy=(
            *("-m", "benchmarks.gpu_hosts", "--device", "cpu", "--mib", "8"),
            *("--updates", "1", "--backends", "ipc,tcp"),
        ),
        limit_s=20,
    ),
)


@dataclass
class Outcome:
    """What came of a step: `passed`, `failed`, `late` or `left out`, and why."""

    name: str
    verdict: str
    seconds: float = 0.0
    why: str = ""


@dataclass
class Day:
    """The outcomes so far, kept in a folder."""

    folder: Path
    about: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def begin(cls, folder: Path, about: str) -> Day:
        """Return what is known of an earlier run on such a machine, if there was one."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / STATE
        said = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if said.get("about") != about:
            return cls(folder, about)
        known = {one["name"]: Outcome(**one) for one in said["outcomes"]}
        return cls(folder, about, known)

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome, and write the summary anew."""
        self.outcomes[outcome.name] = outcome
        said = {"about": self.about, "outcomes": [asdict(o) for o in self.outcomes.values()]}
        (self.folder / STATE).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
        (self.folder / SUMMARY).write_text(self.summary(), encoding="utf-8")

    def summary(self) -> str:
        """Return the verdicts, and the tables that the steps printed."""
        lines = [self.about, ""]
        titles = {step.name: step.title for step in STEPS}
        for one in self.outcomes.values():
            why = f": {one.why}" if one.why else ""
            lines.append(f"- {one.verdict} in {one.seconds:.0f} s: {titles[one.name]}{why}")
        for name in self.outcomes:
            found = _found(self.output(name))
            if found:
                lines += ["", f"## {titles[name]}", "", *found]
        return "\n".join(lines) + "\n"

    def output(self, name: str) -> Path:
        """Return the file of what a step prints."""
        return self.folder / f"{name}.txt"


def _found(path: Path) -> list[str]:
    """Return the tables of an output, each after the line before it; its last lines without one."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept: list[str] = []
    for before, line in itertools.pairwise(["", *lines]):
        if line.startswith("|"):
            if before and not before.startswith("|"):
                kept += [before, ""]
            kept.append(line)
    return kept or (["```text", *lines[-SHOWN_LINES:], "```"] if lines else [])


def missing(step: Step, device: str) -> str:
    """Return what a step wants that is not there; empty where it can run."""
    packages = [name for name in step.packages if importlib.util.find_spec(name) is None]
    if packages:
        return f"needs {', '.join(packages)}"
    if device == "cpu":
        return "" if step.toy is not None else "needs a GPU"
    found = torch.cuda.device_count()
    return "" if found >= step.gpus else f"needs {step.gpus} GPUs, and {found} are there"


def run(step: Step, device: str, output: Path, limit_s: float) -> Outcome:
    """Run a step, and its children, for at most `limit_s`."""
    words = step.words if device == "cuda" else step.toy
    assert words is not None
    begin = time.monotonic()
    with output.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
    seconds = time.monotonic() - begin
    if code is None:
        return Outcome(step.name, "late", seconds, f"not done in {limit_s:.0f} s")
    if code:
        last = output.read_text(encoding="utf-8").strip().rpartition("\n")[2]
        return Outcome(step.name, "failed", seconds, f"status {code}: {last[:200]}")
    return Outcome(step.name, "passed", seconds)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a step and what it started, which is in a session of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        try:
            child.wait(KILL_S)
        except subprocess.TimeoutExpired:
            continue
    child.wait()


def about(device: str) -> str:
    """Return what the machine is, as the summary says it."""
    if device == "cpu":
        return f"CPU at toy size: figures without a meaning; torch {torch.__version__}"
    count = torch.cuda.device_count()
    return (
        f"{count} x {torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}, Python {sys.version.split()[0]}"
    )


def main(arguments: Sequence[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    """Run the steps that are left, within the budget."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-day"))
    parser.add_argument("--only", nargs="+", choices=[step.name for step in steps])
    parser.add_argument("--again", action="store_true", help="also what has passed")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S)
    parser.add_argument(
        "--patience", type=float, help=f"times the limits and the budget; {PATIENCE:g} on a CPU"
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU; --device cpu tries the same steps without")
    day = Day.begin(options.out, about(options.device))
    patience = options.patience or (PATIENCE if options.device == "cpu" else 1.0)
    ends = time.monotonic() + options.budget_s * patience
    results: dict[str, Outcome] = {}
    for step in steps:
        if options.only and step.name not in options.only:
            continue
        known = day.outcomes.get(step.name)
        if known is not None and known.verdict == "passed" and not options.again:
            results[step.name] = known
            continue
        left = ends - time.monotonic()
        why = missing(step, options.device)
        if not why and left <= 0:
            why = "no time was left"
        if why:
            outcome = Outcome(step.name, "left out", 0.0, why)
        else:
            limit_s = min(step.limit_s * patience, left)
            outcome = run(step, options.device, day.output(step.name), limit_s)
        results[step.name] = outcome
        day.add(outcome)
        print(
            f"{outcome.verdict:<8} {outcome.seconds:6.1f} s  {step.name}  {outcome.why}", flush=True
        )
    print(f"\n{day.folder / SUMMARY}")
    return int(any(one.verdict in ("failed", "late") for one in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
