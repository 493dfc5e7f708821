"""Deltas of ranks that each send a stream of their own: bytes, reports, refusals and failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.crew import Crew, Died, crew
from tests.e2e import ranks_at_work as work
from tests.e2e import shard_servers
from tests.e2e import stream_deltas as at_work
from tests.e2e.processes import Host, Remote
from tests.e2e.ranks_at_work import Digests, Seen
from tests.e2e.stream_faults import Step
from tests.e2e.test_ranks import SMALL, check_alike, check_sent, receivers, start
from weightsync.report import SyncReport

ALWAYS: dict[str, Any] = {"delta": "always"}


@pytest.fixture(scope="module")
def crews() -> Iterator[dict[int, Crew]]:
    with crew(2) as two, crew(3) as three, crew(4) as four:
        yield {2: two, 3: three, 4: four}


def check_delta(report: SyncReport) -> None:
    """It went as a delta, by the streams of all ranks, and the report says so."""
    delta = report.delta
    assert delta is not None
    assert (delta.sent, delta.reason, report.gathered) == (True, "", {})
    assert delta.lines > 0
    assert 0 < delta.share <= 1
    for receiver in report.receivers:
        # The headers of packets count on both sides, those of rooms that stay empty on one.
        assert 68 * delta.lines <= sum(receiver.sources.values()) <= delta.nbytes


CASES: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (2, "fsdp", {}, {}),
    (3, "fsdp", {}, {"apply": "in_place"}),
    (3, "fsdp", {"packed": True, **SMALL}, {}),
    (4, "fsdp", {"dtype": torch.bfloat16, **SMALL}, {"model": "decoder-bfloat16"}),
    (4, "hybrid", {}, {"apply": "in_place"}),
    (4, "tensor_parallel", {}, {}),
    (4, "tensor_parallel", {"packed": True}, {"apply": "in_place"}),
    (2, "offloaded", {}, {}),
    (2, "ddp", {}, {}),
    (3, "plain", {"packed": False}, {}),
    (3, "fsdp", {}, {"sink": "hook"}),
    (4, "tensor_parallel", SMALL, {"sink": "hook"}),
]


@pytest.mark.parametrize(("ranks", "kind", "options", "place"), CASES, indirect=["ranks"])
def test_each_rank_sends_what_changed(
    ranks: Crew, host: Host, kind: str, options: dict[str, Any], place: dict[str, Any]
) -> None:
    """Receivers hold the bits of the trainer after each of several deltas."""
    to = receivers(host, 2, **place)
    start(ranks, to, kind, **ALWAYS, **options)
    for version in (1, 2, 3, 4):
        sent = ranks.run(at_work.change_and_send, version, 1, options.get("dtype"))
        if place.get("sink") == "hook":
            for _, full in sent:
                full.pop("head.weight")
        check_sent(sent, to, version)
        report = sent[0][0].result
        assert report.verified == ("arrived" if place.get("sink") == "hook" else "held")
        assert all(set(one.sources) == set(range(len(sent))) for one in report.receivers)
        if version == 1:
            assert report.delta.reason.startswith("the receivers hold no weights")
            assert all(sum(one.sources.values()) == report.nbytes for one in report.receivers)
        else:
            check_delta(report)


SHARD_CASES: list[tuple[int, str, dict[str, Any], str]] = [
    (2, "fsdp", {}, "auto"),
    (3, "fsdp", {"packed": True, **SMALL}, "in_place"),
    (4, "tensor_parallel", {}, "in_place"),
    (2, "wide", {}, "auto"),
    (2, "wide", {"packed": True}, "in_place"),
]


@pytest.mark.parametrize(("ranks", "kind", "options", "apply"), SHARD_CASES, indirect=["ranks"])
def test_a_receiver_of_shards_takes_its_part_of_each_line(
    ranks: Crew, kind: str, options: dict[str, Any], apply: str
) -> None:
    urls = ranks.run(shard_servers.serve, "wide" if kind == "wide" else "decoder", apply)
    try:
        results = ranks.run(work.start, kind, urls, {**ALWAYS, **options})
        assert [result.text for result in results] == [""] * len(urls)
        for version in (1, 2, 3, 4):
            sent: list[tuple[Seen, Digests]] = ranks.run(at_work.change_and_send, version)
            assert [outcome.text for outcome, _ in sent] == [""] * len(sent)
            report = sent[0][0].result
            assert (report.version, report.gathered, report.verified) == (version, {}, "held")
            for full, _ in ranks.run(shard_servers.held):
                assert {name: full[name] for name in sent[0][1]} == sent[0][1]
            if version > 1:
                check_delta(report)
    finally:
        ranks.run(work.close)
        ranks.run(shard_servers.end)


@pytest.mark.parametrize("apply", ["auto", "in_place"])
def test_a_shard_that_other_code_changed_is_replaced(ranks: Crew, apply: str) -> None:
    """Also one element that other code wrote through the DTensor, where torch counts the write."""
    urls = ranks.run(shard_servers.serve, "wide", apply)
    try:
        results = ranks.run(work.start, "wide", urls, ALWAYS)
        assert [result.text for result in results] == [""] * len(urls)
        for version in (1, 2, 3, 4):
            if version == 3:
                ranks.run(shard_servers.write, 1)
            sent: list[tuple[Seen, Digests]] = ranks.run(at_work.change_and_send, version)
            assert [outcome.text for outcome, _ in sent] == [""] * len(sent)
            for full, _ in ranks.run(shard_servers.held):
                assert {name: full[name] for name in sent[0][1]} == sent[0][1]
            delta = sent[0][0].result.delta
            assert delta.sent == (version in (2, 4))
            assert "other code has changed" in delta.reason or version != 3
    finally:
        ranks.run(work.close)
        ranks.run(shard_servers.end)


@pytest.mark.parametrize(
    ("ranks", "kind"), [(2, "fsdp"), (3, "fsdp"), (4, "tensor_parallel")], indirect=["ranks"]
)
def test_a_hook_is_given_the_elements_that_changed(ranks: Crew, kind: str) -> None:
    assert ranks.run(at_work.patched, kind)[0] == [(False, True), *[(True, True)] * 3]


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_a_hook_is_given_the_tensors_that_changed(ranks: Crew) -> None:
    first, second = ranks.run(at_work.named, "fsdp")[0]
    assert len(first) > 5
    assert second == {"layers.1.up.weight"}


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_a_receiver_that_joins_takes_the_next_delta(ranks: Crew, apply: str) -> None:
    """It fetched the weights; the same version, sent to one alone, is no delta."""
    outcomes = ranks.run(at_work.joined, "wide", apply)
    for outcome in outcomes:
        assert [sent for sent, _ in outcome] == [False, True, True, True, False, False, True]
    bits = [held for _, held in outcomes[0]]
    assert bits == [[True, True], *[[True, False]] * 2, *[[True, True]] * 4]


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_a_shard_that_joins_gets_the_whole_model_once(ranks: Crew) -> None:
    """It fetched whole tensors, so that it knows the sum of no rank's stream: no delta is tried."""
    urls = ranks.run(shard_servers.serve, "wide")
    try:
        for outcome in ranks.run(at_work.joined_shard, "wide", urls):
            assert [same for *_, same in outcome] == [True] * 5
            assert [sent for sent, *_ in outcome] == [False, True, True, False, True]
            assert outcome[3][1].startswith("the receivers hold no weights")
    finally:
        ranks.run(work.close)
        ranks.run(shard_servers.end)


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_copies_go_as_deltas(ranks: Crew) -> None:
    found = ranks.run(at_work.copied, "wide")
    assert [[(sent, same) for sent, same, *_ in each] for each in found] == [
        [(False, True), *[(True, True)] * 3]
    ] * len(found)
    copies = [each[-1][2] for each in found]
    assert max(copies) < 1.2 * sum(copies) / len(copies)
    assert 0 < found[0][-1][3] < sum(copies) / 20


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("forgets", "the changes since the weights that the receivers hold are not known"),
        ("misjudges", "a delta failed: "),
        ("changes more", "about 100% of the lines changed"),
    ],
)
def test_one_rank_that_cannot_send_a_delta(
    ranks: Crew, at: int, way: at_work.Way, reason: str
) -> None:
    """All send the whole model in the same call, and the next update is a delta again."""
    for outcome in ranks.run(at_work.unlike, at, way):
        assert [sent for sent, *_ in outcome][:3] == [False, True, False]
        assert outcome[2][1].startswith(reason)
        assert [same for *_, same in outcome] == [True] * 4
        assert outcome[3][0] == (way != "changes more")


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_weights_that_other_code_changed_are_replaced(ranks: Crew, apply: str) -> None:
    for outcome in ranks.run(at_work.overwritten, "wide", apply):
        assert [sent for sent, *_ in outcome] == [False, True, False, True]
        assert "changed or discarded" in outcome[2][1]
        assert [same for *_, same in outcome] == [True] * 4


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_a_receiver_that_fails_in_a_delta_is_dropped(ranks: Crew) -> None:
    for outcome in ranks.run(at_work.dropped):
        assert [sent for sent, *_ in outcome] == [False, True, True, True]
        assert [len(gone) for _, gone, _ in outcome] == [0, 0, 1, 0]
        assert [same for *_, same in outcome] == [True] * 4


