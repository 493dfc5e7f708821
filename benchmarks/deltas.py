"""How long an update takes that carries only what changed, beside a plain copy and a full update.

    python -m benchmarks.deltas [--readers 1,4] [--rounds 7]

The preset `deltas` of benchmarks/plan.py, which has all kinds of changes, as one table. Changes are
random, by one unit in the last place, or those of a recorded step of reinforcement learning: the
layer that was recorded is used for every layer, shuffled, and the embedding changes at random by
its recorded share. `make bench` measures some of them, beside the codings of others.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.compare import compare
from benchmarks.plan import OUR_DELTAS, PRESETS, WORKLOADS, Trial
from benchmarks.results import Results, Row, machine
from benchmarks.tables import LINE_NBYTES, cell, groups, table

HEAD = (
    *("changes", "receivers", "copy, ms", "full update, x copy", "delta, x copy", "delta, x full"),
    *('`delta="auto"`, x copy', "lines changed", "MB sent", "longest pause, ms"),
)
OFF, AUTO, ALWAYS = OUR_DELTAS


def table_of(results: Results) -> str:
    """Return a line for each kind of changes and number of receivers."""
    lines = []
    for workload, readers in groups(results, changing=True):
        full, auto, delta = (results.find(workload, readers, name) for name in (OFF, AUTO, ALWAYS))
        figures = [cell(full), cell(delta), _over(delta, full), cell(auto), *_sent(delta)]
        copies = [s for row in (full, auto, delta) if row is not None for s in row.memcpy]
        copy = f"{statistics.median(copies) * 1e3:.1f}" if copies else ""
        lines.append((WORKLOADS[workload]().title, str(readers), copy, *figures))
    return table(HEAD, lines)


def _over(row: Row | None, other: Row | None) -> str:
    if row is None or other is None or row.failed or other.failed:
        return ""
    return f"{row.ratio.median / other.ratio.median:.2f}"


def _sent(row: Row | None) -> tuple[str, str, str]:
    if row is None or row.failed:
        return "", "", ""
    share = row.changed_lines / (row.nbytes / LINE_NBYTES)
    return f"{share:.1%}", f"{row.sent_nbytes / 1e6:.1f}", f"{row.stall_s * 1e3:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--readers", default="1,4", help="numbers of receivers, by commas")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    readers = [int(number) for number in options.readers.split(",")]
    preset = PRESETS["deltas"]
    trials = tuple(
        Trial(workload, number, (name,))
        for workload in dict.fromkeys(trial.workload for trial in preset.trials)
        for number in readers
        for name in OUR_DELTAS
    )
    results = Results(preset.name, machine())
    compare(replace(preset, trials=trials, rounds=options.rounds), results, None)
    print(table_of(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
