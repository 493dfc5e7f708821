from __future__ import annotations

from weightsync.errors import NotReadyError, TransferTimeout, WeightSyncError
from weightsync.serve.engine_core import PauseController
from weightsync.serve.messages import EngineRequest

Said = list[tuple[str, WeightSyncError | None]]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def job(request_id: str) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt=[1], max_new_tokens=1)


def test_keep_answers_at_once_and_stops_steps() -> None:
    pauses, said = PauseController(), list[WeightSyncError | None]()
    pauses.pause("keep", said.append)
    assert said == [None]
    assert not pauses.may_step
    assert pauses.resume() == []
    assert pauses.may_step


def test_wait_answers_when_nothing_is_in_flight() -> None:
    pauses, said = PauseController(), list[WeightSyncError | None]()
    pauses.pause("wait", said.append)
    assert pauses.may_step
    pauses.settle(2)
    assert said == []
    pauses.settle(0)
    assert said == [None]
    assert pauses.mode == "wait"


def test_jobs_that_come_later_wait_for_the_end_in_order() -> None:
    pauses = PauseController()
    pauses.pause("abort", lambda _: None)
    for name in ("one", "two", "three"):
        pauses.postpone(b"a", job(name))
    pauses.cancel(b"b", "one")
    pauses.cancel(b"a", "two")
    assert pauses.late == 2
    assert [late.request_id for _, late in pauses.resume()] == ["one", "three"]
    assert pauses.late == 0


def test_everyone_who_waits_is_answered_when_jobs_have_ended_and_not_before() -> None:
    pauses, said = PauseController(), Said()
    pauses.pause("wait", lambda error: said.append(("first", error)))
    pauses.pause("abort", lambda error: said.append(("second", error)))
    pauses.settle(1)
    assert said == []
    pauses.settle(0)
    assert said == [("first", None), ("second", None)]


def test_keep_answers_those_who_wait_too_since_jobs_do_not_end_any_more() -> None:
    pauses, said = PauseController(), Said()
    pauses.pause("wait", lambda error: said.append(("first", error)))
    pauses.pause("keep", lambda error: said.append(("second", error)))
    assert said == [("first", None), ("second", None)]


def test_resume_tells_those_who_wait_that_jobs_have_not_ended() -> None:
    pauses, said = PauseController(), Said()
    pauses.pause("wait", lambda error: said.append(("first", error)))
    pauses.resume()
    ((_, error),) = said
    assert isinstance(error, NotReadyError)
    assert str(error) == "generation was resumed before all requests had ended"


def test_what_takes_too_long_is_told_to_both_sides() -> None:
    clock = Clock()
    pauses, said = PauseController(timeout_s=5.0, clock=clock), list[WeightSyncError | None]()
    pauses.pause("wait", said.append)
    pauses.postpone(b"a", job("early"))
    clock.now = 4.0
    pauses.postpone(b"a", job("late"))
    clock.now = 6.0
    assert [overdue.request_id for _, overdue in pauses.settle(3)] == ["early"]
    assert isinstance(said[0], TransferTimeout)
    assert str(said[0]).startswith("3 requests did not end within 5 s; generation stays paused")
    assert pauses.settle(3) == []
    assert len(said) == 1
    assert [late.request_id for _, late in pauses.resume()] == ["late"]
