"""Runs rivals in this process, with readers in other processes, and writes their times.

    python -m benchmarks.rivals.trial ORDER RESULTS

ORDER is a JSON file of an `Order`; RESULTS gets one JSON line per rival and way. Each round changes
the parameters, copies them once inside this process, and updates every reader; then the values of
all readers are compared with the trainer's, for each option. A failed option does not stop the
others.

Where a workload says what changes between updates, the last update is such a change too, and there
is a pause before each copy, as a training step is: receivers of deltas work then.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.changes import Change, change_of, count_changes
from benchmarks.plan import WORKLOADS
from benchmarks.rivals.contract import Job, Rival, RivalError
from benchmarks.rivals.crew import Crew
from benchmarks.rivals.parameters import (
    Parameters,
    digests,
    fill,
    fill_as_weights,
    make_module,
    parameters_of,
    touch,
)
from benchmarks.rivals.registry import RIVALS
from benchmarks.shapes import Step, Workload

MIN_ROUNDS = 3
# Part of a trial's time: start of processes, and comparison of values.
BESIDE_ROUNDS = 0.3
SHM = "/dev/shm"
REASON_CHARACTERS = 300
STEP_S_PER_BYTE = 0.25e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One trial: rivals on one workload, each for about `budget_s` per option.

    Each rival should end within `aim_s`; slow ones have fewer rounds, at least one.
    """

    workload: str
    readers: int
    rivals: list[str]
    rounds: int
    warm_ups: int
    budget_s: float
    aim_s: float


@dataclass(slots=True)
class Taken:
    """Seconds of copies and updates in turns, and the figures of a row of results.

    `failed` is the reason for missing figures.
    """

    memcpy: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    setup_s: float = 0.0
    connect_s: float = 0.0
    stall_s: float = 0.0
    changed_values: int = 0
    changed_lines: int = 0
    sent_nbytes: int = 0
    load: float = 0.0
    failed: str = ""


class Course:
    """The rounds of one option: their number, and their time limit."""

    def __init__(self, order: Order, ways: int, taken: Taken) -> None:
        self.taken = taken
        self._order = order
        self._share_s = order.aim_s * (1 - BESIDE_ROUNDS) / ways
        self._warm_ups = 0
        self._spent_s = self._last_s = 0.0

    def wants_more(self) -> bool:
        """Whether there is another round; the checked update follows the last round."""
        done = len(self.taken.update)
        if self.taken.failed or done >= self._order.rounds:
            return False
        enough = done >= MIN_ROUNDS and self._spent_s >= self._order.budget_s
        return not done or (not enough and self._room_for(1))

    def run(self, work: Callable[[Taken], None]) -> None:
        """Run one round, measured or as a warm-up; an error is the reason for missing figures."""
        warm = self._warm_ups < self._order.warm_ups and (
            not self._warm_ups or self._room_for(MIN_ROUNDS + 1)
        )
        self._warm_ups += warm
        began = time.perf_counter()
        with failing(self.taken):
            if not warm and not self._room_for(1):
                raise RivalError(
                    f"an update takes {self._last_s:.1f} s: too long for {self._share_s:.0f} s "
                    "of rounds"
                )
            work(Taken() if warm else self.taken)
        self._last_s = time.perf_counter() - began
        self._spent_s += self._last_s

    def _room_for(self, rounds: int) -> bool:
        """Whether this number of rounds and the check still fit."""
        return self._spent_s + (rounds + 1) * self._last_s <= self._share_s


@contextmanager
def failing(taken: Taken) -> Iterator[None]:
    """Record an error as the reason for missing figures of an option."""
    try:
        yield
    except Exception as exc:  # noqa: BLE001 # becomes the reason in the row
        taken.failed = reason_of(exc)


def reason_of(exc: Exception) -> str:
    """Return a failure in one line."""
    return f"{type(exc).__name__}: {exc}"[:REASON_CHARACTERS]


