"""What rank 0 has the other ranks of its trainer do, and what they answer."""

from __future__ import annotations

from typing import Literal

import msgspec

from weightsync.report import SyncReport
from weightsync.wire.messages import RegisteredUpdate
from weightsync.wire.offers import IpcInit, ProbeInfo
from weightsync.wire.problem import Problem

Places = dict[int, list[int]]
"""Reader places by the rank whose ring they belong to."""


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what rank 0 broadcasts; every rank does it and answers."""


class Open(Command, frozen=True, kw_only=True):
    """Make an engine of this path on each of these ranks; the others have none.

    `relayed` says that rank 0's ring also feeds receivers on other hosts.
    """

    paths: dict[int, Literal["cuda_ipc", "shared_memory"]]
    packed: bool
    relayed: bool


class Probe(Command, frozen=True, kw_only=True):
    """Export a probe for each of these places."""

    places: Places


class Export(Command, frozen=True, kw_only=True):
    """Export everything for each of these places; `fleet_version` goes along."""

    places: Places
    fleet_version: int | None = None


class CheckMoved(Command, frozen=True, kw_only=True):
    """Say whether registered memory has moved. Nothing else is on its way."""


class Begin(Command, frozen=True, kw_only=True):
    """Start an update of these places, of other tensors than the model's where `pairs`."""

    places: Places
    verify: bool
    pairs: bool = False


class Transfer(Command, frozen=True, kw_only=True):
    """Hand every byte over."""


class KeepAlive(Command, frozen=True, kw_only=True):
    """Rank 0 waits for receivers: say how those of this rank stand, and raise if it leaves.

    Without `asks` the update is past giving up: it does not raise.
    """

    asks: bool = True


class End(Command, frozen=True, kw_only=True):
    """The update is over, well or not."""


class Withdraw(Command, frozen=True, kw_only=True):
    """Free everything that was made for receivers."""


class Finished(Command, frozen=True, kw_only=True):
    """The call that rank 0 made is over: return, or raise `problem`."""

    version: int
    report: SyncReport | None = None
    problem: Problem | None = None


AnyCommand = (
    Open | Probe | Export | CheckMoved | Begin | Transfer | KeepAlive | End | Withdraw | Finished
)


class CommandResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank answers: the fields that belong to the command, or `problem`.

    `changed` names tensors of its source that changed while they were sent.
    """

    problem: Problem | None = None
    probes: list[ProbeInfo] = []
    inits: list[IpcInit] = []
    moved: bool = False
    beats: dict[int, int] = {}
    update: RegisteredUpdate | None = None
    table_digest: str | None = None
    extra_nbytes: int = 0
    written_nbytes: int = 0
    changed: list[str] = []


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who a rank is: its device keys, and whether its tensors stay where they are."""

    keys: list[str]
    stable: bool
    on_gpu: bool
    no_cuda_ipc: str | None = None


_commands: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)
_answers = msgspec.msgpack.Decoder(CommandResult)


def encode(message: Command | CommandResult | RankInfo) -> bytes:
    """Return the MessagePack of anything here."""
    return msgspec.msgpack.encode(message)


def decode_command(data: bytes) -> AnyCommand:
    """Return the command that rank 0 sent."""
    return _commands.decode(data)


def decode_result(data: bytes) -> CommandResult:
    """Return what a rank answered."""
    return _answers.decode(data)


def decode_rank_info(data: bytes) -> RankInfo:
    """Return a rank's card."""
    return msgspec.msgpack.decode(data, type=RankInfo)
