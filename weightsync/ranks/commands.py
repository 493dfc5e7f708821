"""Commands that rank 0 broadcasts to the ranks, and the results with which the ranks reply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import structs

from weightsync.backends.base import Reader, Replies, Round
from weightsync.report import SyncReport
from weightsync.wire.messages import DeltaTerms, TensorPart
from weightsync.wire.offers import ManifestMessage, WantsInfo
from weightsync.wire.problem import Problem

ReadersByRank = dict[str, dict[int, list[int]]]
"""Reader indices by backend, and by the rank that sends to them."""

LINES_DIGEST = "lines"
"""The key of the source's fingerprint among the digests of an update, beside the backends'."""


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of the commands that rank 0 broadcasts. Every rank executes them and replies."""


class Open(Command, frozen=True, kw_only=True):
    """Create trainer engines. `paths` has the path of each rank, by backend.

    With `streams`, the digest of the plan, each rank sends its own boxes; else the model. `wants`
    are the boxes of receivers where the boxes of the ranks are cut.
    """

    streams: str = ""
    wants: list[WantsInfo] = []
    paths: dict[str, dict[int, str]]
    packed: bool | None
    bucket_nbytes: int | None
    num_buckets: int | None


class Connect(Command, frozen=True, kw_only=True):
    """Begin the handshake of one backend with `readers`, or continue it with `replies`, by rank.

    Before it begins, the engines of the other ranks learn what rank 0's knows: readers that were
    `removed` since the last one, and all that are `using` the next update, where some of these are
    not ready for it. `wants` has the boxes of a reader, by their place in those of Open.
    """

    backend: str
    generation: int = 0
    removed: list[int] = []
    using: list[int] = []
    wants: dict[int, int] = {}
    readers: dict[int, list[Reader]] = {}
    replies: dict[int, Replies] | None = None
    over: bool = False


class CheckMoved(Command, frozen=True, kw_only=True):
    """Return whether registered memory has moved. Sent between updates."""


class TakeSnapshot(Command, frozen=True, kw_only=True):
    """Copy the source's tensors. The copy is sent from now on, and every engine opened anew.

    With `streams` each rank copies the boxes that it sends; else the whole model.
    """

    streams: bool = False


class DeltaTask(msgspec.Struct, frozen=True, kw_only=True):
    """The part of deltas in an update that sends the weights `weights_id`.

    With `bases`, as a delta that can be applied to any of these weights, of about `expected` lines;
    receivers read the lines of `scrub` back, by the first and their number. Without, the source's
    lines are only recorded, for later deltas; with an empty id none of these builds on them.
    `by_value`, deltas are coded for a slow path, for which the rank `keeps` a copy of the stream.
    `to_shards`: some receivers hold shards. `gives_up`: the whole model is sent where coded values
    begin to take more than half of the bytes.
    """

    weights_id: str
    bases: list[str] = []
    expected: int = 0
    scrub: tuple[int, int] = (0, 0)
    by_value: bool = False
    keeps: bool = False
    to_shards: bool = False
    gives_up: bool = False


class ChangeEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate of the changes of the source before a scan, on one rank or of all.

    `share` is about the share of lines that changed since the last update, None for tensors that
    are made. `marked` is the number of lines that are known to differ from the bases, None where
    these are not known. `are_newest` says that the bases are the weights of the last scan.
    `cannot` says why a rank makes no deltas at all.
    """

    share: float | None = None
    marked: int | None = None
    are_newest: bool = False
    cannot: str = ""


class DeltaOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A delta that an update may send; the ranks decide by what they estimate of the changes.

    `task` is the delta, for the ids of the weights that receivers hold; an empty id is unknown
    ones. It pays up to the share `most` of `lines`. Where it was refused `refusals` times, it is
    not tried in the next `pause` updates.
    """

    task: DeltaTask
    most: float
    lines: int
    refusals: int = 0
    pause: int = 0

    def decide(self, estimate: ChangeEstimate) -> tuple[DeltaTask | None, str]:
        """Return what an update does about deltas, and why it sends none, or "".

        Every rank decides alike: it depends on the arguments alone.
        """
        share, task = estimate.share, self.task
        recorded = DeltaTask(weights_id=task.weights_id, keeps=task.keeps)
        if estimate.cannot:
            return None, estimate.cannot
        if share is not None and share > self.most:
            return None, f"about {share:.0%} of the lines changed"
        if self.pause:
            reason = f"deltas failed {self.refusals} times; tried later again"
            return None if self.pause > 1 else recorded, reason
        if "" in task.bases:
            return recorded, "the receivers hold no weights of this sender that it knows"
        slow_and_older = task.by_value and not estimate.are_newest and share is None
        if estimate.marked is None or slow_and_older:
            return recorded, "the changes since the weights that the receivers hold are not known"
        if share is None or self.refusals:  # room for all that pay, or for all
            expected = int(self.most * self.lines)
        else:
            expected = min(int(share * self.lines) + estimate.marked, self.lines)
        by_value = task.by_value and estimate.are_newest
        return structs.replace(task, expected=expected, by_value=by_value), ""

    def deciding(self, found: Sequence[BeforeBegin | CommandResult]) -> ChangeEstimate | None:
        """Return the estimate by which all ranks decide: of one that sends no delta, if there is.

        None where no rank has one.
        """
        known = [one.estimate for one in found if one.estimate is not None]
        decided = [(self.decide(estimate)[0], estimate) for estimate in known]
        whole = [estimate for task, estimate in decided if task is None]
        whole += [estimate for task, estimate in decided if task is not None and not task.bases]
        if whole:
            return whole[0]
        return BeforeBegin.of_all(found).estimate if known else None

    def of_lines(self, lines: int) -> DeltaOffer:
        """Return this offer for the stream of one rank, of that many lines."""
        first, count = self.task.scrub
        begin, end = (at * lines // max(self.lines, 1) for at in (first, first + count))
        task = structs.replace(self.task, scrub=(begin, end - begin))
        return structs.replace(self, task=task, lines=lines)


class Begin(Command, frozen=True, kw_only=True):
    """Start an update of these readers. With `pairs`, of other tensors than the model's.

    `checks_memory`: where registered memory has moved on any rank, nothing begins on any, and the
    results say so. `offer` stands for a `delta` that the ranks decide about. `apart`: no rank waits
    for another one before the End, where those reply that have failed in the transfer. Each decides
    about an offer by itself then, and no rank transfers where some send a delta and others do not.
    `sums`: the results of the End have the parts of the mix64 of each tensor of a whole model.
    """

    readers: ReadersByRank
    verify: bool
    sums: bool = False
    apart: bool = False
    pairs: bool = False
    checks_memory: bool = False
    delta: DeltaTask | None = None
    offer: DeltaOffer | None = None


class BeforeBegin(msgspec.Struct, frozen=True, kw_only=True):
    """State of a rank before it begins an update; `estimate` is None without receivers."""

    moved: bool = False
    estimate: ChangeEstimate | None = None

    @classmethod
    def of_all(cls, found: Iterable[BeforeBegin | CommandResult]) -> BeforeBegin:
        """Return what all ranks have found: the most changes of any."""
        ranks = list(found)
        known = [one.estimate for one in ranks if one.estimate is not None]
        shares = [one.share for one in known]
        marked = [one.marked for one in known]
        return cls(
            moved=any(one.moved for one in ranks),
            estimate=ChangeEstimate(
                share=None if None in shares else max(filter(None, shares), default=0.0),
                marked=None if None in marked else max(filter(None, marked), default=0),
                are_newest=all(one.are_newest for one in known),
                cannot=next((one.cannot for one in known if one.cannot), ""),
            ),
        )


class Transfer(Command, frozen=True, kw_only=True):
    """Transfer every byte. After a Begin `apart` the ranks do not reply to it."""


class KeepAlive(Command, frozen=True, kw_only=True):
    """Return the signs of life of this rank's readers. Sent while rank 0 waits for receivers.

    Also after a failed transfer, for the readers that a rank waited for in vain. Raises if this
    rank has left the update, unless `may_raise` is False: then the update cannot be aborted any
    more, or has failed.
    """

    may_raise: bool = True


class End(Command, frozen=True, kw_only=True):
    """End the update, after success or failure."""


class Withdraw(Command, frozen=True, kw_only=True):
    """Free everything that was allocated for receivers."""


class Compare(Command, frozen=True, kw_only=True):
    """Raise on all ranks how the calls differ that their users make."""


class AgreeOnLate(Command, frozen=True, kw_only=True):
    """Agree on the error of a step that the ranks did apart, and raise it on rank 0."""


class Finished(Command, frozen=True, kw_only=True):
    """The user's call on rank 0 has ended: return from `serve`, or raise `problem`.

    `goes_on`: the call was one inside of a block of the user, which goes on.
    """

    version: int
    goes_on: bool = False
    report: SyncReport | None = None
    problem: Problem | None = None


AnyCommand = (
    Open
    | Connect
    | CheckMoved
    | TakeSnapshot
    | Begin
    | Transfer
    | KeepAlive
    | End
    | Withdraw
    | Compare
    | AgreeOnLate
    | Finished
)


class CommandResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reply of one rank: the fields that belong to the command, or `problem`.

    `is_late`: the transfer before an End has failed on this rank. `round` has the next messages of
    a handshake. `beats` has each reader's sign of life, by backend, `late` the readers that made
    the transfer of this rank time out; `has_failed` that this transfer failed, and was not
    cancelled by another rank. `updates` has the payloads by backend, and by reader where each
    reader gets its own. `changed` names tensors of the source that changed during the transfer,
    `not_finite` those that hold NaN or infinity. `moved` and `estimate` are what the rank found
    before it began, `estimate` None on a rank without receivers. `delta` has the terms of a delta,
    `delta_lines` and `delta_nbytes` its changed lines and the bytes of its packets. `merged` has
    the elements that adapters changed and those that lost the adapter in rounding, where the source
    merges them. `parts` are those of the mix64 of the tensors of which this rank sent boxes.
    """

    problem: Problem | None = None
    is_late: bool = False
    round: Round | None = None
    moved: bool = False
    beats: dict[str, dict[int, int | None]] = {}
    late: dict[str, list[int]] = {}
    has_failed: bool = False
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
    merged: tuple[int, int] | None = None
    parts: dict[str, list[TensorPart]] = {}


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
decode_before_begin = msgspec.msgpack.Decoder(BeforeBegin).decode
decode_rank_info = msgspec.msgpack.Decoder(RankInfo).decode
