"""A steady update makes no thread, and what a receiver keeps ends with it."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import Future

import pytest

import weightsync as ws
from tests.e2e import models
from weightsync.transports.calls import CallThreads
from weightsync.update.lifecycle import ApplyChoice
from weightsync.update.session import ProgressTimer

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


@pytest.mark.parametrize("error", [None, OSError("planted")])
def test_a_call_that_follows_at_once_has_the_same_thread(error: OSError | None) -> None:
    threads: CallThreads[int] = CallThreads()
    first: Future[int] = Future()
    second: Future[int] = Future()
    used: list[int] = []

    def call() -> int:
        used.append(threading.get_ident())
        if error is not None:
            raise error
        return 1

    first.add_done_callback(lambda _: threads.submit(threading.get_ident, second))
    threads.submit(call, first)
    try:
        assert [second.result(TIMEOUT_S)] == used
        assert first.exception(0) is error
    finally:
        threads.close()


def test_a_timer_expires_once_and_only_what_was_not_renewed() -> None:
    expired: list[float] = []
    timer = ProgressTimer(lambda: expired.append(time.monotonic()))

    def wait_for(count: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while len(expired) < count and time.monotonic() < deadline:
            time.sleep(0.01)

    try:
        for _ in range(10):
            timer.renew(0.8)
            time.sleep(0.02)
        assert expired == []
        wait_for(1)
        assert not timer.runs
        time.sleep(1.0)
        assert len(expired) == 1
        timer.renew(0.5)  # by a thread that sleeps until then
        wait_for(2)
        timer.renew(0.5)
        timer.renew(None)
        time.sleep(1.0)
        assert len(expired) == 2
        timer.renew(60.0)
        time.sleep(0.1)
        asked = time.monotonic()
        timer.renew(0.1)  # earlier than the thread would wake by itself
        wait_for(3)
        assert expired[2] - asked < 30.0
    finally:
        timer.close()


def test_an_error_does_not_end_the_thread_of_a_timer(caplog: pytest.LogCaptureFixture) -> None:
    expired = threading.Event()
    errors = [OSError("planted")]

    def expire() -> None:
        if errors:
            raise errors.pop()
        expired.set()

    timer = ProgressTimer(expire)
    try:
        timer.renew(0.01)
        deadline = time.monotonic() + TIMEOUT_S
        while "planted" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        thread = timer._thread
        timer.renew(0.01)
        assert expired.wait(TIMEOUT_S)
        assert timer._thread is thread
    finally:
        timer.close()


def test_the_thread_of_a_timer_that_is_dropped_ends() -> None:
    timer = ProgressTimer(lambda: None)
    timer.renew(60.0)
    thread = timer._thread
    assert thread is not None
    assert thread.is_alive()
    del timer
    gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_the_thread_of_a_receiver_that_is_dropped_ends() -> None:
    receiver = ws.WeightReceiver(models.make("plain", seed=1))
    receiver.handle({"call": "start_weight_update", "body": {"update_id": "open"}})
    thread = receiver._session._timer._thread
    assert thread is not None
    assert thread.is_alive()
    del receiver
    gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