STEPS: list[Step] = ["before", "begin", "begun", "transfer", "transferred", "end"]


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize(("ranks", "at"), [(2, 0), (2, 1), (3, 2)], indirect=["ranks"])
def test_a_rank_that_raises_in_a_delta(ranks: Crew, host: Host, at: int, apply: str) -> None:
    """At each step: all ranks raise its error, and the next update sends what they have."""
    to = receivers(host, 2, apply=apply)
    start(ranks, to, "fsdp", **ALWAYS)
    held = ranks.run(at_work.change_and_send, 0)[0][1]
    for i, step in enumerate(STEPS, start=1):
        outcomes = [seen for seen, _ in ranks.run(at_work.change_and_fail, i, at, step, "raise")]
        check_alike(outcomes, outcomes[0].kind, f"in {step}")
        if apply == "staged":
            for remote in to:
                assert {name: remote.digests()[name] for name in held} == held
                assert remote.reading() == 2 * i - 1
        for version in (2 * i, 2 * i + 1):
            sent = ranks.run(at_work.change_and_send, 100 * version)
            check_sent(sent, to, version)
        check_delta(sent[0][0].result)
        held = sent[0][1]


@pytest.mark.parametrize(
    ("size", "at", "step", "apply"),
    [(2, 1, "transfer", "staged"), (3, 0, "begun", "staged"), (3, 2, "begin", "in_place")],
)
def test_a_rank_that_dies_in_a_delta(
    crews: dict[int, Crew], host: Host, size: int, at: int, step: Step, apply: str
) -> None:
    """The others raise, by its name; nothing is committed; another trainer can connect."""
    to = receivers(host, 2, apply=apply)
    with crew(size) as dying:
        start(dying, to, "fsdp", **ALWAYS)
        for version in (1, 2):
            held = dying.run(at_work.change_and_send, version)[0][1]
        outcomes = dying.run(at_work.change_and_fail, 3, at, step, "die")
        assert isinstance(outcomes.pop(at), Died)
        check_alike([seen for seen, _ in outcomes], "TransferError", f"rank {at} of {size} did not")
        if apply == "staged":
            for remote in to:
                assert {name: remote.digests()[name] for name in held} == held
                assert remote.reading() == 2
        dying.lose(at)
        assert [closed.text for closed in dying.run(work.close)] == [""] * (size - 1)
    check_successor(crews[2], to)


