"""Models of FSDP1, whose ranks hold runs of elements: nothing is gathered, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.crew import Crew, crew
from tests.e2e import ranks_at_work as work
from tests.e2e.processes import Host
from tests.e2e.test_ranks import SMALL, check_sent, receivers, start


@pytest.fixture(scope="module")
def crews() -> Iterator[dict[int, Crew]]:
    with crew(2) as two, crew(3) as three, crew(4) as four:
        yield {2: two, 3: three, 4: four}


CASES: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
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
    """Every rank sends its runs, each byte once, and goes on training in between."""
    to = receivers(host, 2, **place)
    start(ranks, to, kind, **options)
    for version in (1, 2, 3):
        sent = ranks.run(work.step_and_send, options.get("dtype"))
        if place.get("sink") == "hook":
            for _, full in sent:
                full.pop("head.weight")
        check_sent(sent, to, version)
        report = sent[0][0].result
        assert report.gathered == {}
        assert report.verified == ("arrived" if place.get("sink") == "hook" else "held")
        assert report.summed == (report.tensors if version == 1 else 0)
        for receiver in report.receivers:
            assert sum(receiver.sources.values()) == report.nbytes


@pytest.mark.parametrize("kind", ["flat", "flat_kept", "flat_originals"])
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_after_a_forward_pass_alone(ranks: Crew, host: Host, kind: str) -> None:
    """What the optimizer writes next is the shard, that is sent, and it trains on."""
    to = receivers(host, 1)
    start(ranks, to, kind)
    for version in (1, 2, 3):
        sent = ranks.run(work.generate_and_send)
        check_sent(sent, to, version)
    assert ranks.run(work.train_alone, kind, 3) == [full for _, full in sent]


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_copy_is_sent_while_the_trainer_steps(ranks: Crew, host: Host) -> None:
    """Each rank copies its runs alone."""
    to = receivers(host, 1)
    start(ranks, to, "flat")
    for version in (1, 2):
        sent = ranks.run(work.send_copy_and_step)
        check_sent([(outcome, full) for outcome, full, _ in sent], to, version)
        assert sum(copied for _, _, copied in sent) <= 1.2 * sent[0][0].result.nbytes


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_deltas(ranks: Crew, host: Host) -> None:
    to = receivers(host, 1)
    start(ranks, to, "flat", delta="always")
    for version in (1, 2, 3):
        sent = ranks.run(work.step_and_send)
        check_sent(sent, to, version)
        assert sent[0][0].result.delta.sent is (version > 1)
