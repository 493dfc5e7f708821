"""Fails when updates have become slower, beside a plain copy, than the committed ratios.

    python -m benchmarks.guard              # make bench-check
    python -m benchmarks.guard --commit     # make bench-commit: on a quiet machine

Noise makes a ratio worse and hardly ever better. So a loss counts only if it appears in each of
several tries, and later tries measure only the rows that seemed slower. The committed ratio is the
median of as many tries. On another kind of machine (CPU, cores) than the committed one it compares
nothing, prints this and exits with 0.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.compare import compare
from benchmarks.plan import PRESETS, Preset
from benchmarks.results import Results, Row, machine, same_kind, today

COMMITTED = Path(__file__).with_name("committed.json")
TRIES = 3
ALLOWED = 1.15

Ratios = Mapping[str, float]
Measure = Callable[[Collection[str] | None], Ratios]
"""Returns ratios by row: of all rows, or at least of the named rows; nan for a failed row."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A row that was too slow in each try; `seen` is empty where it had no figure at all."""

    row: str
    committed: float
    seen: list[float]

    def __str__(self) -> str:
        said = ", ".join(f"{ratio:.2f}" for ratio in self.seen) or "no figure"
        return f"{self.row}: {said} x memcpy, where {self.committed:.2f} is committed"


def judge(committed: Ratios, measure: Measure, tries: int = TRIES) -> list[Loss]:
    """Return the rows that are more than 15 % slower than committed in each of `tries` tries."""
    seen: dict[str, list[float]] = {row: [] for row in committed}
    suspects = set(committed)
    for number in range(tries):
        found = measure(suspects if number else None)
        for row in sorted(suspects):
            if not math.isnan(found.get(row, math.nan)):
                seen[row].append(found[row])
                if found[row] <= committed[row] * ALLOWED:
                    suspects.discard(row)
        if not suspects:
            break
    return [Loss(row, committed[row], seen[row]) for row in committed if row in suspects]


def measure_with(preset: Preset, only: Sequence[str] = ()) -> Measure:
    """Return a `Measure` that runs the preset."""

    def measure(wanted: Collection[str] | None) -> Ratios:
        results = Results(preset.name, machine())
        if wanted is None:
            compare(preset, results, None, only)
        else:
            _again(preset, results, wanted, only)
        return ratios(results.rows)

    return measure


def _again(preset: Preset, results: Results, wanted: Collection[str], only: Sequence[str]) -> None:
    """Measure the rivals of the wanted rows."""
    for trial in preset.trials:
        rivals = [
            name
            for name in trial.rivals
            if any(row.startswith(f"{trial.workload} x{trial.readers} {name} ") for row in wanted)
            and (not only or name.startswith(tuple(only)))
        ]
        if rivals:
            compare(replace(preset, trials=(trial,)), results, None, rivals)


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return the median ratio of each row, nan where it failed."""
    return {row.key: math.nan if row.failed else row.ratio.median for row in rows}


def commit(measure: Measure, path: Path, preset: str, tries: int = TRIES) -> None:
    """Write the median over tries of each row, and the machine. Exits where a row failed."""
    found = [measure(None) for _ in range(tries)]
    rows = sorted(set().union(*found))
    failed = [row for row in rows if any(math.isnan(one.get(row, math.nan)) for one in found)]
    if failed or not rows:
        raise SystemExit(
            f"nothing is committed: {len(failed)} of {len(rows)} rows have no figure in one of "
            f"{tries} tries: {', '.join(failed)}"
        )
    said = {
        "preset": preset,
        "date": today(),
        "machine": machine(),
        "ratios": {row: round(statistics.median(one[row] for one in found), 3) for row in rows},
    }
    path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """Return the committed ratios. Exits if there are none."""
    if not path.exists():
        raise SystemExit(f"{path} is missing: `make bench-commit` on a quiet machine writes it")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare with the committed ratios, or commit new ones. Returns 1 for a loss.

    Returns 0 on another kind of machine, where the ratios cannot be compared.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", action="store_true", help="write the ratios of this machine")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="check")
    parser.add_argument("--file", type=Path, default=COMMITTED)
    parser.add_argument("--tries", type=int, default=TRIES)
    parser.add_argument("--rivals", nargs="+", default=["weightsync"], metavar="NAME")
    options = parser.parse_args(arguments)
    measure = measure_with(PRESETS[options.preset], options.rivals)
    if options.commit:
        commit(measure, options.file, options.preset, options.tries)
        print(f"{options.file} is written")
        return 0
    committed = read(options.file)
    if not same_kind(committed["machine"], machine()):
        there = committed["machine"]
        print(
            f"not judged: {options.file} is from another kind of machine ({there['cpu']}, "
            f"{there['cores']} cores); `make bench-commit` makes one here"
        )
        return 0
    losses = judge(committed["ratios"], measure, options.tries)
    for loss in losses:
        print(f"slower in each of {options.tries} tries: {loss}")
    print(f"{len(committed['ratios']) - len(losses)} of {len(committed['ratios'])} rows held")
    return 1 if losses else 0


if __name__ == "__main__":
    raise SystemExit(main())
