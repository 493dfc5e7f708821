"""Time profile of an update on both sides, unpacked and packed, verified and not.

    python -m benchmarks.profile_update

One receiver over HTTP, a module, staged. Methods of both processes are wrapped by a clock that all
processes share; the phases between their starts and ends add up to the update, and the sender's
concurrent work is shown beside them. A wrapper costs about half a microsecond, and there is one
around each copy of 512 KiB. Medians, phase by phase.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence

import torch

from benchmarks.profile_watch import SENDER, WatchedTrainer, watch
from benchmarks.rivals.contract import Job
from benchmarks.rivals.crew import Crew
from benchmarks.rivals.parameters import fill, make_module, parameters_of, touch
from benchmarks.shapes import equal
from benchmarks.tables import table

WARM_UPS = 2
PATHS = ("unpacked", "packed")
WAYS = ("not verified", "verified")


def measure(path: str, mib: int, tensors: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of each phase, not verified and verified, for one path."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as directory:
        job = Job(tensors=tuple(equal(mib << 20, tensors)), readers=1, directory=directory)
        module = make_module(job.tensors)
        fill(parameters_of(module), 1)
        trainer = WatchedTrainer(f"{path},module,staged,off")
        try:
            trainer.setup(job, module)
            for number in range(WARM_UPS + rounds):
                for way, rows in found.items():
                    touch(list(module.parameters()))
                    row = trainer.profile(way)
                    if number >= WARM_UPS:
                        rows.append(row)
        finally:
            trainer.close()
    return {
        way: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for way, rows in found.items()
    }


def report(columns: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table: microseconds and per cent of each column's update, phase by phase."""
    whole = {
        column: sum(s for name, s in found.items() if not name.startswith("beside"))
        for column, found in columns.items()
    }
    head = ["us (per cent)", *columns]
    lines = [
        [name, *(_cell(found[name], whole[column]) for column, found in columns.items())]
        for name in next(iter(columns.values()))
        if any(found[name] for found in columns.values())
    ]
    lines.append(["sum, without what is beside", *(f"{s * 1e6:.0f}" for s in whole.values())])
    return table(head, lines)


def _cell(seconds: float, whole: float) -> str:
    """Return both values, empty where the path lacks the phase."""
    return f"{seconds * 1e6:.0f} ({seconds / whole:.1%})" if seconds else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    watch(SENDER)
    Crew.preload("benchmarks.profile_watch")
    columns = {}
    for path in PATHS:
        for way, found in measure(path, options.mib, options.tensors, options.rounds).items():
            columns[f"{path}, {way}"] = found
    print(report(columns))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
