"""Two receivers of a set, with messages in any order: both commit an update of it, or neither does.

Messages that start, load, prepare, finish and abort are sent in any order, twice, or never; leases
run out, hooks fail, receivers forget what they gave up or are closed, and senders die. After each
step both receivers have committed the same updates of the set, and hold what the last one brought.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future

import pytest

import weightsync as ws
from tests.protocol.sizes import SOAK_TIMEOUT_S
from tests.update.test_leases import take_several_leases
from tests.update.test_races import Sender, until
from tests.update.test_set_commits import Pair, Part
from tests.update.uniform import values
from weightsync.update.lifecycle import State
from weightsync.update.sets import new_set_id
from weightsync.wire.messages import (
    AbortRequest,
    PrepareRequest,
    Request,
    StartRequest,
    StepReply,
)

WAIT_S = 30.0
WALKS, STEPS = 12, 25
WALKS_AT_LENGTH = 600

_ERRORS = (ws.WeightSyncError, RuntimeError)
"""What a message may raise; the latter is a hook's."""

pytestmark = pytest.mark.usefixtures("shm_clean")


class Walk:
    """A sequence of random steps; most messages are of the last two updates of the set."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pair = Pair(apply=self.random.choice(["staged", "staged", "in_place"]))
        self.value_of: dict[str, float] = {"": 0.0}
        self.ids = [self._new(), self._new()]
        self.sent: dict[Part, Request] = {}
        self.finishing: list[tuple[Part, str, Future[StepReply]]] = []
        self.gone: list[Sender] = []
        self.past: list[str] = []
        self.disturbances: list[Callable[[Part, int], None]] = [
            self.abort,
            self.close,
            self.die,
            self.fail,
            self.forget,
            self.let_leases_pass,
            self.update_alone,
        ]
        self.messages: list[Callable[[Part, int], None]] = [
            self.start,
            self.load,
            self.load_and_prepare,
            self.load_again,
            self.prepare,
            self.finish,
            self.finish,
        ]

    def _new(self, prefix: str = "") -> str:
        update_id = f"{prefix}{len(self.value_of)}" if prefix else new_set_id(2)
        self.value_of[update_id] = float(len(self.value_of))
        return update_id

    def step(self) -> None:
        """Take one step, and check what came of it."""
        part, at = self.random.choice(self.pair.parts), self.random.randrange(2)
        if self.random.random() < 0.5:
            self.update(at)
        else:
            self._do(self.random.choice([*self.messages, *self.disturbances]), part, at)
        self.check()

    def _do(self, what: Callable[[Part, int], None], part: Part, at: int) -> None:
        self.past.append(f"{what.__name__} {self.pair.parts.index(part)} {at}")
        what(part, at)
        self.settle()

    def _say(self, part: Part, request: Request) -> None:
        try:
            part.receiver.dispatch(request)
        except _ERRORS as exc:
            self.past.append(f"({type(exc).__name__})")

    def update(self, at: int) -> None:
        """Send an update as a sender does, with up to two other things between its messages."""
        for part in self.pair.parts:
            opened = part.receiver.open_update
            if opened is not None:
                self._say(part, AbortRequest(update_id=opened.update_id))
        self.settle()
        self.ids[at] = self._new()
        first, second = self.random.sample(self.pair.parts, 2)
        steps: list[tuple[Callable[[Part, int], None], Part]] = [
            (self.load_and_prepare, first),
            (self.load_and_prepare, second),
            (self.finish, first),
            (self.finish, second),
        ]
        for _ in range(self.random.randrange(3)):
            disturbance = self.random.choice(self.disturbances)
            steps.insert(self.random.randrange(5), (disturbance, self.random.choice(steps)[1]))
        for what, part in steps:
            self._do(what, part, at)

    # Messages

    def start(self, part: Part, at: int) -> None:
        part.sender.init(part.receiver)
        self._say(part, StartRequest(update_id=self.ids[at], sender=part.sender.id))

    def load(self, part: Part, at: int, *, prepare: bool = False) -> None:
        part.sender.init(part.receiver)
        update_id = self.ids[at]
        request = part.sender.update(self.value_of[update_id], update_id, prepare=prepare)
        self.sent[part] = request
        self._say(part, request)

    def load_and_prepare(self, part: Part, at: int) -> None:
        self.load(part, at, prepare=True)

    def load_again(self, part: Part, _: int) -> None:
        """The reply was lost."""
        if part in self.sent:
            self._say(part, self.sent[part])

    def prepare(self, part: Part, at: int) -> None:
        self._say(part, PrepareRequest(update_id=self.ids[at]))

    def finish(self, part: Part, at: int) -> None:
        """It may wait for the other part from here on; a second one joins it."""
        if len(self.finishing) < 3:  # threads of the pair
            future = self.pair.pool.submit(part.finish, self.ids[at])
            self.finishing.append((part, self.ids[at], future))

    def abort(self, part: Part, at: int) -> None:
        self._say(part, AbortRequest(update_id=self.ids[at]))

    # What else happens

    def let_leases_pass(self, part: Part, _: int) -> None:
        take_several_leases(part.receiver)

    def forget(self, part: Part, _: int) -> None:
        """What was aborted: so many others were after it."""
        if part.receiver.open_update is None:
            for i in range(300):
                part.abort(f"other{i}")

    def close(self, part: Part, _: int) -> None:
        part.receiver.close(for_good=False)

    def die(self, part: Part, _: int) -> None:
        """Another sender comes after the dead one."""
        part.sender.die()
        self.gone.append(part.sender)
        self.sent.pop(part, None)
        part.sender = Sender()

    def fail(self, part: Part, _: int) -> None:
        """The hook of the next commit fails."""
        part.fails = True

    def update_alone(self, part: Part, _: int) -> None:
        update_id = self._new("alone")
        try:
            part.send(self.value_of[update_id], update_id)
            part.finish(update_id)
        except _ERRORS as exc:
            self.past.append(f"({type(exc).__name__})")

    # What has to hold

    def settle(self) -> None:
        """Wait until each finish has returned, or waits for that of the other part."""
        until(lambda: all(f.done() or self._waits(part, u) for part, u, f in self.finishing))
        for _, _, future in self.finishing:
            if future.done():
                error = future.exception()
                self.past.append(f"finished: {type(error).__name__}" if error else "finished")
                assert error is None or isinstance(error, _ERRORS), self.past
        self.finishing = [each for each in self.finishing if not each[2].done()]

    def _waits(self, part: Part, update_id: str) -> bool:
        """Whether a finish waits rightly: the other part is open, and may get one."""
        sessions = [each.receiver._session for each in self.pair.parts]
        round_ = sessions[0]._set._commits._rounds.get(update_id)
        told = [] if round_ is None else [session for session, _ in round_.parts]
        others = [session for session in sessions if session not in told]
        return (
            part.receiver._session in told
            and all(
                session._is_open(update_id) and (session in told or not session.orphaned)
                for session in sessions
            )
            and len(others) == 1
        )

    def check(self) -> None:
        committed = []
        for part in self.pair.parts:
            session = part.receiver._session
            ids = [record.update_id for record in session.table.recent]
            committed.append([each for each in ids if each.startswith("set-")])
            last = session.lifecycle.last_finished
            assert last == (ids or [""])[-1], self.past
            if session.lifecycle.may_generate:
                assert values(part.served) == {self.value_of[last]}, self.past
            else:
                assert part.receiver.status().apply == "in_place", self.past
        assert committed[0] == committed[1], self.past

    def end(self) -> None:
        """Whatever came before, the next update of the set is committed."""
        for part in self.pair.parts:
            part.fails = False
            opened = part.receiver.open_update
            if opened is not None:
                part.abort(opened.update_id)
        self.settle()
        update_id = self._new()
        self.pair.update(self.value_of[update_id], update_id)
        self.check()
        for part in self.pair.parts:
            assert part.receiver._session.lifecycle.state is State.READY

    def close_all(self) -> None:
        for sender in self.gone:
            sender.engine.close()
        self.pair.close()


def walk(seed: int, steps: int) -> list[str]:
    """Take this many steps; return what was done."""
    here = Walk(seed)
    try:
        for _ in range(steps):
            here.step()
        here.end()
    finally:
        here.close_all()
    return here.past


def test_both_or_neither() -> None:
    past = [each for seed in range(WALKS) for each in walk(seed, STEPS)]
    assert past.count("finished") > WALKS  # the walks come that far
    assert past.count("finished: UpdateConflictError") > WALKS


@pytest.mark.soak
@pytest.mark.timeout(SOAK_TIMEOUT_S)
def test_both_or_neither_at_length() -> None:
    first = random.SystemRandom().randrange(1 << 32)
    for seed in range(first, first + WALKS_AT_LENGTH):
        try:
            walk(seed, STEPS)
        except BaseException as exc:
            exc.add_note(f"of the walk {seed}")
            raise
