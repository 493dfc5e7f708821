"""What the model found, each by itself."""

from __future__ import annotations

from contextlib import suppress

import pytest

import weightsync as ws
from tests.protocol.trainers import Death, Offering, Trainer
from tests.protocol.world import PATIENT_S, SHORT_S, Apply, World
from weightsync.testing.fleet import FleetMember
from weightsync.wire.messages import InitRequest, ShutdownRequest, StartRequest, UpdateRequest

pytestmark = pytest.mark.usefixtures("shm_clean")


def connected(applies: list[Apply], *, packed: bool) -> tuple[World, Trainer, ws.WeightSender]:
    """A fleet, and a trainer that is connected to all of it."""
    world = World(applies)
    trainer = Trainer(world, packed=packed, drops=False)
    world.trainers.append(trainer)
    trainer.connect(PATIENT_S)
    assert trainer.sender is not None
    return world, trainer, trainer.sender


def a_start_comes_late(world: World, member: FleetMember) -> None:
    """The member is started again, and gets the inits and starts that it had once more."""
    kinds = (InitRequest, StartRequest)
    late = [m for m in world.messages[member.name] if isinstance(m, kinds)]
    member.restart()
    for request in late:
        with suppress(ws.ConfigError):  # the first only asks who is there
            member.receiver.dispatch(request)


def the_next_update_reaches_all(world: World, trainer: Trainer) -> None:
    """The last step of a test."""
    assert trainer.sender is not None
    trainer.fill()
    version = trainer.sender.send_weights().version
    for member in world.fleet:
        world.holds(member, version, trainer.contents)
    world.end()


def test_an_update_that_was_only_started_is_known_to_be_a_dead_senders() -> None:
    """Its lease may be minutes long: the next sender must not have to wait for it."""
    world = World(["staged", "in_place"])
    dying = Trainer(world, packed=True, drops=False)
    world.trainers.append(dying)
    dying.connect(PATIENT_S)
    dying.fill()
    dying.arm(Death(2, acted=True))
    assert dying.sender is not None
    with pytest.raises(ws.WeightSyncError), dying.sender.update():
        raise AssertionError("a dead trainer's block does not run")
    status = [member.receiver.status() for member in world.fleet]
    assert {s.state for s in status} == {"UPDATING"}
    assert all(s.orphaned for s in status)
    world.end()


@pytest.mark.parametrize("death", [Death(2, acted=True), Death(5, acted=True)])
def test_a_sender_that_was_there_before_ends_what_another_one_left(death: Death) -> None:
    """It is connected already, so it is no successor that starts: it must not wait for one."""
    world = World(["staged", "in_place"])
    staying, dying = [Trainer(world, packed=True, drops=False) for _ in range(2)]
    for trainer in (staying, dying):
        world.trainers.append(trainer)
        trainer.connect(PATIENT_S)
        trainer.note_segments()
        trainer.fill()
    dying.arm(death)
    assert dying.sender is not None
    assert staying.sender is not None
    with suppress(ws.WeightSyncError), dying.sender.update() as update:
        update.send([(name, tensor.detach()) for name, tensor in dying.model.named_parameters()])
    assert any(status.orphaned for status in world.statuses())
    with pytest.raises(ws.SenderReplacedError, match="receiver-0, receiver-1"):
        staying.sender.send_weights()
    version = staying.sender.send_weights().version
    for member in world.fleet:
        world.holds(member, version, staying.contents)
    world.end()


def test_one_that_rolls_forward_alone_is_freed_from_a_dead_sender_as_well() -> None:
    """The others could go on, since one of them is in place; this one has to follow."""
    world = World(["in_place", "staged"])
    # Not packed: one that refuses does not keep the other from having everything.
    staying, dying = [Trainer(world, packed=packed, drops=False) for packed in (False, True)]
    for trainer in (dying, staying):
        world.trainers.append(trainer)
        trainer.connect(PATIENT_S)
        trainer.note_segments()
        assert trainer.sender is not None
        if trainer is dying:
            trainer.fill()
            trainer.sender.send_weights()
    assert dying.sender is not None
    assert staying.sender is not None
    world.fleet[1].restart()
    dying.arm(Death(5, acted=True))
    with pytest.raises(ws.WeightSyncError):
        dying.sender.resync("receiver-1")
    assert world.statuses()[1].orphaned
    staying.fill()
    world.fleet[1].fail("delay", "update_weights", seconds=0.3)
    report = staying.sender.send_weights()
    assert report.rule == "roll-forward"
    for member in world.fleet:
        world.holds(member, report.version, staying.contents)
    world.end()


