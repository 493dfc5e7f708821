"""Trainers of the model: real senders that die, fail and connect anew on command."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

import weightsync as ws
from weightsync.shm.segment import live_segments
from weightsync.testing import FleetMember, TinyModel
from weightsync.transports.base import Transport
from weightsync.wire.messages import Reply, Request
from weightsync.wire.offers import InitInfo

if TYPE_CHECKING:
    from tests.protocol.world import World

BUCKET_NBYTES = 4096
WAIT_S = 60.0
NAMES = ("embedding", "norm", "scale")

Contents = tuple[float, ...]
"""The one value that every element of each tensor has, by NAMES."""


class Offering(Enum):
    """The offer of a trainer that connects anew: the former one, or one that is refused."""

    THE_SAME = "the same"
    OTHER_MODEL = "another model, known only when everything was opened"
    NO_PLACE = "a place outside of the ring, known before anything is"


Meanwhile = tuple[int, Offering | int | None]
"""Events during a call, by message number: the receiver's lease expires (None), a new offer
arrives, or an old message arrives again (counted from the last)."""


class SourceFailed(Exception):
    """The trainer's own code failed while it yielded tensors."""


@dataclass(frozen=True)
class Death:
    """The trainer dies at its `message`-th message of a call, before or after its effect.

    Messages to members are concurrent. A message to `last` waits for the effect of the others.
    """

    message: int
    acted: bool
    last: str | None = None


class Line:
    """A transport from one trainer to one member. A dead trainer sends nothing."""

    def __init__(self, trainer: Trainer, member: FleetMember) -> None:
        self.member = member
        self._trainer = trainer
        self._carried = member.transport()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carried, name)

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        trainer = self._trainer
        trainer.wait_for_others(self.member)
        dies = trainer.count(self.member)
        if dies is not None and not dies.acted:
            trainer.die()
        trainer.refuse_if_dead()
        trainer.world.sent_by(trainer, self.member, request)
        try:
            return self._carried.call(request, timeout_s=timeout_s)
        finally:
            if dies is not None:
                trainer.die()
            trainer.acted.release()
            trainer.refuse_if_dead()

    def close(self) -> None:
        if not self._trainer.dead:
            self._carried.close()


class Trainer:
    """A sender and its weights: every tensor is full of one value, another one for every try.

    One that sends deltas changes one tensor at a time.
    """

    def __init__(
        self,
        world: World,
        *,
        packed: bool,
        drops: bool,
        takes_over: bool = True,
        deltas: bool = False,
    ) -> None:
        self.world = world
        self.takes_over = takes_over
        self.dead = False
        self.packed = packed
        self.drops = drops
        self.deltas = deltas
        self.model = TinyModel()
        self.contents: Contents = (0.0, 0.0, 0.0)
        self.sending: dict[str, float] = {}
        self.fails_at: int | None = None
        self.dies_in_source = False
        self.sender: ws.WeightSender | None = None
        self.lines = [Line(self, member) for member in world.fleet]
        self.death: Death | None = None
        self._messages = 0
        self.acted = threading.Semaphore(0)
        self._segments: set[str] = set()
        self.meanwhile: Meanwhile | None = None
        self.offers: dict[str, InitInfo] = {}

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
            takeover=self.takes_over,
            delta="always" if self.deltas else "off",
            scrub=0.25,
        )

    def send_though_replaced(self) -> ws.SyncReport:
        """Send; once more where the first call only says that another trainer took receivers."""
        assert self.sender is not None
        try:
            return self.sender.send_weights()
        except ws.SenderReplacedError:
            return self.sender.send_weights()

    def fill(self) -> None:
        """Make one step: new weights."""
        value = self.world.next_value()
        changed = [NAMES[int(value) % len(NAMES)]] if self.deltas else NAMES
        self.contents = tuple(
            value if name in changed else old
            for name, old in zip(NAMES, self.contents, strict=True)
        )
        self.sending = dict(zip(NAMES, self.contents, strict=True))
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                tensor.fill_(self.sending[name])

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The source of a packed trainer."""
        for i, (name, tensor) in enumerate(self.model.named_parameters()):
            if self.fails_at == i and self.sender is not None:
                if self.dies_in_source:
                    self.die()
                raise SourceFailed(name)
            yield name, tensor.detach()

    def arm(
        self,
        death: Death | None,
        *,
        fails_at: int | None = None,
        dies_in_source: bool = False,
        meanwhile: Meanwhile | None = None,
    ) -> None:
        """Set the faults of the next call."""
        self.death, self._messages, self.meanwhile = death, 0, meanwhile
        self.acted = threading.Semaphore(0)
        self.fails_at, self.dies_in_source = fails_at, dies_in_source

    def line_again(self, line: Line) -> Line:
        """A new transport to a member whose last one was closed."""
        self.lines[self.lines.index(line)] = again = Line(self, line.member)
        return again

    def wait_for_others(self, member: FleetMember) -> None:
        """Wait for the effect of all messages before the one at which the trainer dies."""
        if self.death is not None and self.death.last == member.name:
            for _ in range(self.death.message - 1):
                assert self.acted.acquire(timeout=WAIT_S)

    def count(self, member: FleetMember) -> Death | None:
        """Return how it dies at this message, if it does."""
        self._messages += 1
        dies = self.death if self.death and self.death.message == self._messages else None
        if self.meanwhile is not None and self.meanwhile[0] == self._messages:
            self.world.disturb(member, self, self.meanwhile[1])
        return dies

    def note_segments(self) -> None:
        """Record the segments that only this trainer can have made."""
        others = {name for other in self.world.trainers if other is not self for name in other.owns}
        self._segments |= {s.name for s in live_segments() if s.owner and s.name not in others}

    @property
    def owns(self) -> set[str]:
        return self._segments

    def die(self) -> None:
        """Imitate SIGKILL as others see it: no message, and a free lock."""
        if not self.dead:
            self.dead = True
            self.free_locks()

    def free_locks(self) -> None:
        """Free the locks of its segments: also of those that it made while it died."""
        self.note_segments()
        for segment in live_segments():
            if segment.name in self._segments and segment._lock is not None:
                segment._lock.release()

    def refuse_if_dead(self) -> None:
        if self.dead:
            raise ws.ConnectError("a dead trainer sends and receives nothing")

    def bury(self) -> None:
        """Free its remaining memory in this process."""
        if self.sender is not None:
            self.sender.close()
