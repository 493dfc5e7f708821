"""Who looks on while rank 0 sends: told of every command and message, and waited for by nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from weightsync.errors import WeightSyncError
from weightsync.sending.commands import AnyCommand
from weightsync.wire.messages import Reply, Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """One message to one member: who that is, how it is fed, and what it is asked."""

    target: str
    rank: int
    reader: int
    road: str
    request: Request

    @property
    def place(self) -> int | None:
        """Its place on this process's own ring; None where another one feeds it."""
        return self.reader if self.rank == 0 and self.road != "distributed" else None


class Observer(Protocol):
    """Looks on. `began` and `ended` come from the sender's thread, `asked` and `answered` from any.

    All return at once. `over` ends what the sender's caller asked for; `error` is what it raises.
    """

    def began(self, command: AnyCommand) -> None: ...

    def ended(self, command: AnyCommand) -> None: ...

    def asked(self, call: ObservedCall) -> None: ...

    def answered(self, call: ObservedCall, answer: Reply | WeightSyncError | None) -> None: ...

    def over(self, error: BaseException | None) -> None: ...


class Observers:
    """Tells all watchers; what one of them raises is logged, and does not touch the update."""

    def __init__(self) -> None:
        self.watchers: list[Observer] = []

    def __bool__(self) -> bool:
        return bool(self.watchers)

    @contextmanager
    def command(self, command: AnyCommand) -> Iterator[None]:
        """Around what all ranks do."""
        self._tell(lambda watcher: watcher.began(command))
        try:
            yield
        finally:
            self._tell(lambda watcher: watcher.ended(command))

    def asked(self, call: ObservedCall) -> None:
        """A message goes out."""
        self._tell(lambda watcher: watcher.asked(call))

    def answered(self, call: ObservedCall, answer: Reply | WeightSyncError | None) -> None:
        """It was answered, or failed."""
        self._tell(lambda watcher: watcher.answered(call, answer))

    @contextmanager
    def also(self, watcher: Observer | None) -> Iterator[None]:
        """Have one more look on, until the block ends."""
        if watcher is not None:
            self.watchers.append(watcher)
        try:
            yield
        finally:
            if watcher is not None:
                self.watchers.remove(watcher)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Around one call of the sender's user."""
        try:
            yield
        except BaseException as exc:
            error = exc
            self._tell(lambda watcher: watcher.over(error))
            raise
        self._tell(lambda watcher: watcher.over(None))

    def _tell(self, tell: Callable[[Observer], None]) -> None:
        for watcher in self.watchers:
            try:
                tell(watcher)
            except Exception:
                logger.warning("%s failed", type(watcher).__name__, exc_info=True)
