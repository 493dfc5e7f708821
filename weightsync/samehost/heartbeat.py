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
    """Calls the bound method `beat` now and then, until `close` or until its object is gone."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(
            target=_beat,
            args=(weakref.WeakMethod(beat), self._done),
            name="weightsync-heartbeat",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """End it; `beat` is not called any more when this returns. Idempotent."""
        self._done.set()
        self._thread.join()


def _beat(beat: weakref.WeakMethod[Callable[[], None]], done: threading.Event) -> None:
    while not done.wait(INTERVAL_S):
        call = beat()
        if call is None:
            return
        call()
        del call
