"""The gate between decode steps and swaps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from weightsync.errors import NotReadyError, TransferError, TransferTimeout
from weightsync.update.gate import ReadWriteGate

SHORT_S = 0.05
WAIT_S = 60.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def gate() -> ReadWriteGate:
    return ReadWriteGate(lambda: None)


def enter(gate: ReadWriteGate, timeout_s: float = SHORT_S) -> bool:
    try:
        with gate.reading(timeout_s):
            return True
    except NotReadyError:
        return False


def test_many_read_at_once(gate: ReadWriteGate, pool: ThreadPoolExecutor) -> None:
    together = threading.Barrier(3)

    def read() -> int:
        with gate.reading(WAIT_S):
            return together.wait(WAIT_S)

    assert sorted(f.result(WAIT_S) for f in [pool.submit(read) for _ in range(3)]) == [0, 1, 2]


def test_a_hold_waits_for_who_is_inside_and_keeps_others_out(
    gate: ReadWriteGate, pool: ThreadPoolExecutor
) -> None:
    with gate.reading(WAIT_S):
        held = pool.submit(gate.hold, WAIT_S)
        while not gate.held:
            threading.Event().wait(0.001)
        assert not pool.submit(enter, gate).result(WAIT_S)
        assert not held.done()
    held.result(WAIT_S)
    assert not pool.submit(enter, gate).result(WAIT_S)
    assert gate.release() > 0
    assert pool.submit(enter, gate).result(WAIT_S)


def test_a_reader_kept_out_goes_on_when_the_hold_ends(
    gate: ReadWriteGate, pool: ThreadPoolExecutor
) -> None:
    gate.hold(WAIT_S)
    waiting: Future[bool] = pool.submit(enter, gate, WAIT_S)
    assert not waiting.done()
    gate.release()
    assert waiting.result(WAIT_S)


def test_the_reader_that_waited_too_long_is_told_so(gate: ReadWriteGate) -> None:
    gate.hold(WAIT_S)
    with pytest.raises(NotReadyError, match=r"held generation for 0.05 s"), gate.reading(SHORT_S):
        pass


def test_a_hold_that_times_out_lets_all_go_on(
    gate: ReadWriteGate, pool: ThreadPoolExecutor
) -> None:
    with gate.reading(WAIT_S):
        with pytest.raises(TransferTimeout, match="1 decode step did not end"):
            pool.submit(gate.hold, SHORT_S).result(WAIT_S)
        assert not gate.held
        assert pool.submit(enter, gate).result(WAIT_S)


def test_releasing_what_nobody_holds_is_nothing(gate: ReadWriteGate) -> None:
    assert gate.release() == 0.0


def test_an_inner_block_never_waits_for_a_holder(
    gate: ReadWriteGate, pool: ThreadPoolExecutor
) -> None:
    with gate.reading(WAIT_S):
        held = pool.submit(gate.hold, WAIT_S)
        while not gate.held:
            threading.Event().wait(0.001)
        with gate.reading(SHORT_S):
            pass
        assert not held.done()
    held.result(WAIT_S)
    gate.release()


def test_blocks_of_one_thread_may_end_in_any_order(
    gate: ReadWriteGate, pool: ThreadPoolExecutor
) -> None:
    first, second = gate.reading(WAIT_S), gate.reading(WAIT_S)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with pytest.raises(TransferTimeout):
        pool.submit(gate.hold, SHORT_S).result(WAIT_S)
    second.__exit__(None, None, None)
    gate.hold(WAIT_S)
    assert not enter(gate)


def test_a_block_that_raises_leaves(gate: ReadWriteGate) -> None:
    with pytest.raises(ZeroDivisionError), gate.reading(WAIT_S):
        _ = 1 // 0
    gate.hold(SHORT_S)
    assert gate.held


def test_refused_readers_do_not_count_as_inside() -> None:
    def refuse() -> None:
        raise NotReadyError("torn")

    gate = ReadWriteGate(refuse)
    with pytest.raises(NotReadyError, match="torn"), gate.reading(WAIT_S):
        pass
    gate.hold(SHORT_S)
    assert gate.held


class Steps:
    """Generation elsewhere: notes what the gate says to it, and whether readers are kept out."""

    def __init__(self, *, fails: Exception | None = None) -> None:
        self.said: list[tuple[str, bool]] = []
        self._fails = fails
        self.gate = ReadWriteGate(lambda: None, on_hold=self._hold, on_release=self._release)

    def _hold(self, timeout_s: float) -> None:
        assert 0 < timeout_s <= WAIT_S
        # Without a lock of the gate: a reader on another thread goes in and out meanwhile.
        with ThreadPoolExecutor(1) as pool:
            self.said.append(("hold", not pool.submit(enter, self.gate).result(WAIT_S)))
        if self._fails is not None:
            raise self._fails

    def _release(self) -> None:
        with ThreadPoolExecutor(1) as pool:
            self.said.append(("release", not pool.submit(enter, self.gate).result(WAIT_S)))


def test_steps_elsewhere_are_stopped_before_and_go_on_after(pool: ThreadPoolExecutor) -> None:
    steps = Steps()
    steps.gate.hold(WAIT_S)
    assert steps.said == [("hold", False)]
    assert not pool.submit(enter, steps.gate).result(WAIT_S)
    assert steps.gate.held_s <= steps.gate.release()
    assert steps.said == [("hold", False), ("release", False)]


def test_steps_that_cannot_be_stopped_fail_the_hold_and_are_not_released() -> None:
    for error, kind in ((TransferTimeout("late"), TransferTimeout), (OSError(5), TransferError)):
        steps = Steps(fails=error)
        with pytest.raises(kind, match=r"late|on_hold raised OSError: 5"):
            steps.gate.hold(WAIT_S)
        assert steps.said == [("hold", False)]
        assert not steps.gate.held
        assert enter(steps.gate)


def test_a_hold_that_waits_in_vain_releases_steps_elsewhere(pool: ThreadPoolExecutor) -> None:
    steps = Steps()
    late = pytest.raises(TransferTimeout, match="1 decode step did not end")
    with steps.gate.reading(WAIT_S), late:
        pool.submit(steps.gate.hold, SHORT_S).result(WAIT_S)
    assert steps.said == [("hold", False), ("release", False)]
