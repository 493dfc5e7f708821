"""The state machine of a receiver, step by step and at random."""

from __future__ import annotations

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weightsync.errors import ProtocolError, StaleVersionError, UpdateConflictError
from weightsync.update.lifecycle import State, Terms, UpdateLifecycle


def torn(by: str = "bad") -> UpdateLifecycle:
    life = UpdateLifecycle(3)
    life.start(Terms(update_id=by))
    life.mark_dirty(by)
    life.begin_abort(by)
    life.end_abort()
    return life


class TestSteps:
    def test_an_update_from_start_to_finish(self) -> None:
        life = UpdateLifecycle()
        life.start(Terms(update_id="a", version=5, label="step 5"))
        assert (life.state, life.version, life.update_id) == (State.UPDATING, 0, "a")
        life.prepared("a")
        assert (life.state, life.version, life.next_version) == (State.PREPARED, 0, 5)
        life.finish("a")
        assert (life.state, life.version, life.label) == (State.READY, 5, "step 5")
        assert (life.update_id, life.last_finished) == ("", "a")

    def test_no_version_means_one_more(self) -> None:
        life = UpdateLifecycle(41)
        life.start(Terms(update_id="a"))
        life.prepared("a")
        life.finish("a")
        assert life.version == 42

    def test_the_same_update_may_start_twice_but_not_once_prepared(self) -> None:
        life = UpdateLifecycle()
        life.start(Terms(update_id="a", version=2))
        life.start(Terms(update_id="a", version=2))
        life.prepared("a")
        with pytest.raises(UpdateConflictError):
            life.start(Terms(update_id="a", version=2))

    def test_the_refusal_says_who_holds_it(self) -> None:
        life = UpdateLifecycle()
        life.start(Terms(update_id="a"))
        with pytest.raises(UpdateConflictError, match="held by update a") as caught:
            life.start(Terms(update_id="b"))
        assert (caught.value.state, caught.value.update_id) == ("UPDATING", "a")

    def test_finish_needs_prepare(self) -> None:
        life = UpdateLifecycle()
        life.start(Terms(update_id="a"))
        with pytest.raises(UpdateConflictError):
            life.finish("a")
        with pytest.raises(UpdateConflictError):
            life.finish("unknown")

    @pytest.mark.parametrize("version", [0, 2, 3])
    def test_versions_grow(self, version: int) -> None:
        life = UpdateLifecycle(3)
        with pytest.raises(StaleVersionError) as caught:
            life.start(Terms(update_id="a", version=version))
        assert (caught.value.held, caught.value.offered) == (3, version)
        assert life.state is State.READY

    def test_rewind_may_go_back(self) -> None:
        life = UpdateLifecycle(9)
        life.start(Terms(update_id="a", version=2, rewind=True))
        life.prepared("a")
        life.finish("a")
        assert life.version == 2

    def test_a_base_is_looked_at_for_partial_updates_alone(self) -> None:
        life = UpdateLifecycle(3)
        with pytest.raises(StaleVersionError, match="builds on version 2, but version 3"):
            life.start(Terms(update_id="a", base_version=2, partial=True))
        life.start(Terms(update_id="a", base_version=2))
        assert life.state is State.UPDATING

    def test_abort_with_nothing_open_does_nothing(self) -> None:
        life = UpdateLifecycle(3)
        assert life.begin_abort("a") is False
        assert life.state is State.READY
        with pytest.raises(UpdateConflictError):
            life.end_abort()

    def test_an_untouched_abort_returns_to_the_old_version(self) -> None:
        life = UpdateLifecycle(3)
        life.start(Terms(update_id="a"))
        assert life.begin_abort("a")
        assert life.state is State.ABORTING
        life.end_abort()
        assert (life.state, life.version, life.may_generate) == (State.READY, 3, True)


class TestTorn:
    def test_a_touched_abort_tears(self) -> None:
        life = torn(by="bad")
        assert (life.state, life.version, life.update_id) == (State.TORN, 3, "bad")
        assert not life.may_generate

    def test_a_partial_update_cannot_heal(self) -> None:
        with pytest.raises(UpdateConflictError, match="only a full update heals") as caught:
            torn().start(Terms(update_id="lora", partial=True))
        assert caught.value.update_id == "bad"

    def test_the_same_version_may_be_sent_again(self) -> None:
        life = torn()
        life.start(Terms(update_id="again", version=3))
        life.prepared("again")
        life.finish("again")
        assert (life.state, life.version, life.may_generate) == (State.READY, 3, True)

    def test_an_untouched_abort_heals_nothing(self) -> None:
        life = torn()
        life.start(Terms(update_id="next"))
        life.begin_abort("next")
        life.end_abort()
        assert (life.state, life.update_id, life.may_generate) == (State.TORN, "bad", False)

    def test_torn_weights_stay_unusable_while_the_healing_update_runs(self) -> None:
        life = torn()
        life.start(Terms(update_id="next"))
        assert not life.may_generate
        life.prepared("next")
        assert not life.may_generate
        life.finish("next")
        assert life.may_generate


