"""The contract of sinks and load targets, and the sink of a `load_weights` hook."""

from __future__ import annotations

import ctypes
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self, cast

import torch
from torch import nn

from weightsync.errors import (
    AuthError,
    ConfigError,
    DeltaError,
    ManifestMismatchError,
    NotReadyError,
    PeerLostError,
    SenderConflictError,
    SourceLostError,
    StaleVersionError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    TransportError,
    UnknownSenderError,
    UpdateConflictError,
    WeightSyncError,
    is_readable,
    shorten,
    text_of,
)
from weightsync.report import Apply as Apply  # noqa: PLC0414  # its users import it from here
from weightsync.report import Verification as Verification  # noqa: PLC0414  # as Apply
from weightsync.specs import (
    Manifest,
    ManifestDifference,
    compare,
    count_casts,
    find_widened,
    refuse_inner,
    rounds,
)
from weightsync.tensors import from_bytes
from weightsync.weights.copying import arena
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.layout import ALIGNMENT, StreamLayout, aligned, layer_of
from weightsync.weights.copying.shards import Slice
from weightsync.weights.lines.memory import LineMemory, Marks, touched
from weightsync.weights.lines.patches import Patches, RecordingLines, SparseWeightPatch
from weightsync.weights.lines.shard_lines import lines_of
from weightsync.weights.tensor_kinds import Shared
from weightsync.wire.messages import TensorPart

_KEPT_DIFFERENCES = 8
NamedTensor = tuple[str, torch.Tensor]
LoadWeights = Callable[[Iterable[NamedTensor]], object]
"""A hook with vLLM's signature: takes `(name, tensor)` pairs, may return the names it loaded."""
Together = Callable[[str], Hashable]
"""Maps a tensor's name to its part: a hook gets the tensors of a part in one call."""
LoadPatches = Callable[[Iterable[SparseWeightPatch]], object]
"""A hook that takes the changed elements of tensors, may return the names it loaded."""


_OF_STEPS = (
    TransportError,
    NotReadyError,
    AuthError,
    StaleVersionError,
    DeltaError,
    UnknownSenderError,
    SenderConflictError,
    UpdateConflictError,
    SourceLostError,
    TransferTimeout,
    TransferCancelled,
    PeerLostError,
)
"""Errors by which a sender learns what became of a step, or of the connection to a receiver."""


@contextmanager
def users_code(name: str) -> Iterator[None]:
    """Run code of the user. Errors that a sender would take for those of a step are wrapped.

    A hook that uses weightsync itself, or a network, may raise any of them: they say nothing of
    this receiver's messages. They become a TransferError, as do those whose `str()` fails.
    """
    try:
        yield
    except WeightSyncError as exc:
        if isinstance(exc, _OF_STEPS) or not is_readable(exc):
            raise TransferError(f"{name} raised {type(exc).__name__}: {text_of(exc)}") from exc
        raise


