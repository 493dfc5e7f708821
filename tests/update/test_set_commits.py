"""Two receivers of one set, told by hand: both commit an update of the set, or neither does."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest

import weightsync as ws
from tests.interrupts import Interrupt
from tests.update.test_leases import let_a_lease_pass
from tests.update.test_races import Sender, StoppingSink, make, until
from tests.update.uniform import values
from weightsync.update.lifecycle import ApplyChoice, State
from weightsync.update.sets import new_set_id
from weightsync.wire.messages import (
    AbortRequest,
    FinishRequest,
    PrepareRequest,
    Request,
    StartRequest,
    StepReply,
)

WAIT_S = 30.0
SHORT_S = 0.2
BOTH = ["_finish", "finish", "_gather", "_forget_rounds"]
LEADER = ["_lead", "_commit", "_settle"]
"""The functions of a thread that finishes a part, and of the one that commits all of them."""

pytestmark = pytest.mark.usefixtures("shm_clean")


class Part:
    """A receiver of the set, with a sender that is connected."""

    def __init__(
        self,
        beside: ws.WeightReceiver | None,
        *,
        lease_s: float = WAIT_S,
        apply: ApplyChoice = "staged",
    ) -> None:
        self.fails = False
        self.served = make(0)
        self.sink = StoppingSink(self.served)
        self.receiver = ws.WeightReceiver(
            self.sink, lease_s=lease_s, apply=apply, beside=beside, on_commit=self._on_commit
        )
        self.sender = Sender()
        self.sender.init(self.receiver)

    def _on_commit(self, _: int) -> None:
        if self.fails:
            self.fails = False
            raise RuntimeError("this hook fails once")

    def say(self, request: Request) -> StepReply:
        reply = self.receiver.dispatch(request)
        assert isinstance(reply, StepReply)
        return reply

    def send(self, value: float, update_id: str) -> None:
        """Send an update until it is PREPARED."""
        self.sender.init(self.receiver)
        self.say(self.sender.update(value, update_id))

    def finish(self, update_id: str) -> StepReply:
        return self.say(FinishRequest(update_id=update_id))

    def abort(self, update_id: str) -> None:
        self.receiver.dispatch(AbortRequest(update_id=update_id))

    @property
    def holds(self) -> tuple[int, set[float]]:
        return self.receiver.version, values(self.served)

    def close(self) -> None:
        self.sink.go_on.set()
        self.receiver.close()
        self.sender.engine.close()


class Pair:
    """Two parts, and threads in which each gets its messages."""

    def __init__(self, *, lease_s: float = WAIT_S, apply: ApplyChoice = "staged") -> None:
        first = Part(None, lease_s=lease_s, apply=apply)
        self.parts = [first, Part(first.receiver, lease_s=lease_s, apply=apply)]
        self.pool = ThreadPoolExecutor(4)

    def send(self, value: float, update_id: str) -> None:
        for part in self.parts:
            part.send(value, update_id)

    def finishing(self, part: Part, update_id: str) -> Future[StepReply]:
        """Send a finish in another thread, and return when it waits for that of the other part."""
        commits = part.receiver._session._set._commits
        running = self.pool.submit(part.finish, update_id)
        until(lambda: running.done() or any(one.parts for one in commits._rounds.values()))
        return running

    def update(self, value: float, update_id: str) -> None:
        """Send an update of the set, and commit it."""
        self.send(value, update_id)
        first = self.finishing(self.parts[0], update_id)
        assert self.parts[1].finish(update_id).state == "READY"
        assert first.result(WAIT_S).state == "READY"

    @property
    def holds(self) -> list[tuple[int, set[float]]]:
        return [part.holds for part in self.parts]

    def close(self) -> None:
        for part in self.parts:
            part.close()
        self.pool.shutdown()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def aborted(part: Part, update_id: str) -> None:
    part.send(2, update_id)
    part.abort(update_id)


def aborted_unseen(part: Part, update_id: str) -> None:
    part.abort(update_id)


def expired(part: Part, update_id: str) -> None:
    part.say(StartRequest(update_id=update_id))
    let_a_lease_pass(part.receiver)
    until(lambda: part.receiver.open_update is None)


def failed(part: Part, update_id: str) -> None:
    part.say(StartRequest(update_id=update_id))
    with pytest.raises(ws.ManifestMismatchError, match="2 missing"):
        part.say(PrepareRequest(update_id=update_id))


def closed(part: Part, update_id: str) -> None:
    part.send(2, update_id)
    part.receiver.close(for_good=False)


def forgotten(part: Part, update_id: str) -> None:
    """So many others were aborted since that the receiver has forgotten this one."""
    aborted(part, update_id)
    for i in range(300):
        part.abort(f"other{i}")


def late(part: Part, update_id: str) -> None:
    """Longer ago than a receiver keeps an abort."""
    aborted(part, update_id)
    update = part.receiver._session.table._updates[update_id]
    assert update.aborted_at is not None
    update.aborted_at -= 2 * WAIT_S


WAYS = [aborted, aborted_unseen, expired, failed, closed, forgotten, late]


@pytest.mark.parametrize("before", ["start", "finish"])
@pytest.mark.parametrize("given_up", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("first", [0, 1])
def test_a_part_that_was_given_up_is_not_committed_by_the_other(
    pair: Pair, first: int, given_up: Callable[[Part, str], None], before: str
) -> None:
    """Whenever the other part's messages come."""
    gone, other = pair.parts[first], pair.parts[1 - first]
    pair.update(1, new_set_id(2))
    update_id = new_set_id(2)
    if before == "finish":
        other.send(2, update_id)
    given_up(gone, update_id)
    if before == "start":
        with suppress(ws.UpdateConflictError):
            other.send(2, update_id)
    for _ in range(2):
        with pytest.raises(ws.UpdateConflictError):
            other.finish(update_id)
        assert pair.holds == [(1, {1})] * 2
    assert other.receiver.open_update is None
    pair.update(3, new_set_id(2))
    assert pair.holds == [(2, {3})] * 2


