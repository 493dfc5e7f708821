"""Runs some rivals in this process, with readers in others, and writes what each one took.

    python -m benchmarks.rivals.trial ORDER RESULTS

ORDER is a JSON file of an `Order`; RESULTS gets one JSON line per rival and way. Each round changes
the parameters, copies them once inside this process, and updates every reader; then the values that
readers hold are compared with the trainer's, way by way.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.plan import WORKLOADS
from benchmarks.rivals.contract import Job, Rival, RivalError
from benchmarks.rivals.crew import Crew
from benchmarks.rivals.parameters import digests, fill, make_module, parameters_of, touch
from benchmarks.rivals.registry import RIVALS

MIN_ROUNDS = 3
SHM = "/dev/shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one trial measures: rivals on one workload, each for about `budget_s` per way."""

    workload: str
    readers: int
    rivals: list[str]
    rounds: int
    warm_ups: int
    budget_s: float


@dataclass(slots=True)
class Taken:
    """Seconds of copies and updates that took turns, and the machine's load at the end."""

    memcpy: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    setup_s: float = 0.0
    load: float = 0.0


def run(order: Order, results: Path) -> None:
    """Measure every rival of the order; a failure is a line too."""
    torch.set_num_threads(1)
    tensors = WORKLOADS[order.workload]().tensors
    with results.open("a", encoding="utf-8") as file:
        for name in order.rivals:
            taken, reason = _measured(order, name, tensors)
            for way in RIVALS[name].ways:
                found = taken.get(way)
                line = {
                    "rival": name,
                    "way": way,
                    **(asdict(found) if found else {"failed": reason}),
                }
                file.write(json.dumps(line) + "\n")
            file.flush()


def _measured(order: Order, name: str, tensors: Any) -> tuple[dict[str, Taken], str]:
    taken: dict[str, Taken] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="weights-bench-", dir=SHM) as directory:
            job = Job(tensors=tensors, readers=order.readers, directory=directory)
            Crew.preload(f"benchmarks.rivals.{RIVALS[name].module}")
            rival = RIVALS[name].make()()
            try:
                _measure(order, rival, job, RIVALS[name].ways, taken)
            finally:
                rival.close()
    except Exception as exc:  # noqa: BLE001 # becomes the reason in the row
        return taken, f"{type(exc).__name__}: {exc}"[:300]
    return taken, ""


def _measure(
    order: Order, rival: Rival, job: Job, ways: tuple[str, ...], checked: dict[str, Taken]
) -> None:
    """Fill `checked` way by way: what has failed its check, or has not come to it, stays out."""
    module = make_module(job.tensors)
    parameters = parameters_of(module)
    fill(parameters, 1)
    began = time.perf_counter()
    rival.setup(job, module)
    taken = {way: Taken(setup_s=time.perf_counter() - began) for way in ways}
    twins = [torch.ones_like(tensor) for tensor in parameters.values()]
    budget_s = order.budget_s * len(ways)
    for number in range(order.warm_ups + order.rounds):
        if number == order.warm_ups:
            began = time.perf_counter()
        elif number >= order.warm_ups + MIN_ROUNDS and time.perf_counter() - began > budget_s:
            break
        for way, found in taken.items():
            _round(rival, way, parameters, twins, found if number >= order.warm_ups else Taken())
    for seed, (way, found) in enumerate(taken.items(), start=2):
        fill(parameters, seed)
        rival.update(way)
        _check(rival, parameters, way)
        found.load = os.getloadavg()[0]
        checked[way] = found


def _round(
    rival: Rival,
    way: str,
    parameters: Mapping[str, torch.Tensor],
    twins: list[torch.Tensor],
    taken: Taken,
) -> None:
    sources = list(parameters.values())
    touch(sources)
    began = time.perf_counter()
    for twin, source in zip(twins, sources, strict=True):
        twin.copy_(source)
    taken.memcpy.append(time.perf_counter() - began)
    began = time.perf_counter()
    rival.update(way)
    taken.update.append(time.perf_counter() - began)


def _check(rival: Rival, parameters: Mapping[str, torch.Tensor], way: str) -> None:
    sent = digests(parameters)
    for number, held in enumerate(rival.held()):
        wrong = [name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name)]
        if wrong:
            raise RivalError(
                f"{way}: {len(wrong)} of {len(sent)} tensors of reader {number} are not what was "
                f"sent, {min(wrong)} among them"
            )


if __name__ == "__main__":
    run(Order(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), Path(sys.argv[2]))