class LoadTarget(ABC):
    """The memory or hook that updates of one manifest write to, in one sink.

    A sink opens it once and uses it for every update of that manifest. In each update `begin` is
    called, then the bytes are written to `memory` (or `load` is called, once or more), then
    `validate` and `commit`. `discard` ends an update that fails at any point, also in `commit`.

    `memory` has `uint8[nbytes]` for each tensor of the manifest; it is None where the sink takes
    whole tensors through `load`. With `in_place` the bytes change weights in use.
    `peak_extra_nbytes` is the memory that the target keeps beside the model.

    `users_own`: `load` runs code of the user, which may write to the tensors that it is given.
    `together`: the parts whose tensors it gets in one call; None: as they come. `named`: whether a
    hook named tensors that it loaded, None where no hook loads them.

    A delta writes to the memory of `catch_up`, where `takes_deltas`. `written` then has the lines
    that it wrote, from `begin` to `commit` or `discard`; None means all of them.
    """

    memory: Memory | None = None
    in_place: bool = False
    peak_extra_nbytes: int = 0
    users_own: bool = True
    together: Together | None = None
    named: bool | None = None
    takes_deltas: bool = False
    written: Marks | None = None

    @property
    def is_current(self) -> bool:
        """Whether the destination was the same at its last inspection as when this was opened."""
        return True

    def is_unused(self) -> bool:
        """Whether bytes may be written to `memory` without an inspection of the sink before.

        `validate` then inspects it. Cheap, whatever the size of the model; False where that is not
        known.
        """
        return False

    def catch_up(self, layout: StreamLayout) -> LineMemory | None:
        """Make the memory of the next update hold the weights in use, and return it for a delta.

        None where that is not possible: the weights in use were changed by other code, or are kept
        in a form that has no lines of the stream. May be called between updates, to save time.
        """
        return None

    def is_in_use(self) -> bool:
        """Whether the weights in use are those of its last commit, as far as writes are counted."""
        return False

    def in_use(self) -> Sequence[torch.Tensor] | None:
        """Return `uint8[nbytes]` of each tensor of the weights in use; None where none are kept."""
        return None

    def begin(self) -> None:
        """Start an update. No weights in use have changed yet."""

    def load(self, pairs: Sequence[NamedTensor]) -> None:
        """Load whole tensors, which are valid until this returns. Called where `memory` is None."""
        raise NotImplementedError

    def validate(self) -> None:
        """Check the update after its last byte, before `commit`. Raises an error to refuse it."""

    def shared(self) -> Sequence[Shared]:
        """Return those tensors of the sink that share memory without being tied; rarely any.

        Called after `validate` for all load targets of an update: their values must agree.
        """
        return ()

    def undo(self) -> Callable[[], None] | None:
        """Keep the weights in use, and return what puts them back after `commit`; None: nothing.

        Called before `commit`, where the user's `on_commit` may refuse it.
        """
        return None

    @abstractmethod
    def commit(self) -> None:
        """Put the weights to use. No decode step runs meanwhile; an error leaves the receiver TORN.

        Copies on a GPU may still be on the current stream at the end; the receiver waits for it.
        """

    def discard(self) -> None:
        """Abandon the update. The next update may overwrite staged memory."""

    def forget(self) -> None:
        """Note that it is not known any more what the weights in use, and the memory, hold."""

    def staged(self) -> Sequence[torch.Tensor]:
        """Return the memory that it has beside the model's tensors, and that nothing else uses."""
        return ()


class PartTarget(LoadTarget):
    """The part of a load target that one of several streams writes to; the whole is committed."""

    def commit(self) -> None:
        raise NotImplementedError("the load target of the model is committed")


class ArenaTarget(LoadTarget):
    """A load target whose `memory` stays, and holds the weights in use after a commit.

    A subclass calls `holds_commit` when its commit is complete. `begin` and `discard` keep account
    of updates that overwrote the memory and were not committed.
    """

    _holds_weights_in_use = False

    def catch_up(self, layout: StreamLayout) -> LineMemory | None:
        if not (self.takes_deltas and self._holds_weights_in_use) or self.memory is None:
            return None
        return lines_of(layout, self.memory)

    def is_in_use(self) -> bool:
        return self._holds_weights_in_use

    def in_use(self) -> Sequence[torch.Tensor] | None:
        memory = self.memory
        if memory is None or memory.shares is not None or not self.is_in_use():
            return None
        return memory.tensors

    def begin(self) -> None:
        super().begin()
        self.written = None

    def discard(self) -> None:
        super().discard()
        if self.written is None or self.written.any():
            self._holds_weights_in_use = False

    def forget(self) -> None:
        self._holds_weights_in_use = False

    def staged(self) -> Sequence[torch.Tensor]:
        return () if self.memory is None else self.memory.tensors

    def holds_commit(self, whole: bool = True) -> None:
        """Note that the memory holds the weights in use from now on, or not any more."""
        self._holds_weights_in_use = whole


