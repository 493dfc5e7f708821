from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from weightsync.errors import ConfigError, NotReadyError, TransferTimeout
from weightsync.rollout.pausing import PauseControl

WAIT_S = 10.0


class Request:
    """A request in flight in a thread: steps until it is told to stop, or `steps` are made."""

    def __init__(self, pauses: PauseControl, pool: ThreadPoolExecutor, steps: int = 10**9) -> None:
        self.made = 0
        self.gone = threading.Event()
        self.may_end = threading.Event()
        self._pauses = pauses
        self._steps = steps
        self.result: Future[str] = pool.submit(self._run)

    def _run(self) -> str:
        with self._pauses.request(self.gone.is_set) as should_stop:
            while not (self.made >= self._steps and self.may_end.is_set()):
                if should_stop():
                    return "stopped"
                self._pauses.wait_step()
                self.made += 1
                time.sleep(0.001)
        return "finished"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def stands_still(request: Request) -> bool:
    until(lambda: request.made > 0)
    time.sleep(0.05)  # the step that it was in
    before = request.made
    time.sleep(0.1)
    return request.made == before


def test_keep_stops_between_steps_and_resume_goes_on() -> None:
    pauses = PauseControl()
    with ThreadPoolExecutor() as pool:
        request = Request(pauses, pool)
        until(lambda: request.made > 3)
        pauses.pause("keep")
        assert stands_still(request)
        assert not request.result.done()
        at = request.made
        pauses.resume()
        until(lambda: request.made > at + 3)
        pauses.close()
        assert request.result.result(WAIT_S) == "stopped"


def test_wait_returns_when_requests_are_finished() -> None:
    pauses = PauseControl()
    with ThreadPoolExecutor() as pool:
        request = Request(pauses, pool, steps=1)
        until(lambda: request.made > 3)
        pause = pool.submit(pauses.pause, "wait")
        at = request.made
        until(lambda: request.made > at + 3)  # it goes on
        assert not pause.done()
        request.may_end.set()
        pause.result(WAIT_S)
        assert request.result.result(WAIT_S) == "finished"
        assert pauses.in_flight == 0


def test_abort_ends_requests_and_returns_after_them() -> None:
    pauses = PauseControl()
    with ThreadPoolExecutor() as pool:
        request = Request(pauses, pool)
        until(lambda: request.made > 3)
        pauses.pause("abort")
        assert pauses.in_flight == 0
        assert request.result.result(WAIT_S) == "stopped"


def test_abort_ends_requests_that_keep_holds() -> None:
    pauses = PauseControl()
    with ThreadPoolExecutor() as pool:
        request = Request(pauses, pool)
        until(lambda: request.made > 3)
        pauses.pause("keep")
        assert stands_still(request)
        pauses.pause("abort")
        assert request.result.result(WAIT_S) == "stopped"


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_new_requests_wait_for_resume(mode: str) -> None:
    pauses = PauseControl()
    pauses.pause(mode)
    with ThreadPoolExecutor() as pool:
        request = Request(pauses, pool)
        time.sleep(0.1)
        assert request.made == 0
        assert pauses.in_flight == 0
        pauses.resume()
        until(lambda: request.made > 3)  # and is not aborted by the pause before it
        request.gone.set()
        assert request.result.result(WAIT_S) == "stopped"


def test_a_request_whose_client_left_does_not_wait() -> None:
    pauses = PauseControl()
    pauses.pause("keep")
    with ThreadPoolExecutor() as pool:
        request = Request(pauses, pool)
        request.gone.set()
        assert request.result.result(WAIT_S) == "stopped"
    assert pauses.in_flight == 0


def test_waits_end() -> None:
    pauses = PauseControl(timeout_s=0.1)
    with ThreadPoolExecutor() as pool:
        request = Request(pauses, pool)
        until(lambda: request.made > 0)
        with pytest.raises(TransferTimeout, match="1 requests did not end"):
            pauses.pause("wait")
        with pytest.raises(NotReadyError, match="paused"), pauses.request(lambda: False):
            pass
        pauses.pause("keep")
        with pytest.raises(NotReadyError, match="call resume"):
            request.result.result(WAIT_S)


def test_closing_ends_everything() -> None:
    pauses = PauseControl()
    with ThreadPoolExecutor() as pool:
        running = Request(pauses, pool)
        until(lambda: running.made > 0)
        pauses.pause("keep")
        waiting = Request(pauses, pool)
        pauses.close()
        assert running.result.result(WAIT_S) == "stopped"
        with pytest.raises(NotReadyError, match="going down"):
            waiting.result.result(WAIT_S)


def test_an_unknown_mode_changes_nothing() -> None:
    pauses = PauseControl()
    with pytest.raises(ConfigError, match="known: abort, wait, keep"):
        pauses.pause("sleep")
    with pauses.request(lambda: False) as should_stop:
        assert not should_stop()
