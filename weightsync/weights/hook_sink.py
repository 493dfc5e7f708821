"""A bare `load_weights` hook as a sink."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightsync.errors import ManifestMismatchError, shorten
from weightsync.specs import Manifest
from weightsync.weights import arena
from weightsync.weights.buckets import StreamLayout
from weightsync.weights.copier import Memory
from weightsync.weights.dtypes import from_bytes
from weightsync.weights.loans import own_storage, refuse_kept, uses
from weightsync.weights.sink import Apply, LoadTarget, LoadWeights, NamedTensor, WeightSink


class HookSink(WeightSink):
    """A bare `load_weights` hook. What it returned is checked if it returns names.

    `keeps_views`: the hook keeps the tensors it is given (vLLM's layerwise reload does), so it is
    given clones. `device`: where the hook wants its tensors.

    Staged, the whole stream is kept aside on `device` and the hook is called once, in `commit`:
    what fails before has changed nothing, what fails inside the hook leaves the receiver TORN. That
    takes as many bytes as the model, and as many again for the clones of `keeps_views`, stated as
    `peak_extra_nbytes`; `apply="auto"` does it where they fit into the memory that is free with a
    tenth to spare, and else hands tensors over as they come, which takes no more than the largest
    (and its clone); where buckets cut it, its memory stays for the next update.
    """

    def __init__(
        self,
        load_weights: LoadWeights,
        *,
        manifest: Manifest | None = None,
        keeps_views: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.load_weights = load_weights
        self.manifest = manifest
        self.keeps_views = keeps_views
        self._device = torch.device(device)

    @property
    def device(self) -> torch.device:
        """Where staged tensors are kept aside."""
        return self._device

    def open_target(self, plan: StreamLayout, apply: Apply) -> LoadTarget:
        """Keep the stream aside until `commit`, or hand tensors over as they come."""
        return _AsideLanding(self, plan) if apply == "staged" else _HookLanding(self, plan.manifest)

    def staged_nbytes(self, plan: StreamLayout) -> int:
        """The whole stream is kept aside, and all of it cloned where the hook keeps views."""
        return plan.nbytes + self.cloned_nbytes(plan.manifest)

    def cloned_nbytes(self, manifest: Manifest) -> int:
        """Return the bytes of the clones that `call` makes when it is given all of a manifest."""
        return sum(spec.nbytes for spec in manifest.specs) if self.keeps_views else 0

    def call(self, pairs: Sequence[NamedTensor]) -> set[str] | None:
        """Call the hook; return the names it says it loaded, or None when it says nothing."""
        given = [(n, t.clone()) for n, t in pairs] if self.keeps_views else list(pairs)
        loaded = self.load_weights(given)
        return (
            {str(name) for name in loaded} if isinstance(loaded, set | frozenset | list) else None
        )


class _NamesLoaded:
    """Compares what a hook says it loaded with what it was given."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._said = False
        self._loaded: set[str] = set()

    def note(self, loaded: set[str] | None) -> None:
        if loaded is not None:
            self._said = True
            self._loaded |= loaded

    def check(self) -> None:
        """Raise for names given and not loaded; a hook that renames (fused layers) is believed."""
        if not self._said:
            return
        given = {spec.name for spec in self._manifest.specs}
        skipped = [name for name in given if name not in self._loaded]
        foreign = self._loaded - set(self._manifest.index)
        if skipped and not foreign:
            raise ManifestMismatchError(
                f"load_weights did not load {len(skipped)} of {len(given)} tensors: "
                f"{shorten(sorted(skipped))}; its model has no place for these names",
                missing=sorted(skipped),
            )


class _HookLanding(LoadTarget):
    in_place = True

    def __init__(self, sink: HookSink, manifest: Manifest) -> None:
        self._sink = sink
        self._manifest = manifest
        self._names = _NamesLoaded(manifest)
        largest = max((spec.nbytes for spec in manifest.specs), default=0)
        self.peak_extra_nbytes = 2 * largest if sink.keeps_views else largest

    def begin(self) -> None:
        self._names = _NamesLoaded(self._manifest)

    def load(self, pairs: Sequence[NamedTensor]) -> None:
        self._names.note(self._sink.call(pairs))

    def validate(self) -> None:
        self._names.check()

    def commit(self) -> None:
        pass


class _AsideLanding(LoadTarget):
    def __init__(self, sink: HookSink, plan: StreamLayout) -> None:
        self._sink = sink
        self._plan = plan
        buffer = arena.allocate(plan.nbytes, sink.device)
        self.memory = Memory.of_stream(plan, buffer)
        self.peak_extra_nbytes = sink.staged_nbytes(plan)

    def commit(self) -> None:
        memory = self.memory
        if memory is None:
            return
        names = _NamesLoaded(self._plan.manifest)
        specs = self._plan.manifest.specs
        lent = [
            (spec.name, own_storage(flat)) for spec, flat in zip(specs, memory.tensors, strict=True)
        ]
        counts = [uses(flat) for _, flat in lent]
        pairs = [
            (name, from_bytes(flat, spec)) for spec, (name, flat) in zip(specs, lent, strict=True)
        ]
        names.note(self._sink.call(pairs))
        names.check()
        pairs.clear()
        if not self._sink.keeps_views:
            refuse_kept(lent, counts)