class WeightSink(ABC):
    """The destination of weights in a receiver.

    `manifest` declares the tensors it wants; None where only a hook knows them. `verification` is
    the strongest level that its updates reach: `held` where what was written is read back, else
    `arrived`. weightsync.report.COMPARED has the meaning of both.
    `casts` accepts floating-point tensors of another dtype than declared. `fetchable` False: other
    receivers may not fetch the weights in use. `holds_parts`: it holds parts of tensors, which
    others may fetch with those of the receivers that hold the rest. `keeps_views`: it keeps tensors
    that it is given.
    `takes_parts` False: each update makes new weights, so that one of a part of them is refused.
    `swaps` False: a commit changes nothing that a decode step uses, and need not wait for one.
    `may_cast`: floating-point tensors that it casts although `casts` is False, because receivers of
    one sender keep them in unlike dtypes; set it by `let_cast`. `quantization`: the
    `quantization_config` of the checkpoint whose tensors it takes, for `connect(quantize=)`.
    `sleeps`: it gives the memory of the weights back by itself, in `fall_asleep`.
    """

    manifest: Manifest | None = None
    verification: Verification = "arrived"
    casts: bool = False
    may_cast: frozenset[str] = frozenset()
    quantization: Mapping[str, object] | None = None
    fetchable: bool = True
    holds_parts: bool = False
    keeps_views: bool = False
    takes_parts: bool = True
    swaps: bool = True
    sleeps: bool = False

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the weights."""

    @property
    def gpus(self) -> Collection[torch.device]:
        """The GPUs that hold weights, whose streams generation and updates share."""
        return (self.device,) if self.device.type == "cuda" else ()

    @abstractmethod
    def open_target(self, layout: StreamLayout, apply: Apply) -> LoadTarget:
        """Allocate for the tensors of `layout`. Called once per manifest, before its bytes.

        Raises ManifestMismatchError for tensors without a place in this sink, and TransferError
        where there is no memory.
        """

    @abstractmethod
    def staged_nbytes(self, layout: StreamLayout) -> int:
        """Return the bytes that a staged load target allocates beside the model."""

    @property
    def ties(self) -> Mapping[str, str]:
        """Tied names: each alias, and the name whose tensor it shares.

        A sender that does not know them sends one of the two, or both with equal bytes.
        """
        return self.manifest.aliases if self.manifest else {}

    def difference(self, offered: Manifest) -> ManifestDifference:
        """Return how `offered` differs from this sink's manifest.

        Without a manifest only inner tensors of torchao differ, which a hook would not know. Cached
        for a few manifests, since an update needs it more than once.
        """
        if self.manifest is None:
            return refuse_inner(offered)
        known = self.__dict__.setdefault("_differences", {})
        found = cast(ManifestDifference | None, known.get(offered.digest))
        if found is None:
            found = compare(offered, self.manifest, cast=self.casts, may_cast=self.may_cast)
            if len(known) >= _KEPT_DIFFERENCES:
                known.clear()
            known[offered.digest] = found
        return found

    def let_cast(self, names: frozenset[str]) -> None:
        """Cast these tensors from now on, and no others. Does nothing in a sink that cannot."""

    def kept(self) -> Mapping[str, str] | None:
        """Return the dtypes in which tensors are kept, by all of their names; None if not known."""
        if self.manifest is None:
            return None
        return {name: self.manifest.specs[i].dtype for name, i in self.manifest.index.items()}

    def counted_casts(self, offered: Manifest) -> dict[str, int]:
        """Return how many offered tensors this sink casts, as `{"float32 to bfloat16": 3}`."""
        if self.manifest is None or not (self.casts or self.may_cast):
            return {}
        return count_casts(offered, self.manifest)

    def widened(self, offered: Manifest) -> list[str] | None:
        """Return the names of offered tensors that this sink keeps in a dtype of more digits.

        None where it does not know the dtypes that it keeps.
        """
        if self.manifest is None:
            return None
        return find_widened(offered, self.manifest) if self.casts or self.may_cast else []

    def boxes(self, offered: Manifest) -> Sequence[tuple[int, Slice]] | None:
        """Return the boxes that are loaded of offered tensors, by their positions; None for whole.

        A tensor may have several, or none.
        """
        return None

    def whole(self, offered: Manifest) -> Mapping[str, str]:
        """Return the offered tensors of which no box is known, so that they are loaded whole.

        With the reasons. Empty for a sink that loads no boxes.
        """
        return {}

    def fall_asleep(self, level: int) -> None:
        """Give the memory of the weights back: of level 1 they are kept on the host, of 2 lost.

        Called while nothing reads or writes them. An error of level 1 has changed nothing.
        """

    def wake_up(self) -> None:
        """Take the memory again, with the weights that were kept. May be called again."""

    def commit_all(self, load_targets: Sequence[LoadTarget]) -> None:
        """Commit the load targets of one update, in this order; see LoadTarget.commit."""
        for load_target in load_targets:
            load_target.commit()

    def refresh(self) -> int:
        """Inspect the destination again; return a number that changes when the destination changed.

        Load targets opened under another number are of no use. Raises ManifestMismatchError when
        the destination no longer has the declared tensors.
        """
        return 0

    def in_use(self, manifest: Manifest) -> list[torch.Tensor] | None:
        """Return the tensors in use that `manifest` names, whole, to be read; None without any.

        Staged, they keep their bytes until a commit.
        """
        return None

    def parts_in_use(self, manifest: Manifest) -> list[tuple[int, Slice, torch.Tensor]]:
        """Return the parts in use of the tensors of `manifest`, by their positions there.

        Where it `holds_parts`, in the order in which a load target of that manifest has them.
        """
        return []

    def checksums(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return mix64 (16 hex digits) of the weights in use by name, aliases included.

        None means all names. Raises ConfigError for unknown names, and for sinks that cannot read
        their weights back.
        """
        raise ConfigError(
            f"{type(self).__name__} cannot read its weights back; pass the nn.Module itself to "
            "WeightReceiver, or a sink that implements checksums()"
        )

    def checksum_parts(
        self, names: Iterable[str] | None = None
    ) -> tuple[dict[str, str], dict[str, TensorPart]]:
        """Return mix64 of tensors held in full, and the parts of the others' fingerprints."""
        return self.checksums(names), {}


