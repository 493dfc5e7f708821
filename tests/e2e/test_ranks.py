"""Trainers of several ranks, end to end: what arrives, who hears of a failure, who survives one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.crew import Crew, Died, crew
from tests.e2e import ranks_at_work as work
from tests.e2e.models import BUCKET_NBYTES
from tests.e2e.processes import Host, Remote
from tests.e2e.ranks_at_work import Digests, Seen
from tests.weights.trainer_models import plain
from weightsync.weights.sources.base import ModuleSource, groups_of

GROUPS = len(groups_of(ModuleSource(plain()).manifest))
TENSORS = len(ModuleSource(plain()).manifest.specs)
SMALL: dict[str, Any] = {"bucket_nbytes": 256, "num_buckets": 2}


four = pytest.mark.parametrize("ranks", [4], indirect=True)


def receivers(host: Host, count: int, **place: Any) -> list[Remote]:
    return [host.receiver("http", **{"model": "decoder", **place}) for _ in range(count)]


def start(ranks: Crew, to: list[Remote], kind: str = "fsdp", **options: Any) -> None:
    results: list[Seen] = ranks.run(work.start, kind, [remote.url for remote in to], options)
    assert [result.text for result in results] == [""] * len(results)


def check_sent(sent: list[tuple[Seen, Digests]], to: list[Remote], version: int) -> None:
    """All ranks have the same report, and all receivers what the ranks have together."""
    reports = [outcome.result for outcome, _ in sent]
    assert [outcome.text for outcome, _ in sent] == [""] * len(sent)
    assert reports == [reports[0]] * len(reports)
    assert reports[0].version == version
    for remote in to:
        held = remote.digests()
        assert {name: held[name] for name in sent[0][1]} == sent[0][1]
        assert remote.reading() == version


def check_alike(outcomes: list[Seen], kind: str, *parts: str) -> None:
    """All ranks raised the same, which says all of this, and none waited for a timeout."""
    assert {(seen.kind, seen.text) for seen in outcomes} == {(kind, outcomes[0].text)}
    for part in parts:
        assert part in outcomes[0].text
    assert max(seen.took_s for seen in outcomes) < work.TIMEOUT_S / 2


CASES: list[tuple[int, str, int, dict[str, Any], dict[str, Any]]] = [
    (4, "fsdp", 1, {}, {}),
    (2, "fsdp", 2, {"dtype": torch.bfloat16, **SMALL}, {"model": "decoder-bfloat16"}),
    (2, "fsdp", 2, {"packed": False}, {"apply": "in_place"}),
    (4, "fsdp", 4, SMALL, {"sink": "hook", "apply": "in_place"}),
    (2, "ddp", 2, {}, {}),
    (4, "ddp", 1, {"packed": True, **SMALL}, {"apply": "in_place"}),
    (4, "plain", 3, {}, {}),
    (2, "plain", 1, {"dtype": torch.bfloat16, "packed": False}, {"model": "decoder-bfloat16"}),
    (2, "fsdp", 2, {"delta": "always"}, {}),
    (4, "fsdp", 1, {"delta": "always", **SMALL}, {"apply": "in_place"}),
    (2, "fsdp", 2, {"delta": "always", "backend": "tcp"}, {}),
    (2, "fsdp", 1, {"delta": "always", "dtype": torch.bfloat16}, {"model": "decoder-bfloat16"}),
    (2, "plain", 3, {"delta": "always", "packed": False}, {}),
]


@pytest.mark.parametrize(("ranks", "kind", "count", "options", "place"), CASES, indirect=["ranks"])
def test_bit_for_bit(
    ranks: Crew,
    host: Host,
    kind: str,
    count: int,
    options: dict[str, Any],
    place: dict[str, Any],
) -> None:
    to = receivers(host, count, **place)
    start(ranks, to, kind, **options)
    for version in (1, 2, 3):
        sent = ranks.run(work.step_and_send, options.get("dtype"))
        if place.get("sink") == "hook":
            for _, full in sent:
                full.pop("head.weight")
        check_sent(sent, to, version)
        assert len(sent[0][0].result.receivers) == count
        if "delta" in options:
            assert sent[0][0].result.delta.sent == (version > 1)


@four
def test_a_part_of_the_model_then_all_of_it_again(ranks: Crew, host: Host) -> None:
    to = receivers(host, 2)
    start(ranks, to)
    _, full = ranks.run(work.step_and_send)[0]
    parts = ranks.run(work.send_part)
    assert [part.text for part in parts] == [""] * len(parts)
    assert [part.result for part in parts] == [parts[0].result] * len(parts)
    for remote in to:
        held = remote.digests()
        changed = [name for name in full if held[name] != full[name]]
        assert changed == ["norm.bias"]
        assert remote.reading() == 2
    check_sent(ranks.run(work.release_and_send), to, 3)


@pytest.mark.parametrize(
    ("fault", "kind", "parts"),
    [
        ("name", "ManifestMismatchError", ["position 0", "rank 1", "layers.0.up.weight"]),
        ("fewer", "ManifestMismatchError", ["norm.bias", "rank 1 has nothing"]),
        ("more", "ProtocolError", ["rank 1", "often as rank 0"]),
        ("block", "", ["KeyError"]),
        ("leading block", "", ["KeyError"]),
    ],
)
def test_parts_that_ranks_do_not_share(
    ranks: Crew, host: Host, fault: str, kind: str, parts: list[str]
) -> None:
    to = receivers(host, 1)
    start(ranks, to)
    _, full = ranks.run(work.step_and_send)[0]
    outcomes = ranks.run(work.send_part, fault)
    if kind:
        check_alike(outcomes, kind, *parts)
    else:
        at = 1 if fault == "block" else 0
        assert outcomes[at].kind == "KeyError"
        assert outcomes[1 - at].kind == "RemoteError"
        assert "KeyError" in outcomes[1 - at].text
    assert to[0].digests() == full
    assert to[0].reading() == 1
    check_sent(ranks.run(work.step_and_send), to, 2)


@pytest.mark.parametrize("at", [0, 1])
def test_a_part_with_nan_in_the_shard_of_one_rank(ranks: Crew, host: Host, at: int) -> None:
    """Rank 0 looks alone, at the whole tensor: the others have gathered it with rank 0."""
    to = receivers(host, 1)
    start(ranks, to, check_finite="raise")
    _, full = ranks.run(work.step_and_send)[0]
    outcomes = ranks.run(work.send_nan, at)
    check_alike(outcomes, "VerificationError", "layers.0.up.weight", "NaN")
    assert to[0].digests() == full
    assert to[0].reading() == 1
    check_sent(ranks.run(work.step_and_send), to, 2)


PLACES = {
    "before the model": 0,
    "at a group's second": 2,
    "between groups": 1,
    "at its last": TENSORS - 1,
    "after the end": TENSORS,
}


def test_a_rank_whose_source_raises(ranks: Crew, host: Host) -> None:
    """At once and on all ranks, by name; the receivers stay, and the next update works."""
    to = receivers(host, 1)
    start(ranks, to, fault={}, **SMALL)
    held = ranks.run(work.step_and_send)[0][1]
    for version, at in enumerate(PLACES.values(), start=1):
        for rank in (0, 1):
            fault = {"rank": rank, "kind": "raises", "at": at}
            outcomes = ranks.run(work.send_with, fault)
            check_alike(outcomes, "RemoteError", f"rank {rank}: ", "in the source")
            assert outcomes[rank].cause == "ZeroDivisionError"
            assert to[0].digests() == held
            assert to[0].reading() == version
        ranks.run(work.set_fault, {})
        sent = ranks.run(work.step_and_send)
        check_sent(sent, to, version + 1)
        held = sent[0][1]


@pytest.mark.parametrize(("ranks", "packed"), [(4, True), (2, False)], indirect=["ranks"])
def test_a_rank_whose_source_differs(ranks: Crew, host: Host, packed: bool) -> None:
    to = receivers(host, 1)
    start(ranks, to, fault={}, packed=packed)
    names = [spec.name for spec in ModuleSource(plain()).manifest.specs]
    held = ranks.run(work.step_and_send)[0][1]
    for kind in ("order", "missing", "surplus", "shape"):
        outcomes = ranks.run(work.send_with, {"rank": 1, "kind": kind})
        wanted = "extra" if kind == "surplus" else names[4]
        check_alike(outcomes, "ManifestMismatchError", "rank 1: ", wanted)
        assert to[0].digests() == held
    ranks.run(work.set_fault, {})
    check_sent(ranks.run(work.step_and_send), to, 2)


def test_ranks_with_different_models(ranks: Crew, host: Host) -> None:
    to = receivers(host, 1)
    fault = {"rank": 1, "kind": "missing"}
    outcomes = ranks.run(work.start, "fsdp", [to[0].url], {"fault": fault})
    names = [spec.name for spec in ModuleSource(plain()).manifest.specs]
    check_alike(outcomes, "ManifestMismatchError", "rank 1 has", "rank 0 has", names[4])


@four
def test_ranks_that_make_different_calls(ranks: Crew, host: Host) -> None:
    start(ranks, receivers(host, 1))
    firsts, closes = zip(*ranks.run(work.part_ways), strict=True)
    check_alike(list(firsts), "ProtocolError", "rank 0 send_weights", "rank 1 close")
    assert max(seen.took_s for seen in closes) < work.TIMEOUT_S / 2


@pytest.mark.parametrize(("ranks", "moved"), [(4, None), (2, 0)], indirect=["ranks"])
def test_a_receiver_that_fails_in_the_middle(ranks: Crew, host: Host, moved: int | None) -> None:
    """Fed by rank 0, or by rank 1; all ranks hear of it, and the next update heals it."""
    to = receivers(host, 1, sink="hook", apply="in_place")
    start(ranks, to, host=moved, gathers=True, **SMALL)
    if moved is not None:
        assert ranks.run(feeding) == [rank == 1 for rank in range(len(ranks.run(feeding)))]
    ranks.run(work.step_and_send)
    to[0].hinder(failing_calls=1)
    outcomes = [seen for seen, _ in ranks.run(work.step_and_send)]
    check_alike(outcomes, "RemoteError", to[0].url, "no room for")
    sent = ranks.run(work.step_and_send)
    for _, full in sent:
        full.pop("head.weight")
    check_sent(sent, to, 2)


def feeding(rank: int) -> bool:
    return bool(work.kept().sender._group.worker.engines)


@pytest.mark.parametrize(("ranks", "canceller"), [(2, 0), (4, 1)], indirect=["ranks"])
def test_a_cancelled_rank_takes_the_others_along(ranks: Crew, host: Host, canceller: int) -> None:
    to = receivers(host, 1, sink="hook", apply="in_place")
    start(ranks, to, fault={}, **SMALL)
    ranks.run(work.step_and_send)
    to[0].hinder(delay_s=0.1)
    outcomes = ranks.run(work.cancelled, canceller)
    for rank, (outcome, was_cancelled) in enumerate(outcomes):
        assert was_cancelled is (rank == canceller)
        if rank != canceller:
            assert outcome.kind == "TransferCancelled"
            assert "cancelled by its caller" in outcome.text
    to[0].hinder()
    sent = ranks.run(work.step_and_send)
    for _, full in sent:
        full.pop("head.weight")
    check_sent(sent, to, sent[0][0].result.version)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_ranks_that_are_cancelled_while_receivers_commit(ranks: Crew, host: Host) -> None:
    to = receivers(host, 1, sink="hook")
    start(ranks, to, fault={}, **SMALL)
    version = ranks.run(work.step_and_send)[0][0].result.version
    to[0].hinder(delay_s=3.0)
    assert ranks.run(work.cancelled_in_finish) == [(True, False, version + 1)] * 2
    to[0].hinder()
    assert ranks.run(work.step_and_send)[0][0].result.version == version + 2


def test_a_word_for_each_group_and_none_for_chunks(ranks: Crew, host: Host) -> None:
    to = [remote.url for remote in receivers(host, 1)]
    few, many = (ranks.run(work.count_calls, to, nbytes)[0] for nbytes in (BUCKET_NBYTES, 128))
    assert few == many
    assert few[1] == GROUPS + 2  # and one at the end of each of the two steps


@pytest.mark.parametrize(
    ("kind", "options", "questions", "words"),
    [("plain", {"host": 0}, 0, 2), ("fsdp", {"gathers": True}, 1, GROUPS + 2)],
)
def test_a_steady_update_by_one_rank_is_three_commands(
    ranks: Crew, host: Host, kind: str, options: dict[str, Any], questions: int, words: int
) -> None:
    """Begin, Transfer, End, and the end of the call; ranks reply while they wait for the next one.

    Only where the ranks gather what they send do they compare what they know of its changes.
    """
    start(ranks, receivers(host, 1), kind, delta="always", **options)
    for version in (1, 2):
        assert ranks.run(work.step_and_send)[0][0].result.version == version
    for counts in ranks.run(work.count_steady_calls):
        collectives = counts.pop("run")
        wanted = Counter(exchange=questions, broadcast=4, agree=words)
        assert counts == +wanted
        # A call takes one, if its payloads are short.
        assert collectives == wanted.total()


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize(
    ("kind", "delta"), [("plain", "auto"), ("fsdp", "off"), ("fsdp", "always")]
)
def test_a_steady_update_is_four_words(ranks: Crew, host: Host, kind: str, delta: str) -> None:
    """Begin, Transfer, End, and the end of the call. A delta takes no word more."""
    start(ranks, receivers(host, 1), kind, delta=delta)
    for version in (1, 2):
        assert ranks.run(work.step_and_send)[0][0].result.version == version
    for counts in ranks.run(work.count_steady_calls):
        assert counts == {"broadcast": 4, "run": 4}


@pytest.mark.parametrize("at", [0, 1])
def test_memory_that_moves_on_the_rank_that_sends(ranks: Crew, host: Host, at: int) -> None:
    to = receivers(host, 2)
    start(ranks, to, "plain", packed=False, host=1 - at)  # the other rank is elsewhere
    check_sent(ranks.run(work.step_and_send), to, 1)
    sent = ranks.run(work.step_and_send)
    check_sent(sent, to, 2)
    assert not sent[0][0].result.connect_seconds
    sent = ranks.run(work.exchange_memory_and_send, at)
    check_sent(sent, to, 3)
    assert sent[0][0].result.connect_seconds  # it was registered anew
    check_sent(ranks.run(work.step_and_send), to, 4)


def test_no_more_than_a_group_is_gathered_at_a_time(ranks: Crew, host: Host) -> None:
    to = [host.receiver("http", model="equal").url]
    ring = 2 * 4096
    for peak, total, layer, extra in ranks.run(work.watch_memory, to, 4096):
        assert total == layer * work.EQUAL_LAYERS
        assert peak <= layer + layer // 4  # the last one before it is still being packed
        assert extra < ring + 3 * layer


def test_ranks_that_die(crews: dict[int, Crew], host: Host) -> None:
    """One in the middle of a transfer, then another while rank 0 waits for a slow receiver."""
    to = receivers(host, 1)
    slow = receivers(host, 1, sink="hook", delay_s=3.0)
    with crew(4) as dying:
        start(dying, to, "plain", fault={}, **SMALL)
        held = dying.run(work.step_and_send)[0][1]
        outcomes = dying.run(work.send_with, {"rank": 3, "kind": "dies", "at": 5})
        assert isinstance(outcomes.pop(3), Died)
        check_alike(outcomes, "TransferError", "rank 3 of 4 did not answer")
        assert to[0].digests() == held
        assert to[0].reading() == 1
        dying.lose(3)
        assert [closed.text for closed in dying.run(work.close)] == [""] * 3
        start(dying, slow, "plain", fault={}, members=[0, 1, 2])
        outcomes = dying.run(work.send_with, {"rank": 1, "kind": "dies later"})
        assert isinstance(outcomes.pop(1), Died)
        check_alike(outcomes, "TransferError", "rank 1 of 3 did not answer")
        assert slow[0].reading() == 1
    for version, size in enumerate((2, 4), start=2):
        start(crews[size], to, "fsdp")
        check_sent(crews[size].run(work.step_and_send), to, version)
        crews[size].run(work.close)


def test_the_first_rank_dies(crews: dict[int, Crew], host: Host) -> None:
    to = receivers(host, 1)
    with crew(2) as dying:
        start(dying, to, "fsdp", fault={}, **SMALL)
        held = dying.run(work.step_and_send)[0][1]
        outcomes = dying.run(work.send_with, {"rank": 0, "kind": "dies", "at": 5})
        assert isinstance(outcomes.pop(0), Died)
        check_alike(outcomes, "TransferError", "rank 0 of 2 did not answer")
    start(crews[4], to, "fsdp")
    assert to[0].digests() == held
    check_sent(crews[4].run(work.step_and_send), to, 2)
    crews[4].run(work.close)


@four
def test_a_rank_that_never_connects(ranks: Crew, host: Host) -> None:
    url = host.receiver("http", model="decoder").url
    outcomes = ranks.run(work.connect_without, 1, url)
    assert outcomes.pop(1) is None
    check_alike(outcomes, "TransferTimeout", "rank 1 of", "did not call connect() within 1 s")
