"""Ranks that each send a stream, where a rank or a receiver is stopped (SIGSTOP): who is named."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.crew import Crew, crew
from tests.e2e import processes
from tests.e2e import ranks_at_work as work
from tests.e2e import stream_faults as faults
from tests.e2e.processes import Host, Remote
from tests.e2e.ranks_at_work import Seen
from tests.e2e.test_ranks import SMALL, check_sent, receivers, start

TIMEOUT_S = 2.0
SILENCE_S = 5.0
"""How long a rank is silent before it counts as stopped, however short `timeout_s` is."""
BOUND_S = 20.0
WAYS: dict[str, dict[str, Any]] = {
    "registered": {"timeout_s": TIMEOUT_S},
    "ring": {"timeout_s": TIMEOUT_S, "packed": True, **SMALL},
}
SILENT = {"TransferTimeout", "TransportTimeout"}


def check_named(outcomes: list[Seen], *parts: str) -> None:
    """All ranks raised the same in time, and it says all of this."""
    assert {(seen.kind, seen.text) for seen in outcomes} == {(outcomes[0].kind, outcomes[0].text)}
    assert outcomes[0].kind in SILENT, outcomes[0].text
    for part in parts:
        assert part in outcomes[0].text
    assert max(seen.took_s for seen in outcomes) < BOUND_S


def check_held(to: list[Remote], held: dict[str, str], version: int) -> None:
    for remote in to:
        digests = remote.digests()
        assert {name: digests[name] for name in held} == held
        assert remote.reading() == version


def cases(few: set[tuple[Any, ...]], *axes: Any) -> list[Any]:
    """All combinations: a few in each run, all in a soak."""
    return [
        pytest.param(*case, marks=() if case in few else pytest.mark.soak)
        for case in itertools.product(*axes)
    ]


RANKS = [(2, 0), (2, 1), (4, 2)]
STEPS: list[faults.Step] = ["before", "begin", "begun", "transfer", "transferred", "end"]
FEW_RANKS = {
    ((2, 1), "begun", "registered", "staged"),
    ((2, 0), "transfer", "ring", "in_place"),
    ((4, 2), "end", "ring", "staged"),
    ((2, 0), "end", "registered", "staged"),
}


@pytest.mark.parametrize(
    ("which", "step", "way", "apply"), cases(FEW_RANKS, RANKS, STEPS, WAYS, ["staged", "in_place"])
)
def test_a_rank_that_is_stopped(
    host: Host, which: tuple[int, int], step: faults.Step, way: str, apply: str
) -> None:
    """The others raise, by its name; nothing is committed; when it goes on, all connect again."""
    size, at = which
    to = receivers(host, 2, apply=apply)
    with crew(size) as made:
        start(made, to, "fsdp", **WAYS[way])
        first = made.run(work.step_and_send)
        check_sent(first, to, 1)
        held = first[0][1]
        made.start(faults.send_failing, at, step, "stop")
        others = [rank for rank in range(size) if rank != at]
        outcomes = [seen for seen, _ in made.results(others)]
        check_named(outcomes, f"rank {at} of {size} did not answer", f"within {SILENCE_S:g} s")
        if apply == "staged":
            check_held(to, held, 1)
        made.wake(at)
        ((late, _),) = made.results([at])
        assert late.kind in {"TransferError", "TransferTimeout", "RemoteError"}, late.text
        if apply == "staged":
            check_held(to, held, 1)
        assert [closed.text for closed in made.run(work.close)] == [""] * size
        start(made, to, "fsdp", **WAYS[way])
        sent = made.run(work.step_and_send)
        check_sent(sent, to, sent[0][0].result.version)
        made.run(work.close)


@pytest.fixture(scope="module")
def other_process() -> Iterator[Host]:
    with processes.host() as made:
        yield made


@pytest.fixture
def stopping(other_process: Host, shm_clean: None) -> Iterator[Host]:
    """A process of receivers that is stopped in the test; it goes on when the test ends."""
    assert other_process.process.pid is not None
    try:
        yield other_process
    finally:
        os.kill(other_process.process.pid, signal.SIGCONT)
        other_process.forget()


STAGES: list[faults.Stage] = ["load", "transfer", "finish"]
FEW_RECEIVERS = {
    (0, "load", "registered", "staged"),
    (1, "transfer", "ring", "staged"),
    (0, "transfer", "ring", "in_place"),
    (1, "transfer", "registered", "in_place"),
    (0, "finish", "ring", "staged"),
}


@pytest.mark.parametrize(
    ("at", "stage", "way", "apply"),
    cases(FEW_RECEIVERS, (0, 1), STAGES, WAYS, ["staged", "in_place"]),
)
def test_a_receiver_that_is_stopped(
    crews: dict[int, Crew],
    host: Host,
    stopping: Host,
    at: int,
    stage: faults.Stage,
    way: str,
    apply: str,
) -> None:
    """All ranks raise by its name, whichever of them waits longest for it; the other one stays."""
    lives, gone = receivers(host, 1, apply=apply) + receivers(stopping, 1, apply=apply)
    ranks = crews[2]
    start(ranks, [lives, gone], "fsdp", **WAYS[way])
    try:
        held = ranks.run(work.step_and_send)[0][1]
        assert stopping.process.pid is not None
        ranks.run(faults.stop_at, at, stage, stopping.process.pid, gone.url)
        outcomes = [seen for seen, _ in ranks.run(work.step_and_send)]
        check_named(outcomes, gone.url)
        assert lives.url not in outcomes[0].text
        if apply == "staged" and stage != "finish":
            check_held([lives], held, 1)
        os.kill(stopping.process.pid, signal.SIGCONT)
        if apply == "staged" and stage != "finish":
            check_held([gone], held, 1)
        sent = ranks.run(work.step_and_send)
        assert [outcome.text for outcome, _ in sent] == [""] * 2
        check_sent(sent, [lives, gone], sent[0][0].result.version)
        assert sent[0][0].result.gathered == {}
    finally:
        ranks.run(work.close)


@pytest.mark.parametrize("at", [0, 1])
def test_the_others_go_on_without_one_that_is_stopped(
    crews: dict[int, Crew], host: Host, stopping: Host, at: int
) -> None:
    """Where failed receivers are dropped: the one that a rank waited for, and no other."""
    lives, gone = receivers(host, 1) + receivers(stopping, 1)
    ranks = crews[2]
    start(ranks, [lives, gone], "fsdp", on_failure="drop", **WAYS["ring"])
    try:
        ranks.run(work.step_and_send)
        assert stopping.process.pid is not None
        ranks.run(faults.stop_at, at, "transfer", stopping.process.pid, gone.url)
        sent = ranks.run(work.step_and_send)
        assert [outcome.text for outcome, _ in sent] == [""] * 2
        report = sent[0][0].result
        assert list(report.dropped) == [gone.url]
        check_sent(sent, [lives], report.version)
    finally:
        ranks.run(work.close)
