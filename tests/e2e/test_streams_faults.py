"""Ranks that each send a stream, and fail at any step: who hears of it, and what arrives next."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.crew import Crew, Died, crew
from tests.e2e import processes, sabotage
from tests.e2e import ranks_at_work as work
from tests.e2e import stream_faults as faults
from tests.e2e.processes import Host
from tests.e2e.test_ranks import SMALL, check_alike, check_sent, receivers, start

RING: dict[str, Any] = {"packed": True, **SMALL}
WAYS: dict[str, dict[str, Any]] = {"registered": {}, "ring": RING}
STEPS: list[faults.Step] = ["before", "begin", "begun", "transfer", "transferred", "end"]


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("ranks", "at"), [(2, 0), (2, 1), (4, 3)], indirect=["ranks"])
def test_a_rank_that_raises(ranks: Crew, host: Host, at: int, way: str, apply: str) -> None:
    """At each step: all ranks raise its error, and the next update sends what they have."""
    to = receivers(host, 2, apply=apply)
    start(ranks, to, "fsdp", **WAYS[way])
    held = ranks.run(work.step_and_send)[0][1]
    version = 1
    for step in [*STEPS, "between"] if at == 0 else STEPS:
        outcomes = [seen for seen, _ in ranks.run(faults.send_failing, at, step, "raise")]
        if way == "ring" and apply == "in_place" and not outcomes[0].text:
            version += 1  # the receivers were connected anew, and sent the same again
        elif step in ("between", "end"):
            check_alike(outcomes, "TransferError", f"in {step}")
        else:
            check_alike(outcomes, "RemoteError", f"rank {at}: ", f"in {step}")
            assert outcomes[at].cause == "ZeroDivisionError"
        if apply == "staged":
            for remote in to:
                assert {name: remote.digests()[name] for name in held} == held
                assert remote.reading() == version
        version += 1
        sent = ranks.run(work.step_and_send)
        check_sent(sent, to, version)
        assert sent[0][0].result.gathered == {}
        held = sent[0][1]


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_no_receiver_is_dropped_for_a_rank(ranks: Crew, host: Host, at: int, way: str) -> None:
    """Receivers whose transfer ends because a rank has failed are not to blame."""
    to = receivers(host, 3)
    start(ranks, to, "fsdp", on_failure="drop", **WAYS[way])
    held = ranks.run(work.step_and_send)[0][1]
    outcomes = [seen for seen, _ in ranks.run(faults.send_failing, at, "begun", "raise")]
    check_alike(outcomes, "RemoteError", f"rank {at}: ", "in begun")
    for remote in to:
        assert {name: remote.digests()[name] for name in held} == held
    sent = ranks.run(work.step_and_send)
    check_sent(sent, to, 2)
    assert sent[0][0].result.dropped == {}
    assert len(sent[0][0].result.receivers) == len(to)


@pytest.mark.parametrize(
    ("ranks", "at", "options", "copies"),
    [
        (2, 0, {}, False),
        (2, 1, RING, False),
        (4, 3, {"dtype": torch.bfloat16}, False),
        (2, 1, {"delta": "always"}, False),
        (2, 1, {}, True),
    ],
    indirect=["ranks"],
)
def test_a_rank_that_writes_to_dtensors_while_they_are_sent(
    ranks: Crew, host: Host, at: int, options: dict[str, Any], copies: bool
) -> None:
    """Torch counts such a write at the DTensor alone, not at the local tensor that is read."""
    dtype = options.get("dtype")
    to = receivers(host, 2, model="decoder-bfloat16" if dtype else "decoder")
    start(ranks, to, "fsdp", **options)
    held = ranks.run(work.step_and_send, dtype)[0][1]
    outcomes = ranks.run(faults.send_written_to, at, copies)
    way = "copied" if copies else "sent"
    check_alike(outcomes, "VerificationError", f"the source changed while it was {way}")
    for remote in to:
        assert {name: remote.digests()[name] for name in held} == held
        assert remote.reading() == 1
    check_sent(ranks.run(work.step_and_send, dtype), to, 2)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_rank_that_writes_to_dtensors_while_they_are_quantized(ranks: Crew, host: Host) -> None:
    """The quantized shards are new tensors, and what they are made of is watched."""
    to = receivers(host, 1, sink="hook")
    start(ranks, to, "fsdp", scheme="fp8_channel")
    held = ranks.run(work.step_and_send)[0][1]
    outcomes = ranks.run(faults.send_written_to, 1, False)
    check_alike(outcomes, "VerificationError", "the source changed while it was sent")
    assert {name: to[0].digests()[name] for name in held} == held
    check_sent(ranks.run(work.step_and_send), to, 2)


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_a_copy_has_what_the_ranks_gather(ranks: Crew) -> None:
    """`send_async` makes what no rank holds a known part of, each time it copies."""
    size = 2 if len(ranks.run(work.close)) == 2 else 4
    total = float(sum(range(1, size + 1)))
    found = ranks.run(faults.copies_of_sums)[0]
    for i, (report, values) in enumerate(found, start=1):
        assert list(report.gathered) == ["sums"]
        assert report.verified == "held"
        assert values == [total + i * size]


@pytest.mark.parametrize("at", [0, 1])
def test_a_first_copy_that_fails_leaves_no_memory(ranks: Crew, host: Host, at: int) -> None:
    """On no rank, though the error is kept, whose frames had the copy."""
    to = receivers(host, 1)
    start(ranks, to, "fsdp")
    found = ranks.run(faults.copy_failing, at)
    check_alike([failed for failed, *_ in found], "RemoteError", f"rank {at}: ", "in the copy")
    for _, before, report, left, nbytes in found:
        assert before == [nbytes]
        assert nbytes > 0
        assert left == 0
        assert (report.version, report.verified, report.gathered) == (1, "held", {})
    full = ranks.run(work.full_of_kept)[0]
    assert {name: to[0].digests()[name] for name in full} == full


def test_copies_are_joined_apart_from_the_trainers_group(ranks: Crew) -> None:
    """A thread joins them while the trainer has collectives of its own under way."""
    for full, joined in ranks.run(faults.join_with_no_group, "fsdp"):
        assert joined == full


DEATHS: list[tuple[int, int, faults.Step, str, str]] = [
    (2, 1, "begun", "registered", "staged"),
    (4, 3, "transfer", "ring", "staged"),
    (2, 0, "begun", "registered", "staged"),
]
MORE_DEATHS: list[tuple[int, int, faults.Step, str, str]] = [
    (size, at, step, way, apply)
    for size, at in ((2, 0), (2, 1), (4, 2))
    for step in STEPS
    for way in WAYS
    for apply in ("staged", "in_place")
    if (size, at, step, way, apply) not in DEATHS
]


@pytest.mark.parametrize(
    ("size", "at", "step", "way", "apply"),
    [*DEATHS, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE_DEATHS)],
)
def test_a_rank_that_dies(
    crews: dict[int, Crew],
    host: Host,
    size: int,
    at: int,
    step: faults.Step,
    way: str,
    apply: str,
) -> None:
    """At each step: the others raise, by its name; nothing is committed; others can connect."""
    to = receivers(host, 2, apply=apply)
    with crew(size) as dying:
        start(dying, to, "fsdp", **WAYS[way])
        dying.run(work.set_verify, False)  # so that no receiver waits for fingerprints of it
        held = dying.run(work.step_and_send)[0][1]
        outcomes = dying.run(faults.send_failing, at, step, "die")
        assert isinstance(outcomes.pop(at), Died)
        check_alike([seen for seen, _ in outcomes], "TransferError", f"rank {at} of {size} did not")
        if apply == "staged":
            for remote in to:
                assert {name: remote.digests()[name] for name in held} == held
                assert remote.reading() == 1
        dying.lose(at)
        assert [closed.text for closed in dying.run(work.close)] == [""] * (size - 1)
    start(crews[2], to, "fsdp")
    sent = crews[2].run(work.step_and_send)
    assert sent[0][0].result is not None, sent[0][0].text
    check_sent(sent, to, sent[0][0].result.version)
    crews[2].run(work.close)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_a_rank_whose_wait_for_others_is_interrupted(
    ranks: Crew, host: Host, at: int, way: str
) -> None:
    """At each of its waits. Its next call ends the one that it left, and what arrives is right."""
    to = receivers(host, 1)
    start(ranks, to, "fsdp", **WAYS[way])
    ranks.run(work.step_and_send)
    interrupted = 0
    # Rank 0 waits for the replies, and for its broadcast.
    for wait in range(16):
        results = ranks.run(faults.send_interrupted, at, wait)
        sent = [(next_one, full) for _, next_one, full in results]
        assert [one.kind for one, _ in sent] == [""] * 4, (wait, sent[0][0].text)
        check_sent(sent, to, sent[0][0].result.version)
        ended = results[at][0]
        if ended == "sent":
            break
        if wait < 2:  # its tensors have changed before it sent them
            assert all(other != "sent" for other, _, _ in results)
        interrupted += 1
    assert ended == "sent"
    assert interrupted in (range(4, 15) if at == 0 else (4,))  # those who have replied need no wait


FEW_RECEIVERS: list[tuple[sabotage.Step, str, str]] = [
    ("load", "registered", "staged"),
    ("load", "ring", "in_place"),
    ("finish", "ring", "staged"),
]
MORE_RECEIVERS: list[tuple[sabotage.Step, str, str]] = [
    (step, way, apply)
    for step in ("start", "load", "finish")
    for way in WAYS
    for apply in ("staged", "in_place")
    if (step, way, apply) not in FEW_RECEIVERS
]


@pytest.mark.parametrize(
    ("step", "way", "apply"),
    [
        *FEW_RECEIVERS,
        *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE_RECEIVERS),
    ],
)
def test_a_receiver_that_dies(
    ranks: Crew, host: Host, step: sabotage.Step, way: str, apply: str
) -> None:
    """At each step: all ranks raise, by its name. The other one goes on with one whole version."""
    with processes.host() as other:
        (lives,) = receivers(host, 1, apply=apply)
        (dies,) = receivers(other, 1, apply=apply)
        start(ranks, [lives, dies], "fsdp", **WAYS[way])
        first = ranks.run(work.step_and_send)[0][1]
        dies.sabotage(step, "die")
        sent = ranks.run(work.step_and_send)
        check_alike([outcome for outcome, _ in sent], "ConnectError", f"{dies.url} ")
        # In place nothing can be rolled back, and a commit that has begun is not taken back.
        went_on = apply == "in_place" or step == "finish"
        held, wanted = lives.digests(), sent[0][1] if went_on else first
        assert {name: held[name] for name in wanted} == wanted
        assert lives.reading() == (2 if went_on else 1)
        assert ("while the others hold version 2" in sent[0][0].text) == went_on
        ranks.run(work.remove, dies.url)
        check_sent(ranks.run(work.step_and_send), [lives], 3 if went_on else 2)
