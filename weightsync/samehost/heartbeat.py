"""A thread that shows the other side that this process lives, however long its work takes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERVAL_S = 0.25


@contextmanager
def beating(beat: Callable[[], None]) -> Iterator[None]:
    """Call `beat` now and then from another thread until the block ends."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(INTERVAL_S):
            beat()

    thread = threading.Thread(target=run, name="weightsync-heartbeat", daemon=True)
    try:
        # Inside, since Ctrl-C may come while it waits for the thread, which would beat for ever.
        thread.start()
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()


class Heartbeat:
    """Calls the bound method `beat` now and then, until `close` or until its object is gone.

    Not while the bound method `at_work` returns False, where that is given.
    """

    def __init__(
        self, beat: Callable[[], None], *, at_work: Callable[[], bool] | None = None
    ) -> None:
        self._beat = weakref.WeakMethod(beat)
        self._at_work = at_work and weakref.WeakMethod(at_work)
        self._done = threading.Event()
        self._thread = threading.Thread(
            target=_run,
            args=(self._done, self._beat, self._at_work),
            name="weightsync-heartbeat",
            daemon=True,
        )
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether `beat` is not called any more."""
        return not self._thread.is_alive()

    def close(self, timeout_s: float | None = None) -> None:
        """End it; `beat` is not called any more when this returns. Idempotent.

        With `timeout_s`, one that is at work may outlast this: `ended` tells. The garbage
        collector may call it in any thread, in the heartbeat's own too.
        """
        self._done.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


def _run(
    done: threading.Event,
    beat: weakref.WeakMethod[Callable[[], None]],
    at_work: weakref.WeakMethod[Callable[[], bool]] | None,
) -> None:
    while not done.wait(INTERVAL_S):
        call, asked = beat(), at_work() if at_work is not None else _always
        if call is None or asked is None:
            return
        if asked():
            call()
        del call, asked


def _always() -> bool:
    return True
