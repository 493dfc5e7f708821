"""Comparison of weightsync with other methods: the same model, beside a plain copy.

    python -m benchmarks.compare --preset standard --out results.json

Every trial is a trainer process and its readers, isolated from other trials. The file is written
after each trial. The next run continues an unfinished file and replaces a finished one. A trial
that fails, does not fit into memory or takes too long is a row with its reason. `--pages` also
writes the tables of all rows, when the run ends or is stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import psutil

from benchmarks import isolated, tables
from benchmarks.plan import PRESETS, WORKLOADS, Preset, Trial
from benchmarks.results import Results, Row, machine, same_kind
from benchmarks.rivals.registry import RIVALS
from benchmarks.shapes import Workload

# Beside the weights: interpreters with torch, and the system itself.
SPARE_NBYTES = 1 << 30
PROCESS_NBYTES = 300 << 20
# The kernel frees the /dev/shm of the trial before in its own time.
MEMORY_RETURNS_S = 2.0


def compare(
    preset: Preset,
    results: Results,
    path: Path | None,
    only: Sequence[str] = (),
    *,
    within_s: float = math.inf,
) -> None:
    """Run the trials without rows in `results`; `only` are beginnings of rivals' names.

    No trial starts after `within_s`; raises KeyboardInterrupt if trials are left.
    """
    began = time.monotonic()
    trials = [t for trial in preset.trials if (t := _left(trial, results, only))]
    for number, trial in enumerate(trials, start=1):
        if time.monotonic() - began > within_s:
            raise KeyboardInterrupt
        rows = measure(preset, trial)
        results.rows += rows
        if path is not None:
            results.save(path)
        spent = time.monotonic() - began
        for row in rows:
            print(
                f"[{number}/{len(trials)}, {spent:.0f} s] {describe(row)}",
                file=sys.stderr,
                flush=True,
            )
    results.finished = not only
    if path is not None:
        results.save(path)


def measure(preset: Preset, trial: Trial) -> list[Row]:
    """Run one trial and return a row for each of its rivals and options."""
    workload = WORKLOADS[trial.workload]()
    reasons = {name: _too_large(name, workload, trial.readers) for name in trial.rivals}
    fit = [name for name, reason in reasons.items() if not reason]
    try:
        found, problem = _run(preset, trial, fit) if fit else ({}, "")
    except (OSError, ValueError) as exc:  # a full disk, half a line
        found, problem = {}, f"{type(exc).__name__}: {exc}"
    rows = []
    for name, reason in reasons.items():
        for way in RIVALS[name].ways:
            said = found.get((name, way), {"failed": reason or problem or "no result"})
            rows.append(_row(workload, trial, name, way, said))
    return rows


def describe(row: Row) -> str:
    """Return one line about a row."""
    if row.failed:
        return f"{row.key}: {row.failed}"
    ratio = row.ratio
    return f"{row.key}: {ratio.median:.2f} x memcpy ({ratio.least:.2f} to {ratio.most:.2f})"


def _left(trial: Trial, results: Results, only: Sequence[str]) -> Trial | None:
    rivals = tuple(
        name
        for name in trial.rivals
        if (not only or name.startswith(tuple(only)))
        and results.find(trial.workload, trial.readers, name) is None
    )
    return replace(trial, rivals=rivals) if rivals else None


def _too_large(name: str, workload: Workload, readers: int) -> str:
    """Return why a rival does not fit this machine's memory, an empty string if it fits."""
    needed = RIVALS[name].peak_nbytes(workload.nbytes, readers)
    needed += SPARE_NBYTES + (1 + readers) * PROCESS_NBYTES
    until = time.monotonic() + MEMORY_RETURNS_S
    while needed > (there := psutil.virtual_memory().available) and time.monotonic() < until:
        time.sleep(0.1)
    if needed <= there:
        return ""
    return f"needs about {needed / 2**30:.0f} GiB of memory, {there / 2**30:.0f} GiB are free"


def _run(
    preset: Preset, trial: Trial, rivals: list[str]
) -> tuple[dict[tuple[str, str], dict[str, Any]], str]:
    order = {
        "workload": trial.workload,
        "readers": trial.readers,
        "rivals": rivals,
        "rounds": min(preset.rounds, trial.most_rounds),
        "warm_ups": preset.warm_ups,
        "budget_s": preset.budget_s,
        "aim_s": preset.aim_s,
    }
    with isolated.home() as directory:
        asked, said = directory / "order", directory / "results"
        asked.write_text(json.dumps(order), encoding="utf-8")
        ended = isolated.run_module(
            "benchmarks.rivals.trial",
            asked,
            said,
            directory=directory,
            shm_nbytes=psutil.virtual_memory().total,
            timeout_s=preset.limit_s,
        )
        lines = said.read_text(encoding="utf-8").splitlines() if said.exists() else []
    found = {}
    for line in map(json.loads, lines):
        found[line.pop("rival"), line.pop("way")] = line
    return found, ended.problem


def _row(workload: Workload, trial: Trial, name: str, way: str, said: dict[str, Any]) -> Row:
    return Row(
        workload=workload.name,
        readers=trial.readers,
        rival=name,
        way=way,
        nbytes=workload.nbytes,
        tensors=len(workload.tensors),
        dtype=workload.dtype,
        **said,
    )


def resume(path: Path, preset: str) -> Results:
    """Return the file's rows of an unfinished run of this preset on this machine, else none."""
    here = machine()
    if path.exists():
        found = Results.read(path)
        if not found.finished and found.preset == preset and same_kind(found.machine, here):
            return found
    return Results(preset, here)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison, and print the trials that failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=tuple(PRESETS), default="standard")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument(
        "--rivals",
        nargs="+",
        default=[],
        metavar="NAME",
        help="only rivals whose names begin with these",
    )
    parser.add_argument(
        "--pages", type=Path, metavar="ROOT", help="write docs/performance.md and README.md of ROOT"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no trial after these"
    )
    options = parser.parse_args(arguments)
    results = resume(options.out, options.preset)
    signal.signal(signal.SIGTERM, stop)
    try:
        compare(
            PRESETS[options.preset],
            results,
            options.out,
            options.rivals,
            within_s=options.minutes * 60,
        )
    except KeyboardInterrupt:
        print("stopped: the same command continues from here", file=sys.stderr)
    finally:
        if options.pages is not None and results.rows:
            tables.write(results, options.pages)
    failed = sum(bool(row.failed) for row in results.rows)
    print(f"{len(results.rows)} rows, {failed} without figures: {options.out}")
    return 0 if results.finished or options.rivals else 130


def stop(*_: object) -> NoReturn:
    """Handle SIGTERM like Ctrl-C."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
