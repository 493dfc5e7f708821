"""Ten thousand updates in one pair of processes: nothing grows, and nothing slows down."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.e2e import processes
from tests.e2e.processes import Host
from tests.soak import aging, victims
from tests.soak.sizes import sizes

GROWTH = 0.01
SLOWDOWN = 0.1
TURNS = 10
TURN = 100
FRESH = 5
"""So many fresh pairs may be compared with, since two of them differ a little, too."""
CHECK_EVERY = 97
IDLE_S = 11.0

Footprints = tuple[dict[str, int], dict[str, int]]


@dataclass(frozen=True)
class Size:
    updates: int
    warm_up: int
    times: bool


@pytest.fixture(scope="module")
def trainers() -> Iterator[Host]:
    """The process of the trainers that grow old."""
    with processes.host() as made:
        yield made


class Pair:
    """A sender and a receiver, each in a process of its own."""

    def __init__(self, trainers: Host, receiver: processes.Remote) -> None:
        self.updates = 0
        self._trainers = trainers
        self._receiver = receiver

    def update(self, count: int) -> list[float]:
        """Send so often; look now and then whether what is held is what was sent."""
        seconds: list[float] = []
        while len(seconds) < count:
            some = min(CHECK_EVERY, count - len(seconds))
            sent = self._trainers.run(aging.send, [self.updates, some])
            assert self._receiver.digests() == sent["digests"]
            seconds += sent["seconds"]
            self.updates += some
        return seconds


@contextmanager
def pair(trainers: Host, host: Host, apply: str, path: str) -> Iterator[Pair]:
    receiver = host.receiver("http", apply=apply, model="tied")
    trainers.run(aging.begin, [receiver.url, path])
    try:
        made = Pair(trainers, receiver)
        yield made
        assert receiver.reading() == made.updates
    finally:
        trainers.run(aging.end)


@sizes(
    quick=Size(updates=300, warm_up=50, times=False),
    whole=Size(updates=10_000, warm_up=1_000, times=True),
)
@pytest.mark.parametrize("path", victims.PATHS)
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_nothing_grows(trainers: Host, host: Host, apply: str, path: str, size: Size) -> None:
    with pair(trainers, host, apply, path) as aged:
        aged.update(size.warm_up)
        before = trainers.footprint(), host.footprint()
        own = trainers.run(aging.segments)
        aged.update(size.updates)
        after = trainers.footprint(), host.footprint()
        if grown(before, after):  # an idle thread of a pool ends with the next call after 10 s
            time.sleep(IDLE_S)
            aged.update(TURN)
            after = trainers.footprint(), host.footprint()
        assert trainers.run(aging.segments) == own
        told = size.times and compare(aged, apply, path, warm_up=size.warm_up)
    assert not grown(before, after)  # what earlier tests dropped may be freed meanwhile
    for old, new in zip(before, after, strict=True):
        assert new["rss"] <= (1 + GROWTH) * old["rss"]
    rss = [
        round(100 * (new["rss"] / old["rss"] - 1), 2)
        for old, new in zip(before, after, strict=True)
    ]
    print(f"{aged.updates} updates, {path}, {apply}: memory {rss[0]:+} % and {rss[1]:+} %; {told}")


def grown(before: Footprints, after: Footprints) -> list[str]:
    """Return what the trainer's process, or the receiver's, has more of than it had."""
    return [
        f"{who}: {what} {old[what]} to {new[what]}"
        for who, old, new in zip(("trainer", "receiver"), before, after, strict=True)
        for what in ("fds", "segments", "threads")
        if new[what] > old[what]
    ]


def compare(aged: Pair, apply: str, path: str, *, warm_up: int) -> str:
    """Compare with pairs of fresh processes, in turns: what else the machine does slows both."""
    told = []
    for _ in range(FRESH):
        with (
            processes.host() as trainers,
            processes.host() as host,
            pair(trainers, host, apply, path) as fresh,
        ):
            fresh.update(warm_up)
            old, new = [], []
            for _ in range(TURNS):
                old += aged.update(TURN)
                new += fresh.update(TURN)
        told.append(f"{in_ms(undisturbed(old))}, and {in_ms(undisturbed(new))} of a fresh pair")
        if undisturbed(old) <= (1 + SLOWDOWN) * undisturbed(new):
            return "; ".join(told)
    raise AssertionError(f"slower than every fresh pair: {'; '.join(told)}")


def undisturbed(seconds: list[float]) -> float:
    """The tenth part that is fastest ends here.

    What grows with every update slows each of them down; other programs slow down most, not all.
    """
    return statistics.quantiles(seconds, n=10)[0]


def in_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