def test_a_late_offer_does_not_undo_a_newer_one() -> None:
    """It names a place in the ring that nobody waits for any more."""
    world, trainer, sender = connected(["staged", "staged"], packed=True)
    member = world.fleet[1]
    late = next(
        m for m in world.messages[member.name] if isinstance(m, InitRequest) and m.init_info
    )
    assert late.init_info is not None
    sender.remove(member.name)
    sender.add(trainer.line_again(trainer.lines[1]))
    member.receiver.dispatch(ShutdownRequest(sender=late.init_info.sender))
    with pytest.raises(ws.ProtocolError, match="comes after"):
        member.receiver.dispatch(late)
    the_next_update_reaches_all(world, trainer)


def test_who_finds_others_ahead_after_going_forward_in_place_passes_them() -> None:
    world, trainer, sender = connected(["in_place", "staged"], packed=False)
    trainer.fill()
    sender.send_weights()
    world.strangers[world.fleet[1].name].do("all", [])
    assert world.fleet[1].receiver.version == 2
    trainer.fill()
    report = sender.send_weights()
    assert (report.version, report.rule) == (3, "roll-forward")
    for member in world.fleet:
        world.holds(member, 3, trainer.contents)
    world.end()


def test_who_finds_others_ahead_after_freeing_them_passes_them() -> None:
    """Held by a dead sender's update, one could not say at once that it had been passed."""
    world = World(["staged", "in_place"])
    staying, dying = [Trainer(world, packed=False, drops=False) for _ in range(2)]
    for trainer in (staying, dying):
        world.trainers.append(trainer)
    staying.connect(SHORT_S)
    assert staying.sender is not None
    staying.fill()
    staying.sender.send_weights()
    world.strangers[world.fleet[0].name].do("all", [])
    assert world.fleet[0].receiver.version == 2
    staying.note_segments()
    dying.connect(SHORT_S)
    assert dying.sender is not None
    dying.fill()
    dying.arm(Death(2, acted=False, last=world.fleet[1].name))
    with pytest.raises(ws.WeightSyncError), dying.sender.update():
        raise AssertionError("a dead trainer's block does not run")
    assert [m.receiver.status().state for m in world.fleet] == ["UPDATING", "READY"]
    staying.fill()
    with pytest.raises(ws.SenderReplacedError, match="receiver-0, receiver-1"):
        staying.sender.send_weights()
    assert staying.sender.send_weights().version == 3
    for member in world.fleet:
        world.holds(member, 3, staying.contents)
    world.end()


def test_a_start_that_came_late_to_a_new_instance_is_ended_by_its_own_sender() -> None:
    """The sender lives, so nobody else would end it before its lease."""
    world, trainer, sender = connected(["staged", "in_place"], packed=False)
    trainer.fill()
    with suppress(ZeroDivisionError), sender.update():
        raise ZeroDivisionError
    member = world.fleet[0]
    a_start_comes_late(world, member)
    assert member.receiver.status().state == "UPDATING"
    version = sender.send_weights().version
    for other in world.fleet:
        world.holds(other, version, trainer.contents)
    world.end()


def test_a_start_that_came_late_does_not_outlive_its_dead_sender_whom_others_committed() -> None:
    """It is not PREPARED, so it cannot be finished as it is elsewhere."""
    world, dying, sender = connected(["staged", "in_place"], packed=False)
    dying.fill()
    with sender.update() as update:
        update.send([(name, tensor.detach()) for name, tensor in dying.model.named_parameters()])
    a_start_comes_late(world, world.fleet[0])
    dying.bury()
    dying.dead = True
    before = world.statuses()
    assert before[0].orphaned
    assert (before[0].state, before[0].update_id) == ("UPDATING", before[1].last_finished)
    following = Trainer(world, packed=True, drops=False)
    world.trainers.append(following)
    following.connect(PATIENT_S)
    following.note_segments()
    world.check_taken_over(before)
    the_next_update_reaches_all(world, following)


