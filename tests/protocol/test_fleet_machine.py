"""The promise, whatever happens: one whole version that a trainer sent, or a refusal.

Real receivers and real senders; messages are lost, repeated, delayed and reordered, trainers die at
any message and in the middle of the bytes, receivers are restarted, and the next trainer recovers.
Some trainers send the whole model, others deltas.
After every step each receiver is read as a decode step reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import get_args

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import weightsync as ws
from tests.protocol.sizes import SOAK_TIMEOUT_S, at_length, quick
from tests.protocol.strangers import Step
from tests.protocol.trainers import Death, Meanwhile, Offering, Trainer
from tests.protocol.world import EXPECTED, SHORT_S, Apply, World
from weightsync.testing import Act, Fault

ACTS: list[Act] = ["drop", "drop_reply", "repeat", "late", "kill", "kill_after"]
CALLS = [
    "init_weight_transfer_engine",
    "weight_info",
    "start_weight_update",
    "update_weights",
    "prepare_weight_update",
    "finish_weight_update",
    "abort_weight_update",
    "shutdown_weight_transfer_engine",
]
MEMBERS = st.integers(0, 2)
SLOTS = st.integers(0, 1)
FAULTS = st.lists(
    st.tuples(
        MEMBERS,
        st.builds(
            Fault,
            st.sampled_from(ACTS),
            st.sampled_from(CALLS) | st.none(),
            nth=st.integers(1, 3),
            times=st.sampled_from([1, 1, 1, 4]),
            after=st.integers(1, 5),
        ),
    ),
    max_size=3,
)
DEATHS = st.none() | st.none() | st.builds(Death, st.integers(1, 12), st.booleans())
MEANWHILE = (
    st.none()
    | st.none()
    | st.tuples(st.integers(1, 8), st.none() | st.sampled_from(Offering) | st.integers(0, 12))
)
NAMES = st.sets(st.sampled_from(["embedding", "norm", "scale"]), min_size=1)
LIKELY: list[Step] = ["start", "all", "prepare", "finish"]
STEPS = st.lists(
    st.sampled_from(LIKELY) | st.sampled_from([*get_args(Step)]), min_size=1, max_size=6
)
APPLIES: list[Apply] = ["staged", "in_place"]


class FleetMachine(RuleBasedStateMachine):
    """At most two trainers at a time; a dead one is followed by another."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.slots: list[Trainer | None] = [None, None]

    @initialize(applies=st.lists(st.sampled_from(APPLIES), min_size=2, max_size=3))
    def begin(self, applies: list[Apply]) -> None:
        self.world = World(applies)

    @property
    def here(self) -> World:
        assert self.world is not None
        return self.world

    @rule(
        slot=SLOTS,
        packed=st.booleans(),
        drops=st.booleans(),
        takes_over=st.booleans(),
        deltas=st.booleans(),
        faults=FAULTS,
        death=DEATHS,
    )
    def connect(
        self,
        slot: int,
        packed: bool,
        drops: bool,
        takes_over: bool,
        deltas: bool,
        faults: list[tuple[int, Fault]],
        death: Death | None,
    ) -> None:
        """A trainer starts where none lives."""
        if self.slots[slot] is not None:
            return
        trainer = Trainer(
            self.here, packed=packed, drops=drops, takes_over=takes_over, deltas=deltas
        )
        self.here.trainers.append(trainer)
        trainer.arm(death)
        if self._call(trainer, faults, lambda: trainer.connect(SHORT_S)):
            self.slots[slot] = trainer
        else:
            trainer.dead = True

    @rule(
        slot=SLOTS,
        faults=FAULTS,
        death=DEATHS,
        fails_at=st.none() | st.integers(0, 2),
        dies=st.booleans(),
        meanwhile=MEANWHILE,
        back=st.none() | st.none() | st.integers(0, 3),
        rewind=st.booleans(),
    )
    def send(
        self,
        slot: int,
        faults: list[tuple[int, Fault]],
        death: Death | None,
        fails_at: int | None,
        dies: bool,
        meanwhile: Meanwhile | None,
        back: int | None,
        rewind: bool,
    ) -> None:
        """One update of the whole model; `back` to an older version, which needs `rewind`."""
        trainer, sender = self._living(slot)
        trainer.fill()
        trainer.arm(death, fails_at=fails_at, dies_in_source=dies, meanwhile=meanwhile)
        version = None if back is None else max(sender.version - back, 0)
        rewind = rewind and back is not None
        reports: list[ws.SyncReport] = []

        def send() -> None:
            reports.append(sender.send_weights(version, rewind=rewind))

        if self._call(trainer, faults, send):
            self._all_hold(trainer, reports[0].version)

    @rule(slot=SLOTS)
    def go_on_alone(self, slot: int) -> None:
        """Without faults, and without a rival, the same sender brings everyone up to date."""
        rival = self.slots[1 - slot]
        if rival is not None and rival.sender is not None:
            rival.arm(None)
            rival.sender.close()
            rival.dead, self.slots[1 - slot] = True, None
        for member in self.here.fleet:
            if member.unreachable:
                member.restart()
        trainer, _ = self._living(slot)
        trainer.arm(None)
        trainer.fill()
        version = trainer.send_though_replaced().version
        trainer.note_segments()
        self._all_hold(trainer, version)

    @rule(
        slot=SLOTS,
        faults=FAULTS,
        death=DEATHS,
        meanwhile=MEANWHILE,
        names=NAMES,
        partial=st.booleans(),
        raises=st.booleans(),
    )
    def update_block(
        self,
        slot: int,
        faults: list[tuple[int, Fault]],
        death: Death | None,
        meanwhile: Meanwhile | None,
        names: set[str],
        partial: bool,
        raises: bool,
    ) -> None:
        """A custom loop: start, tensors in two messages, prepare and finish on their own."""
        trainer, sender = self._living(slot)
        trainer.fill()
        trainer.arm(death, meanwhile=meanwhile)
        if partial:
            trainer.sending = {name: trainer.sending[name] for name in names}

        def block() -> None:
            pairs = [(n, t.detach()) for n, t in trainer.model.named_parameters()]
            pairs = [(n, t) for n, t in pairs if n in trainer.sending]
            with sender.update(partial=partial) as update:
                update.send(pairs[:1])
                if raises:
                    raise ws.TransferError("the user's own loop failed")
                if pairs[1:]:
                    update.send(pairs[1:])

        self._call(trainer, faults, block)

    @rule(slot=SLOTS, member=MEMBERS, faults=FAULTS, death=DEATHS)
    def resync(
        self, slot: int, member: int, faults: list[tuple[int, Fault]], death: Death | None
    ) -> None:
        trainer, sender = self._living(slot)
        targets = sender.targets
        trainer.arm(death)
        self._call(trainer, faults, lambda: sender.resync(targets[member % len(targets)]))

    @rule(slot=SLOTS, member=MEMBERS, faults=FAULTS, back=st.booleans())
    def leave_or_return(
        self, slot: int, member: int, faults: list[tuple[int, Fault]], back: bool
    ) -> None:
        """A receiver is let go, or one that is not in the fleet is taken in."""
        trainer, sender = self._living(slot)
        line = trainer.lines[member % len(trainer.lines)]
        trainer.arm(None)
        if not back:
            self._call(trainer, faults, lambda: sender.remove(line.member.name))
        elif line.member.name not in sender.targets:
            self._call(trainer, faults, lambda: sender.add(trainer.line_again(line)))

    @rule(slot=SLOTS, faults=FAULTS, death=DEATHS, for_good=st.booleans())
    def release_or_close(
        self, slot: int, faults: list[tuple[int, Fault]], death: Death | None, for_good: bool
    ) -> None:
        trainer, sender = self._living(slot)
        trainer.arm(death)
        self._call(trainer, faults, sender.close if for_good else sender.release)
        if for_good:
            trainer.dead, self.slots[slot] = True, None

    @rule(slot=SLOTS)
    def die(self, slot: int) -> None:
        """Between two calls."""
        trainer, self.slots[slot] = self.slots[slot], None
        if trainer is not None:
            trainer.die()

    @rule(member=MEMBERS)
    def restart(self, member: int) -> None:
        self.here.fleet[member % len(self.here.fleet)].restart()

    @rule(member=MEMBERS)
    def late_ones_arrive(self, member: int) -> None:
        self.here.fleet[member % len(self.here.fleet)].deliver_late()
        self.here.settle()

    @rule(member=MEMBERS, backs=st.lists(st.integers(0, 12), min_size=1, max_size=4))
    def old_messages_arrive(self, member: int, backs: list[int]) -> None:
        for back in backs:
            self.here.replay(self.here.fleet[member % len(self.here.fleet)], back)
            self.here.settle()
            self.one_version_or_a_reason()

    @rule(member=MEMBERS)
    def a_lease_runs_out(self, member: int) -> None:
        self.here.expire(self.here.fleet[member % len(self.here.fleet)])

    @rule(member=MEMBERS, steps=STEPS, names=NAMES)
    def a_stranger_comes(self, member: int, steps: list[Step], names: set[str]) -> None:
        """Messages of no sender to one receiver; what they begin may stay open."""
        stranger = self.here.strangers[self.here.fleet[member % len(self.here.fleet)].name]
        for step in steps:
            stranger.do(step, names)
            self.one_version_or_a_reason()

    @rule(slot=SLOTS, member=MEMBERS, what=st.sampled_from(Offering))
    def offer_again(self, slot: int, member: int, what: Offering) -> None:
        """A trainer that lives connects anew, perhaps with what no receiver may take."""
        trainer = self.slots[slot]
        there = self.here.fleet[member % len(self.here.fleet)]
        if trainer is None or there.name not in trainer.offers:
            return
        with suppress(*EXPECTED):
            self.here.offer_again(there, trainer, what)
        self.here.settle()

    @invariant()
    def what_is_open_ends(self) -> None:
        if self.world is not None:
            for member in self.world.fleet:
                self.world.check_it_ends(member)

    @invariant()
    def one_version_or_a_reason(self) -> None:
        if self.world is not None:
            for member in self.world.fleet:
                self.world.check(member)

    def _living(self, slot: int) -> tuple[Trainer, ws.WeightSender]:
        """The trainer of a slot; where none lives, one that starts without any fault."""
        trainer = self.slots[slot]
        if trainer is None:
            for member in self.here.fleet:
                if member.unreachable:
                    member.restart()
            trainer = self.slots[slot] = Trainer(
                self.here, packed=slot == 0, drops=False, deltas=True
            )
            self.here.trainers.append(trainer)
            before = self.here.statuses()
            trainer.connect(SHORT_S)
            trainer.note_segments()
            self.here.check_taken_over(before)
        assert trainer.sender is not None
        return trainer, trainer.sender

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            for slot, trainer in enumerate(self.slots):
                if trainer is not None:
                    self.go_on_alone(slot)
        finally:
            self.world.end()

    def _call(
        self, trainer: Trainer, faults: list[tuple[int, Fault]], call: Callable[[], object]
    ) -> bool:
        """Make one call under these faults; return whether it went well and the trainer lives."""
        self.here.strike(faults)
        try:
            call()
            went_well = True
        except EXPECTED:
            went_well = False
        if trainer.dead:
            trainer.free_locks()
        else:
            trainer.note_segments()
        self.here.settle()
        if trainer.dead:
            self.slots = [None if other is trainer else other for other in self.slots]
        return went_well and not trainer.dead

    def _all_hold(self, trainer: Trainer, version: int) -> None:
        """A send that returned has brought everyone who is still in the fleet to this version."""
        assert trainer.sender is not None
        for member in self.here.fleet:
            if member.name in trainer.sender.targets:
                self.here.holds(member, version, trainer.contents)


class FleetAtLength(FleetMachine):
    """The same model, for longer."""


TestFleet = FleetMachine.TestCase
TestFleet.settings = quick(120, 16)
TestFleetAtLength = pytest.mark.soak(pytest.mark.timeout(SOAK_TIMEOUT_S)(FleetAtLength.TestCase))
TestFleetAtLength.settings = at_length(2000, 40)
