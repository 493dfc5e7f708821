"""Who looks on while rank 0 sends: told of every command and message, and waited for by nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from weightsync.errors import WeightSyncError
from weightsync.ranks.worker import AnyCommand
from weightsync.wire.messages import Reply, Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """One message to one member: who that is, how it is fed, and what it is asked."""

    target: str
    rank: int
    backend: str
    reader: int
    request: Request


class Observer(Protocol):
    """Hooks of one observer. None of them may block.

    The sender's thread calls `on_command_start` and `on_command_end`; any thread calls `on_request`
    and `on_reply`. `on_done` ends the user's call; `error` is what that call raises.
    """

    def on_command_start(self, command: AnyCommand) -> None: ...

    def on_command_end(self, command: AnyCommand) -> None: ...

    def on_request(self, call: ObservedCall) -> None: ...

    def on_reply(self, call: ObservedCall, answer: Reply | WeightSyncError | None) -> None: ...

    def on_done(self, error: BaseException | None) -> None: ...


class Observers:
    """Tells all watchers; what one of them raises is logged, and does not touch the update."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []

    def __bool__(self) -> bool:
        return bool(self.observers)

    @contextmanager
    def command(self, command: AnyCommand) -> Iterator[None]:
        """Around what all ranks do."""
        self._notify(lambda observer: observer.on_command_start(command))
        try:
            yield
        finally:
            self._notify(lambda observer: observer.on_command_end(command))

    def on_request(self, call: ObservedCall) -> None:
        """A message goes out."""
        self._notify(lambda observer: observer.on_request(call))

    def on_reply(self, call: ObservedCall, answer: Reply | WeightSyncError | None) -> None:
        """It was answered, or failed."""
        self._notify(lambda observer: observer.on_reply(call, answer))

    @contextmanager
    def also(self, observer: Observer | None) -> Iterator[None]:
        """Have one more look on, until the block ends."""
        if observer is not None:
            self.observers.append(observer)
        try:
            yield
        finally:
            if observer is not None:
                self.observers.remove(observer)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Around one call of the sender's user."""
        try:
            yield
        except BaseException as exc:
            error = exc
            self._notify(lambda observer: observer.on_done(error))
            raise
        self._notify(lambda observer: observer.on_done(None))

    def _notify(self, tell: Callable[[Observer], None]) -> None:
        for observer in self.observers:
            try:
                tell(observer)
            except Exception:
                logger.warning("%s failed", type(observer).__name__, exc_info=True)
