"""Liveness of a trainer's ranks: tells a rank that is stopped from one that is slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from weightsync.runtime.interpreter_exit import end_at_exit

LEAST_SILENCE_S = 5.0
"""The shortest silence that counts. A rank cannot answer while its program holds the interpreter's
lock, in an extension module for seconds, or gets no core."""
_MAX_INTERVAL_S = 2.0
_LOOKS_PER_SILENCE = 8
_INTERVAL_OF_A_RANK_S = 0.005
"""The interval grows with the number of ranks: all of them ask one store."""
_MAX_STEP_S = 1.0
"""The longest step that counts of a wait in slices: a longer one is a stop of this process."""
_KEYS_INTERVAL_S = 0.2
_FORGET_S = 5.0
"""How long the thread looks for a key after it was last asked for it."""
_LOOK_WAIT_S = 0.001
_ASKED = "watch/asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOutcome:
    """Why a wait cannot end: ranks or the store are silent, or another rank has noticed a loss."""

    silent: Sequence[int] = ()
    store_is_silent: bool = False


class RankWatch:
    """Answers ranks that wait for this one, and finds those that do not answer this one.

    A rank that waits increases a counter in the store, in intervals. A thread of each rank copies
    the counter to a key of that rank. A rank is silent when its key has not changed for `limit_s`
    of a wait. Time in which this process itself was stopped does not count. Where no rank waits,
    the threads only read the counter.

    The thread has a connection of its own to `store`, where the store allows it: a call to a store
    whose process is stopped does not return. So waits ask the thread for keys too (`is_set`).
    `lost` is the key that a rank sets there which has
    noticed the loss of another one.
    """

    def __init__(self, store: Store, *, rank: int, size: int, lost: str, timeout_s: float) -> None:
        self.limit_s = max(timeout_s, LEAST_SILENCE_S)
        self._store = _cloned(store)
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._lost = lost
        interval_s = min(_MAX_INTERVAL_S, self.limit_s / _LOOKS_PER_SILENCE)
        self._interval_s = max(interval_s, size * _INTERVAL_OF_A_RANK_S)
        self._answered = "0"
        self._answers: list[str] = []
        self._silences: list[float] = []
        self._looked_at = 0.0
        self._waits = False
        self._looks = 0
        self._seen_looks = 0
        self._stuck_s = 0.0
        self._polled_at = 0.0
        self._wanted: dict[str, float] = {}
        self._found: set[str] = set()
        self._ends = False
        self._wakes = threading.Event()
        self._store.set(_key_of(rank), "0")
        self._store.set(_ASKED, "0")
        self._thread = threading.Thread(target=self._run, name="weightsync-ranks", daemon=True)

    def start(self) -> None:
        """Begin to answer. Called when every rank has made its watch."""
        end_at_exit(self)
        self._thread.start()

    def begin_wait(self) -> None:
        """Begin to look for silent ranks: this rank waits for all others. Idempotent."""
        if not self._waits:
            self._answers, self._silences = [], [0.0] * len(self._others)
            self._looked_at = self._polled_at = time.monotonic()
            self._stuck_s = 0.0
            self._waits = True
            self._wakes.set()

    def end_wait(self) -> None:
        """End the wait."""
        self._waits = False

    def is_set(self, key: str) -> bool:
        """Whether the key is in the store, as of the thread's last look. Never waits for the store.

        The thread looks for the key while this is called again and again.
        """
        if key not in self._wanted:
            self._wakes.set()
        self._wanted[key] = time.monotonic()
        return key in self._found

    @property
    def is_losing(self) -> bool:
        """Whether a rank has noticed the loss of another one; see `is_set`."""
        return self.is_set(self._lost)

    def look_for_loss(self, timeout_s: float) -> bool:
        """Whether a rank has noticed the loss of another one by now.

        Waits for a look of the thread. False after `timeout_s`, or where the thread has ended.
        """
        deadline = time.monotonic() + timeout_s
        seen = self._looks
        # The first look to end may have begun before.
        while not self.is_losing and self._looks < seen + 2:
            if time.monotonic() >= deadline or not self._thread.is_alive():
                return False
            self._wakes.set()
            time.sleep(_LOOK_WAIT_S)
        return self.is_losing

    def poll(self) -> WatchOutcome | None:
        """Return why the wait cannot end, None while it may. Called several times a second."""
        now = time.monotonic()
        self._stuck_s += min(now - self._polled_at, _MAX_STEP_S)
        self._polled_at = now
        if self._looks != self._seen_looks:
            self._seen_looks, self._stuck_s = self._looks, 0.0
        if self.is_losing:
            return WatchOutcome()
        silent = [
            other
            for other, silence_s in zip(self._others, list(self._silences), strict=True)
            if silence_s >= self.limit_s
        ]
        if silent:
            return WatchOutcome(silent=silent)
        return WatchOutcome(store_is_silent=True) if self._stuck_s >= self.limit_s else None

    def close(self) -> None:
        """End the thread; does not wait for it."""
        self._ends = True
        self._wakes.set()

    def end(self, timeout_s: float) -> None:
        """End the thread, and wait at most `timeout_s` for it: see `end_at_exit`."""
        self.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._wakes.wait(_KEYS_INTERVAL_S if self._wanted else self._interval_s)
            self._wakes.clear()
            if self._ends:
                return
            try:
                self._find()
                self._answer()
                now = time.monotonic()
                if self._waits and now - self._looked_at >= self._interval_s:
                    self._look(now)
            except dist.DistNetworkError:  # the store's process has died: the group notices that
                return
            except RuntimeError:  # a timeout, after which the store may answer again
                time.sleep(_KEYS_INTERVAL_S)
            self._looks += 1

    def _find(self) -> None:
        """Look for the keys that were asked for lately."""
        now = time.monotonic()
        for key, asked_at in list(self._wanted.items()):
            if key in self._found or now - asked_at > _FORGET_S:
                self._wanted.pop(key, None)
            elif self._store.check([key]):
                self._found.add(key)

    def _answer(self) -> None:
        asked = self._store.get(_ASKED).decode()
        if asked != self._answered:
            self._store.set(_key_of(self._rank), asked)
            self._answered = asked

    def _look(self, now: float) -> None:
        """Ask the others, and add to the silences of those that have not answered since."""
        self._store.add(_ASKED, 1)
        answers = self._read([_key_of(other) for other in self._others])
        step_s = min(now - self._looked_at, 2 * self._interval_s)
        self._looked_at = now
        before, self._answers = self._answers, answers
        if before:
            rows = zip(self._silences, before, answers, strict=True)
            self._silences = [s + step_s if old == new else 0.0 for s, old, new in rows]

    def _read(self, keys: Sequence[str]) -> list[str]:
        if self._store.has_extended_api():
            return [answer.decode() for answer in self._store.multi_get(list(keys))]
        return [self._store.get(key).decode() for key in keys]


def _key_of(rank: int) -> str:
    return f"watch/answer/{rank}"


def _cloned(store: Any) -> Any:  # torch's stub lacks methods of stores
    try:
        return store.clone()
    except (RuntimeError, NotImplementedError, AttributeError):  # a store of the user's
        return store
