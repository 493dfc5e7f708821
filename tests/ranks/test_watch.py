"""How ranks that wait tell a rank that is stopped from one that is slow."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from tests.children import CONTEXT
from weightsync.ranks import watch
from weightsync.ranks.watch import RankWatch, WatchOutcome

LIMIT_S = 1.0
WAIT_S = 40.0


@pytest.fixture(autouse=True)
def short_silences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LEAST_SILENCE_S", LIMIT_S)


def watches(store: Any, size: int) -> list[RankWatch]:
    return [
        RankWatch(store, rank=rank, size=size, lost="lost", timeout_s=LIMIT_S)
        for rank in range(size)
    ]


@contextmanager
def answering(made: list[RankWatch]) -> Iterator[None]:
    for one in made:
        one.start()
    try:
        yield
    finally:
        for one in made:
            one.end(WAIT_S)


def until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        value = found()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError("it was not noticed")


def test_ranks_that_do_not_answer_are_found_by_each_that_waits() -> None:
    made = watches(HashStore(), 4)
    with answering([made[0], made[2]]):
        for rank in (0, 2):
            made[rank].begin_wait()
            assert until(made[rank].poll) == WatchOutcome(silent=[1, 3])
            made[rank].end_wait()


def test_a_rank_that_answers_late_is_not_silent_in_the_next_wait() -> None:
    made = watches(HashStore(), 2)
    with answering([made[0]]):
        made[0].begin_wait()
        assert until(made[0].poll) == WatchOutcome(silent=[1])
        made[0].end_wait()
        with answering([made[1]]):
            made[0].begin_wait()
            begun = time.monotonic()
            looks = made[0]._looks
            while time.monotonic() < begun + 3 * LIMIT_S or made[0]._looks < looks + 10:
                assert made[0].poll() is None
                time.sleep(0.1)


def test_a_loss_that_another_rank_noticed_ends_the_wait() -> None:
    store = HashStore()
    made = watches(store, 2)
    with answering(made):
        made[0].begin_wait()
        assert made[0].poll() is None
        store.set("lost", "1")
        assert until(made[0].poll) == WatchOutcome()


class Counting:
    """A store that counts calls."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._store = HashStore()

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise RuntimeError("cannot be cloned")

        def call(*args: Any) -> Any:
            self.counts[name] += 1
            return getattr(self._store, name)(*args)

        return call


def test_nothing_is_written_while_no_rank_waits() -> None:
    store = Counting()
    made = watches(store, 2)
    with answering(made):
        store.counts.clear()
        until(lambda: store.counts["get"] > 10)
        assert set(store.counts) == {"get"}
        made[0].begin_wait()
        until(lambda: store.counts["set"] > 2)


def hold_a_store(end: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    end.send(store.port)
    end.recv()


def test_a_store_whose_process_is_stopped_is_found_and_holds_no_wait() -> None:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=hold_a_store, args=(theirs,), daemon=True)
    process.start()
    try:
        assert ours.poll(WAIT_S)
        store = TCPStore("127.0.0.1", ours.recv(), None, False, wait_for_workers=False)
        made = watches(store, 2)
        with answering(made):
            assert not made[0].is_set("cancelled")
            os.kill(process.pid or 0, signal.SIGSTOP)
            made[0].begin_wait()
            assert until(made[0].poll) == WatchOutcome(store_is_silent=True)
            assert not made[0].is_set("cancelled")
            assert not made[0].is_losing
            os.kill(process.pid or 0, signal.SIGCONT)
    finally:
        process.kill()
        process.join(WAIT_S)
