"""The sender reads a little ahead of a reader, and waits for none that stands still."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import pytest
import torch
from torch import nn

import weightsync as ws
from weightsync.backends.ipc import sender as pace
from weightsync.backends.ipc.sender import LEAD_NBYTES, ReadAhead
from weightsync.shm.ring import Control

MIB = 1 << 20


def test_it_stays_within_its_lead_of_the_furthest_reader() -> None:
    taken = iter(range(0, 64 * MIB, MIB // 2))
    now = 0

    def furthest() -> int:
        nonlocal now
        now = next(taken)
        return now

    paced = ReadAhead(furthest)
    for start in range(0, 32 * MIB, MIB):
        paced.wait(start)
        assert start <= now + LEAD_NBYTES
    assert now >= 31 * MIB - LEAD_NBYTES


def test_near_the_start_nobody_is_asked() -> None:
    def never() -> int:
        raise AssertionError("asked")

    ReadAhead(never).wait(LEAD_NBYTES)


def test_a_reader_that_stands_still_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "STANDSTILL_S", 0.2)
    looks: list[float] = []

    def still() -> int:
        looks.append(time.monotonic())
        return 0

    paced = ReadAhead(still)
    paced.wait(LEAD_NBYTES + 1)
    assert looks[-1] - looks[0] >= 0.19
    count = len(looks)
    paced.wait(64 * MIB)
    assert len(looks) == count


@pytest.mark.parametrize("sink", ["module", "hook"])
def test_an_updates_fingerprints_follow_its_reader(
    sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules while they copy, hooks while they fingerprint: both show how far they are."""
    monkeypatch.setattr(pace, "STANDSTILL_S", 5.0)
    asked: list[int] = []
    seen: set[int] = set()
    plain, load = ReadAhead.wait, Control.load

    def counted(self: ReadAhead, start: int) -> None:
        plain(self, start)
        asked.append(start)
        seen.add(self._taken)

    def slow_load(self: Control, reader: int, nbytes: int) -> None:
        load(self, reader, nbytes)
        time.sleep(0.005)

    monkeypatch.setattr(Control, "load", slow_load)
    monkeypatch.setattr(ReadAhead, "wait", counted)
    ours, theirs = nn.Linear(2048, 2048), nn.Linear(2048, 2048)
    took = threading.Event()

    def hook(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in pairs:
            assert tensor.isfinite().all()
        took.set()

    receiver = ws.WeightReceiver(theirs if sink == "module" else hook, apply="in_place")
    with ws.connect(ours, to=receiver.handle, packed=False) as sender:
        assert sender.send_weights().verified != "none"
    receiver.close()
    assert len(seen) > 2, f"the sender saw its reader at {sorted(seen)} only"
    assert len(asked) >= 16 * MIB // (512 << 10)
    assert asked[-1] > 2 * LEAD_NBYTES
    assert took.is_set() or torch.equal(ours.weight, theirs.weight)
