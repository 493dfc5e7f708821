"""A client without a sender, which updates a receiver by handles in its messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

import torch

import weightsync as ws
from weightsync.shm.host_keys import host_key
from weightsync.shm.segment import Segment
from weightsync.tensors import as_bytes
from weightsync.testing import FleetMember

if TYPE_CHECKING:
    from tests.protocol.world import World

Step = Literal[
    "start",
    "start_partial",
    "start_named",
    "start_as_sender",
    "all",
    "some",
    "prepare",
    "finish",
    "abort",
    "expire",
]
NBYTES = 32 << 10
_NUMBERS = itertools.count(1)


class Stranger:
    """A client of one receiver; it forgets an update when the receiver has ended it.

    Its updates are anonymous sessions, or have names and no sender.
    """

    def __init__(self, world: World, member: FleetMember) -> None:
        self._world = world
        self._member = member
        self._session: str | None = None
        self._partial = False
        self._brought: dict[str, float] = {}
        self._named: dict[str, object] = {}

    @property
    def session(self) -> str | None:
        """The update that is open and no sender's, whether it began here or not."""
        incoming = self._member.receiver._session._incoming
        ours = incoming is not None and (
            incoming.sender is None or incoming.update_id.startswith("stranger-")
        )
        return incoming.update_id if incoming is not None and ours else None

    def do(self, step: Step, names: Iterable[str]) -> None:
        """Make one step, which the receiver may refuse."""
        if self.session != self._session:
            self._session, self._brought, self._named = None, {}, {}
        if step == "expire":
            self._world.expire(self._member)
        elif step.startswith("start"):
            self._start(step)
        elif step in ("all", "some"):
            self._load(list(self._names if step == "all" else names))
        else:
            if step == "finish":
                self._may_hold_what_came()
            self._tell(f"{step}_weight_update")

    @property
    def _names(self) -> list[str]:
        return [name for name, _ in self._member.module.named_parameters()]

    def _start(self, step: Step) -> None:
        partial = step == "start_partial"
        named = step in ("start_named", "start_as_sender")
        self._named = {"update_id": f"stranger-{next(_NUMBERS)}"} if named else {}
        sender = next(iter(self._member.receiver.status().senders), None)
        pretends = {"sender": sender} if step == "start_as_sender" else {}
        if self._tell("start_weight_update", partial=partial, **pretends):
            self._session, self._partial, self._brought = self.session, partial, {}

    def _load(self, names: list[str]) -> None:
        value = self._world.next_value()
        tensors = {
            name: torch.full_like(t, value, requires_grad=False)
            for name, t in self._member.module.named_parameters()
            if name in names
        }
        alone = self._session is None
        if alone:
            self._brought, self._partial = dict.fromkeys(tensors, value), False
            self._may_hold_what_came()  # outside a session it is a whole update
        with Segment.create(NBYTES) as segment:
            went_well = self._tell("update_weights", update_info=_message(tensors, segment))
        if went_well and not alone:
            self._brought |= dict.fromkeys(tensors, value)

    def _may_hold_what_came(self) -> None:
        lifecycle = self._member.receiver._session.lifecycle
        version = lifecycle.next_version if self._session else lifecycle.version + 1
        self._world.may_consist(
            version, self._brought, lifecycle.version if self._partial else None
        )

    def _tell(self, call: str, **body: object) -> bool:
        return accepted(
            lambda: self._member.receiver.handle({"call": call, "body": body | self._named})
        )


def accepted(call: Callable[[], object]) -> bool:
    """Whether the receiver executed it, or refused it with a WeightSyncError."""
    try:
        call()
    except ws.WeightSyncError:
        return False
    return True


def _message(tensors: dict[str, torch.Tensor], segment: Segment) -> dict[str, object]:
    """An unpacked update that carries the handles of `tensors`, which are copied to `segment`."""
    handles, at = [], 0
    for tensor in tensors.values():
        flat = as_bytes(tensor)
        segment.tensor(at, flat.numel()).copy_(flat)
        where = {"kind": "segment", "name": segment.name, "nbytes": segment.nbytes, "offset": at}
        handles.append({host_key(): where})
        at += flat.numel()
    return {
        "names": list(tensors),
        "dtype_names": ["float32"] * len(tensors),
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "ipc_handles": handles,
    }
