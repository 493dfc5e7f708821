"""Sets: parts of one trainer, each with a receiver of its own, that are committed together.

The parts of a set use one update id, which says how many they are. That is all that receivers need:
those of one server know each other, and commit such an update only together with as many others. No
message has a field for it.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from weightsync.errors import (
    TransferError,
    TransportTimeout,
    UpdateConflictError,
    WeightSyncError,
    text_of,
)

T = TypeVar("T")

_LOOK_S = 0.05
_SET_ID = re.compile(r"set-([1-9][0-9]{0,8})-")


def new_set_id(parts: int) -> str:
    """Return a new update id of a set with this number of parts; see `parts_of`."""
    return f"set-{parts}-{secrets.token_hex(8)}"


def parts_of(update_id: str) -> int:
    """Return of how many parts an update is: 1 unless its id is that of a set."""
    found = _SET_ID.match(update_id)
    return int(found[1]) if found else 1


class SetUpdate:
    """One attempt to update all parts of a set, each by a thread of its own on the sender.

    No part sends its finish before all parts are PREPARED. `error` is the first of a part before;
    `again`, whether a part knows why another attempt may go well.
    """

    def __init__(self, parts: int) -> None:
        self.update_id = new_set_id(parts)
        self.error: BaseException | None = None
        self.again = False
        self._parts = parts
        self._running = self._ready = 0
        self._changed = threading.Condition()

    @contextmanager
    def part(self) -> Iterator[None]:
        """Send one part inside the block; an error of it is the update's.

        Raises TransferError where another part has failed before this one begins.
        """
        with self._changed:
            self._check()
            self._running += 1
        try:
            yield
        except BaseException as exc:
            self.failed(exc)
            raise
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def await_parts(self) -> None:
        """After `failed`: wait until the parts that have begun are over; no other begins."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)

    def ready(self) -> None:
        """Wait until every part is PREPARED. Raises TransferError where one has failed.

        Called once by each part, in the block of `part`. It needs no timeout: the blocks of the
        others, whose waits have one each, come here or end with an error.
        """
        with self._changed:
            self._ready += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._all_ready or self.error is not None)
            self._check()

    def _check(self) -> None:
        if self.error is not None:
            raise TransferError(
                f"another part of the set failed before the commit: {text_of(self.error)}"
            )

    def failed(self, error: BaseException, *, again: bool = False) -> None:
        """Note that a part has failed; the others do not commit, if none has begun to.

        `again`: another attempt may go well.
        """
        with self._changed:
            if not self._all_ready and self.error is None:
                self.error = error
            self.again = self.again or again
            self._changed.notify_all()

    @property
    def _all_ready(self) -> bool:
        return self.error is None and self._ready == self._parts


class SetCommits(Generic[T]):
    """Brings together the finishes of one update on all receivers of a set. Thread-safe.

    Each receiver calls `finish` in its own thread. When all that take part are there, one of the
    threads commits them all, and the others return what came of it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rounds: dict[str, _Round[T]] = {}

    def finish(
        self,
        update_id: str,
        part: T,
        missing: Callable[[Sequence[T]], bool],
        commit: Callable[[Sequence[T]], None],
        timeout_s: float,
    ) -> bool:
        """Commit an update with all of its parts; return whether that was done.

        `missing(parts)` says whether others have yet to call. False where they did not within
        `timeout_s`: nothing was done. Raises the error of `commit`, and in the other threads one
        that names it, and TransportTimeout where another thread still commits after twice
        `timeout_s`. After an interrupt of that thread the others begin again.
        """
        deadline, mine = time.monotonic() + timeout_s, _Finish(part)
        try:
            mine.waits = True
            while True:
                round_ = self._gather(update_id, mine, missing, deadline)
                if round_ is None:
                    return False
                if round_.leader is mine:
                    _lead(round_, commit)
                else:
                    # The leader may wait as long as that for a part that is busy, and then commits.
                    self._follow(round_, 2 * timeout_s)
                if round_.error is not None:
                    raise round_.error
                if round_.done:
                    return True
        finally:
            # An interrupt may come at each call, so that this is none.
            mine.waits = False
            self._forget_rounds()

    def _gather(
        self,
        update_id: str,
        mine: _Finish[T],
        missing: Callable[[Sequence[T]], bool],
        deadline: float,
    ) -> _Round[T] | None:
        """Return the round of an update when it has a leader: the first thread that misses none.

        None where it has none by the deadline.
        """
        with self._changed:
            round_ = self._rounds.get(update_id)
            if round_ is None or round_.is_over:
                round_ = self._rounds[update_id] = _Round()
            round_.finishes.append(mine)
            self._changed.notify_all()
            while round_.leader is None and missing(round_.parts):
                if time.monotonic() > deadline:
                    break
                self._changed.wait(_LOOK_S)
            else:
                round_.leader = round_.leader or mine
        return None if round_.leader is None else round_

    def _follow(self, round_: _Round[T], timeout_s: float) -> None:
        """Wait until a round is over. Raises TransportTimeout."""
        with self._changed:
            deadline = time.monotonic() + timeout_s
            while not round_.is_over:
                if time.monotonic() > deadline:
                    raise TransportTimeout(
                        f"all parts of the set are still being committed after {timeout_s:g} s"
                    )
                self._changed.wait(_LOOK_S)

    def _forget_rounds(self) -> None:
        with self._changed:
            self._rounds = {key: one for key, one in self._rounds.items() if not one.is_over}
            self._changed.notify_all()


class _Finish(Generic[T]):
    """A thread in `SetCommits.finish`; it `waits` there, or commits."""

    def __init__(self, part: T) -> None:
        self.part = part
        self.waits = False


class _Round(Generic[T]):
    """The finishes of one update that have come. The `leader` commits it.

    `error` is what the others raise where that failed.
    """

    def __init__(self) -> None:
        self.finishes: list[_Finish[T]] = []
        self.leader: _Finish[T] | None = None
        self.done = False
        self.error: WeightSyncError | None = None

    @property
    def parts(self) -> list[T]:
        """The parts whose threads are there."""
        return [finish.part for finish in self.finishes if finish.waits]

    @property
    def is_over(self) -> bool:
        """Whether the leader, or without one every thread, has left."""
        if self.leader is not None:
            return not self.leader.waits
        return not self.parts


def _lead(round_: _Round[T], commit: Callable[[Sequence[T]], None]) -> None:
    try:
        commit(round_.parts)
    except Exception as exc:
        why = f"another part of the set could not be committed: {text_of(exc)}"
        if isinstance(exc, UpdateConflictError):  # of this kind no error is kept for a retry
            round_.error = UpdateConflictError(why, state=exc.state, update_id=exc.update_id)
        else:
            round_.error = TransferError(why)
        raise
    round_.done = True
