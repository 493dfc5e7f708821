"""A thread that shows the other side that this process lives, however long its work takes."""

from __future__ import annotations

import threading
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
