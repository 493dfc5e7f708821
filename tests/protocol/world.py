"""Real receivers, real senders and a network that fails, in one process: what the model moves."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch

import weightsync as ws
from weightsync.samehost.segment import DIRECTORY, live_segments
from weightsync.testing import Fault, FleetMember, InProcessFleet, TinyModel
from weightsync.transports.base import Transport
from weightsync.wire.messages import Reply, Request, StartRequest, Status, UpdateRequest

BUCKET_NBYTES = 4096
SHORT_S = 1.5
PATIENT_S = 30.0
LEASE_S = 10.0
NAMES = ("embedding", "norm", "scale")
KEPT_MESSAGES = 40
REFUSALS = {"TORN", "JOINING", "UPDATING", "PREPARED", "ABORTING"}

Apply = Literal["staged", "in_place"]
Contents = tuple[float, ...]
"""The one value that every element of each tensor has, by NAMES."""


class SourceFailed(Exception):
    """The trainer's own code failed while it handed tensors out."""


@dataclass(frozen=True)
class Death:
    """The trainer dies at its `message`-th message of a call, once it was acted on or before."""

    message: int
    acted: bool


class Line:
    """One trainer's way to one member. A dead trainer sends nothing."""

    def __init__(self, trainer: Trainer, member: FleetMember) -> None:
        self.member = member
        self._trainer = trainer
        self._carried = member.transport()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carried, name)

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        trainer = self._trainer
        dies = trainer.count(request)
        if dies is not None and not dies.acted:
            trainer.die()
        trainer.refuse_if_dead()
        trainer.world.sent_by(trainer, self.member, request)
        try:
            return self._carried.call(request, timeout_s=timeout_s)
        finally:
            if dies is not None:
                trainer.die()
            trainer.refuse_if_dead()

    def close(self) -> None:
        if not self._trainer.dead:
            self._carried.close()


class Trainer:
    """A sender and its weights: every tensor is full of one value, another one for every try."""

    def __init__(self, world: World, *, packed: bool, drops: bool) -> None:
        self.world = world
        self.dead = False
        self.packed = packed
        self.drops = drops
        self.model = TinyModel()
        self.contents: Contents = (0.0, 0.0, 0.0)
        self.sending: dict[str, float] = {}
        self.fails_at: int | None = None
        self.dies_in_source = False
        self.sender: ws.WeightSender | None = None
        self.lines = [Line(self, member) for member in world.fleet]
        self.death: Death | None = None
        self._messages = 0
        self._segments: set[str] = set()

    def connect(self, timeout_s: float) -> None:
        to: list[Transport] = [line for line in self.lines]  # noqa: C416  # a list of the protocol
        self.sender = ws.connect(
            self.pairs if self.packed else self.model,
            to=to,
            packed=self.packed,
            bucket_nbytes=BUCKET_NBYTES,
            num_buckets=2,
            timeout_s=timeout_s,
            on_failure="drop" if self.drops else "abort",
        )

    def fill(self) -> None:
        """Make one step: new weights."""
        value = self.world.next_value()
        self.contents = (value, value, value)
        self.sending = dict(zip(NAMES, self.contents, strict=True))
        with torch.no_grad():
            for tensor in self.model.parameters():
                tensor.fill_(value)

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The source of a packed trainer."""
        for i, (name, tensor) in enumerate(self.model.named_parameters()):
            if self.fails_at == i and self.sender is not None:
                if self.dies_in_source:
                    self.die()
                raise SourceFailed(name)
            yield name, tensor.detach()

    def arm(self, death: Death | None, *, fails_at: int | None, dies_in_source: bool) -> None:
        self.death, self._messages = death, 0
        self.fails_at, self.dies_in_source = fails_at, dies_in_source

    def line_again(self, line: Line) -> Line:
        """A new transport to a member whose last one was closed."""
        self.lines[self.lines.index(line)] = again = Line(self, line.member)
        return again

    def count(self, request: Request) -> Death | None:
        """Return how it dies at this message, if it does."""
        self._messages += 1
        return self.death if self.death and self.death.message == self._messages else None

    def note_segments(self) -> None:
        """What nobody else made is this trainer's."""
        others = {name for other in self.world.trainers if other is not self for name in other.owns}
        self._segments |= {s.name for s in live_segments() if s.owner and s.name not in others}

    @property
    def owns(self) -> set[str]:
        return self._segments

    def die(self) -> None:
        """SIGKILL, as others see it: no word, and no lock that says it lives."""
        if self.dead:
            return
        self.dead = True
        self.note_segments()
        for segment in live_segments():
            if segment.name in self._segments and segment._lock is not None:
                segment._lock.release()

    def refuse_if_dead(self) -> None:
        if self.dead:
            raise ws.ConnectError("a dead trainer sends and hears nothing")

    def bury(self) -> None:
        """Free what this process still has of it."""
        if self.sender is not None:
            self.sender.close()


