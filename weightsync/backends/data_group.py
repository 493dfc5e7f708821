"""How the bytes of chunks go from one host of the chain to the next: by Gloo, or by NCCL.

Heads go by Gloo in either case, before the bytes, so that both ends of a transfer know its size
beforehand and an update is given up, and a dead host noticed, in one way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weightsync.backends import nccl_wire
from weightsync.backends.bounded_call import BoundedCall
from weightsync.backends.nccl_data import NcclData
from weightsync.backends.private_group import Meeting, PrivateGroup, data_lane
from weightsync.errors import WeightSyncError
from weightsync.wire.offers import GroupInfo

logger = logging.getLogger(__name__)

_PROOF_S = 60.0
"""The most that making NCCL's connections may take, before the group goes by Gloo instead."""
_ASK_S = 0.1
_ABLE, _PROVEN = "nccl-able", "nccl-proven"
_FOLLOWS = "NCCL had failed elsewhere"


class Transit(Protocol):
    """A send or receive at work; its memory is in use until `wait` returned."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it is done. A timeout breaks the whole group, as every failure does.

        Raises TransferTimeout or TransferError without a name: the caller knows whose it was.
        """


class DataGroup(Protocol):
    """The connections for chunks, for one thread; at most `depth` receives may be at work."""

    depth: int

    def send(self, tensor: torch.Tensor, rank: int, chunk: int) -> Transit:
        """Send `uint8[nbytes]` of host memory; chunks arrive in order."""

    def receive(self, room: torch.Tensor, nbytes: int, rank: int, chunk: int) -> Transit:
        """Receive exactly `nbytes` to the start of `room`, which is a whole slot of host memory."""

    def sever(self) -> None:
        """Make every operation fail, here and at the others as they notice. Idempotent."""

    def close(self) -> None:
        """Free everything; nobody may wait any more. Idempotent."""


class GlooData:
    """Chunks go by the private group itself, straight between the slots."""

    depth = 3

    def __init__(self, group: PrivateGroup) -> None:
        self._group = group

    def send(self, tensor: torch.Tensor, rank: int, chunk: int) -> Transit:
        return self._group.send(tensor, rank, data_lane(chunk))

    def receive(self, room: torch.Tensor, nbytes: int, rank: int, chunk: int) -> Transit:
        # All of it: Gloo ends the process of whoever is sent more than it waits for.
        return self._group.receive(room, rank, data_lane(chunk))

    def sever(self) -> None:
        """The private group's own does it."""

    def close(self) -> None:
        """The private group's own does it."""


@dataclass(frozen=True, slots=True)
class Staging:
    """Where a rank stages chunks of at most `slot_nbytes`: on `device`, unless `why_not`."""

    slot_nbytes: int
    device: torch.device
    why_not: str = ""

    @classmethod
    def of(cls, keys: Sequence[str], slot_nbytes: int) -> Staging:
        """Return the staging of a receiver with these device keys."""
        reason = nccl_wire.why_not()
        device = nccl_wire.own_gpu(keys) if reason is None else None
        if device is None:
            return cls(slot_nbytes, torch.device("cpu"), reason or "its weights are on no GPU")
        return cls(slot_nbytes, device)


def data_group(
    meeting: Meeting, group: PrivateGroup, info: GroupInfo, staging: Staging | None
) -> tuple[DataGroup, str | None]:
    """Return what the chunks of a group go by, the same for all of its ranks, and why not NCCL.

    Every rank says whether NCCL could work, and then whether it did for a few bytes. Raises
    TransferTimeout when one of them says nothing.
    """
    if staging is None:
        return GlooData(group), None
    refused = _refusal(meeting, info, _ABLE, staging.why_not)
    if refused is not None:
        return GlooData(group), refused
    data, fault = _proven(meeting, group, info, staging)
    try:
        refused = _refusal(meeting, info, _PROVEN, fault)
    except WeightSyncError:
        _abandon(data)
        raise
    if refused is None and data is not None:
        logger.info("the private group's chunks go by NCCL, from %s", staging.device)
        return data, None
    _abandon(data)
    return GlooData(group), refused


def _overtaken(call: BoundedCall[None], meeting: Meeting, size: int, limit_s: float) -> bool:
    """Wait for a proof; return whether another rank has given its own up meanwhile."""
    deadline = time.monotonic() + limit_s
    while call.pending and time.monotonic() < deadline:
        if any(meeting.words(_PROVEN, size).values()):
            return True
        call.wait(_ASK_S)
    return False


def _refusal(meeting: Meeting, info: GroupInfo, topic: str, word: str) -> str | None:
    """Tell the others what speaks against NCCL here, if anything; return the first that is told."""
    wait_s = info.timeout_s + _PROOF_S
    words = meeting.agree(topic, info.rank, len(info.members), word, wait_s)
    told = [f"{info.members[rank]}: {said}" for rank, said in enumerate(words) if said]
    told.sort(key=lambda line: line.endswith(_FOLLOWS))
    if told:
        logger.warning("the private group's chunks go by Gloo, not by NCCL: %s", told[0])
    return told[0] if told else None


def _proven(
    meeting: Meeting, group: PrivateGroup, info: GroupInfo, staging: Staging
) -> tuple[NcclData | None, str]:
    """Connect, and send a few known bytes down the chain. Returns what went wrong as text."""
    limit_s = min(info.timeout_s, _PROOF_S)
    size = len(info.members)
    data: NcclData | None = None
    try:
        store = meeting.another_store(limit_s)
        wire = nccl_wire.connect(store, info.rank, size, staging.device)
        data = NcclData.over(wire, group, info, staging.slot_nbytes)
        proof = BoundedCall(data.prove)
        if _overtaken(proof, meeting, size, limit_s):
            return data, _FOLLOWS
        proof.result(0)
    except (RuntimeError, WeightSyncError) as exc:
        return data, str(exc).partition("\n")[0][:300] or type(exc).__name__
    except TimeoutError:
        return data, f"NCCL made no connection within {limit_s:g} s"
    return data, ""


def _abandon(data: NcclData | None) -> None:
    if data is not None:
        data.abandon()
