"""The thread that shows that a process lives ends with the work it stands for."""

from __future__ import annotations

import threading

import pytest

from weightsync.shm.wait import Heartbeat, beating

WAIT_S = 60.0


def beats() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weightsync-heartbeat"]


def test_ctrl_c_while_it_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start
    before = beats()

    def start(thread: threading.Thread) -> None:
        real(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt), beating(lambda: None):
        raise AssertionError("the block was entered")
    for thread in set(beats()) - set(before):
        thread.join(WAIT_S)
    assert set(beats()) <= set(before)


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