class TestJoining:
    def test_an_older_version_joins_until_a_whole_update_commits(self) -> None:
        life = UpdateLifecycle(3)
        life.join(7)
        assert (life.state, life.may_generate) == (State.CATCHING_UP, False)
        life.start(Terms(update_id="a", version=7))
        life.prepared("a")
        assert not life.may_generate
        life.finish("a")
        assert (life.state, life.version, life.may_generate) == (State.READY, 7, True)

    @pytest.mark.parametrize("fleet", [0, 2, 3])
    def test_a_fleet_that_is_not_ahead_is_not_waited_for(self, fleet: int) -> None:
        life = UpdateLifecycle(3)
        life.join(fleet)
        assert (life.state, life.may_generate) == (State.READY, True)

    def test_without_a_fleet_there_is_nothing_to_wait_for(self) -> None:
        life = UpdateLifecycle(3)
        life.join(7)
        life.join(0)
        assert (life.state, life.may_generate) == (State.READY, True)

    def test_a_partial_update_brings_nobody_up_to_date(self) -> None:
        life = UpdateLifecycle(3)
        life.join(7)
        with pytest.raises(UpdateConflictError, match="holds version 3, its fleet 7"):
            life.start(Terms(update_id="lora", partial=True))
        late = UpdateLifecycle(3)
        late.start(Terms(update_id="lora", partial=True))
        late.join(7)
        late.prepared("lora")
        late.finish("lora")
        assert (late.state, late.may_generate) == (State.CATCHING_UP, False)

    def test_an_abort_leaves_it_joining(self) -> None:
        life = UpdateLifecycle(3)
        life.join(7)
        life.start(Terms(update_id="a"))
        life.begin_abort("a")
        life.end_abort()
        assert (life.state, life.may_generate) == (State.CATCHING_UP, False)

    def test_a_torn_joiner_stays_torn(self) -> None:
        life = torn()
        life.join(7)
        life.join(0)
        assert (life.state, life.update_id, life.may_generate) == (State.TORN, "bad", False)


IDS = st.sampled_from(["a", "a", "a", "b"])


class Lifecycles(RuleBasedStateMachine):
    """Random calls, against what must hold whatever their order."""

    def __init__(self) -> None:
        super().__init__()
        self.life = UpdateLifecycle()
        self.version = 0
        self.torn = False
        self.dirty = False
        self.open: Terms | None = None
        self.required_version = 0

    def refused(self, call: str, *args: object) -> bool:
        """Make a call; when it is refused, nothing at all may have changed."""
        before = copy.deepcopy(vars(self.life))
        try:
            getattr(self.life, call)(*args)
        except ProtocolError:
            assert vars(self.life) == before
            return True
        return False

    @rule(
        update_id=IDS,
        version=st.none() | st.integers(0, 6),
        base=st.none() | st.integers(0, 6),
        partial=st.booleans(),
        rewind=st.booleans(),
    )
    def start(
        self, update_id: str, version: int | None, base: int | None, partial: bool, rewind: bool
    ) -> None:
        terms = Terms(
            update_id=update_id, version=version, base_version=base, partial=partial, rewind=rewind
        )
        state = self.life.state
        refused = self.refused("start", terms)
        if self.open is not None:
            again = self.open.update_id == update_id and state is State.UPDATING
            assert refused is not again
            return
        if (self.torn or self.required_version) and partial:
            assert refused
        if not refused:
            assert self.life.state is State.UPDATING
            assert version is None or rewind or version > self.version or self.torn
            assert not (partial and base not in (None, self.version))
            self.open, self.dirty = terms, False

    @rule(update_id=IDS)
    def mark_dirty(self, update_id: str) -> None:
        if not self.refused("mark_dirty", update_id):
            assert self.open is not None
            assert self.open.update_id == update_id
            self.dirty = True

    @rule(update_id=IDS)
    def prepare(self, update_id: str) -> None:
        state = self.life.state
        if not self.refused("prepared", update_id):
            assert state is State.UPDATING
            assert self.life.state is State.PREPARED

    @rule(update_id=IDS)
    def finish(self, update_id: str) -> None:
        state = self.life.state
        if not self.refused("finish", update_id):
            assert state is State.PREPARED
            assert self.open is not None
            assert self.open.update_id == update_id
            asked = self.open.version
            self.version = self.version + 1 if asked is None else asked
            self.torn = self.dirty = False
            if not self.open.partial:
                self.required_version = 0
            self.open = None
            assert self.life.last_finished == update_id
            assert self.life.state is (State.CATCHING_UP if self.required_version else State.READY)

    @rule(update_id=IDS)
    def abort(self, update_id: str) -> None:
        if self.open is None:
            before = copy.deepcopy(vars(self.life))
            assert self.life.begin_abort(update_id) is False
            assert vars(self.life) == before
        elif self.refused("begin_abort", update_id):
            assert self.open.update_id != update_id
        else:
            assert self.life.state is State.ABORTING

    @rule()
    def end_abort(self) -> None:
        state = self.life.state
        if not self.refused("end_abort"):
            assert state is State.ABORTING
            self.torn = self.torn or self.dirty
            self.open, self.dirty = None, False
            idle = State.CATCHING_UP if self.required_version else State.READY
            assert self.life.state is (State.TORN if self.torn else idle)

    @rule(version=st.integers(0, 8))
    def join(self, version: int) -> None:
        self.life.join(version)
        self.required_version = version if version > self.version else 0

    @invariant()
    def version_changes_by_finish_alone(self) -> None:
        assert self.life.version == self.version

    @invariant()
    def generation_needs_one_whole_version(self) -> None:
        assert self.life.may_generate is not bool(self.torn or self.dirty or self.required_version)

    @invariant()
    def an_update_is_open_or_it_is_not(self) -> None:
        busy = self.life.state in (State.UPDATING, State.PREPARED, State.ABORTING)
        assert busy is (self.open is not None)


Lifecycles.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLifecycles = Lifecycles.TestCase