def test_all_who_forgot_the_sender_are_met_again_at_once() -> None:
    """One refusal ends the update before the others have answered."""
    world, trainer, _ = connected(["staged", "staged", "staged"], packed=True)
    for member in world.fleet:
        inits = [m for m in world.messages[member.name] if isinstance(m, InitRequest)]
        offered = next(m.init_info for m in inits if m.init_info is not None)
        member.receiver.dispatch(ShutdownRequest(sender=offered.sender))
    world.fleet[2].fail("delay", "update_weights", seconds=0.3)
    the_next_update_reaches_all(world, trainer)


@pytest.mark.parametrize("anew", ["refused", "accepted"])
def test_one_whose_new_offer_was_refused_leaves_no_update_for_ever(anew: str) -> None:
    """PREPARED has no lease, and there is no engine left to tell that the sender is dead."""
    world = World(["staged"])
    dying = Trainer(world, packed=True, drops=False)
    world.trainers.append(dying)
    dying.connect(PATIENT_S)
    dying.fill()
    dying.arm(Death(2, acted=False))
    assert dying.sender is not None
    with pytest.raises(ws.WeightSyncError):
        dying.sender.send_weights()
    assert {status.state for status in world.statuses()} == {"PREPARED"}
    for member in world.fleet:
        if anew == "refused":
            with pytest.raises(ws.ManifestMismatchError):
                world.offer_again(member, dying, Offering.OTHER_MODEL)
        else:
            world.offer_again(member, dying, Offering.THE_SAME)
    assert all(status.orphaned for status in world.statuses())
    world.end()


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_an_update_that_came_late_to_a_new_instance_does_not_hold_it(
    apply: Apply,
) -> None:
    """The sender lives, so nobody else would end it: PREPARED has no lease."""
    world, trainer, sender = connected([apply, "staged"], packed=False)
    trainer.fill()
    sender.send_weights()
    member = world.fleet[0]
    member.restart()
    for request in list(world.messages[member.name]):
        if isinstance(request, InitRequest | UpdateRequest):
            with suppress(ws.WeightSyncError):  # the first only asks who is there
                member.receiver.dispatch(request)
    assert member.receiver.status().senders
    the_next_update_reaches_all(world, trainer)


def test_a_goodbye_that_comes_late_beside_a_session_does_not_end_the_next_update() -> None:
    """One refusal comes after the other: both are mended within one call."""
    for after in range(1, 9):
        world, trainer, sender = connected(["staged", "staged"], packed=True)
        member = world.fleet[0]
        member.fail("late", "shutdown_weight_transfer_engine", after=after)
        sender.release()
        world.strangers[member.name].do("start", [])
        the_next_update_reaches_all(world, trainer)


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_an_init_that_comes_again_after_a_rewind_holds_nobody(apply: Apply) -> None:
    """It still says that the fleet holds the newer version, which the rewind has left."""
    world, trainer, sender = connected([apply, "staged"], packed=False)
    for _ in range(3):
        trainer.fill()
        sender.send_weights()
    sender.release()
    trainer.fill()
    assert sender.send_weights().version == 4
    assert {offer.fleet_version for offer in trainer.offers.values()} == {3}
    trainer.fill()
    sender.send_weights(2, rewind=True)
    for member in world.fleet:
        world.offer_again(member, trainer, Offering.THE_SAME)
        world.holds(member, 2, trainer.contents)
        assert member.receiver.status().state == "READY"
    the_next_update_reaches_all(world, trainer)


@pytest.mark.parametrize(("apply", "left"), [("staged", "READY"), ("in_place", "TORN")])
def test_a_lease_of_the_model_runs_out(apply: Apply, left: str) -> None:
    """The model itself is tested: its leases once ran out without an effect."""
    world, trainer, _ = connected([apply], packed=False)
    member = world.fleet[0]
    for steps in (["start"], ["start", "all"]):
        for step in steps:
            world.strangers[member.name].do(step, [])  # type: ignore[arg-type]  # steps of its own
        assert member.receiver.status().state == "UPDATING"
        world.expire(member)
    assert member.receiver.status().state == left
    the_next_update_reaches_all(world, trainer)
