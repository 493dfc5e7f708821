from __future__ import annotations

from weightsync.serve.engine_core import HELD_S, SPLIT_S, ReplicaReadiness
from weightsync.serve.messages import WorkerState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def may_step(standings: ReplicaReadiness) -> bool:
    return standings.may_step


def test_no_step_between_the_first_hold_and_the_last_release() -> None:
    clock = Clock()
    standings = ReplicaReadiness(2, clock=clock)
    assert may_step(standings)
    standings.hold(0)
    assert not may_step(standings)
    standings.note_state(0, WorkerState(version=5, released=True))
    assert not may_step(standings)  # worker 1 still has the old weights
    assert standings.refusal() is None  # and is about to swap
    clock.now += 0.25
    standings.hold(1)
    standings.note_state(0, WorkerState(version=5))
    assert not may_step(standings)
    standings.note_state(1, WorkerState(version=5, released=True))
    assert may_step(standings)
    assert standings.last_stall_s == 0.25


def test_torn_weights_are_refused_at_once_but_not_while_they_are_written() -> None:
    standings = ReplicaReadiness(2)
    torn = WorkerState(version=1, state="TORN", why_not="the weights are TORN: update x …")
    standings.hold(1)
    standings.note_state(1, torn)
    assert standings.refusal() is None
    standings.note_state(
        1, WorkerState(version=1, state="TORN", why_not=torn.why_not, released=True)
    )
    refusal = standings.refusal()
    assert refusal is not None
    assert (refusal.state, str(refusal)) == ("TORN", f"worker 1: {torn.why_not}")
    standings.note_state(1, WorkerState(version=0))
    assert may_step(standings)
    assert standings.refusal() is None


def test_workers_that_stay_apart_are_refused_after_a_while() -> None:
    clock = Clock()
    standings = ReplicaReadiness(2, clock=clock)
    standings.hold(0)
    standings.note_state(0, WorkerState(version=2, released=True))
    clock.now += SPLIT_S / 2
    standings.note_state(0, WorkerState(version=2))
    assert standings.refusal() is None
    clock.now += SPLIT_S / 2
    refusal = standings.refusal()
    assert refusal is not None
    assert "worker 0 2 of update none, worker 1 0 of update none" in str(refusal)
    assert refusal.state == "TORN"
    standings.hold(1)  # somebody mends it
    assert standings.refusal() is None
    standings.note_state(1, WorkerState(version=2, released=True))
    assert may_step(standings)


def test_other_weights_of_the_same_version_are_told_apart() -> None:
    standings = ReplicaReadiness(2)
    for worker in (0, 1):
        standings.note_state(worker, WorkerState(version=3, weights_id="before"))
    standings.hold(0)
    standings.note_state(0, WorkerState(version=3, weights_id="after", released=True))
    assert not may_step(standings)
    standings.hold(1)
    standings.note_state(1, WorkerState(version=3, weights_id="after", released=True))
    assert may_step(standings)


def test_a_hold_that_changes_nothing_is_no_stall() -> None:
    clock = Clock()
    standings = ReplicaReadiness(1, clock=clock)
    standings.hold(0)
    clock.now += 5
    standings.note_state(0, WorkerState(version=0, released=True))
    assert may_step(standings)
    assert standings.last_stall_s == 0.0


def test_who_waits_for_a_worker_that_holds_for_ever_is_told_so() -> None:
    clock = Clock()
    standings = ReplicaReadiness(1, clock=clock)
    standings.hold(0)
    clock.now += HELD_S - 1
    assert standings.refusal() is None
    clock.now += 2
    refusal = standings.refusal()
    assert refusal is not None
    assert str(refusal).startswith(f"worker 0 has held generation for {HELD_S + 1:.0f} s")
