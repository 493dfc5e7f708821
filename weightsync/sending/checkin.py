"""Who is there: ranks that meet through the trainer's store before they have a group."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from torch._C._distributed_c10d import PrefixStore, Store

COMPLETE = "complete"
_POLL_S = 0.005
_MAX_POLL_S = 0.1


class StoreRendezvous:
    """One meeting of all ranks. `store` is the meeting's own corner of the trainer's store.

    Every rank counts its own meetings, and the outcome of each is settled once in the store: so a
    rank that comes after the others gave up goes on to the meeting they hold next.
    """

    def __init__(self, store: Store, *, rank: int, size: int) -> None:
        self.store = store
        self._rank = rank
        self._size = size

    @classmethod
    def arrive(
        cls, store: Store, *, rank: int, size: int, timeout_s: float
    ) -> tuple[Self, list[int]]:
        """Wait for all ranks; return the meeting, and the ranks that did not come in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            number = store.add(f"meetings/{rank}", 1)
            meeting = cls(PrefixStore(f"meeting/{number}", store), rank=rank, size=size)
            if meeting._enter() in (b"", COMPLETE.encode()) or time.monotonic() >= deadline:
                return meeting, meeting._wait(deadline)

    def survivors_miss(self, timeout_s: float) -> list[int]:
        """Return the ranks that do not call this too, within `timeout_s`. Called after a loss."""
        self.survive()
        return self._missing("survivor", time.monotonic() + timeout_s)

    def survive(self) -> None:
        """Say that this rank is left."""
        self.store.set(f"survivor/{self._rank}", "1")

    def _enter(self) -> bytes:
        self.store.set(f"rank/{self._rank}", "1")
        if self.store.add("arrived", 1) == self._size:
            return self._settle(COMPLETE)
        return self.store.get("outcome") if self.store.check(["outcome"]) else b""

    def _settle(self, outcome: str) -> bytes:
        """Settle the outcome; return how it was settled first."""
        return self.store.compare_set("outcome", "", outcome)

    def _wait(self, deadline: float) -> list[int]:
        if _poll(lambda: self.store.check(["outcome"]), deadline):
            settled = self.store.get("outcome")
        else:
            missing = self._missing("rank", deadline)
            settled = self._settle(" ".join(map(str, missing)) or COMPLETE)
        return [] if settled == COMPLETE.encode() else [int(n) for n in settled.split()]

    def _missing(self, kind: str, deadline: float) -> list[int]:
        """Return the ranks without a key of this kind once the time is up, or none at once."""
        left = [rank for rank in range(self._size) if rank != self._rank]

        def all_here() -> bool:
            left[:] = [rank for rank in left if not self.store.check([f"{kind}/{rank}"])]
            return not left

        _poll(all_here, deadline)
        return left


def _poll(ready: Callable[[], bool], deadline: float) -> bool:
    pause = _POLL_S
    while not ready():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, _MAX_POLL_S)
    return True
