"""The choice between a delta and the whole model, for each update of a sender. Used on rank 0."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal

from weightsync.errors import WeightSyncError
from weightsync.ranks.commands import CommandResult, DeltaTask, EstimateChanges
from weightsync.ranks.group import RankGroup
from weightsync.report import DeltaReport
from weightsync.specs import Manifest
from weightsync.update.fleet import Member
from weightsync.weights.delta import MAX_SHARE
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
        if self._never:
            self._reason = self._never
            return None
        cannot = [member.target for member in members if not member.status.takes_deltas]
        if cannot:
            self._reason = f"{cannot[0]} takes no deltas"
            return None
        by_value = any(member.cost > _MEMORY_COST for member in members)
        record = DeltaTask(weights_id=weights_id, by_value=by_value)
        if self._rest > 1:
            self._rest -= 1
            self._reason = f"too many lines changed; tried again in {self._rest} updates"
            return None
        if self._rest:
            self._rest = 0
            self._reason = "too many lines changed; the next update is tried as a delta"
            return record
        if any(member.delta_base is None for member in members):
            self._reason = "the receivers hold no weights of this sender yet"
            return record
        bases = sorted({member.delta_base for member in members if member.delta_base is not None})
        found, newest = self._estimate(bases)
        if found is None:
            self._reason = "the changes since the weights that the receivers hold are not known"
            return record
        if not self._group.rank_infos[0].stable:  # room for all, or for all that pay
            found = self.lines if self.choice == "always" else int(MAX_SHARE * self.lines)
        share = found / max(self.lines, 1)
        if share > MAX_SHARE and self.choice == "auto":
            self._next_rest = self._rest = min(max(2 * self._next_rest, 2), _MAX_REST)
            self._reason = f"about {share:.0%} of the lines changed"
            return None
        self._next_rest = 0
        self._reason = ""
        return DeltaTask(
            weights_id=weights_id,
            bases=bases,
            expected=found,
            scrub=self._next_scrub(),
            by_value=by_value and newest,
        )

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
        """Note that a delta failed; the whole model is sent instead."""
        self._reason = f"a delta failed: {error}"

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
        whole = self._group.manifest.nbytes
        return DeltaReport(
            sent=True,
            lines=lines,
            share=lines / max(self.lines, 1),
            nbytes=nbytes,
            saved_nbytes=max(whole - nbytes, 0),
        )

    def _estimate(self, bases: Sequence[str]) -> tuple[int | None, bool]:
        """Return about how many lines have changed on the rank with the most; None if not known.

        And whether the bases are the weights of the last scan on all ranks.
        """
        results = self._group.run_on_all(EstimateChanges(bases=list(bases)))
        counts = [result.delta_lines for result in results if result.knows_changes is not None]
        known = all(result.knows_changes is not False for result in results)
        newest = all(result.are_newest for result in results)
        return max(counts) if known and counts else None, newest


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
