"""An interrupt (Ctrl-C) of one rank while the ranks send: what its call raises, and the next one.

The next call of all ranks sends what they have, or raises on each of them. None waits for a
timeout, and no rank takes what another one says for something else.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.crew import Crew
from tests.e2e import ranks_at_work as work
from tests.e2e import stream_faults as faults
from tests.e2e.processes import Host, Remote
from tests.e2e.test_ranks import SMALL, check_alike, check_sent, receivers, start
from weightsync.ranks import comm

RING: dict[str, Any] = {"packed": True, **SMALL}
GATHERED: dict[str, Any] = {"gathers": True}
WAYS: dict[str, dict[str, Any]] = {"registered": {}, "ring": RING}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("ranks", "at"), [(2, 0), (2, 1), (4, 3)], indirect=["ranks"])
@pytest.mark.parametrize("step", ["begun", "transfer", "transferred"])
def test_an_interrupt_of_a_transfer_comes_out_as_one(
    ranks: Crew, host: Host, at: int, step: faults.Step, way: str
) -> None:
    """The other ranks raise an error that names it, and the next update sends what all have."""
    to = receivers(host, 2)
    start(ranks, to, "fsdp", **WAYS[way])
    held = ranks.run(work.step_and_send)[0][1]
    outcomes = [seen for seen, _ in ranks.run(faults.send_failing, at, step, "interrupt")]
    assert outcomes.pop(at).kind == "KeyboardInterrupt"
    check_alike(outcomes, "RemoteError", f"rank {at}: " if at else "", "KeyboardInterrupt")
    for remote in to:
        assert {name: remote.digests()[name] for name in held} == held
    check_sent(ranks.run(work.step_and_send), to, 2)


@pytest.mark.parametrize(("ranks", "at", "wait"), [(2, 0, 3), (4, 3, 0)], indirect=["ranks"])
def test_an_interrupt_between_broadcasts_in_a_row(ranks: Crew, at: int, wait: int) -> None:
    """The others wait for the next of them, and raise by the name of the rank that left."""
    outcomes = ranks.run(faults.join_interrupted, at, wait)
    size = len(outcomes)
    assert outcomes.pop(at).kind == "KeyboardInterrupt"
    check_alike(outcomes, "TransferError", f"rank {at} of {size} left a call in the middle")
    for full, joined in ranks.run(work.join_copies, "fsdp"):
        assert joined == full


@pytest.mark.parametrize("at", [0, 1])
def test_a_block_whose_wait_is_interrupted(ranks: Crew, host: Host, at: int) -> None:
    """At its first waits: the next call of each rank is not taken for a later part of the block."""
    to = receivers(host, 1)
    start(ranks, to, "fsdp")
    ranks.run(work.step_and_send)
    for wait in range(3):
        results = ranks.run(faults.send_interrupted, at, wait, True)
        assert [ended for ended, _, _ in results].count("sent") == 0
        sent = [(next_one, full) for _, next_one, full in results]
        check_sent(sent, to, sent[0][0].result.version)


def check_interrupted(
    ranks: Crew, to: list[Remote], options: dict[str, Any], at: int, *where: Any
) -> bool:
    """Check a call that is interrupted, and the next one; return whether it was interrupted."""
    results = ranks.run(faults.send_interrupted_in, at, *where)
    raised = results[at][0]
    said = f"interrupted in {raised}, point {where[1]} of {where[0]}"
    assert results[at][1].kind == ("KeyboardInterrupt" if raised else ""), said
    for _, first, second, _ in results:
        assert max(first.took_s, second.took_s) < work.TIMEOUT_S / 2, said
    sent = [(second, full) for _, _, second, full in results]
    kinds = {outcome.kind for outcome, _ in sent}
    if kinds != {""}:
        assert kinds <= {"ProtocolError", "TransferError"}, said
        ranks.run(work.close)
        start(ranks, to, "fsdp", **options)
        sent = ranks.run(work.step_and_send)
    report = sent[0][0].result
    assert report is not None, f"{said}: {sent[0][0].text}"
    check_sent(sent, to, report.version)
    return bool(raised)


CASES = [
    (where, way, at, nbytes)
    for where in ("ranks/comm.py", "ranks/group.py", "ranks/worker.py")
    for way in ("registered", "gathered")
    for at in (0, 1)
    for nbytes in ((comm._INLINE_NBYTES, 200) if where == "ranks/comm.py" else (200,))
]
"""Where the interrupts come, and how long a payload of the ranks may be to travel at once."""
SOAKED = {"registered": 1, "gathered": 7}
POSTING = [
    ("_begin_gather", "registered", 0, comm._INLINE_NBYTES, 1),
    ("_say", "registered", 0, 200, 1),
    ("_begin", "registered", 1, comm._INLINE_NBYTES, 1),
]
"""The functions that post collectives, at all of their points."""


@pytest.mark.parametrize(
    ("where", "way", "at", "nbytes", "step"),
    [
        *POSTING,
        *((*case, 41) for case in CASES),
        *(pytest.param(*case, SOAKED[case[1]], marks=pytest.mark.soak) for case in CASES),
    ],
)
def test_the_call_after_an_interrupt(
    ranks: Crew, host: Host, where: str, way: str, at: int, nbytes: int, step: int
) -> None:
    """Of one rank, at any point of these files; every 41st in each run, more in a soak."""
    to = receivers(host, 1)
    options = GATHERED if way == "gathered" else {}
    start(ranks, to, "fsdp", **options)
    ranks.run(work.step_and_send)
    point = 1
    while check_interrupted(ranks, to, options, at, where, point, nbytes):
        point += step
    assert point > step