def test_a_part_whose_receiver_is_gone_is_not_committed_by_the_other(pair: Pair) -> None:
    pair.update(1, new_set_id(2))
    update_id = new_set_id(2)
    pair.send(2, update_id)
    pair.parts.pop().close()
    gc.collect()
    with pytest.raises(ws.UpdateConflictError, match="1 of the 2 parts of this set are left"):
        pair.parts[0].finish(update_id)
    assert pair.holds == [(1, {1})]


@pytest.mark.parametrize("first", [0, 1])
def test_a_part_that_is_aborted_while_it_waits_ends_the_other(pair: Pair, first: int) -> None:
    update_id = new_set_id(2)
    pair.send(2, update_id)
    waiting = pair.finishing(pair.parts[first], update_id)
    pair.parts[first].abort(update_id)
    with pytest.raises(ws.UpdateConflictError):
        waiting.result(WAIT_S)
    with pytest.raises(ws.UpdateConflictError):
        pair.parts[1 - first].finish(update_id)
    assert pair.holds == [(0, {0})] * 2
    assert [part.receiver.open_update for part in pair.parts] == [None, None]


def test_updates_of_one_part_alone_do_not_wait(pair: Pair) -> None:
    """Also two of one id: it is none of a set."""
    pair.send(2, "mine")
    for part in pair.parts:
        assert part.finish("mine").version == 1
    assert pair.holds == [(1, {2})] * 2


@pytest.mark.parametrize("busy", [0, 1])
def test_a_part_that_is_busy_fails_no_later_finish(busy: int) -> None:
    """Neither the thread that commits, nor the one that waits for it, keeps the error."""
    pair = Pair(lease_s=SHORT_S)
    update_id = new_set_id(2)
    pair.send(2, update_id)
    sink = pair.parts[busy].sink
    sink.arm("difference")
    init = pair.pool.submit(pair.parts[busy].sender.init, pair.parts[busy].receiver)
    assert sink.stopped.wait(WAIT_S)
    finishes = [pair.pool.submit(part.finish, update_id) for part in pair.parts]
    for finish in finishes:
        with pytest.raises(ws.UpdateConflictError):
            finish.result(WAIT_S)
    assert pair.holds == [(0, {0})] * 2
    sink.go_on.set()
    init.result(WAIT_S)
    until(lambda: _commit(pair, update_id))
    assert pair.holds == [(1, {2})] * 2
    pair.close()


def _commit(pair: Pair, update_id: str) -> bool:
    finishes = [pair.pool.submit(part.finish, update_id) for part in pair.parts]
    errors = [finish.exception(WAIT_S) for finish in finishes]
    assert all(error is None or isinstance(error, ws.UpdateConflictError) for error in errors)
    return errors == [None, None]


@pytest.mark.parametrize(
    ("function", "leads", "apply"),
    [
        *((name, leads, "staged") for name in BOTH for leads in (True, False)),
        ("_follow", False, "staged"),
        *((name, True, apply) for name in LEADER for apply in ("staged", "in_place")),
    ],
)
def test_an_interrupt_leaves_both_or_none(function: str, leads: bool, apply: ApplyChoice) -> None:
    """At each point of the thread that commits, and of one that waits for it."""
    pair = Pair(apply=apply)
    mine, other = pair.parts
    at, more = 0, True
    while more:
        at += 1
        update_id = new_set_id(2)
        pair.send(at, update_id)
        if leads:
            running = pair.finishing(other, update_id)
            more = interrupted(function, at, lambda: mine.finish(update_id))  # noqa: B023
        else:
            go = threading.Event()
            running = pair.pool.submit(after_it_waits, mine, other, go, update_id)
            more = interrupted(function, at, lambda: mine.finish(update_id))  # noqa: B023
            go.set()
        where = f"interrupted at point {at} of {function}"
        gc.collect()
        with suppress(ws.UpdateConflictError):
            mine.finish(update_id)
        error = running.exception(WAIT_S)
        assert error is None or isinstance(error, ws.UpdateConflictError), where
        sessions = [part.receiver._session for part in pair.parts]
        committed = [session.lifecycle.last_finished == update_id for session in sessions]
        assert committed in ([True, True], [False, False]), where
        for part, session in zip(pair.parts, sessions, strict=True):
            assert not session.busy, where
            assert session.lifecycle.state in (State.READY, State.TORN), where
            assert not session.gate.held, where
            if session.lifecycle.may_generate:
                assert values(part.served) == {at if all(committed) else at - 1}, where
        update_id = new_set_id(2)
        pair.update(at, update_id)
        assert [values(part.served) for part in pair.parts] == [{at}, {at}], where
    assert at > 1
    pair.close()


def after_it_waits(mine: Part, other: Part, go: threading.Event, update_id: str) -> StepReply:
    """Finish the other part when the first one waits for it, or was interrupted before."""
    commits = mine.receiver._session._set._commits
    until(lambda: go.is_set() or any(one.parts for one in list(commits._rounds.values())))
    return other.finish(update_id)


def interrupted(function: str, at: int, call: Callable[[], object]) -> bool:
    interrupt = Interrupt(function, at)
    with suppress(KeyboardInterrupt), interrupt.traced():
        call()
    return bool(interrupt.raised)
