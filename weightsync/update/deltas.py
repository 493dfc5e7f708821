"""The choice between a delta and the whole model, for each update of a sender. Used on rank 0."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal

from weightsync.errors import DeltaError, WeightSyncError
from weightsync.ranks.commands import ChangeEstimate, CommandResult, DeltaTask, EstimateChanges
from weightsync.ranks.group import RankGroup
from weightsync.report import DeltaReport
from weightsync.specs import Manifest
from weightsync.update.fleet import Member
from weightsync.weights.delta import MAX_SHARE
from weightsync.weights.delta_coding import zstd
from weightsync.weights.layout import aligned
from weightsync.weights.lines import LINE, MAX_LINES

DeltaChoice = Literal["auto", "off", "always"]
MIN_NBYTES = 32 << 20
"""Below this size of a model a delta saves nothing: the messages take longer than the copies."""
_MEMORY_COST = 2.0
"""Paths that cost more copies than this are slow: deltas are coded, which takes time, for them."""
_MAX_REST = 16
"""Updates after which a sender whose deltas were too large tries again, at most."""


class DeltaPlanner:
    """Decides what the next update carries, and keeps the account of it.

    `auto` sends deltas where that is faster; `always` also where most lines changed, or where no
    compiled loops are installed; `off` never. `scrub` is the share of the model that receivers read
    back with each delta, besides the lines that changed.
    """

    def __init__(self, group: RankGroup, choice: DeltaChoice, scrub: float) -> None:
        self.choice = choice
        self._group = group
        specs = group.manifest.specs
        self.lines = sum(aligned(spec.nbytes) for spec in specs) // LINE
        self._scrub_lines = min(self.lines, int(scrub * self.lines) + (scrub > 0))
        self._scrubbed, self._scrubbed_once = 0, False
        self._never = why_never(choice, group.manifest)
        self._rest = self._next_rest = 0
        self._reason = ""

    @property
    def enabled(self) -> bool:
        """Whether this sender may ever send a delta."""
        return not self._never

    def task(self, weights_id: str, members: Sequence[Member]) -> DeltaTask | None:
        """Return what the ranks do for deltas in the update of these members; None for nothing.

        The task has no bases where the whole model is sent, and the changes are only recorded.
        """
        self._reason = self._never
        if self._never:
            return None
        cannot = [member.target for member in members if not member.status.delta_forms]
        if cannot:
            self._reason = f"{cannot[0]} takes no deltas"
            return None
        forms = [member.status.delta_forms for member in members]
        by_value = any(member.cost > _MEMORY_COST for member in members) and zstd() is not None
        by_value = by_value and all("values" in taken for taken in forms)
        record = DeltaTask(weights_id=weights_id, keeps=by_value)
        bases = sorted({member.delta_base or "" for member in members})
        estimate = self._estimate(bases)
        too_many = self._too_many(estimate)
        if too_many:
            self._reason = too_many
            return None
        if "" in bases:
            self._reason = "the receivers hold no weights of this sender that it knows"
            return record
        if estimate.marked is None:
            self._reason = "the changes since the weights that the receivers hold are not known"
            return record
        if estimate.share is None:  # room for all that pay, or for all
            expected = self.lines if self.choice == "always" else int(MAX_SHARE * self.lines)
        else:
            expected = min(int(estimate.share * self.lines) + estimate.marked, self.lines)
        return DeltaTask(
            weights_id=weights_id,
            bases=bases,
            expected=expected,
            scrub=self._next_scrub(),
            by_value=by_value and estimate.are_newest,
            to_shards=any("shards" in taken for taken in forms),
            keeps=by_value,
        )

    def _too_many(self, estimate: ChangeEstimate) -> str:
        """Return why so much has changed that a delta does not pay; an empty string if it may."""
        if self.choice == "always":
            return ""
        if estimate.share is not None:
            many = estimate.share > MAX_SHARE
            return f"about {estimate.share:.0%} of the lines changed" if many else ""
        if self._rest:
            self._rest -= 1
            return f"too many lines changed; a delta is tried again after {self._rest + 1} updates"
        return ""

    def _next_scrub(self) -> tuple[int, int]:
        """Return the first line and the number of lines that receivers read back, in turn.

        Each window twice: a staged receiver has two copies of the model, and uses them in turn.
        """
        first, count = self._scrubbed, min(self._scrub_lines, self.lines - self._scrubbed)
        if self._scrubbed_once:
            self._scrubbed = (first + count) % max(self.lines, 1)
        self._scrubbed_once = not self._scrubbed_once
        return first, count

    def failed(self, error: WeightSyncError) -> None:
        """Note that a delta failed; the whole model is sent instead.

        Where tensors are made, only an attempt shows how much has changed, so the next one is made
        after some updates, after twice as many each time.
        """
        self._reason = f"a delta failed: {error}"
        if isinstance(error, DeltaError) and not self._group.rank_infos[0].stable:
            self._next_rest = self._rest = min(max(2 * self._next_rest, 2), _MAX_REST)

    def repeat(self, weights_id: str) -> DeltaTask | None:
        """Return the task of an update that sends the whole model after a delta failed."""
        return None if self._never else DeltaTask(weights_id=weights_id)

    def report(self, results: Sequence[CommandResult]) -> DeltaReport | None:
        """Return the report of the update whose `End` had these results; None where it is off."""
        if self.choice == "off":
            return None
        lines = max((result.delta_lines for result in results), default=0)
        nbytes = max((result.delta_nbytes for result in results), default=0)
        if not nbytes:
            return DeltaReport(reason=self._reason)
        self._next_rest = 0
        whole = self._group.manifest.nbytes
        return DeltaReport(
            sent=True,
            lines=lines,
            share=lines / max(self.lines, 1),
            nbytes=nbytes,
            saved_nbytes=max(whole - nbytes, 0),
        )

    def _estimate(self, bases: Sequence[str]) -> ChangeEstimate:
        """Return what the ranks know, of the rank with the most changes."""
        found = self._group.run_on_all(EstimateChanges(bases=list(bases)))
        known = [result.estimate for result in found if result.estimate is not None]
        shares = [one.share for one in known]
        marked = [one.marked for one in known]
        return ChangeEstimate(
            share=None if None in shares else max(filter(None, shares), default=0.0),
            marked=None if None in marked else max(filter(None, marked), default=0),
            are_newest=all(one.are_newest for one in known),
        )


def why_never(choice: DeltaChoice, manifest: Manifest) -> str:
    """Return why no delta of this model is ever sent; an empty string where they may be."""
    if choice == "off":
        return "deltas are off"
    if sum(aligned(spec.nbytes) for spec in manifest.specs) > MAX_LINES * LINE:
        return f"the model has more than {MAX_LINES * LINE} bytes"
    if choice == "always":
        return ""
    if manifest.nbytes < MIN_NBYTES:
        return f"a model of less than {MIN_NBYTES} bytes is sent whole"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed: pip install 'weightsync[delta]'"
    return ""