def check_manifest(
    sink: WeightSink, offered: Manifest, *, partial: bool, more_follows: bool = False
) -> None:
    """Raise ManifestMismatchError unless `offered` fits the sink's manifest; see `difference`.

    `partial` and `more_follows` as in ManifestDifference.check.
    """
    sink.difference(offered).check(partial=partial, more_follows=more_follows)


def own_storage(flat: torch.Tensor) -> torch.Tensor:
    """View `uint8[nbytes]` in host memory through a new storage, so that `uses` counts its views.

    The storage keeps the memory of `flat` alive: the bytes under a view that a hook keeps may
    change, but are never freed. Tensors on a GPU are returned as they are.
    """
    if flat.device.type != "cpu" or not flat.numel():
        return flat
    array = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    array.keeps = flat  # type: ignore[attr-defined]  # ctypes instances take attributes
    return torch.frombuffer(array, dtype=torch.uint8)


_VERSION = operator.attrgetter("_version")


def write_counts(tensors: Iterable[torch.Tensor]) -> list[int] | None:
    """Return how often torch has written to each tensor; None where one has no count."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # made in inference mode
        return None


def uses(tensor: torch.Tensor) -> int:
    """Return the number of tensors and Python wrappers that use the storage of `tensor`."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


HOOK_ADVICE = (
    "copy them in the hook, or give HookSink(hook, keeps_views=True), which hands out clones"
)


