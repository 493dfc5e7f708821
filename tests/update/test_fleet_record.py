"""Whose word about a fleet counts, and for how long."""

from __future__ import annotations

import time

import pytest

from weightsync.update.lifecycle import State, Terms, UpdateLifecycle
from weightsync.update.senders import FleetClaims, Senders

GRACE_S = 60.0
SHORT_S = 0.05


class Connected(Senders):
    """Senders that are connected because a test says so."""

    def __init__(self, *senders: str) -> None:
        super().__init__([])
        self.senders = set(senders)

    def knows(self, sender: str) -> bool:
        return sender in self.senders


class Held:
    """A receiver's version and readiness, without weights."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.life = UpdateLifecycle()
        self.peers = Connected("a", "b")
        self.claims = FleetClaims(self.life, self.peers, grace_s)

    @property
    def now(self) -> tuple[State, int]:
        return self.life.state, self.life.required_version

    def start(self, version: int, *, partial: bool = False) -> None:
        self.life.start(Terms(update_id="u", version=version, partial=partial, rewind=True))
        self.claims.started()

    def finish(self, sender: str | None, *, partial: bool = False) -> None:
        self.life.prepared("u")
        self.life.finish("u")
        self.claims.committed(sender, partial=partial)

    def update(self, version: int, sender: str | None) -> None:
        self.start(version)
        self.finish(sender)


@pytest.fixture
def held() -> Held:
    return Held()


class TestWhoseWord:
    @pytest.mark.parametrize("words", [(9, 5), (5, 9)])
    def test_the_newest_fleet_is_waited_for(self, held: Held, words: tuple[int, int]) -> None:
        for sender, version in zip("ab", words, strict=True):
            held.claims.joined(sender, version)
        assert held.now == (State.CATCHING_UP, 9)

    def test_a_sender_may_correct_itself(self, held: Held) -> None:
        held.claims.joined("a", 9)
        held.claims.joined("a", 0)
        assert held.now == (State.READY, 0)

    def test_when_one_leaves_the_other_still_counts(self, held: Held) -> None:
        held.claims.joined("a", 9)
        held.claims.joined("b", 5)
        held.claims.left("a", for_good=True)
        assert held.now == (State.CATCHING_UP, 5)
        held.claims.left(None, for_good=True)
        assert held.now == (State.READY, 0)

    def test_a_dead_one_does_not_count(self, held: Held) -> None:
        held.claims.joined("a", 9)
        held.claims.remove_dead([])
        assert held.now == (State.CATCHING_UP, 9)
        held.claims.remove_dead(["a"])
        assert held.now == (State.READY, 0)


class TestGone:
    @pytest.mark.parametrize("sender", ["a", None])
    def test_who_only_withdrew_is_waited_for(self, sender: str | None) -> None:
        held = Held(grace_s=0)
        held.claims.joined("a", 9)
        held.peers.senders.clear()
        held.claims.left(sender, for_good=False)
        held.claims.remove_dead([])
        assert held.now == (State.CATCHING_UP, 9)
        held.claims.left("a", for_good=True)
        assert held.now == (State.READY, 0)

    def test_who_withdrew_and_came_again_may_be_lost(self) -> None:
        held = Held(grace_s=0)
        held.claims.joined("a", 9)
        held.claims.left("a", for_good=False)
        held.claims.joined("a", 9)
        held.peers.senders.clear()
        held.claims.remove_dead([])
        assert held.now == (State.READY, 0)

    def test_who_is_lost_has_a_while_to_come_again(self) -> None:
        held = Held(SHORT_S)
        held.claims.joined("a", 9)
        held.peers.senders.clear()
        held.claims.remove_dead([])
        assert held.now == (State.CATCHING_UP, 9)
        time.sleep(2 * SHORT_S)
        held.claims.remove_dead([])
        assert held.now == (State.READY, 0)

    def test_who_comes_again_is_not_lost(self) -> None:
        held = Held(SHORT_S)
        held.claims.joined("a", 9)
        held.peers.senders.clear()
        held.claims.remove_dead([])
        held.peers.senders.add("a")
        time.sleep(2 * SHORT_S)
        held.claims.remove_dead([])
        held.peers.senders.clear()
        held.claims.remove_dead([])  # the while begins anew
        assert held.now == (State.CATCHING_UP, 9)


class TestUpdates:
    def test_a_rewind_outdates_what_was_told_before(self, held: Held) -> None:
        held.claims.joined("a", 5)
        held.update(6, "a")
        held.update(3, "a")
        held.claims.joined("b", 3)
        assert held.now == (State.READY, 0)

    @pytest.mark.parametrize("sender", ["b", None])
    def test_so_does_a_rewind_by_another(self, held: Held, sender: str | None) -> None:
        held.claims.joined("a", 5)
        held.update(5, "a")
        held.update(3, sender)
        held.claims.joined("b", 3)
        assert held.now == (State.READY, 0)

    def test_what_is_told_during_an_update_stands(self, held: Held) -> None:
        held.start(6)
        held.claims.joined("b", 9)
        held.finish("a")
        assert held.now == (State.CATCHING_UP, 9)
        held.update(9, "b")
        assert held.now == (State.READY, 0)

    def test_but_not_by_the_one_that_sends(self, held: Held) -> None:
        held.start(3)
        held.claims.joined("a", 6)
        held.finish("a")
        assert held.now == (State.READY, 0)

    def test_a_partial_update_outdates_nothing(self, held: Held) -> None:
        held.start(6, partial=True)
        held.claims.joined("a", 9)
        held.finish("a", partial=True)
        held.claims.remove_dead([])
        assert held.now == (State.CATCHING_UP, 9)
