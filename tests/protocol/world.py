"""Real receivers, real senders and a network that fails, in one process: the system under the
model."""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

import torch
from msgspec.structs import replace

import weightsync as ws
from tests.protocol.strangers import Stranger
from tests.protocol.trainers import NAMES, Contents, Offering, SourceFailed, Trainer
from weightsync.backends.ring import IpcInit
from weightsync.shm.segment import DIRECTORY, live_segments
from weightsync.testing import Fault, FleetMember, InProcessFleet
from weightsync.wire.codec import decode_payload
from weightsync.wire.messages import (
    InitRequest,
    Request,
    StartRequest,
    Status,
    UpdateRequest,
)
from weightsync.wire.offers import InitInfo

SHORT_S = 1.5
PATIENT_S = 30.0
LEASE_S = 600.0
"""No lease expires by itself here; see World.expire."""
KEPT_MESSAGES = 40
REFUSALS = {"TORN", "CATCHING_UP", "UPDATING", "PREPARED", "ABORTING"}

Apply = Literal["staged", "in_place"]


class World:
    """The receivers, all trainers so far, and the allowed content of each version."""

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
        self.strangers = {member.name: Stranger(self, member) for member in self.fleet}
        self._values = itertools.count(1)

    def next_value(self) -> float:
        return float(next(self._values))

    def sent_by(self, trainer: Trainer, member: FleetMember, request: Request) -> None:
        """Record a message, and the content of the version that it starts."""
        kept = self.messages[member.name]
        kept.append(request)
        del kept[:-KEPT_MESSAGES]
        if isinstance(request, InitRequest) and isinstance(request.init_info, InitInfo):
            trainer.offers[member.name] = request.init_info
        terms = request.start if isinstance(request, UpdateRequest) else None
        terms = request if isinstance(request, StartRequest) else terms
        if terms is None or terms.version is None:
            return
        self.rewound = self.rewound or terms.rewind  # resync() and add() do so as well
        base = terms.base_version or 0
        self.may_consist(terms.version, trainer.sending, base if terms.partial else None)

    def may_consist(self, version: int, parts: Mapping[str, float], base: int | None) -> None:
        """Record the content of a version: `parts`, over any content of `base` if given."""
        if base is None and len(parts) < len(NAMES):
            return  # no receiver may accept it
        for under in list(self.sent[base]) if base is not None else [(0.0, 0.0, 0.0)]:
            whole = dict(zip(NAMES, under, strict=True)) | dict(parts)
            self.sent[version].add(tuple(whole[name] for name in NAMES))

    def expire(self, member: FleetMember) -> None:
        """Expire the lease of its open update, if there is one."""
        session = member.receiver._session
        incoming = session._incoming
        if incoming is not None and session._may_expire(incoming):
            session._last_message_at = -math.inf  # for longer than any heartbeat counts
            session._check_progress()

    def disturb(self, member: FleetMember, trainer: Trainer, what: Offering | int | None) -> None:
        """Act in the middle of a trainer's call; see Meanwhile."""
        if what is None:
            self.expire(member)
        elif isinstance(what, int):
            self.replay(member, what)
        elif member.name in trainer.offers:
            with suppress(ws.WeightSyncError):
                self.offer_again(member, trainer, what)

    def offer_again(self, member: FleetMember, trainer: Trainer, what: Offering) -> None:
        """Connect a trainer anew. Raises the receiver's error."""
        offer = trainer.offers[member.name]
        if what is Offering.OTHER_MODEL:
            manifest = offer.manifest
            other = replace(manifest, names=[f"other.{name}" for name in manifest.names])
            offer = replace(offer, manifest=other)
        elif what is Offering.NO_PLACE:
            ring = decode_payload(offer.payload, IpcInit)
            offer = replace(offer, payload=replace(ring, reader=ring.num_readers))
        member.receiver.dispatch(InitRequest(init_info=offer))

    def check_it_ends(self, member: FleetMember) -> None:
        """Check that an open update will end: by its lease, its living sender, or the next
        sender."""
        deadline = time.monotonic() + PATIENT_S
        while not self._ends(member):
            assert time.monotonic() < deadline, f"nobody ever ends {member.receiver.status()}"
            time.sleep(0.001)

    def _ends(self, member: FleetMember) -> bool:
        session = member.receiver._session
        incoming = session._incoming
        if incoming is None:
            return True
        if session.lifecycle.state.value != "PREPARED" or incoming.sender is None:
            return session._timer.runs
        alive = any(
            offer.sender == incoming.sender
            for trainer in self.trainers
            for offer in trainer.offers.values()
            if not trainer.dead
        )
        return alive or member.receiver.status().orphaned

    def strike(self, faults: list[tuple[int, Fault]]) -> None:
        for place, fault in faults:
            self.fleet[place % len(self.fleet)].faults.add(fault)

    def settle(self) -> None:
        """Clear the faults of the call; wait for loaders, which need a moment to notice a death."""
        for member in self.fleet:
            member.faults.clear()
        deadline = time.monotonic() + PATIENT_S
        while any(member.receiver.status().busy for member in self.fleet):
            assert time.monotonic() < deadline, "a receiver never stops loading"
            time.sleep(0.001)
        self.made |= {s.name for s in live_segments()} - self.segments_before

    def replay(self, member: FleetMember, back: int) -> None:
        """Deliver a message that was sent some time ago, perhaps again."""
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
        """Check that recovery ended the updates of dead senders, with one result everywhere."""
        for old, new in zip(before, self.statuses(), strict=True):
            if not old.orphaned:
                continue
            assert new.update_id != old.update_id or new.state == "TORN"
            if old.state == "PREPARED":
                committed = any(other.last_finished == old.update_id for other in before)
                assert new.version == (old.prepared_version if committed else old.version)

    def heal(self) -> None:
        """End every trainer and all faults: the next trainer brings all receivers to one
        version."""
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
        """Close everything; nothing stays in /dev/shm, or mapped."""
        try:
            self.heal()
            left = {name for name in self.made if (DIRECTORY / name).exists()}
            assert not left, f"segments of dead trainers are left: {left}"
            for member in self.fleet:
                assert not member.receiver.shared_memory_usage()
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
