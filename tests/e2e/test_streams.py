"""Ranks that each send what they hold, end to end: bytes, sources, failures and fallbacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.crew import Crew, crew
from tests.e2e import ranks_at_work as work
from tests.e2e import shard_servers
from tests.e2e.processes import Host
from tests.e2e.test_ranks import SMALL, check_alike, check_sent, receivers, start
from weightsync.weights.copying.layout import UNIT_NBYTES


@pytest.fixture(scope="module")
def crews() -> Iterator[dict[int, Crew]]:
    with crew(2) as two, crew(3) as three, crew(4) as four:
        yield {2: two, 3: three, 4: four}


CASES: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (2, "fsdp", {}, {}),
    (3, "fsdp", {"verify": False}, {"apply": "in_place"}),
    (3, "fsdp", {"packed": True, **SMALL}, {}),
    (4, "fsdp", {"dtype": torch.bfloat16, **SMALL}, {"model": "decoder-bfloat16"}),
    (4, "fsdp", {}, {"sink": "hook", "apply": "in_place"}),
    (4, "hybrid", {}, {"apply": "in_place"}),
    (4, "hybrid", {"packed": True, **SMALL}, {"sink": "hook"}),
    (4, "hybrid", {}, {"sink": "hook", "apply": "in_place"}),
    (4, "tensor_parallel", {}, {}),
    (4, "tensor_parallel", {"packed": True, **SMALL}, {"apply": "in_place"}),
    (2, "offloaded", {}, {}),
    (2, "ddp", {}, {}),
    (2, "plain", {"dtype": torch.bfloat16}, {"model": "decoder-bfloat16"}),
    (3, "fsdp", {}, {"sink": "hook"}),
    (2, "fsdp", {}, {"sink": "hook", "apply": "in_place"}),
    (3, "fsdp", {"packed": True, **SMALL}, {"sink": "hook", "apply": "in_place"}),
    (4, "tensor_parallel", SMALL, {"sink": "hook", "apply": "in_place"}),
    (2, "flat", {}, {}),
    (3, "flat_originals", {}, {"apply": "in_place"}),
    (3, "flat", {"packed": True, **SMALL}, {"sink": "hook"}),
    (2, "flat_originals", {"dtype": torch.bfloat16}, {"model": "decoder-bfloat16"}),
    (4, "flat_hybrid", {}, {}),
    (2, "flat_kept", {}, {"sink": "hook", "apply": "in_place"}),
]


@pytest.mark.parametrize(("ranks", "kind", "options", "place"), CASES, indirect=["ranks"])
def test_nothing_is_gathered(
    ranks: Crew, host: Host, kind: str, options: dict[str, Any], place: dict[str, Any]
) -> None:
    """Every rank sends what it holds, each byte once, and goes on training in between."""
    options = dict(options)
    verify = options.pop("verify", True)
    to = receivers(host, 2, **place)
    start(ranks, to, kind, **options)
    ranks.run(work.set_verify, verify)
    for version in (1, 2, 3):
        sent = ranks.run(work.step_and_send, options.get("dtype"))
        if place.get("sink") == "hook":
            for _, full in sent:
                full.pop("head.weight")
        check_sent(sent, to, version)
        report = sent[0][0].result
        assert report.gathered == {}
        level = "arrived" if place.get("sink") == "hook" else "held"
        assert report.verified == (level if verify else "none")
        assert report.summed == (report.tensors if verify and version == 1 else 0)
        for receiver in report.receivers:
            assert set(receiver.sources) == set(range(len(sent)))
            assert sum(receiver.sources.values()) == report.nbytes
    assert ranks.run(work.gathers_of_an_update) == [0] * len(sent)


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_a_callable_that_gathers_in_its_iteration(ranks: Crew, host: Host) -> None:
    """No rank waits for one that waits for it: rank 0 sends what each iteration gathers."""
    to = receivers(host, 2)
    start(ranks, to, "fsdp", iterates=True, **SMALL)
    for version in (1, 2):
        sent = ranks.run(work.step_and_send)
        check_sent(sent, to, version)
        (why,) = sent[0][0].result.gathered.values()
        assert "several ranks make it in an iteration, and may wait for each other" in why


@pytest.mark.parametrize("kind", ["fsdp", "tensor_parallel"])
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_each_rank_casts_to_what_the_receivers_keep(ranks: Crew, host: Host, kind: str) -> None:
    """Of one that they keep in unlike dtypes, each receiver casts what it is sent."""
    rounded, mixed = (receivers(host, 1, model=f"decoder-{m}")[0] for m in ("bfloat16", "mixed"))
    start(ranks, [rounded, mixed], kind, dtype="receiver")
    for version in (1, 2, 3):
        sent = ranks.run(work.step_and_send, torch.bfloat16)
        check_sent(sent, [rounded], version)
        exact = ranks.run(work.full_of_kept)[0]
        report, held = sent[0][0].result, mixed.digests()
        for name, digest in sent[0][1].items():
            assert held[name] == (exact[name] if "layers.1" in name else digest), name
        assert report.gathered == {}
        assert set(report.casts) == {"float32 to bfloat16"}
        assert min(sum(one.casts.values()) for one in report.receivers) == 0


QUANTIZED: list[tuple[int, str, str, str, Any]] = [
    (2, "fsdp", "fp8_channel", "", "staged"),
    (3, "fsdp", "int8_channel", "", "in_place"),
    (4, "hybrid", "fp8_channel", "", "staged"),
    (2, "plain", "fp8_block", "", "staged"),
    (2, "fsdp", "fp8_block", "a shard may cut the blocks that share a scale", "staged"),
    (4, "tensor_parallel", "fp8_channel", "the shards cut the rows that share a scale", "in_place"),
]


@pytest.mark.parametrize(("ranks", "kind", "scheme", "why", "apply"), QUANTIZED, indirect=["ranks"])
def test_ranks_quantize_what_they_hold(
    ranks: Crew, host: Host, kind: str, scheme: str, why: str, apply: Any
) -> None:
    """Shards of rows are quantized where they are; else the report says why they are gathered."""
    to = receivers(host, 2, sink="hook", apply=apply)
    start(ranks, to, kind, scheme=scheme)
    for version in (1, 2, 3):
        sent = ranks.run(work.step_and_send)
        check_sent(sent, to, version)
        assert any(name.endswith("weight_scale") for name in sent[0][1])
        gathered = list(sent[0][0].result.gathered.values())
        assert len(gathered) == bool(why)
        assert all(why in reason for reason in gathered)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_cast_of_nan_is_no_difference(ranks: Crew, host: Host) -> None:
    """The bits of NaN depend on how torch casts it, which is no reason to refuse the update."""
    to = receivers(host, 1, model="decoder-bfloat16")
    start(ranks, to, "plain", dtype=torch.bfloat16)
    sent = ranks.run(work.send_nan_in_columns)
    assert [outcome.text for outcome in sent] == ["", ""]
    report = sent[0].result
    assert (report.version, report.summed) == (1, report.tensors - 1)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_a_rank_that_fails_to_add_up_its_boxes(ranks: Crew, host: Host, failing: int) -> None:
    """Nothing is committed; the next update is compared."""
    to = receivers(host, 1)
    start(ranks, to)
    outcomes = ranks.run(work.send_without_sums, failing)
    check_alike(outcomes, "RemoteError", f"rank {failing}", "no room for a cast")
    assert to[0].reading() == 0
    sent = ranks.run(work.step_and_send)
    check_sent(sent, to, 1)
    assert sent[0][0].result.summed == sent[0][0].result.tensors


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_receiver_that_was_restarted_is_compared_again(ranks: Crew, host: Host) -> None:
    to = receivers(host, 2)
    start(ranks, to)
    summed = []
    for restarts in (False, False, True, False):
        if restarts:
            ranks.run(work.redirect, receivers(host, 1)[0].url)
        (outcome, _), *_ = ranks.run(work.step_and_send)
        summed.append(outcome.result.summed)
    assert summed == [outcome.result.tensors, 0, outcome.result.tensors, 0]


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_receiver_that_restarts_before_it_finishes_is_compared(ranks: Crew, host: Host) -> None:
    """It is sent the version alone, after the others have committed it."""
    to = receivers(host, 2)
    start(ranks, to)
    check_sent(ranks.run(work.step_and_send), to, 1)
    to[1:] = receivers(host, 1)
    ranks.run(work.restart_before_finish, to[1].url)
    sent = ranks.run(work.step_and_send)
    check_sent(sent, to, 2)
    report = sent[0][0].result
    assert (report.rule, report.summed) == ("roll-forward", report.tensors)


def test_a_shard_that_was_sent_alone_is_compared_with_the_others_again(ranks: Crew) -> None:
    """A part of a tensor is no tensor: that of another rank is needed, too."""
    urls = ranks.run(shard_servers.serve, "decoder")
    try:
        ranks.run(work.start, "fsdp", urls, {})
        (first, _), *_ = ranks.run(work.step_and_send)
        assert first.result.summed == first.result.tensors
        url = ranks.run(shard_servers.serve, "decoder")[-1]  # as after a restart
        ranks.run(work.redirect, url)
        alone, *_ = ranks.run(work.resync, url)
        assert 0 < alone.result.summed < alone.result.tensors
        summed = [ranks.run(work.step_and_send)[0][0].result.summed for _ in range(2)]
        assert summed == [first.result.tensors, 0]
    finally:
        ranks.run(work.close)
        ranks.run(shard_servers.end)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_sums_take_little_memory(ranks: Crew, host: Host) -> None:
    """A box that is cast, or whose elements do not lie in their order, is summed in pieces."""
    most = 64
    to = receivers(host, 1, model="decoder-bfloat16")
    start(ranks, to, "plain", dtype=torch.bfloat16)
    largest = 0
    for outcome, nbytes in ranks.run(work.send_columns_and_measure_sums, most):
        assert (outcome.text, outcome.result.summed) == ("", outcome.result.tensors)
        largest = max(largest, nbytes)
    assert 0 < largest <= most


@pytest.mark.parametrize(
    ("ranks", "kind", "released"),
    [(4, "fsdp", False), (3, "plain", False), (2, "fsdp", True)],
    indirect=["ranks"],
)
def test_each_rank_copies_what_it_sends(ranks: Crew, host: Host, kind: str, released: bool) -> None:
    """A sender that lets the trainer go on copies the boxes of each rank, not the model."""
    to = receivers(host, 1)
    start(ranks, to, kind)
    if released:  # before its first copy
        ranks.run(work.release)
    for version in (1, 2):
        sent = ranks.run(work.send_copy_and_step)
        check_sent([(outcome, full) for outcome, full, _ in sent], to, version)
        assert sent[0][0].result.gathered == {}
        assert sent[0][0].result.summed == (sent[0][0].result.tensors if version == 1 else 0)
        assert sum(nbytes for *_, nbytes in sent) == sent[0][0].result.nbytes


@pytest.mark.parametrize(
    ("ranks", "kind"), [(2, "plain"), (4, "tensor_parallel"), (3, "fsdp")], indirect=["ranks"]
)
def test_the_copies_of_all_ranks_are_the_model(ranks: Crew, kind: str) -> None:
    for full, joined in ranks.run(work.join_copies, kind):
        assert joined == full


SHARD_CASES: list[tuple[int, str, dict[str, Any], str]] = [
    (2, "fsdp", {}, "auto"),
    (3, "fsdp", {"packed": True, **SMALL}, "in_place"),
    (4, "fsdp", {}, "auto"),
    (4, "hybrid", {}, "auto"),
    (4, "hybrid", {"packed": True, **SMALL}, "in_place"),
    (4, "tensor_parallel", {}, "in_place"),
    (4, "tensor_parallel", {"packed": True, **SMALL}, "auto"),
    (2, "wide", {}, "auto"),
    (4, "wide", {"packed": True}, "auto"),
    (3, "wide", {}, "in_place"),
]


@pytest.mark.parametrize(("ranks", "kind", "options", "apply"), SHARD_CASES, indirect=["ranks"])
def test_a_receiver_of_shards_reads_its_own(
    ranks: Crew, kind: str, options: dict[str, Any], apply: str
) -> None:
    """The boxes of the ranks are cut where those of the receivers are."""
    urls = ranks.run(shard_servers.serve, "wide" if kind == "wide" else "decoder", apply)
    try:
        results = ranks.run(work.start, kind, urls, options)
        assert [result.text for result in results] == [""] * len(urls)
        for version in (1, 2, 3):
            sent = ranks.run(work.step_and_send)
            assert [outcome.text for outcome, _ in sent] == [""] * len(sent)
            report = sent[0][0].result
            assert (report.version, report.gathered, report.verified) == (version, {}, "held")
            assert report.summed == (report.tensors if version == 1 else 0)
            for full, _ in ranks.run(shard_servers.held):
                assert {name: full[name] for name in sent[0][1]} == sent[0][1]
        if kind == "wide":
            for receiver, (_, nbytes) in zip(
                report.receivers, ranks.run(shard_servers.held), strict=True
            ):
                # Of each rank, a copy unit before its own boxes and one after may have others' too.
                most = nbytes + 2 * UNIT_NBYTES * len(sent)
                assert nbytes <= sum(receiver.sources.values()) <= most
    finally:
        ranks.run(work.close)
        ranks.run(shard_servers.end)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_module_that_is_cast_between_updates_is_sent_in_the_dtype_of_connect(
    ranks: Crew,
) -> None:
    """Registered boxes, which are cut where the receivers' are, are then copied to their places."""
    urls = ranks.run(shard_servers.serve, "decoder")
    try:
        ranks.run(work.start, "plain", urls, {"dtype": torch.float32})
        for dtype in (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32):
            sent = ranks.run(work.cast_and_send, dtype)
            assert [outcome.text for outcome, _ in sent] == [""] * 2
            for full, _ in ranks.run(shard_servers.held):
                assert {name: full[name] for name in sent[0][1]} == sent[0][1]
    finally:
        ranks.run(work.close)
        ranks.run(shard_servers.end)
