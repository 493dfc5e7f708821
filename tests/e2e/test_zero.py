"""Engines of the real DeepSpeed with ZeRO-3: what each rank holds is sent, nothing is gathered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.crew import Crew, crew
from tests.e2e import zero_ranks
from tests.e2e.processes import Host
from tests.e2e.test_ranks import SMALL, check_sent, receivers


@pytest.fixture(scope="module")
def crews() -> Iterator[dict[int, Crew]]:
    with crew(2) as two:
        yield {2: two}


CASES: list[tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (2, {}, {}, {}),
    (2, {}, {"packed": True, **SMALL}, {"apply": "in_place"}),
    (2, {"bf16": True}, {}, {"model": "decoder-bfloat16", "sink": "hook"}),
    (2, {"stage3_param_persistence_threshold": 1 << 20}, {}, {}),
    (2, {"offload_param": {"device": "cpu"}}, {}, {}),
    (2, {"stage": 2}, {}, {}),
]


@pytest.mark.parametrize(("ranks", "settings", "options", "place"), CASES, indirect=["ranks"])
def test_nothing_is_gathered(
    ranks: Crew,
    host: Host,
    settings: dict[str, Any],
    options: dict[str, Any],
    place: dict[str, Any],
) -> None:
    to = receivers(host, 1, **place)
    started = ranks.run(zero_ranks.start, [remote.url for remote in to], settings, options)
    assert [outcome.text for outcome in started] == [""] * len(started)
    for version in (1, 2, 3):
        sent = ranks.run(zero_ranks.step_and_send)
        if place.get("sink") == "hook":
            for _, full in sent:
                full.pop("head.weight")
        check_sent(sent, to, version)
        full = sent[0][1]
        report = sent[0][0].result
        assert report.gathered == {}
        assert report.verified == ("arrived" if place.get("sink") == "hook" else "held")
        (receiver,) = report.receivers
        assert set(receiver.sources) == set(range(len(sent)))
        assert sum(receiver.sources.values()) == report.nbytes
    alone, *_ = ranks.run(zero_ranks.train_alone, settings, 3)
    assert {name: alone[name] for name in full} == full, "to be sent changed what is trained"


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_the_example_of_the_page(ranks: Crew, host: Host) -> None:
    (to,) = receivers(host, 1)
    full, *_ = ranks.run(zero_ranks.run_page, to.url)
    held = to.digests()
    assert {name: held[name] for name in full} == full
    assert to.reading() == 2