def refuse_kept(
    tensors: Sequence[tuple[str, torch.Tensor]], counts: Sequence[int], advice: str = HOOK_ADVICE
) -> None:
    """Raise TransferError naming those of `tensors` of which a hook kept views.

    `tensors` are `(name, uint8[nbytes])`. `counts` are their `uses` before any view was made; now a
    higher number means that a view is alive. `advice` ends the message.
    """
    kept = [
        name
        for (name, base), count in zip(tensors, counts, strict=True)
        if base.numel() and uses(base) > count
    ]
    if kept:
        raise TransferError(
            f"load_weights kept views of {len(kept)} tensors after it returned: {shorten(kept)}; "
            f"their memory is about to be overwritten; {advice}"
        )


class HookSink(WeightSink):
    """The sink of a `load_weights` hook. If the hook returns names, they are checked.

    `keeps_views`: the hook keeps the tensors it is given (as vLLM's layerwise reload does), so it
    is given clones. `device` is where the hook wants its tensors.

    Staged, the whole stream is kept in an arena on `device`, and the hook is called once, in
    `commit`. An error before that changes nothing; an error inside the hook leaves the receiver
    TORN. This takes as many bytes as the model, and as many again for the clones of `keeps_views`
    (`peak_extra_nbytes`). `apply="auto"` stages where they fit into free memory with a tenth to
    spare.

    After a delta the hook is given the whole model again, or with `changed_only` the tensors that
    changed, whole.

    `load_patches` is a hook that takes index and value. After a delta it is called in place of
    `load_weights`, with a SparseWeightPatch for each tensor that changed since the last call of
    either hook; not at all where none did. The patches have exactly the elements whose bits differ.
    Each is made when the hook's iteration arrives at it, and takes 8 bytes beside each value.
    During the update, each changed line of 64 bytes takes 12 to 24 bytes. All other updates call
    `load_weights`, among them the first one, and those that `apply="auto"` found no memory to
    stage. The two hooks share what is said here of errors, and of the names that they return.

    Else (`in_place`) tensors are handed over as they come, with all tensors of a part in one call,
    since a hook may fuse them (q, k and v). `together` maps a name to its part; by default that is
    the decoder layer, or else the module that holds the tensor. Parts that come together are given
    in one call. With None nothing is waited for. This takes the bytes of the largest part (twice
    with clones); where it is split over buckets, its memory is kept for the next update.

    The tensors are views of the sender's memory, valid until the hook returns. A hook may write to
    them: only its own process sees that, and the next update has the sender's bytes again. On a GPU
    they are the memory itself, and a write is a TransferError.

    A hook that returns no names proves nothing: the report says so.

    Raises ConfigError for both `changed_only` and `load_patches`, and for another `together`.
    """

    def __init__(
        self,
        load_weights: LoadWeights,
        *,
        manifest: Manifest | None = None,
        keeps_views: bool = False,
        device: torch.device | str = "cpu",
        changed_only: bool = False,
        load_patches: LoadPatches | None = None,
        together: Together | None = layer_of,
    ) -> None:
        if together is not None and not callable(together):
            raise ConfigError(
                "together is a function that returns a tensor's part by its name, or None, not "
                f"{together!r}"
            )
        if changed_only and load_patches is not None:
            raise ConfigError(
                "changed_only gives load_weights whole tensors after a delta, and load_patches is "
                "called in its place; give one of the two"
            )
        self.changed_only = changed_only
        self.together = together
        self.load_patches = load_patches
        self.load_weights = load_weights
        self.manifest = manifest
        self.keeps_views = keeps_views
        self._device = torch.device(device)

    @property
    def device(self) -> torch.device:
        """The device of staged tensors."""
        return self._device

    def open_target(self, layout: StreamLayout, apply: Apply) -> LoadTarget:
        """Return an arena for the stream (`staged`), or a target that calls the hook as they come.

        Raises TransferError where there is no memory.
        """
        return (
            _StagedHookTarget(self, layout)
            if apply == "staged"
            else _HookTarget(self, layout.manifest)
        )

    def largest_part_nbytes(self, manifest: Manifest) -> int:
        """Return the bytes of the largest part whose tensors the hook gets in one call."""
        parts: dict[Hashable, int] = {}
        for i, spec in enumerate(manifest.specs):
            part = i if self.together is None else self.together(spec.name)
            parts[part] = parts.get(part, 0) + spec.nbytes
        return max(parts.values(), default=0)

    def staged_nbytes(self, layout: StreamLayout) -> int:
        """Return the bytes of the whole stream, and of clones where the hook keeps views."""
        return layout.nbytes + self.cloned_nbytes(layout.manifest)

    def cloned_nbytes(self, manifest: Manifest) -> int:
        """Return the bytes of the clones that `call` makes of all tensors of a manifest."""
        return sum(spec.nbytes for spec in manifest.specs) if self.keeps_views else 0

    def widened(self, offered: Manifest) -> list[str] | None:
        """Return the names of offered tensors that the hook's module keeps in more digits.

        That is known of a module's own method, by the names that both have; else None.
        """
        module = getattr(self.load_weights, "__self__", None)
        if self.manifest is not None or not isinstance(module, nn.Module):
            return super().widened(offered)
        held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        known = [spec for spec in offered.specs if spec.name in held]
        kept = [
            spec.name
            for spec in known
            if rounds(str(held[spec.name].dtype).removeprefix("torch."), spec.dtype)
        ]
        return kept if kept or len(known) == len(offered.specs) else None

    def call(self, pairs: Sequence[NamedTensor]) -> set[str] | None:
        """Call the hook; return the names that it returns, or None when it returns none."""
        given = [(n, t.clone()) for n, t in pairs] if self.keeps_views else list(pairs)
        with users_code("load_weights"):
            loaded = self.load_weights(given)
        return _loaded_names(loaded)


