"""A steady update makes no thread, and what a receiver keeps ends with it."""

from __future__ import annotations

import gc
import threading
import time

import pytest

import weightsync as ws
from tests.e2e import models
from weightsync.update.incoming import ProgressTimer
from weightsync.update.lifecycle import ApplyChoice

TIMEOUT_S = 20.0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of threads that were started."""
    names: list[str] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        names.append(thread.name)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return names


def timers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weightsync-progress"]


def wait_for_no_more_than(count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while len(timers()) > count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(timers()) <= count


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_steady_update_makes_no_thread(
    started: list[str], packed: bool, apply: ApplyChoice
) -> None:
    before = len(timers())
    source = models.make("plain", seed=1)
    receiver = ws.WeightReceiver(models.make("plain", seed=2), apply=apply)
    with ws.connect(source, to=receiver.handle, packed=packed) as sender:
        sender.send_weights()
        assert started
        started.clear()
        for _ in range(5):
            sender.send_weights()
        assert started == []
    receiver.close()
    wait_for_no_more_than(before)


def test_a_timer_expires_once_and_only_what_was_not_renewed() -> None:
    expired: list[str] = []
    timer = ProgressTimer(0.8, expired.append)
    try:
        for _ in range(10):
            timer.renew("renewed")
            time.sleep(0.02)
        assert expired == []
        timer.renew("late")
        deadline = time.monotonic() + TIMEOUT_S
        while not expired and time.monotonic() < deadline:
            time.sleep(0.01)
        assert timer.update_id is None
        time.sleep(1.0)
        assert expired == ["late"]
        timer.renew("again")  # by a thread that sleeps until then
        while len(expired) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        timer.renew("stopped")
        timer.stop()
        time.sleep(1.0)
        assert expired == ["late", "again"]
    finally:
        timer.close()


def test_the_thread_of_a_timer_that_is_dropped_ends() -> None:
    timer = ProgressTimer(60.0, lambda _: None)
    timer.renew("an update")
    thread = timer._thread
    assert thread is not None
    assert thread.is_alive()
    del timer
    gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