@pytest.mark.parametrize(("size", "at", "apply"), [(2, 1, "staged"), (3, 0, "in_place")])
def test_a_rank_that_dies_between_two_deltas(
    crews: dict[int, Crew], host: Host, size: int, at: int, apply: str
) -> None:
    """The others raise in the next call, by its name; what is held stays as it was verified."""
    to = receivers(host, 2, apply=apply)
    with crew(size) as dying:
        start(dying, to, "fsdp", **ALWAYS)
        for version in (1, 2, 3):
            sent = dying.run(at_work.change_and_send, version)
            check_sent(sent, to, version)
        check_delta(sent[0][0].result)
        assert isinstance(dying.run(work.die_on, at).pop(at), Died)
        dying.lose(at)
        outcomes = dying.run(at_work.change_and_send_alone, 4)
        check_alike(outcomes, "TransferError", f"rank {at} of {size} did not")
        check_sent(sent, to, 3)
        assert [closed.text for closed in dying.run(work.close)] == [""] * (size - 1)
    check_successor(crews[2], to)


def check_successor(ranks: Crew, to: list[Remote]) -> None:
    """Another trainer connects, and sends the whole model and then a delta."""
    start(ranks, to, "fsdp", **ALWAYS)
    for seed in (1, 2):
        sent = ranks.run(at_work.change_and_send, seed)
        check_sent(sent, to, sent[0][0].result.version)
        assert sent[0][0].result.delta.sent == (seed == 2)
    ranks.run(work.close)


