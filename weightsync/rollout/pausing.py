"""What happens to requests in flight, and to new ones, while generation is paused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weightsync.errors import ConfigError, NotReadyError, TransferTimeout

MODES = ("abort", "wait", "keep")
PAUSE_TIMEOUT_S = 600.0

_POLL_S = 0.05

ShouldStop = Callable[[], bool]


class PauseControl:
    """Holds generation between `pause` and `resume`; thread-safe.

    keep: requests in flight stop after the step they are in, and go on at `resume`. wait: they are
    finished before `pause` returns. abort: they return what they have. New requests wait, in
    every mode, at most `timeout_s`. After `close` nothing waits and everything stops.
    """

    def __init__(self, *, timeout_s: float = PAUSE_TIMEOUT_S) -> None:
        self._condition = threading.Condition()
        self._timeout_s = timeout_s
        self._mode = ""
        self._in_flight = 0
        self._aborts = 0
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Requests that were let in and have not ended."""
        return self._in_flight

    def pause(self, mode: str) -> None:
        """Begin a pause, or change its mode. Raises TransferTimeout when `wait` takes too long."""
        if mode not in MODES:
            raise ConfigError(f"pause mode {mode!r} is not known; known: {', '.join(MODES)}")
        with self._condition:
            self._mode = mode
            self._aborts += mode == "abort"
            self._condition.notify_all()
            if mode == "keep":
                return
            if not self._condition.wait_for(self._drained, self._timeout_s):
                raise TransferTimeout(
                    f"{self._in_flight} requests did not end within {self._timeout_s:g} s; "
                    "generation stays paused, pause with mode abort or resume"
                )

    def resume(self) -> None:
        """End the pause, if there is one."""
        with self._condition:
            self._mode = ""
            self._condition.notify_all()

    def close(self) -> None:
        """End every wait and every request. Called when the server goes down."""
        with self._condition:
            self._closed = True
            self._aborts += 1
            self._condition.notify_all()

    @contextmanager
    def request(self, is_gone: ShouldStop) -> Iterator[ShouldStop]:
        """Be a request in flight; yields what its generator asks whether to stop.

        Waits while generation is paused. `is_gone` says that nobody wants the answer any more.
        Raises NotReadyError when the pause outlasts the timeout, or the server goes down.
        """
        aborts = self._enter(is_gone)
        try:
            yield lambda: is_gone() or self._aborts != aborts
        finally:
            with self._condition:
                self._in_flight -= 1
                self._condition.notify_all()

    def wait_step(self) -> None:
        """Wait between two steps while a pause keeps requests. Called before every step."""
        with self._condition:
            if not self._condition.wait_for(self._may_step, self._timeout_s):
                raise self._paused_too_long()

    def _enter(self, is_gone: ShouldStop) -> int:
        deadline = time.monotonic() + self._timeout_s
        with self._condition:
            while self._mode and not self._closed and not is_gone():
                if time.monotonic() > deadline:
                    raise self._paused_too_long()
                self._condition.wait(_POLL_S)
            if self._closed:
                raise NotReadyError("the server is going down; ask another one", state="CLOSED")
            self._in_flight += 1
            return self._aborts

    def _drained(self) -> bool:
        # A later pause or resume takes over from this one.
        return self._in_flight == 0 or self._closed or self._mode not in ("wait", "abort")

    def _may_step(self) -> bool:
        return self._mode != "keep" or self._closed

    def _paused_too_long(self) -> NotReadyError:
        return NotReadyError(
            f"generation has been paused for over {self._timeout_s:g} s; call resume",
            state="PAUSED",
        )
