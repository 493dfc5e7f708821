"""What ranks that each send a stream may not do: one error on all, and the next good call works."""

from __future__ import annotations

from typing import Any

import pytest

from tests.crew import Crew
from tests.e2e import misplaced, shard_servers
from tests.e2e import ranks_at_work as work
from tests.e2e import stream_faults as faults
from tests.e2e.processes import Host
from tests.e2e.test_ranks import check_alike, check_sent, receivers, start


@pytest.mark.parametrize("what", ["replicated", "columns", "plain", "sums"])
@pytest.mark.parametrize("at", ["all", "rank 1"])
def test_a_placement_that_changed_since_connect(
    ranks: Crew, host: Host, what: faults.Placed, at: str
) -> None:
    """Refused by name and rank; nothing changed, and back in its place it is sent."""
    to = host.receiver("http", model="rows")
    found = ranks.run(faults.send_placed_otherwise, to.url, what, at == "all")
    assert [first.text for first, *_ in found] == [""] * 2
    check_alike([refused for _, refused, _ in found], "ManifestMismatchError", "rows.weight")
    if at == "rank 1":
        assert "rank 1: " in found[0][1].text
    for _, _, (again, full) in found:
        assert (again.text, again.result.version) == ("", 2)
        assert {name: to.digests()[name] for name in full} == full
    assert to.reading() == 2


def test_a_plan_of_another_generation(ranks: Crew, host: Host) -> None:
    """A rank that planned for other holdings does not take part, and the plan is not used."""
    to = host.receiver("http", model="rows")
    for first, refused, (again, full) in ranks.run(faults.send_with_another_plan, to.url):
        assert first.text == ""
        assert refused.kind == "ProtocolError"
        assert "rank 1: this rank planned which rank sends what as another" in refused.text
        assert (again.text, again.result.version, again.result.gathered) == ("", 2, {})
        assert {name: to.digests()[name] for name in full} == full


def test_a_rank_that_was_replaced(ranks: Crew, host: Host) -> None:
    """A rank that connects by itself again is no part of the others' sender."""
    to = host.receiver("http", model="rows")
    found = ranks.run(faults.replace_a_rank, to.url)
    for first, refused, (again, full) in found:
        assert first.text == ""
        assert refused.kind in {"ProtocolError", "TransferError", "TransferTimeout"}, refused.text
        assert "rank" in refused.text
        assert (again.text, again.result.gathered) == ("", {})
        assert {name: to.digests()[name] for name in full} == full


@pytest.mark.parametrize(
    "place", [{}, {"apply": "in_place"}, {"sink": "hook"}, {"sink": "hook", "apply": "in_place"}]
)
def test_parts_that_come_to_a_wrong_place(ranks: Crew, host: Host, place: dict[str, Any]) -> None:
    """Every part has its fingerprint, and none is missing: only the sum over all ranks differs."""
    (to,) = receivers(host, 1, **place)
    host.run(misplaced.begin)
    try:
        start(ranks, [to])
        before = to.digests()
        outcomes = [outcome for outcome, _ in ranks.run(work.step_and_send)]
    finally:
        host.run(misplaced.end)
    where = f"(on {to.url}, sent by rank"
    check_alike(outcomes, "VerificationError", "are not those that the ranks hold", where)
    if place.get("apply") == "in_place":
        assert to.status()["state"] == "TORN"
    else:
        assert (to.digests(), to.reading()) == (before, 0)
    ranks.run(work.close)
    start(ranks, [to])
    sent = ranks.run(work.step_and_send)
    if place.get("sink") == "hook":
        for _, full in sent:
            full.pop("head.weight")
    check_sent(sent, [to], 1)


def test_parts_that_come_to_a_wrong_place_of_shards(ranks: Crew) -> None:
    urls = ranks.run(shard_servers.serve, "decoder", "auto")
    try:
        ranks.run(misplaced.begin)
        ranks.run(work.start, "fsdp", urls, {})
        outcomes = [outcome for outcome, _ in ranks.run(work.step_and_send)]
        where = ", ".join(urls), " and ".join(urls)  # what each has in part, both have together
        check_alike(
            outcomes, "VerificationError", "are not those that the ranks hold", "sent by rank"
        )
        assert any(f"(on {one}, " in outcomes[0].text for one in where)
        assert set(ranks.run(shard_servers.version)) == {0}
    finally:
        ranks.run(misplaced.end)
        ranks.run(work.close)
        ranks.run(shard_servers.end)
