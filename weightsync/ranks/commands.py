"""Commands that rank 0 broadcasts to the ranks, and the results with which the ranks reply."""

from __future__ import annotations

from typing import Any

import msgspec

from weightsync.backends.base import Reader, Replies, Round
from weightsync.report import SyncReport
from weightsync.wire.messages import DeltaTerms
from weightsync.wire.offers import ManifestMessage
from weightsync.wire.problem import Problem

ReadersByRank = dict[str, dict[int, list[int]]]
"""Reader indices by backend, and by the rank that sends to them."""

LINES_DIGEST = "lines"
"""The key of the source's fingerprint among the digests of an update, beside the backends'."""


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of the commands that rank 0 broadcasts. Every rank executes them and replies."""


class Open(Command, frozen=True, kw_only=True):
    """Create trainer engines. `paths` has the path of each rank, by backend."""

    paths: dict[str, dict[int, str]]
    packed: bool | None
    bucket_nbytes: int | None
    num_buckets: int | None


class Connect(Command, frozen=True, kw_only=True):
    """Begin the handshake of one backend with `readers`, or continue it with `replies`, by rank."""

    backend: str
    generation: int = 0
    readers: dict[int, list[Reader]] = {}
    replies: dict[int, Replies] | None = None
    over: bool = False


class CheckMoved(Command, frozen=True, kw_only=True):
    """Return whether registered memory has moved. Sent between updates."""


class TakeSnapshot(Command, frozen=True, kw_only=True):
    """Copy the source's tensors. The copy is sent from now on, and every engine opened anew."""


class EstimateChanges(Command, frozen=True, kw_only=True):
    """Return about how much of the source has changed: since the last update, and since `bases`.

    `bases` are the ids of the weights that receivers hold. The rank `keeps` a copy of the stream.
    """

    bases: list[str]
    keeps: bool = False


class DeltaTask(msgspec.Struct, frozen=True, kw_only=True):
    """The part of deltas in an update that sends the weights `weights_id`.

    With `bases`, as a delta that can be applied to any of these weights, of about `expected` lines;
    receivers read the lines of `scrub` back, by the first and their number. Without, the source's
    lines are only recorded, for later deltas; with an empty id none of these builds on them.
    `by_value`, deltas are coded for a slow path, for which the rank `keeps` a copy of the stream.
    `to_shards`: some receivers hold shards.
    """

    weights_id: str
    bases: list[str] = []
    expected: int = 0
    scrub: tuple[int, int] = (0, 0)
    by_value: bool = False
    keeps: bool = False
    to_shards: bool = False


class Begin(Command, frozen=True, kw_only=True):
    """Start an update of these readers. With `pairs`, of other tensors than the model's."""

    readers: ReadersByRank
    verify: bool
    pairs: bool = False
    delta: DeltaTask | None = None


class Transfer(Command, frozen=True, kw_only=True):
    """Transfer every byte."""


class KeepAlive(Command, frozen=True, kw_only=True):
    """Return the signs of life of this rank's readers. Sent while rank 0 waits for receivers.

    Raises if this rank has left the update, unless `may_raise` is False: then the update cannot be
    aborted any more.
    """

    may_raise: bool = True


class End(Command, frozen=True, kw_only=True):
    """End the update, after success or failure."""


class Withdraw(Command, frozen=True, kw_only=True):
    """Free everything that was allocated for receivers."""


class Finished(Command, frozen=True, kw_only=True):
    """The user's call on rank 0 has ended: return from `serve`, or raise `problem`."""

    version: int
    report: SyncReport | None = None
    problem: Problem | None = None


AnyCommand = (
    Open
    | Connect
    | CheckMoved
    | TakeSnapshot
    | EstimateChanges
    | Begin
    | Transfer
    | KeepAlive
    | End
    | Withdraw
    | Finished
)


class ChangeEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate, on one rank, of the changes of its source before a scan.

    `share` is about the share of lines that changed since the last update, None for tensors that
    are made. `marked` is the number of lines that are known to differ from the bases, None where
    these are not known. `are_newest` says that the bases are the weights of the last scan.
    """

    share: float | None = None
    marked: int | None = None
    are_newest: bool = False


class CommandResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reply of one rank: the fields that belong to the command, or `problem`.

    `round` has the next messages of a handshake. `beats` has each reader's sign of life, by
    backend. `updates` has the payloads by backend, and by reader where each reader gets its
    own. `changed` names tensors of the source that changed during the transfer, `not_finite`
    those that hold NaN or infinity. `estimate` answers EstimateChanges, None on a rank without
    receivers. `delta` has the terms of a delta, `delta_lines` and `delta_nbytes` its changed
    lines and the bytes of its packets.
    """

    problem: Problem | None = None
    round: Round | None = None
    moved: bool = False
    beats: dict[str, dict[int, int | None]] = {}
    updates: dict[str, Any] = {}
    manifest: ManifestMessage | None = None
    packed: dict[str, bool] = {}
    digests: dict[str, str | None] = {}
    extra_nbytes: int = 0
    written_nbytes: int = 0
    changed: list[str] = []
    not_finite: list[str] = []
    estimate: ChangeEstimate | None = None
    delta: DeltaTerms | None = None
    delta_lines: int = 0
    delta_nbytes: int = 0


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a rank: its device keys, and whether its tensors are `stable` in memory.

    Receivers know the rank by `sender_id`. `backends` has the endpoint facts of each usable
    backend, `unusable` the reasons against the others.
    """

    keys: list[str]
    stable: bool
    sender_id: str
    backends: dict[str, Any]
    unusable: dict[str, str] = {}


encode = msgspec.msgpack.encode
decode_command = msgspec.msgpack.Decoder[AnyCommand](AnyCommand).decode
decode_result = msgspec.msgpack.Decoder(CommandResult).decode
decode_rank_info = msgspec.msgpack.Decoder(RankInfo).decode
