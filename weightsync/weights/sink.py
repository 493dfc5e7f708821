"""Where weights go on a receiver: sinks, load targets, and the sink of a load_weights hook."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, cast

import torch

from weightsync.errors import ConfigError, ManifestMismatchError, TransferError, shorten
from weightsync.specs import Manifest, ManifestDifference, compare
from weightsync.tensors import from_bytes
from weightsync.weights import arena
from weightsync.weights.copy_plan import Memory
from weightsync.weights.layout import StreamLayout
from weightsync.wire.messages import TensorPart

Apply = Literal["staged", "in_place"]
Verification = Literal["none", "arrived", "held"]
_KEPT_DIFFERENCES = 8
NamedTensor = tuple[str, torch.Tensor]
LoadWeights = Callable[[Iterable[NamedTensor]], object]
"""vLLM's signature: takes `(name, tensor)` pairs, may return the set of names it loaded."""


class LoadTarget(ABC):
    """The place of one manifest's updates in one sink.

    `memory` holds `uint8[nbytes]` per tensor of the manifest, or is None where the sink takes whole
    tensors (`load`). `in_place` says that bytes change weights in use,
    `peak_extra_nbytes` is what the landing keeps beside the model.
    """

    memory: Memory | None = None
    in_place: bool = False
    peak_extra_nbytes: int = 0

    def begin(self) -> None:
        """An update starts; nothing in use has changed yet."""

    def load(self, pairs: Sequence[NamedTensor]) -> None:
        """Take whole tensors, valid until this returns. Called where `memory` is None."""
        raise NotImplementedError

    def validate(self) -> None:
        """Every byte has arrived. Raises what proves that the weights are not all there."""

    @abstractmethod
    def commit(self) -> None:
        """Put the weights to use; no decode step runs meanwhile. Once begun it must not be cut."""

    def discard(self) -> None:
        """The update is given up; staged memory may be overwritten by the next."""


class WeightSink(ABC):
    """Receives weights. `manifest` declares what it wants, None when only a hook knows.

    `verification` is what can be proved: `held`, read back from the destination, or `arrived`.
    """

    manifest: Manifest | None = None
    verification: Verification = "arrived"
    casts: bool = False

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the weights live."""

    @property
    def gpus(self) -> Collection[torch.device]:
        """The GPUs that hold weights, whose streams generation and updates share."""
        return (self.device,) if self.device.type == "cuda" else ()

    @abstractmethod
    def open_target(self, plan: StreamLayout, apply: Apply) -> LoadTarget:
        """Make room for the tensors of `plan.manifest`, once per manifest, before bytes move.

        Raises ManifestMismatchError for tensors that have no place here.
        """

    @abstractmethod
    def staged_nbytes(self, plan: StreamLayout) -> int:
        """Bytes that a staged landing allocates."""

    @property
    def ties(self) -> Mapping[str, str]:
        """The names whose tensor is that of another name, and that name.

        A sender that cannot say what is tied offers one of them, or both with equal bytes.
        """
        return self.manifest.aliases if self.manifest else {}

    def difference(self, offered: Manifest) -> ManifestDifference:
        """How `offered` differs from what this sink declares; nothing where it declares nothing.

        Remembered for the last few manifests, since an update asks more than once.
        """
        if self.manifest is None:
            return ManifestDifference()
        known = self.__dict__.setdefault("_differences", {})
        if offered.digest not in known:
            if len(known) >= _KEPT_DIFFERENCES:
                known.clear()
            known[offered.digest] = compare(offered, self.manifest, cast=self.casts)
        return cast(ManifestDifference, known[offered.digest])

    def commit_all(self, load_targets: Sequence[LoadTarget]) -> None:
        """Put the weights of one update to use, in this order; see Landing.commit."""
        for load_target in load_targets:
            load_target.commit()

    def refresh(self) -> int:
        """Look at the destination again; landings made under another answer are of no use any more.

        Raises ManifestMismatchError when it is not what it was.
        """
        return 0

    def checksums(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return mix64 of the weights in use, aliases included. Raises ConfigError if unknown."""
        raise ConfigError(
            f"{type(self).__name__} cannot read its weights back; pass the nn.Module itself to "
            "WeightReceiver, or a sink that implements checksums()"
        )

    def checksum_parts(
        self, names: Iterable[str] | None = None
    ) -> tuple[dict[str, str], dict[str, TensorPart]]:
        """Return mix64 of tensors that are whole here, and what is held of those that are cut."""
        return self.checksums(names), {}


def check_manifest(
    sink: WeightSink, offered: Manifest, *, partial: bool, more_follows: bool = False
) -> None:
    """Raise ManifestMismatchError unless `offered` fits what the sink declares."""
    sink.difference(offered).check(partial=partial, more_follows=more_follows)


def own_storage(flat: torch.Tensor) -> torch.Tensor:
    """View `uint8[nbytes]` of the host through a storage of its own, whose uses can be counted.

    It keeps the memory of `flat` alive: a view that a hook keeps may go stale, but never dangles.
    """
    if flat.device.type != "cpu" or not flat.numel():
        return flat
    array = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    array.keeps = flat  # type: ignore[attr-defined]  # ctypes instances take attributes
    return torch.frombuffer(array, dtype=torch.uint8)


def uses(tensor: torch.Tensor) -> int:
    """Return how many tensors and wrappers use the storage of `tensor`."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


HOOK_ADVICE = (
    "copy them in the hook, or give HookSink(hook, keeps_views=True), which hands out clones"
)


def refuse_kept(
    lent: Sequence[tuple[str, torch.Tensor]], counts: Sequence[int], advice: str = HOOK_ADVICE
) -> None:
    """Raise TransferError naming the bases in `lent` whose views outlive the call.

    `counts` are their uses before any view of them was made: a larger one means a view lives on.
    `advice` ends the message.
    """
    kept = [
        name
        for (name, base), count in zip(lent, counts, strict=True)
        if base.numel() and uses(base) > count
    ]
    if kept:
        raise TransferError(
            f"load_weights kept views of {len(kept)} tensors after it returned: {shorten(kept)}; "
            f"their memory is about to be overwritten; {advice}"
        )


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
