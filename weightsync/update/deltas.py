"""The choice between a delta and the whole model, for each update of a sender. Used on rank 0."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal

from weightsync.errors import WeightSyncError, install_hint
from weightsync.ranks.commands import ChangeEstimate, CommandResult, DeltaTask, EstimateChanges
from weightsync.ranks.group import RankGroup
from weightsync.report import DeltaReport
from weightsync.specs import Manifest
from weightsync.update.fleet import Member
from weightsync.weights.copying.layout import aligned
from weightsync.weights.deltas.coding import zstd
from weightsync.weights.lines.memory import LINE, MAX_LINES, kernels
from weightsync.wire.messages import StartTerms

DeltaChoice = Literal["auto", "off", "always"]
MIN_NBYTES = 32 << 20
"""Below this size of a model a delta saves nothing: the messages take longer than the copies."""
_MAX_SHARES = (0.1, 0.25)
_MAX_SHARE = 0.4
"""With more changed lines than this share a full update is faster: on one host, with one receiver
and with two; else (measured, docs/deltas.md)."""
_MEMORY_COST = 2.0
"""Paths that cost more copies than this are slow: deltas are coded, which takes time, for them."""
_DEVICE_COST = 0.5
"""Paths that cost less stay on a GPU: the whole model is copied before its changes are found."""
_MAX_PAUSE = 16
"""Whole models that are sent before a delta is tried again, at most, after several failed."""


class DeltaPlanner:
    """Decides whether the next update is a delta; counts refusals and lines that were read back.

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
        self._refusals = self._pause = 0
        self._reason = ""
        self._sampled = 0

    @property
    def may_send(self) -> bool:
        """Whether any update may be a delta."""
        return not self._never

    def task(self, terms: StartTerms, members: Sequence[Member]) -> DeltaTask | None:
        """Return what the ranks do for deltas in the update of these members; None for nothing.

        The task has no bases where the whole model is sent, and the changes are only recorded.
        """
        weights_id = terms.weights_id or ""
        self._reason = self._why_not(members)
        if self._reason:
            return None
        forms = [member.status.delta_forms for member in members]
        by_value = any(member.cost > _MEMORY_COST for member in members) and zstd() is not None
        by_value = by_value and all("values" in taken for taken in forms)
        record = DeltaTask(weights_id=weights_id, keeps=by_value)
        bases = sorted({member.delta_base or "" for member in members})
        estimate = self._estimate(bases, keeps=by_value)
        most = _max_share(members) if self.choice == "auto" else 1.0
        if estimate.share is not None and estimate.share > most:
            self._reason = f"about {estimate.share:.0%} of the lines changed"
            return None
        if self._pause:
            self._pause -= 1
            self._reason = f"deltas failed {self._refusals} times; tried later again"
            return None if self._pause else record
        if "" in bases:
            self._reason = "the receivers hold no weights of this sender that it knows"
            return record
        slow_and_older = by_value and not estimate.are_newest and estimate.share is None
        if estimate.marked is None or slow_and_older:
            self._reason = "the changes since the weights that the receivers hold are not known"
            return record
        if estimate.share is None or self._refusals:  # room for all that pay, or for all
            expected = int(most * self.lines)
        else:
            expected = min(int(estimate.share * self.lines) + estimate.marked, self.lines)
        to_shards = any("shards" in taken for taken in forms)
        scrub = self._next_scrub()
        # A line of each tensor; shards hold parts of lines, which the sender's sums do not tell.
        self._sampled = len(self._group.manifest.specs) + (0 if to_shards else scrub[1])
        return DeltaTask(
            weights_id=weights_id,
            bases=bases,
            expected=expected,
            scrub=scrub,
            by_value=by_value and estimate.are_newest,
            keeps=by_value,
            to_shards=to_shards,
        )

    def _why_not(self, members: Sequence[Member]) -> str:
        """Return why these members are sent no delta, whatever has changed."""
        if not self._never and self.choice == "auto" and kernels() is None:
            self._never = "numba cannot be used here; the log says why"
        if self._never:
            return self._never
        fastest = {member.path for member in members if member.cost < _DEVICE_COST}
        if self.choice == "auto" and fastest == {member.path for member in members}:
            return f"a whole model takes less time over {', '.join(sorted(fastest))}"
        cannot = [member.target for member in members if not member.status.delta_forms]
        return f"{cannot[0]} takes no deltas" if cannot else ""

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
        lines = max((result.delta_lines for result in results), default=0)
        nbytes = max((result.delta_nbytes for result in results), default=0)
        if not nbytes:
            return DeltaReport(reason="the version was sent again" if again else self._reason)
        self._refusals = 0
        self._advance_scrub()
        whole = self._group.manifest.nbytes
        return DeltaReport(
            sent=True,
            lines=lines,
            share=lines / max(self.lines, 1),
            sampled=min(self._sampled / max(self.lines, 1), 1.0),
            nbytes=nbytes,
            saved_nbytes=max(whole - nbytes, 0),
        )

    def _estimate(self, bases: Sequence[str], *, keeps: bool) -> ChangeEstimate:
        """Return what the ranks know, of the rank with the most changes."""
        command = EstimateChanges(bases=list(bases), keeps=keeps)
        known = [r.estimate for r in self._group.run_on_all(command) if r.estimate is not None]
        shares = [one.share for one in known]
        marked = [one.marked for one in known]
        return ChangeEstimate(
            share=None if None in shares else max(filter(None, shares), default=0.0),
            marked=None if None in marked else max(filter(None, marked), default=0),
            are_newest=all(one.are_newest for one in known),
        )


def _max_share(members: Sequence[Member]) -> float:
    """Return the share of changed lines up to which a delta to these members pays."""
    on_host = all(member.cost <= _MEMORY_COST for member in members)
    few = on_host and len(members) <= len(_MAX_SHARES)
    return _MAX_SHARES[len(members) - 1] if few else _MAX_SHARE


def why_never(choice: DeltaChoice, manifest: Manifest) -> str:
    """Return why no delta of this model is ever sent; an empty string where they may be."""
    if choice == "off":
        return "deltas are off"
    if sum(aligned(spec.nbytes) for spec in manifest.specs) > MAX_LINES * LINE:
        return f"the model has more than {(MAX_LINES * LINE) >> 30} GiB"
    if choice == "always":
        return ""
    if manifest.nbytes < MIN_NBYTES:
        return f"a model of less than {MIN_NBYTES >> 20} MiB is sent whole"
    if importlib.util.find_spec("numba") is None:
        return f"numba is not installed: {install_hint('delta')}"
    return ""