def _loaded_names(loaded: object) -> set[str] | None:
    """Return the names that a hook returned, None when it returned none."""
    return {str(name) for name in loaded} if isinstance(loaded, set | frozenset | list) else None


def _check_loaded(
    manifest: Manifest,
    loaded: set[str] | None,
    names: Iterable[str] | None = None,
    *,
    calls: int = 1,
) -> None:
    """Raise ManifestMismatchError for names that a hook was given and did not return.

    It was given `names`, None: all of the manifest, in this number of `calls`. A hook that returned
    no names (None), or other names (of fused layers), is not checked.
    """
    given = {spec.name for spec in manifest.specs} if names is None else set(names)
    skipped = sorted(given - loaded) if loaded is not None else []
    if loaded is not None and skipped and loaded.issubset(manifest.index):
        why = "its model has no place for these names"
        if calls > 1:
            why += (
                f", or it fuses tensors that it was given in different ones of {calls} calls: "
                "HookSink(hook, together=...) takes a function that names the part of each tensor, "
                'and WeightReceiver(..., apply="staged") gives all of them in one call'
            )
        raise ManifestMismatchError(
            f"the hook did not load {len(skipped)} of {len(given)} tensors: "
            f"{shorten(skipped)}; {why}",
            missing=skipped,
        )


class _HookTarget(LoadTarget):
    """Calls the hook with tensors as they come: the weights in use change before the commit."""

    in_place = True

    def __init__(self, sink: HookSink, manifest: Manifest) -> None:
        self._sink = sink
        self._manifest = manifest
        self._loaded: set[str] | None = None
        self._calls = 0
        self.together = sink.together
        largest = sink.largest_part_nbytes(manifest)
        self.peak_extra_nbytes = 2 * largest if sink.keeps_views else largest

    def begin(self) -> None:
        self._loaded, self._calls = None, 0

    def load(self, pairs: Sequence[NamedTensor]) -> None:
        self._calls += 1
        loaded = self._sink.call(pairs)
        if loaded is not None:
            self._loaded = loaded.union(self._loaded or ())

    def validate(self) -> None:
        self.named = bool(self._loaded)
        _check_loaded(self._manifest, self._loaded, calls=self._calls)

    def commit(self) -> None:
        pass


