"""Sets: parts of one trainer, each with a receiver of its own, that are committed together.

The parts of a set use one update id. That is all that receivers need: those of one server know each
other, and finish an update only with every other one that has an open update of the same id. No
message has a field for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from weightsync.errors import TransferError, WeightSyncError, text_of

T = TypeVar("T")

_LOOK_S = 0.05


class SetUpdate:
    """One attempt to update all parts of a set, each by a thread of its own on the sender.

    No part sends its finish before all parts are PREPARED. `error` is the first of a part before.
    """

    def __init__(self, update_id: str, parts: int) -> None:
        self.update_id = update_id
        self.error: BaseException | None = None
        self._parts = parts
        self._ready = 0
        self._changed = threading.Condition()

    def ready(self) -> None:
        """Wait until every part is PREPARED. Raises TransferError where one has failed."""
        with self._changed:
            self._ready += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._all_ready or self.error is not None)
            if self._all_ready:
                return
        assert self.error is not None  # or the wait would go on
        raise TransferError(
            f"another part of the set failed before the commit: {text_of(self.error)}"
        )

    def failed(self, error: BaseException) -> None:
        """Note that a part has failed; the others do not commit, if none has begun to."""
        with self._changed:
            if not self._all_ready and self.error is None:
                self.error = error
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
        `timeout_s`: nothing was done. Raises the error of `commit`, in every thread.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            round_ = self._rounds.setdefault(update_id, _Round())
            round_.parts.append(part)
            self._changed.notify_all()
            while not round_.begun and missing(round_.parts):
                if time.monotonic() > deadline:
                    round_.parts.remove(part)
                    if not round_.parts:
                        self._rounds.pop(update_id, None)
                    return False
                self._changed.wait(_LOOK_S)
            leads, round_.begun = not round_.begun, True
        if leads:
            try:
                commit(round_.parts)
            except BaseException as exc:
                round_.error = exc
                raise
            finally:
                with self._changed:
                    round_.over = True
                    self._rounds.pop(update_id, None)
                    self._changed.notify_all()
            return True
        with self._changed:
            self._changed.wait_for(lambda: round_.over)
        if round_.error is not None:
            raise TransferError(
                f"another part of the set could not be committed: {text_of(round_.error)}"
            ) from (round_.error if isinstance(round_.error, WeightSyncError) else None)
        return True


class _Round(Generic[T]):
    """The parts whose finish has come. `begun`: one of the threads commits them."""

    def __init__(self) -> None:
        self.parts: list[T] = []
        self.begun = False
        self.over = False
        self.error: BaseException | None = None