class World:
    """The receivers, all trainers that ever were, and what each version may consist of."""

    def __init__(self, applies: list[Apply]) -> None:
        self.segments_before = {segment.name for segment in live_segments()}
        self.made: set[str] = set()
        self.fleet = InProcessFleet(len(applies), apply=applies, lease_s=LEASE_S)
        self.applies = applies
        self.trainers: list[Trainer] = []
        self.sent: dict[int, set[Contents]] = defaultdict(set)
        self.sent[0].add((0.0, 0.0, 0.0))
        self.messages: dict[str, list[Request]] = defaultdict(list)
        self.rewound = False
        self.seen: dict[str, int] = {}
        self._values = itertools.count(1)

    def next_value(self) -> float:
        return float(next(self._values))

    def sent_by(self, trainer: Trainer, member: FleetMember, request: Request) -> None:
        """Remember a message, and what the version that it starts is made of."""
        kept = self.messages[member.name]
        kept.append(request)
        del kept[:-KEPT_MESSAGES]
        terms = request.start if isinstance(request, UpdateRequest) else None
        terms = request if isinstance(request, StartRequest) else terms
        if terms is None or terms.version is None:
            return
        self.rewound = self.rewound or terms.rewind  # resync() and add() do so as well
        bases = self.sent[terms.base_version or 0] if terms.partial else {trainer.contents}
        for base in list(bases):
            parts = dict(zip(NAMES, base, strict=True)) | trainer.sending
            self.sent[terms.version].add(tuple(parts[name] for name in NAMES))

    def strike(self, faults: list[tuple[int, Fault]]) -> None:
        for place, fault in faults:
            self.fleet[place % len(self.fleet)].faults.add(fault)

    def settle(self) -> None:
        """Faults are of one call; loaders of a dead trainer need a moment to notice."""
        for member in self.fleet:
            member.faults.clear()
        deadline = time.monotonic() + PATIENT_S
        while any(member.receiver.status().busy for member in self.fleet):
            assert time.monotonic() < deadline, "a receiver never stops loading"
            time.sleep(0.001)
        self.made |= {s.name for s in live_segments()} - self.segments_before

    def replay(self, member: FleetMember, back: int) -> None:
        """A message that was sent some time ago arrives, perhaps again."""
        kept = self.messages[member.name]
        if not kept:
            return
        request = kept[-1 - back % len(kept)]
        with suppress(ws.WeightSyncError):
            member.receiver.dispatch(request)

    def check(self, member: FleetMember) -> None:
        """The promise: exactly one version that a trainer sent, or a refusal that says why."""
        refused: ws.NotReadyError | None = None
        try:
            version, tensors = member.tensors(timeout_s=0.0)
        except ws.NotReadyError as exc:
            refused = exc
        if refused is not None:
            assert refused.state in REFUSALS
            assert str(refused)
            in_place = self.applies[self.fleet.members.index(member)] == "in_place"
            assert in_place or refused.state != "TORN", f"a staged receiver is torn: {refused}"
            return
        held = contents_of(tensors)
        assert held in self.sent[version], f"{member.name}: version {version} is not {held}"
        instance = member.receiver.instance
        assert self.rewound or version >= self.seen.get(instance, 0), "an old version came back"
        self.seen[instance] = version

    def statuses(self) -> list[Status]:
        return [member.receiver.status() for member in self.fleet]

    def check_taken_over(self, before: list[Status]) -> None:
        """A successor has ended what dead senders left open: everywhere, and everywhere alike."""
        for old, new in zip(before, self.statuses(), strict=True):
            if not old.orphaned:
                continue
            assert new.update_id != old.update_id or new.state == "TORN"
            if old.state == "PREPARED":
                committed = any(other.last_finished == old.update_id for other in before)
                assert new.version == (old.prepared_version if committed else old.version)

    def heal(self) -> None:
        """Every trainer is gone, the network is well: the next one brings everyone up to date."""
        for trainer in self.trainers:
            if not trainer.dead:
                trainer.bury()
                trainer.dead = True
        for member in self.fleet:
            member.deliver_late()
            if member.unreachable:
                member.restart()
        last = Trainer(self, packed=True, drops=False)
        last.connect(PATIENT_S)
        assert last.sender is not None
        try:
            last.fill()
            report = last.sender.send_weights()
            for member in self.fleet:
                self.holds(member, report.version, last.contents)
                assert member.receiver.status().state == "READY"
        finally:
            last.bury()

    def holds(self, member: FleetMember, version: int, contents: Contents) -> None:
        held, tensors = member.tensors(timeout_s=1.0)
        assert (held, contents_of(tensors)) == (version, contents), member.name

    def end(self) -> None:
        """Close everything; nothing stays in /dev/shm, mapped or in a ledger."""
        try:
            self.heal()
            left = {name for name in self.made if (DIRECTORY / name).exists()}
            assert not left, f"segments of dead trainers are left: {left}"
            for member in self.fleet:
                assert not member.receiver.ledger()
        finally:
            for trainer in self.trainers:
                trainer.bury()
            self.fleet.close()
        assert {s.name for s in live_segments()} <= self.segments_before


def contents_of(tensors: dict[str, torch.Tensor]) -> Contents:
    """Return the value of each tensor; a tensor of several values is no version at all."""
    values = []
    for name in NAMES:
        flat = tensors[name].reshape(-1)
        assert bool((flat == flat[0]).all()), f"{name} is a mixture: {sorted(set(flat.tolist()))}"
        values.append(float(flat[0]))
    return tuple(values)


EXPECTED = (ws.WeightSyncError, SourceFailed)
