"""The choice between a delta and the whole model, for each update of a sender. Used on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from weightsync.errors import MissingExtraError, WeightSyncError
from weightsync.ranks.commands import ChangeEstimate, CommandResult, DeltaOffer, DeltaTask
from weightsync.ranks.group import RankGroup
from weightsync.report import DeltaReport
from weightsync.specs import Manifest
from weightsync.update.fleet import Member
from weightsync.weights.deltas.coding import zstd
from weightsync.weights.lines.memory import (
    LINE,
    MAX_LINES,
    count_lines_of,
    may_have_kernels,
    why_no_kernels,
)
from weightsync.wire.messages import StartTerms

DeltaChoice = Literal["auto", "off", "always"]
MIN_NBYTES = 32 << 20
"""Below this size of a model a delta saves nothing: the messages take longer than the copies."""
_MAX_SHARES = (0.1, 0.25)
_MAX_SHARE = 0.4
"""With more changed lines than this share a full update is faster: on one host, with one receiver
and with two; else (measured, docs/deltas.md)."""
_MAX_SHARE_OF_STREAMS = 0.1
"""The same on one host where each rank sends what it holds: all share the copies of a full update.
"""
_MEMORY_COST = 2.0
"""Paths that cost more copies than this are slow: deltas are coded, which takes time, for them."""
_DEVICE_COST = 0.5
"""Paths that cost less stay on a GPU: the whole model is copied before its changes are found."""
_MAX_PAUSE = 16
"""Whole models that are sent before a delta is tried again, at most, after several failed."""


class DeltaPlanner:
    """Decides whether the next update is a delta; counts refusals and lines that were read back.

    `auto` sends deltas where that is faster; `always` also where most lines changed; `off` never.
    `scrub` is the share of the model that receivers read back with each delta, besides the lines
    that changed.
    """

    def __init__(self, group: RankGroup, choice: DeltaChoice, scrub: float) -> None:
        self.choice = choice
        self._group = group
        self.lines = count_lines_of(group.manifest)
        self._scrub_lines = min(self.lines, int(scrub * self.lines) + (scrub > 0))
        self._scrubbed, self._scrubbed_once = 0, False
        self._never = why_never(choice, group.manifest)
        self._refusals = self._pause = 0
        self._reason = ""
        self._sampled = 0
        self._offer: DeltaOffer | None = None

    @property
    def may_send(self) -> bool:
        """Whether any update may be a delta."""
        return not self._never

    def offer(self, terms: StartTerms, members: Sequence[Member]) -> DeltaOffer | None:
        """Return the delta that the update of these members may send; None for none."""
        self._reason = self._why_not(members)
        if self._reason:
            return None
        forms = [member.status.delta_forms for member in members]
        by_value = any(member.cost > _MEMORY_COST for member in members) and zstd() is not None
        by_value = by_value and all("values" in taken for taken in forms)
        self._offer = DeltaOffer(
            task=DeltaTask(
                weights_id=terms.weights_id or "",
                bases=sorted({member.delta_base or "" for member in members}),
                scrub=self._next_scrub(),
                by_value=by_value,
                keeps=by_value,
                to_shards=any("shards" in taken for taken in forms),
                gives_up=self.choice == "auto",
            ),
            most=self._max_share(members) if self.choice == "auto" else 1.0,
            lines=self.lines,
            refusals=self._refusals,
            pause=self._pause,
        )
        return self._offer

    def note(self, estimate: ChangeEstimate | None) -> None:
        """Note what the ranks decided about the offer by this estimate; None if they did not."""
        offer, self._offer = self._offer, None
        if offer is None or estimate is None:
            return
        task, self._reason = offer.decide(estimate)
        self._never = self._never or estimate.cannot
        few_changed = estimate.share is None or estimate.share <= offer.most
        if self._pause and few_changed:
            self._pause -= 1
        if task is not None and task.bases:
            # A line of each tensor; shards hold parts of lines, which the sender's sums don't tell.
            read_back = 0 if task.to_shards else task.scrub[1]
            self._sampled = len(self._group.manifest.specs) + read_back

    def _why_not(self, members: Sequence[Member]) -> str:
        """Return why these members are sent no delta, whatever has changed."""
        if self._never:
            return self._never
        fastest = {member.path for member in members if member.cost < _DEVICE_COST}
        if self.choice == "auto" and fastest == {member.path for member in members}:
            return f"a whole model takes less time over {', '.join(sorted(fastest))}"
        cannot = [member.target for member in members if not member.status.delta_forms]
        if cannot:
            return f"{cannot[0]} takes no deltas"
        if self._group.sends_streams:
            cannot = [member.target for member in members if not member.status.stream_deltas]
        return f"{cannot[0]} takes no deltas of several ranks" if cannot else ""

    def _max_share(self, members: Sequence[Member]) -> float:
        """Return the share of changed lines up to which a delta to these members pays."""
        on_host = all(member.cost <= _MEMORY_COST for member in members)
        if self._group.sends_streams and on_host:
            return _MAX_SHARE_OF_STREAMS
        few = on_host and len(members) <= len(_MAX_SHARES)
        return _MAX_SHARES[len(members) - 1] if few else _MAX_SHARE

    def _next_scrub(self) -> tuple[int, int]:
        """Return the first line and the number of lines that receivers read back with a delta."""
        return self._scrubbed, min(self._scrub_lines, self.lines - self._scrubbed)

    def _advance_scrub(self) -> None:
        """Go on to the next lines, after each was read back twice.

        A staged receiver has two copies of the model, and uses them in turn.
        """
        if self._scrubbed_once:
            first, count = self._next_scrub()
            self._scrubbed = (first + count) % max(self.lines, 1)
        self._scrubbed_once = not self._scrubbed_once

    def failed(self, error: WeightSyncError) -> None:
        """Note that a delta failed; the whole model is sent instead.

        A receiver may refuse each of them, and where tensors are made only an attempt shows how
        much has changed. So from the second failure on whole models are sent, twice as many each
        time, before another attempt.
        """
        self._reason = f"a delta failed: {error}"
        self._refusals += 1
        self._pause = min(2 ** (self._refusals - 1), _MAX_PAUSE) if self._refusals > 1 else 0

    def retry(self, terms: StartTerms) -> DeltaTask | None:
        """Return the task of an update that sends the whole model after a failure in this call."""
        return None if self._never else DeltaTask(weights_id=terms.weights_id or "")

    def repeat(self) -> DeltaTask | None:
        """Return the task of an update that sends weights which receivers hold already.

        The source may have changed since, which is found at the end of the update only. So what is
        recorded of it has no id: receivers hold other weights under theirs.
        """
        return None if self._never else DeltaTask(weights_id="")

    def report(
        self, results: Sequence[CommandResult], *, again: bool = False
    ) -> DeltaReport | None:
        """Return the report of the update whose `End` had these results; None where it is off.

        `again`: it brought single receivers to the version of the others.
        """
        if self.choice == "off":
            return None
        # Each rank has sent its own lines, or some have sent the same ones.
        streams = self._group.sends_streams
        lines = (sum if streams else max)([0, *(result.delta_lines for result in results)])
        nbytes = (sum if streams else max)([0, *(result.delta_nbytes for result in results)])
        of_lines = sum(self._group.worker.stream_lines) if streams else self.lines
        if not nbytes:
            return DeltaReport(reason="the version was sent again" if again else self._reason)
        self._refusals = 0
        self._advance_scrub()
        whole = self._group.manifest.nbytes
        return DeltaReport(
            sent=True,
            lines=lines,
            share=lines / max(of_lines, 1),
            sampled=min(self._sampled / max(self.lines, 1), 1.0),
            nbytes=nbytes,
            saved_nbytes=max(whole - nbytes, 0),
        )


def why_never(choice: DeltaChoice, manifest: Manifest) -> str:
    """Return why no delta of this model is ever sent; an empty string where they may be."""
    if choice == "off":
        return "deltas are off"
    if count_lines_of(manifest) > MAX_LINES:
        return f"the model has more than {(MAX_LINES * LINE) >> 30} GiB"
    if choice == "auto" and manifest.nbytes < MIN_NBYTES:
        return f"a model of less than {MIN_NBYTES >> 20} MiB is sent whole"
    return "" if may_have_kernels() else why_no_kernels()


def check_choice(choice: DeltaChoice) -> None:
    """Raise MissingExtraError where deltas are asked for, and this process cannot make any."""
    if choice == "always" and not may_have_kernels():
        raise MissingExtraError(f'delta="always": {why_no_kernels()}')