def run(order: Order, results: Path) -> None:
    """Measure every rival of the order; write a line for a failure, too."""
    torch.set_num_threads(1)
    workload = WORKLOADS[order.workload]()
    with results.open("a", encoding="utf-8") as file:
        for name in order.rivals:
            for way, taken in _measured(order, name, workload).items():
                said = {"failed": taken.failed} if taken.failed else asdict(taken)
                file.write(json.dumps({"rival": name, "way": way, **said}) + "\n")
            file.flush()


def _measured(order: Order, name: str, workload: Workload) -> dict[str, Taken]:
    found = {way: Taken() for way in RIVALS[name].ways}
    checked: set[str] = set()
    try:
        with tempfile.TemporaryDirectory(prefix="weights-bench-", dir=SHM) as directory:
            job = Job(tensors=workload.tensors, readers=order.readers, directory=directory)
            Crew.preload(f"benchmarks.rivals.{RIVALS[name].module}")
            rival = RIVALS[name].make()()
            try:
                _measure(order, rival, job, workload.step, found, checked)
            finally:
                rival.close()
    except Exception as exc:  # noqa: BLE001 # becomes the reason in the rows
        for way in found.keys() - checked:
            found[way].failed = found[way].failed or reason_of(exc)
    return found


class Training:
    """The trainer's parameters, and a twin that the plain copy writes.

    `step` is what a training step changes; without one the values do not matter, and some bytes
    change in its place.
    """

    def __init__(self, parameters: Parameters, step: Step | None) -> None:
        self.parameters = parameters
        self._change = None if step is None else change_of(step)
        self._steps = 0
        self._step_s = STEP_S_PER_BYTE * sum(one.nbytes for one in parameters.values())
        if self._change is None:
            fill(parameters, 1)
        else:
            fill_as_weights(parameters)

    def make_twin(self) -> None:
        """Allocate the twin, once the parameters are where they stay."""
        self._twin = {name: torch.ones_like(one) for name, one in self.parameters.items()}

    def train(self) -> None:
        """Change the parameters before an update."""
        if self._change is None:
            touch(list(self.parameters.values()))
        else:
            self._change_some(self._change)

    def copy(self) -> None:
        """Copy the parameters to the twin, inside this process."""
        for twin, source in zip(self._twin.values(), self.parameters.values(), strict=True):
            twin.copy_(source)

    def train_to_check(self, taken: Taken, seed: int) -> None:
        """Give the parameters values that the next update has to bring to the readers."""
        if self._change is None:
            fill(self.parameters, seed)
            return
        self.copy()
        self._change_some(self._change)
        taken.changed_values, taken.changed_lines = count_changes(self._twin, self.parameters)

    def _change_some(self, change: Change) -> None:
        self._steps += 1
        change(self.parameters, self._steps)
        time.sleep(self._step_s)


def _measure(
    order: Order,
    rival: Rival,
    job: Job,
    step: Step | None,
    found: Mapping[str, Taken],
    checked: set[str],
) -> None:
    """Fill `found`; a failed option is left out of the next steps."""
    module = make_module(job.tensors)
    training = Training(parameters_of(module), step)
    began = time.perf_counter()
    rival.setup(job, module)
    setup_s = time.perf_counter() - began
    training.make_twin()
    courses = {way: Course(order, len(found), taken) for way, taken in found.items()}
    while going := [way for way, course in courses.items() if course.wants_more()]:
        for way in going:
            courses[way].run(lambda taken: _round(rival, way, training, taken))  # noqa: B023 # called at once
    for seed, (way, taken) in enumerate(found.items(), start=2):
        if taken.failed:
            continue
        with failing(taken):
            training.train_to_check(taken, seed)
            rival.update(way)
            _check(rival, training.parameters, way)
        taken.setup_s, taken.connect_s = setup_s, rival.connect_s
        taken.sent_nbytes = rival.sent_nbytes
        taken.load = os.getloadavg()[0]
        checked.add(way)


def _round(rival: Rival, way: str, training: Training, taken: Taken) -> None:
    training.train()
    began = time.perf_counter()
    training.copy()
    copied = time.perf_counter()
    rival.update(way)
    taken.update.append(time.perf_counter() - copied)
    taken.memcpy.append(copied - began)
    taken.stall_s = max(taken.stall_s, rival.stall_s)


def _check(rival: Rival, parameters: Parameters, way: str) -> None:
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