@pytest.mark.parametrize("kind", ["decoder", "wide"])
@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_any_changes_arrive(ranks: Crew, kind: str) -> None:
    """Receivers hold what `full_tensor()` gives, after random changes of random ranks."""
    for seed in range(2):
        for outcome in ranks.run(at_work.walk, kind, seed, 12):
            assert [sent for sent, *_ in outcome] == [False, *[True] * 11]
            assert len({lines for _, lines, _ in outcome}) > 5
            assert [same for *_, same in outcome] == [[True, True]] * 12


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_delta_that_is_cancelled_or_refused(ranks: Crew, host: Host, at: int, apply: str) -> None:
    """Nothing is committed, and the next update sends what the ranks have then."""
    to = receivers(host, 2, apply=apply)
    start(ranks, to, "fsdp", **ALWAYS)
    for version in (1, 2):
        check_sent(ranks.run(at_work.change_and_send, version), to, version)
    outcomes = [seen for seen, _ in ranks.run(at_work.change_and_cancel, 3, at)]
    assert [outcome.kind for outcome in outcomes] == ["TransferCancelled"] * len(outcomes)
    for version in (3, 4):
        sent = ranks.run(at_work.change_and_send, 10 * version)
        check_sent(sent, to, version)
    check_delta(sent[0][0].result)
    check_alike(ranks.run(at_work.send_old), "StaleVersionError", "version 1")
    for version in (5, 6):
        sent = ranks.run(at_work.change_and_send, 10 * version)
        check_sent(sent, to, version)
    check_delta(sent[0][0].result)


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_ranks_that_cast_find_what_changes_after_the_cast(ranks: Crew) -> None:
    for outcome in ranks.run(at_work.cast):
        assert [(sent, same) for sent, _, same in outcome] == [(False, True), *[(True, True)] * 3]
        lines = [lines for _, lines, _ in outcome]
        assert lines[1] == 0
        assert 0 < lines[2] < 20


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_changes_of_what_the_ranks_gather_are_expected(ranks: Crew) -> None:
    """There is room for them in a delta: the estimate looks at what was gathered for it."""
    outcomes = ranks.run(at_work.summed)
    assert [(sent, reason) for sent, reason, _ in outcomes[0]][1:] == [(True, "")] * 3
    begin, step = sum(range(1, len(outcomes) + 1)), len(outcomes)
    assert [held for *_, held in outcomes[0]] == [[begin + step * i] for i in range(4)]


@pytest.mark.parametrize(
    ("ranks", "kind", "way", "at", "packed"),
    [
        (2, "decoder", "to", [0, 1], None),
        (2, "wide", "assign", [1], False),
        (3, "decoder", "data", [0, 2], True),
        (2, "wide", "data", [1], None),
        (3, "wide", "to", [0], False),
        (3, "plain", "data", [1, 2], False),
        (3, "wide", "assign", [0, 2], None),
    ],
    indirect=["ranks"],
)
def test_memory_of_ranks_that_is_moved_between_deltas(
    ranks: Crew, kind: str, way: at_work.Move, at: list[int], packed: bool | None
) -> None:
    """Receivers get the bytes of the new memory: in deltas, which go on, and in a whole model."""
    for outcome in ranks.run(at_work.moved, kind, way, at, packed):
        assert [same for _, same in outcome] == [[True, True]] * 5
        assert [sent for sent, _ in outcome] == [False, True, True, False, True]
