"""Observer hooks of rank 0. Called for every command and message, never awaited."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from weightsync.errors import WeightSyncError
from weightsync.ranks.commands import AnyCommand
from weightsync.wire.messages import Reply, Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """One message to one member: the member's target, its rank, backend and reader; the request."""

    target: str
    rank: int
    backend: str
    reader: int
    request: Request


class Observer(Protocol):
    """Hooks of one observer. None of them may block.

    The sender's thread calls `on_command_start` and `on_command_end`; any thread calls `on_request`
    and `on_reply`. `on_done` is called at the end of the user's call, with the error that the call
    raises.
    """

    def on_command_start(self, command: AnyCommand) -> None: ...

    def on_command_end(self, command: AnyCommand) -> None: ...

    def on_request(self, call: ObservedCall) -> None: ...

    def on_reply(self, call: ObservedCall, answer: Reply | WeightSyncError | None) -> None: ...

    def on_done(self, error: BaseException | None) -> None: ...


class Observers:
    """Calls the hooks of all observers. Their errors are logged, and do not affect the update."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []

    def __bool__(self) -> bool:
        return bool(self.observers)

    @contextmanager
    def command(self, command: AnyCommand) -> Iterator[None]:
        """Notify the observers before and after a command of all ranks."""
        self._notify(lambda observer: observer.on_command_start(command))
        try:
            yield
        finally:
            self._notify(lambda observer: observer.on_command_end(command))

    def on_request(self, call: ObservedCall) -> None:
        """Notify the observers that a message is sent."""
        self._notify(lambda observer: observer.on_request(call))

    def on_reply(self, call: ObservedCall, answer: Reply | WeightSyncError | None) -> None:
        """Notify the observers of the reply, or of the error of the call."""
        self._notify(lambda observer: observer.on_reply(call, answer))

    @contextmanager
    def also(self, observer: Observer | None) -> Iterator[None]:
        """Add an observer, until the block ends; None adds nothing."""
        if observer is not None:
            self.observers.append(observer)
        try:
            yield
        finally:
            if observer is not None:
                self.observers.remove(observer)

    @contextmanager
    def user_call(self) -> Iterator[None]:
        """Notify the observers at the end of one call of the sender's user."""
        try:
            yield
        except BaseException as exc:
            error = exc
            self._notify(lambda observer: observer.on_done(error))
            raise
        self._notify(lambda observer: observer.on_done(None))

    def _notify(self, call: Callable[[Observer], None]) -> None:
        for observer in self.observers:
            try:
                call(observer)
            except Exception:
                logger.warning("%s failed", type(observer).__name__, exc_info=True)
