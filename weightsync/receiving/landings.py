"""Which landings a receiver keeps, and whether its updates are staged."""

from __future__ import annotations

import logging
from collections import OrderedDict

from weightsync.errors import ConfigError, TransferError
from weightsync.lifecycle import ApplyChoice
from weightsync.weights import arena
from weightsync.weights.layout import StreamLayout
from weightsync.weights.sink import Apply, LoadTarget, WeightSink

logger = logging.getLogger(__name__)

_KEPT_SUBSETS = 2


class LoadTargets:
    """The landings of one sink, by manifest: the last whole model's, and a few subsets'."""

    def __init__(self, sink: WeightSink, choice: ApplyChoice) -> None:
        if choice not in ("auto", "staged", "in_place"):
            raise ConfigError(f"apply must be auto, staged or in_place, not {choice!r}")
        self._sink = sink
        self._choice = choice
        self._whole: tuple[str, LoadTarget] | None = None
        self._subsets: OrderedDict[str, LoadTarget] = OrderedDict()
        self._generation = 0
        self.apply: Apply = "in_place" if choice == "in_place" else "staged"

    def find(self, plan: StreamLayout) -> LoadTarget | None:
        """Return the landing of `plan` if there is one that still fits the sink."""
        generation = self._sink.refresh()
        if generation != self._generation:
            self._generation, self._whole = generation, None
            self._subsets.clear()
        digest = plan.manifest.digest
        if self._whole and self._whole[0] == digest:
            return self._whole[1]
        if digest in self._subsets:
            self._subsets.move_to_end(digest)
        return self._subsets.get(digest)

    def get(self, plan: StreamLayout, *, whole: bool) -> LoadTarget:
        """Return where the tensors of `plan` go, made now if it is not known."""
        known = self.find(plan)
        if known is not None:
            return known
        digest = plan.manifest.digest
        if whole:
            self.apply = self._choose(plan)
        load_target = self._land(plan)
        if whole:
            self._whole = (digest, load_target)
        else:
            self._subsets[digest] = load_target
            while len(self._subsets) > _KEPT_SUBSETS:
                self._subsets.popitem(last=False)
        return load_target

    def _land(self, plan: StreamLayout) -> LoadTarget:
        """Make a landing; without room for a staged one in place, where that may be chosen."""
        try:
            return self._sink.open_target(plan, self.apply)
        except TransferError:
            if self._choice != "auto" or self.apply == "in_place":
                raise
            self._warn(plan)
            self.apply = "in_place"
            return self._sink.open_target(plan, self.apply)

    def _choose(self, plan: StreamLayout) -> Apply:
        if self._choice != "auto":
            return self._choice
        if arena.fits(self._sink.staged_nbytes(plan), self._sink.device):
            return "staged"
        self._warn(plan)
        return "in_place"

    def _warn(self, plan: StreamLayout) -> None:
        device = self._sink.device
        logger.warning(
            "no room on %s to stage %d bytes (%d are free): weights in use are written in place, "
            "and an update that fails half way leaves the receiver TORN",
            device,
            self._sink.staged_nbytes(plan),
            arena.available(device),
        )
