"""What the ranks decide before an update begins: alike on every rank, by the same arguments."""

from __future__ import annotations

import pytest

from weightsync.ranks.commands import BeforeBegin, ChangeEstimate, DeltaOffer, DeltaTask

NEWEST = ChangeEstimate(share=0.1, marked=5, are_newest=True)
MADE = ChangeEstimate(share=None, marked=5, are_newest=True)


def offer(
    *bases: str, by_value: bool = False, most: float = 0.4, refusals: int = 0, pause: int = 0
) -> DeltaOffer:
    task = DeltaTask(weights_id="new", bases=list(bases), by_value=by_value, keeps=by_value)
    return DeltaOffer(task=task, most=most, lines=100, refusals=refusals, pause=pause)


@pytest.mark.parametrize(
    ("offered", "estimate", "expected"),
    [
        (offer("a", "b"), NEWEST, 15),
        (offer("a"), ChangeEstimate(share=0.4, marked=90), 100),
        (offer("a"), MADE, 40),
        (offer("a", refusals=1), NEWEST, 40),
    ],
)
def test_a_delta_with_room_for_what_may_have_changed(
    offered: DeltaOffer, estimate: ChangeEstimate, expected: int
) -> None:
    task, reason = offered.decide(estimate)
    assert task is not None
    assert (task.bases, task.expected, reason) == (offered.task.bases, expected, "")


@pytest.mark.parametrize(
    ("offered", "estimate", "records", "reason"),
    [
        (offer("a"), ChangeEstimate(share=0.5, marked=5), False, "about 50% of the lines changed"),
        (offer("a", refusals=2, pause=2), NEWEST, False, "deltas failed 2 times"),
        (offer("a", refusals=2, pause=1), NEWEST, True, "deltas failed 2 times"),
        (offer("", "a"), NEWEST, True, "hold no weights of this sender that it knows"),
        (offer("a"), ChangeEstimate(share=0.1), True, "are not known"),
        (offer("a", by_value=True), ChangeEstimate(marked=5), True, "are not known"),
    ],
)
def test_the_whole_model(
    offered: DeltaOffer, estimate: ChangeEstimate, records: bool, reason: str
) -> None:
    task, why = offered.decide(estimate)
    recorded = DeltaTask(weights_id="new", keeps=offered.task.keeps)
    assert task == (recorded if records else None)
    assert reason in why


@pytest.mark.parametrize(("newest", "by_value"), [(True, True), (False, False)])
def test_older_bases_are_not_coded_by_value(newest: bool, by_value: bool) -> None:
    task, _ = offer("a", by_value=True).decide(
        ChangeEstimate(share=0.1, marked=5, are_newest=newest)
    )
    assert task is not None
    assert task.by_value is by_value


def test_the_rank_with_the_most_changes_counts() -> None:
    few = ChangeEstimate(share=0.1, marked=7, are_newest=True)
    many = ChangeEstimate(share=0.3, marked=5, are_newest=False)
    ranks = [BeforeBegin(), BeforeBegin(estimate=few), BeforeBegin(estimate=many)]
    found = BeforeBegin.of_all(ranks)
    assert found.estimate == ChangeEstimate(share=0.3, marked=7, are_newest=False)
    assert not found.moved
    assert BeforeBegin.of_all([*ranks, BeforeBegin(moved=True)]).moved


def test_one_rank_that_does_not_know_is_enough() -> None:
    known, unknown = ChangeEstimate(share=0.1, marked=7), ChangeEstimate()
    found = BeforeBegin.of_all(BeforeBegin(estimate=one) for one in (known, unknown))
    assert found.estimate is not None
    assert (found.estimate.share, found.estimate.marked) == (None, None)
