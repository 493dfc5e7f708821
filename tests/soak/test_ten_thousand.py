"""Ten thousand updates in one pair of processes: nothing grows, and nothing slows down."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import pytest
from torch import nn

import weightsync as ws
from tests.e2e import models, processes
from tests.e2e.models import digests, fill
from tests.e2e.processes import Host
from tests.soak import victims
from tests.soak.sizes import sizes
from weightsync.samehost.segment import live_segments

GROWTH = 0.01
SLOWDOWN = 0.1
SPANS = 10
MORE = 3
"""So many more spans may follow where the last one was slow."""
CHECK_EVERY = 97


@dataclass(frozen=True)
class Size:
    updates: int
    warm_up: int
    times: bool


class Run:
    """One sender and one receiver, and how long each update took."""

    def __init__(
        self, sender: ws.WeightSender, model: nn.Module, receiver: processes.Remote
    ) -> None:
        self._sender = sender
        self._model = model
        self._receiver = receiver
        self.seconds: list[float] = []

    def update(self, count: int) -> None:
        """Send so often; look now and then whether what is held is what was sent."""
        for i in range(count):
            looks = i % CHECK_EVERY == 0
            if looks:
                fill(self._model, seed=i)
            started = time.perf_counter()
            self._sender.send_weights()
            self.seconds.append(time.perf_counter() - started)
            if looks:
                assert self._receiver.digests() == digests(self._model)


@sizes(
    quick=Size(updates=300, warm_up=50, times=False),
    whole=Size(updates=10_000, warm_up=1_000, times=True),
)
@pytest.mark.parametrize("road", victims.ROADS)
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_nothing_grows(host: Host, apply: str, road: str, size: Size) -> None:
    receiver = host.receiver("http", apply=apply, model="tied")
    model = models.make("tied", seed=1)
    with ws.connect(model, to=receiver.url, **victims.ROADS[road]) as sender:
        Run(sender, model, receiver).update(size.warm_up)
        before = processes.footprint(), host.footprint()
        own = [segment.name for segment in live_segments()]
        run = Run(sender, model, receiver)
        run.update(size.updates)
        span = size.updates // SPANS
        first, last = run.seconds[:span], run.seconds[-span:]
        while size.times and slowed(first, last) and len(run.seconds) < size.updates + MORE * span:
            run.update(span)  # what grows stays slow, what disturbs goes
            last = run.seconds[-span:]
        after = processes.footprint(), host.footprint()
        assert [segment.name for segment in live_segments()] == own
        assert receiver.reading() == size.warm_up + len(run.seconds)
    for old, new in zip(before, after, strict=True):
        grown = {w: (old[w], new[w]) for w in ("fds", "segments", "threads") if new[w] > old[w]}
        assert not grown  # what earlier tests dropped may be freed meanwhile
        assert new["rss"] <= (1 + GROWTH) * old["rss"]
    rss = [
        round(100 * (new["rss"] / old["rss"] - 1), 2)
        for old, new in zip(before, after, strict=True)
    ]
    print(
        f"{len(run.seconds)} updates, {road}, {apply}: memory {rss[0]:+} % and {rss[1]:+} %, the "
        f"first {span} and the last: undisturbed {in_ms(undisturbed(first))} and "
        f"{in_ms(undisturbed(last))}, median {in_ms(statistics.median(first))} and "
        f"{in_ms(statistics.median(last))}"
    )
    assert not (size.times and slowed(first, last))


def slowed(first: list[float], last: list[float]) -> bool:
    return undisturbed(last) > (1 + SLOWDOWN) * undisturbed(first)


def undisturbed(seconds: list[float]) -> float:
    """The tenth part that is fastest ends here.

    What grows with every update slows each of them down; other programs slow down most, not all.
    """
    return statistics.quantiles(seconds, n=10)[0]


def in_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