class _LineSample:
    """One line of each tensor of an arena, another one each time.

    Shows writes that torch does not count, through `.data` or NumPy, to a whole tensor.
    """

    def __init__(self, layout: StreamLayout, buffer: torch.Tensor) -> None:
        filled = [i for i, spec in enumerate(layout.manifest.specs) if spec.nbytes]
        nbytes = [aligned(layout.manifest.specs[i].nbytes) for i in filled]
        self._lines = buffer.view(-1, ALIGNMENT)
        self._firsts = torch.tensor([layout.offsets[i] for i in filled]) // ALIGNMENT
        self._counts = torch.tensor(nbytes) // ALIGNMENT
        self._random = torch.Generator()  # not torch's own, whose numbers the user counts on
        self._random.seed()
        self._chosen = self._kept = torch.empty(0, dtype=torch.int64)

    def take(self) -> Self:
        """Choose lines and keep what they hold; return this."""
        share = torch.rand(len(self._counts), generator=self._random, dtype=torch.float64)
        chosen = self._firsts + (share * self._counts).to(torch.int64)
        self._chosen = chosen.to(self._lines.device)
        self._kept = self._lines.index_select(0, self._chosen)
        return self

    def is_unchanged(self) -> bool:
        """Whether the chosen lines hold what they held."""
        return torch.equal(self._lines.index_select(0, self._chosen), self._kept)


class _StagedHookTarget(ArenaTarget):
    """Keeps the whole stream in an arena; `commit` calls the hook with views of it, or clones.

    A hook that changes the tensors that it is given gets no delta after that.
    """

    takes_deltas = True

    def __init__(self, sink: HookSink, layout: StreamLayout) -> None:
        self._sink = sink
        self._layout = layout
        buffer = arena.allocate(layout.nbytes, sink.device)
        self.memory = Memory.of_stream(layout, buffer)
        self._sample = _LineSample(layout, buffer)
        self.peak_extra_nbytes = sink.staged_nbytes(layout)
        self._lines: RecordingLines | None = None

    def catch_up(self, layout: StreamLayout) -> LineMemory | None:
        lines = super().catch_up(layout)
        if lines is not None and self._sink.load_patches is not None:
            lines = self._lines = RecordingLines(layout, lines.memory)
        return lines

    def discard(self) -> None:
        super().discard()
        self._lines = None

    def commit(self) -> None:
        memory, lines = self.memory, self._lines
        if memory is None:
            return
        self.holds_commit(False)  # until the hook has returned
        self._lines = None
        if self.written is not None and lines is not None:
            self.named = self._load_patches(Patches(self._layout, lines))
            self.holds_commit()
            return
        places: Sequence[int] = range(len(memory.tensors))
        if self.written is not None and self._sink.changed_only:
            places = touched(self._layout, self.written)
        specs = [self._layout.manifest.specs[place] for place in places]
        tensors = [
            (spec.name, own_storage(memory.tensors[place]))
            for spec, place in zip(specs, places, strict=True)
        ]
        counts = [uses(flat) for _, flat in tensors]
        pairs = [
            (name, from_bytes(flat, spec))
            for spec, (name, flat) in zip(specs, tensors, strict=True)
        ]
        before = write_counts(tensor for _, tensor in pairs)
        sampled = self._sample.take()
        self.named = None
        if pairs:
            names = [name for name, _ in pairs]
            loaded = self._sink.call(pairs)
            self.named = bool(loaded)
            _check_loaded(self._layout.manifest, loaded, names)
        unchanged = before is not None and before == write_counts(t for _, t in pairs)
        unchanged = unchanged and sampled.is_unchanged()
        pairs.clear()
        if not self._sink.keeps_views:
            refuse_kept(tensors, counts)
        self.holds_commit(unchanged)

    def _load_patches(self, patches: Patches) -> bool | None:
        """Call the hook with patches, where there are any; return whether it named tensors."""
        hook = self._sink.load_patches
        if hook is None or not patches.names:
            return None
        try:
            with users_code("load_patches"):
                loaded = _loaded_names(hook(patches))
        finally:
            patches.end()
        _check_loaded(self._layout.manifest, loaded, patches.names)
        return bool(loaded)
