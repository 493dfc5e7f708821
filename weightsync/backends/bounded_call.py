"""Calls into torch that a silent peer can hold for ever, and that take no timeout of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedCall(Generic[T]):
    """`call`, begun in a daemon thread, which it keeps for as long as it lasts.

    What comes too late is dropped there.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._answer: list[T] = []
        self._error: BaseException | None = None
        self._given_up = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="weightsync-ask", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> bool:
        """Whether it still waits."""
        return self._thread.is_alive()

    def result(self, timeout_s: float | None) -> T:
        """Return what the call returns, or raise what it raises; TimeoutError after `timeout_s`."""
        self._thread.join(timeout_s)
        with self._lock:
            self._given_up = True
            error, self._error = self._error, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its frames hold it
            if not self._answer:
                raise TimeoutError(f"no answer within {timeout_s or 0:g} s")
            return self._answer.pop()

    def _run(self) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        try:
            answer = call()
        except BaseException as exc:  # noqa: BLE001 # raised where the result is waited for
            self._error = exc
            return
        with self._lock:
            if not self._given_up:
                self._answer.append(answer)
