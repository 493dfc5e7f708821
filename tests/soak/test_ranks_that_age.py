"""Two thousand updates of ranks that each send a stream: nothing grows, on ranks or receivers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.crew import Crew, crew
from tests.e2e import processes
from tests.e2e import ranks_at_work as work
from tests.e2e.processes import Host
from tests.e2e.test_ranks import SMALL, check_sent, receivers, start
from tests.soak.sizes import SOAK
from tests.soak.test_ten_thousand import GROWTH, IDLE_S

RANKS = 2
SOME = 50
"""Updates between two looks at what the receivers hold."""
WAYS: dict[str, dict[str, Any]] = {"registered": {}, "ring": {"packed": True, **SMALL}}


@dataclass(frozen=True)
class Size:
    updates: int
    warm_up: int
    growth: float


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(RANKS) as made:
        yield made


def footprint(rank: int) -> dict[str, int]:
    return processes.footprint()


def send_many(rank: int, count: int) -> None:
    for _ in range(count):
        work.kept().step()
        report = work.kept().sender.send_weights()
        assert report.gathered == {}
        assert report.verified == "held"


QUICK = Size(50, 100, 3 * GROWTH)
WHOLE = Size(2_000, 400, GROWTH)
"""Rank 0 of a new process takes 3 MB more once, at about the 250th update."""
CASES = [
    ("staged", "ring"),
    ("in_place", "registered"),
    ("staged", "registered"),
    ("in_place", "ring"),
]


@pytest.mark.parametrize(
    ("apply", "way", "size"),
    [
        *(pytest.param(*case, QUICK, id="-".join([*case, "quick"])) for case in CASES[:2]),
        *(pytest.param(*case, WHOLE, id="-".join([*case, "whole"]), marks=SOAK) for case in CASES),
    ],
)
def test_nothing_grows(ranks: Crew, host: Host, apply: str, way: str, size: Size) -> None:
    """Each way and apply in each run, all four pairs of them in a soak."""
    to = receivers(host, 2, apply=apply)
    start(ranks, to, "fsdp", **WAYS[way])
    try:
        sent = update(ranks, to, size.warm_up, 0)
        before = [*ranks.run(footprint), host.footprint()]
        began = time.perf_counter()
        sent = update(ranks, to, size.updates, sent)
        seconds = time.perf_counter() - began
        after = [*ranks.run(footprint), host.footprint()]
        if grown(before, after):  # an idle thread of a pool ends with the next call after 10 s
            time.sleep(IDLE_S)
            sent = update(ranks, to, SOME, sent)
            after = [*ranks.run(footprint), host.footprint()]
        assert not grown(before, after)
        more = [new["rss"] / old["rss"] - 1 for old, new in zip(before, after, strict=True)]
        assert max(more) <= size.growth, (before, after)
        shown = ", ".join(f"{100 * one:+.2f} %" for one in more)
        fds, threads, segments = (
            [one[what] for one in after] for what in ("fds", "threads", "segments")
        )
        print(
            f"{sent} updates by {RANKS} ranks, {way}, {apply}: memory of ranks and receivers "
            f"{shown}; files {fds}, threads {threads}, segments {segments}, as before; "
            f"{1e3 * seconds / size.updates:.1f} ms an update"
        )
    finally:
        ranks.run(work.close)


def update(ranks: Crew, to: list[processes.Remote], count: int, sent: int) -> int:
    """Send so often; look now and then whether what is held is what was sent. Return the number."""
    for _ in range(count // SOME):
        ranks.run(send_many, SOME - 1)
        sent += SOME
        check_sent(ranks.run(work.step_and_send), to, sent)
    return sent


def grown(before: list[dict[str, int]], after: list[dict[str, int]]) -> list[str]:
    """Return what a rank, or the receivers' process, has more of than it had."""
    return [
        f"{at}: {what} {old[what]} to {new[what]}"
        for at, (old, new) in enumerate(zip(before, after, strict=True))
        for what in ("fds", "segments", "threads")
        if new[what] > old[what]
    ]
