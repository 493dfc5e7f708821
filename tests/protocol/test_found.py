"""What the model found, each by itself."""

from __future__ import annotations

import pytest

import weightsync as ws
from tests.protocol.world import SHORT_S, Death, Trainer, World


@pytest.mark.usefixtures("shm_clean")
def test_an_update_that_was_only_started_is_known_to_be_a_dead_senders() -> None:
    """Its lease may be minutes long: the next sender must not have to wait for it."""
    world = World(["staged", "in_place"])
    dying = Trainer(world, packed=True, drops=False)
    world.trainers.append(dying)
    dying.connect(SHORT_S)
    dying.fill()
    dying.arm(Death(2, acted=True), fails_at=None, dies_in_source=False)
    assert dying.sender is not None
    with pytest.raises(ws.WeightSyncError), dying.sender.update():
        raise AssertionError("a dead trainer's block does not run")
    status = [member.receiver.status() for member in world.fleet]
    assert {s.state for s in status} == {"UPDATING"}
    assert all(s.orphaned for s in status)
    world.end()
