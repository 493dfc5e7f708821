"""The seconds of a report: for how long each receiver waited for the sender's bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

import weightsync as ws

pytestmark = pytest.mark.usefixtures("shm_clean")

TENSORS = [(f"layers.{i}.w", torch.full((1024,), float(i))) for i in range(8)]
PAUSE_S = 0.05
SLOW_S = len(TENSORS) * PAUSE_S


def slowly() -> Iterator[tuple[str, torch.Tensor]]:
    for pair in TENSORS:
        time.sleep(PAUSE_S)
        yield pair


def at_once() -> Iterator[tuple[str, torch.Tensor]]:
    yield from TENSORS


def hook(pause_s: float) -> ws.WeightReceiver:
    def load(pairs: Any) -> list[str]:
        names = [name for name, _ in pairs]
        time.sleep(pause_s * len(names))
        return names

    return ws.WeightReceiver(ws.HookSink(load), apply="in_place")


def seconds(source: Any, *receivers: ws.WeightReceiver) -> list[dict[str, float]]:
    """Return the seconds of each receiver in an update through a ring that is soon full."""
    to = [receiver.handle for receiver in receivers]
    with ws.connect(source, to=to, bucket_nbytes=4096, num_buckets=2, delta="off") as sender:
        report = sender.send_weights()
    return [dict(one.seconds) for one in report.receivers]


def test_a_receiver_waits_for_a_slow_trainer() -> None:
    with closing(hook(0.0)) as receiver:
        (found,) = seconds(slowly, receiver)
    assert SLOW_S / 4 <= found["wait"] <= found["load"]


def test_a_slow_receiver_is_the_one_that_loads_without_waiting() -> None:
    with closing(hook(PAUSE_S)) as slow, closing(hook(0.0)) as fast:
        of_slow, of_fast = seconds(at_once, slow, fast)
    assert of_slow["load"] - of_slow["wait"] >= SLOW_S * 0.99  # what its hook took is no wait
    assert PAUSE_S / 2 <= of_fast["wait"] <= of_fast["load"]  # for the slow one, which has chunks


def test_the_time_until_another_hosts_ring_begins_is_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first receiver of a host fills the ring: others may be told of an update before it."""
    monkeypatch.setenv("WEIGHTSYNC_ADDRESS", "127.0.0.1")
    first, second = hook(0.0), hook(0.0)

    def late(message: Any) -> dict[str, object]:
        if message["call"] == "update_weights":
            time.sleep(SLOW_S)
        return first.handle(message)

    with (
        closing(first),
        closing(second),
        ws.connect(at_once, to=[late, second.handle], backend="tcp", delta="off") as sender,
    ):
        report = sender.send_weights()
    found = report.receivers[1].seconds
    assert SLOW_S / 4 <= found["wait"] <= found["load"]
