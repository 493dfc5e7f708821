"""The heartbeat thread ends with its object."""

from __future__ import annotations

import threading

from weightsync.shm.wait import Heartbeat

WAIT_S = 60.0


def test_it_may_be_closed_in_its_own_thread() -> None:
    """The garbage collector ends a dropped sender in whatever thread it runs."""
    closed = threading.Event()

    class Dropped:
        def __init__(self) -> None:
            self.heartbeat = Heartbeat(self.beat)

        def beat(self) -> None:
            self.heartbeat.close()
            closed.set()

    dropped = Dropped()
    assert closed.wait(WAIT_S)
    dropped.heartbeat.close()
    assert not dropped.heartbeat._thread.is_alive()
