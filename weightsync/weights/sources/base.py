"""Sources of weights on the trainer, and detection of tensors that change while they are sent."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import nn

from weightsync.arguments import Dtype, as_dtype
from weightsync.cuda.wait import wait_for
from weightsync.errors import ConfigError, ManifestMismatchError, TransferError, shorten
from weightsync.look import KnownForms, Look, address_of, version_of
from weightsync.runtime import optimizer_steps
from weightsync.runtime.optimizer_steps import StepWindow, storage_address, stored_at
from weightsync.runtime.provided import provided
from weightsync.specs import Manifest, TensorSpec, changes, rounds
from weightsync.tensors import TORCH_DTYPES, as_integers, dtype_name, spec_of
from weightsync.weights.copying.layout import layer_of as layer_of  # noqa: PLC0414  # with groups_of
from weightsync.weights.copying.shards import (
    find_fsdp,
    fsdp_buffers,
    gather,
    gather_groups,
    gathered_device,
    is_sharded,
    local_of,
)
from weightsync.weights.inner_tensors import Expansion, renamed
from weightsync.weights.sinks.frozen import check_scripted
from weightsync.weights.sinks.module_sink import (
    ModuleTensors,
    Rename,
    Wants,
    identity,
    rename_with,
)
from weightsync.weights.sources.declared import (
    Declared,
    Holding,
    are_holdings,
    boxes_of,
    check_same,
    said_by,
    tensors_of,
    union_of,
)
from weightsync.weights.sources.holdings import Holdings, Places, holdings_of
from weightsync.weights.tensor_kinds import (
    check_readable,
    check_sendable,
    find_sharing,
    refusal,
    state_beside,
    states_beside,
    warn_of_state,
    why_unsendable,
)


def groups_of(manifest: Manifest) -> list[range]:
    """Return the ranges of positions in `manifest` that belong to one layer, in order.

    The layer of `model.layers.3.mlp.up.weight` is `model.layers.3`: see `layer_of`.
    """
    groups: list[range] = []
    for _, members in groupby(manifest.specs, key=lambda spec: layer_of(spec.name)):
        start = groups[-1].stop if groups else 0
        groups.append(range(start, start + sum(1 for _ in members)))
    return groups


logger = logging.getLogger(__name__)

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_dtype_of = operator.attrgetter("dtype")


class SourceWatch:
    """Detects tensors that change during a transfer.

    It also reports those that the user has cast between two updates, as `model.half()` does: they
    are sent in the dtypes of `connect`, in which receivers hold them.

    Detected: a higher `_version`, another data address or dtype, and a step of a torch optimizer
    over the tensor's storage. Not detected: writes that torch does not count (through `.data`,
    NumPy or another process), and an operator outside of an optimizer's step that is still running
    at the end of the transfer.
    """

    def __init__(self) -> None:
        optimizer_steps.install()
        self._names: Sequence[str] = ()
        self._tensors: Sequence[torch.Tensor] = ()
        self._forms = KnownForms()
        self._seen = Look([], [], [])
        self._known: tuple[Sequence[str], list[Any]] = (), []
        self._whole: list[tuple[str, torch.Tensor, int]] = []
        self._window: StepWindow | None = None

    def know(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Record the dtypes of tensors that are sent, before the first update."""
        names, tensors = with_shards(names, tensors)
        self._known = names, list(map(_dtype_of, tensors))

    def begin(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        whole: Iterable[tuple[str, torch.Tensor]] = (),
    ) -> None:
        """Record the state of `tensors`, and keep them alive until `end`.

        `whole` are DTensors of which these are local tensors, or parts of some, and tensors of
        torchao of which these are inner ones: torch counts a write to such a tensor there alone.
        """
        self.end()
        self._window = StepWindow()
        self._names, self._tensors = with_shards(names, tensors)
        self._seen = self._forms.look(self._tensors)
        self._whole = [(name, tensor, version_of(tensor)) for name, tensor in whole]
        self._report_casts(self._names, self._seen.dtypes)

    def look_of(self, tensors: Sequence[torch.Tensor]) -> Look | None:
        """Return what `begin` saw of these tensors; None unless it watches this very list."""
        return self._seen if self._window is not None and tensors is self._tensors else None

    def note_places(self) -> None:
        """Note where the tensors are now: the sender itself has moved some of them since `begin`.

        Called before any of them is read. Their versions are compared with those at `begin`.
        """
        if self._window is not None:
            addresses = list(map(address_of, self._tensors))
            self._seen = self._seen._replace(addresses=addresses)

    def note_forms(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note that tensors of these forms are those to be sent: Look.known tells them again."""
        self._forms.note(tensors)

    def _report_casts(self, names: Sequence[str], dtypes: list[Any]) -> None:
        """Log once which of the known tensors have another dtype than before.

        The dtypes are those of the tensors' states: to ask each tensor again takes time.
        """
        known_names, known = self._known
        if dtypes == known or names != known_names:
            return
        cast = {
            name: f"{name} from {dtype_name(before)} to {dtype_name(now)}"
            for name, before, now in zip(names, known, dtypes, strict=True)
            if before is not now
        }
        self._known = names, dtypes
        logger.warning(
            "%d tensors were cast since connect() or the last update, and are sent in the dtypes "
            "of connect(): %s; connect again to send them as they are",
            len(cast),
            shorten(list(cast.values())),
        )

    def end(self, is_adopted: Callable[[int, int], bool] = lambda _, __: False) -> list[str]:
        """Return the names of tensors that changed since `begin`, and drop all tensors.

        `is_adopted(i, address)` says that the sender itself moved tensor `i` to that address.
        """
        window, self._window = self._window, None
        names, tensors, seen, whole = self._names, self._tensors, self._seen, self._whole
        self._names, self._tensors, self._seen, self._whole = (), (), Look([], [], []), []
        if window is None:
            return []
        stepped = window.close()
        now = self._forms.look(tensors, compares=False)
        changed: set[int] = set()
        if now.differ(seen):
            changed |= set(_differences(seen, now, is_adopted))
        if stepped:
            written = set[int]().union(*map(stored_at, stepped)) - {0}
            changed |= {i for i, t in enumerate(tensors) if storage_address(t) in written}
        found = [names[i] for i in sorted(changed)]
        found += [name for name, tensor, version in whole if version_of(tensor) != version]
        return list(dict.fromkeys(found))


class YieldWatch:
    """Detects changes of tensors that a callable yields one by one, and may itself overwrite.

    Call `note` after the callable yielded a tensor, and `read` before the next one is requested.
    Changes by the callable itself are allowed: it may fill a buffer again, or merge and unmerge an
    adapter. No tensor is kept alive. Of a tensor that is gone when the next one comes, only
    optimizer steps over its storage are detected. Changes of tensors from which the callable made
    new ones are not detected.
    """

    def __init__(self) -> None:
        optimizer_steps.install()
        self._window = StepWindow()
        self._noted: dict[int, tuple[str, weakref.ref[torch.Tensor], int]] = {}
        self._last: list[tuple[str, torch.Tensor, int, int]] = []
        self._before: list[tuple[int, weakref.ref[torch.Tensor]]] = []
        self._changed: dict[str, None] = {}
        self._counting: Sequence[torch.Tensor] = ()

    def note(self, name: str, tensor: torch.Tensor, counting: Sequence[torch.Tensor] = ()) -> None:
        """Record a tensor that the callable yielded; changes until now were its own.

        Writes to it may be counted on the `counting` ones: the same list for tensors that the
        callable yielded as one, between which it has changed nothing.
        """
        if not counting or counting is not self._counting:
            for key, find in self._before:
                last = find()
                if last is not None:
                    self._noted[key] = self._noted[key][0], find, version_of(last)
            self._before.clear()
        self._counting = counting
        for part in (*_parts(tensor), *counting):
            version = version_of(part)
            self._last.append((name, part, version, address_of(part)))
            find = weakref.ref(part if part._base is None else part._base)
            key = storage_address(part) or id(part)
            self._noted[key] = name, find, version
            self._before.append((key, find))

    def read(self) -> None:
        """Check the last tensor after its bytes were read."""
        for name, part, version, address in self._last:
            if version_of(part) != version or address_of(part) != address:
                self._changed[name] = None
        self._last.clear()

    def end(self) -> list[str]:
        """Return the names of tensors that other code changed since they were yielded."""
        self.read()
        written = set[int]().union(*map(stored_at, self._window.close()))
        for address, (name, find, version) in self._noted.items():
            tensor = find()
            if address in written or (tensor is not None and version_of(tensor) != version):
                self._changed[name] = None
        self._noted.clear()
        self._before.clear()
        self._counting = ()
        return list(self._changed)


def with_shards(
    names: Iterable[str], tensors: Sequence[torch.Tensor]
) -> tuple[Sequence[str], Sequence[torch.Tensor]]:
    """Return names and tensors, and after each DTensor its local shard, which optimizers write."""
    if set(map(type, tensors)).issubset(_PLAIN):
        return list(names), tensors
    parts = [(name, p) for name, t in zip(names, tensors, strict=True) for p in _parts(t)]
    return [name for name, _ in parts], [tensor for _, tensor in parts]


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the tensor, and the local shard of a DTensor."""
    if type(tensor) in _PLAIN:
        return (tensor,)
    local = getattr(tensor, "_local_tensor", None)
    return (tensor,) if local is None else (tensor, local)


def _differences(before: Look, now: Look, is_adopted: Callable[[int, int], bool]) -> Iterator[int]:
    """Yield the positions of the tensors that differ between two looks."""
    rows = enumerate(zip(zip(*before[:3], strict=True), zip(*now[:3], strict=True), strict=True))
    for i, ((version, address, dtype), (version_now, address_now, dtype_now)) in rows:
        moved = address != address_now and not is_adopted(i, int(address_now))
        if version != version_now or dtype is not dtype_now or moved:
            yield i


NamedTensors = Iterable[tuple[str, torch.Tensor]]


class WeightSource(Protocol):
    """The tensors that a sender sends.

    It may also have `made_of() -> (names, tensors)`, from which it makes those that it sends, and
    `changed`, names of tensors: an update fails with VerificationError where the former change
    while it is sent, or the latter is not empty then. `rounded` has the original dtypes by name of
    tensors that it casts to a floating-point dtype that is not larger: receivers that keep such a
    tensor in more digits than it has any more are named in a warning. `device_types` has the types
    of the devices of tensors that it makes. `holdings()` returns the Holdings of this rank, so that
    no rank gathers tensors for receivers on its host; None where the source only makes full ones.
    Every rank calls it, once, at `connect`.
    `take_merged()` returns how many elements merged adapters changed since it was called last, and
    how many of these lost the adapter in rounding; None where none were made.
    `belong_together` has for a tensor the name of another one, as that of its scale: an `update()`
    that sends one of the two alone is refused.
    `receiver_path` is the path of its receiver below the URL of a server that has several, as
    `adapters/policy`. If its ranks hold different tensors, it is a SplitSource.
    """

    @property
    def manifest(self) -> Manifest:
        """The specs of all tensors as they are sent. Read once, at `connect`."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors in the manifest's order, without aliases. Called once per update.

        The sender keeps each tensor alive until its bytes are copied.
        """

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """Return the same tensors where their memory stays, so that it can be registered.

        None where they are made for each update. Called once per update.
        """


class BaseTensors(NamedTuple):
    """Tensors in whose memory the stable tensors of a source are: `where[i]` is (base, byte)."""

    tensors: list[torch.Tensor]
    where: list[tuple[int, int]]


class SourceMemory:
    """The memory of a source's stable tensors, as the source of one rank's stream describes it.

    With defaults for other sources, whose tensors are whole.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def bases(self) -> BaseTensors | None:
        """Return the tensors in whose memory stable ones are; None where these are whole."""
        found: Callable[[], BaseTensors | None] | None = getattr(self._source, "bases", None)
        return None if found is None else found()

    def buffers(self) -> Sequence[torch.Tensor]:
        """Return tensors that share the memory of stable ones, and follow where that is moved."""
        found: Callable[[], Sequence[torch.Tensor]] = getattr(self._source, "buffers", tuple)
        return found()

    def views(self) -> Sequence[torch.Tensor]:
        """Return views of the bases that an update uses: they follow where these are moved."""
        found: Callable[[], Sequence[torch.Tensor]] = getattr(self._source, "views", tuple)
        return found()

    def look_of(self, tensors: Sequence[torch.Tensor]) -> Look | None:
        """Return what the update in progress has seen of these tensors, None where it has not."""
        found: Callable[[Sequence[torch.Tensor]], Look | None] | None
        found = getattr(self._source, "look_of", None)
        return None if found is None else found(tensors)

    def note_places(self) -> None:
        """Tell a source that is watched that the sender itself has moved some of its tensors."""
        note: Callable[[], None] | None = getattr(self._source, "note_places", None)
        if note is not None:
            note()

    def counting(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Return further tensors on which torch counts writes to those that are sent, with names.

        DTensors whose local tensors are sent, and tensors of torchao whose inner ones are.
        """
        found: Callable[[], Sequence[tuple[str, torch.Tensor]]]
        found = getattr(self._source, "counting", tuple)
        return found()


class SourceExtras:
    """The members that a WeightSource may have beside its own; defaults for one that lacks them."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def made_of(self) -> tuple[Sequence[str], Sequence[torch.Tensor]] | None:
        """Return names and tensors from which the source makes those that it sends, if it tells."""
        made: Callable[[], tuple[Sequence[str], Sequence[torch.Tensor]]] | None
        made = getattr(self._source, "made_of", None)
        return None if made is None else made()

    def holdings(self) -> Holdings | None:
        """Return what this rank holds of each tensor, None where the source does not tell."""
        held: Callable[[], Holdings | None] | None = getattr(self._source, "holdings", None)
        return None if held is None else held()

    @property
    def changed(self) -> Sequence[str]:
        """The tensors that the source found to have changed while it was sent."""
        return getattr(self._source, "changed", ())

    @property
    def rounded(self) -> Mapping[str, str]:
        """The original dtypes of tensors that the source rounds."""
        rounded: Mapping[str, str] = getattr(self._source, "rounded", {})
        return rounded

    def take_merged(self) -> tuple[int, int] | None:
        """Return, and forget, what a source that merges adapters counted; None of others."""
        take: Callable[[], tuple[int, int] | None] | None
        take = getattr(self._source, "take_merged", None)
        return None if take is None else take()

    @property
    def belong_together(self) -> Mapping[str, str]:
        """For each tensor that is sent with another one alone, the name of that, as a scale.

        Of a source that does not say it: of each quantized weight the scale beside it, and of
        tensors of torchao all that is inside.
        """
        pairs: Mapping[str, str] | None = getattr(self._source, "belong_together", None)
        return self._source.manifest.together if pairs is None else pairs

    @property
    def device_types(self) -> AbstractSet[str]:
        """The types of the devices of tensors that are made; empty where they are not known."""
        types: AbstractSet[str] = getattr(self._source, "device_types", frozenset())
        return types

    @property
    def receiver_path(self) -> str:
        """The path of the source's receivers below the URLs that it is sent to; often empty."""
        return str(getattr(self._source, "receiver_path", ""))


Writers = Iterator[tuple[str, Callable[[torch.Tensor], None]]]
"""Names of tensors, each with what writes its bytes to `uint8[n]` in host memory."""


@runtime_checkable
class WritingSource(WeightSource, Protocol):
    """A WeightSource that writes its tensors to memory that it is given, instead of its own.

    With `writes_pieces`, a tensor may be written in several pieces. Else it is written at once.
    """

    writes_pieces: bool

    def writers(self) -> Writers | None:
        """Yield, as `tensors` would, what writes a tensor; None where `tensors` has to be called.

        Each is called before the next one is requested, with memory for consecutive pieces of the
        tensor that begin at multiples of 64 bytes; not at all for a tensor without bytes.
        """


def makes_others(source: WeightSource) -> bool:
    """Whether a subclass of a source of this module yields other tensors than that one."""
    for name in ("manifest", "tensors", "shards", "gather", "stable_tensors"):
        owner = next((c for c in type(source).__mro__ if name in vars(c)), None)
        if owner is not None and owner.__module__ != __name__:
            return True
    return False


class ModuleSource:
    """The parameters and persistent buffers of an `nn.Module`, tied ones once, with aliases.

    `dtype` casts floating-point tensors on the way, `rename` maps names, `wants` takes those of the
    module's own names whose tensors are sent (None: all). Sharded parameters
    (DTensors, as `fully_shard` makes them) are gathered one decoder layer at a time: a collective
    of every rank of their mesh. Modules of `fully_shard` are resharded first. The methods raise
    ManifestMismatchError while the module does not have the tensors that it had at `connect`, under
    the same names; in which order it has them does not matter. Tensors of torchao are sent whole,
    as their inner tensors (docs/quantized.md); `dtype` does not cast these.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: Dtype | None = None,
        rename: Rename | None = None,
        wants: Wants | None = None,
    ) -> None:
        check_scripted(module)
        self.module = module
        self._dtype = as_dtype("dtype", dtype)
        self._fsdp = find_fsdp(module)
        self._reshard()
        self._found = ModuleTensors(module, rename=rename, wants=wants, opens=True)
        self._manifest = self._describe()
        self._take_over()
        self._fits = True
        named = zip(self._found.names, self._found.tensors, strict=True)
        warn_of_state(states_beside(named), "sent", self._found.modules)
        self._groups = groups_of(self._manifest)

    @property
    def manifest(self) -> Manifest:
        """Names, dtypes as sent, and full shapes."""
        return self._manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors without a cast; sharded ones are cast and gathered.

        A layer is gathered when its first tensor is requested.
        """
        self._look_again()
        names, tensors = self._names, self._tensors
        if self._sharded:
            yield from gather_groups(names, tensors, self._groups, self._dtype)
            return
        for name, tensor in zip(names, tensors, strict=True):
            yield name, tensor.detach()

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """Return the module's own tensors, None where a cast or a gather makes new ones."""
        self._look_again()
        return None if self._sharded or self._casts() else self._tensors

    @property
    def rounded(self) -> dict[str, str]:
        """The dtypes that the module has of tensors that are rounded before they are sent."""
        return rounded_by(self._manifest.specs, map(_dtype_of, self._tensors))

    def made_of(self) -> tuple[list[str], list[torch.Tensor]]:
        """Return the names by which tensors are sent, and the module's own tensors or shards."""
        self._look_again()
        return self._names, self._tensors

    def counting(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors of torchao, whose inner ones are sent, with the parameters' names."""
        return self._found.wrappers

    def holdings(self) -> Holdings | None:
        """Return the shards of this rank, and the tensors that each rank holds whole.

        None of a subclass that makes others.
        """
        if makes_others(self):
            return None
        return holdings_of(self.made_of, buffers=lambda: fsdp_buffers(self._fsdp))

    def cast_tensors(self) -> list[torch.Tensor] | None:
        """Return the tensors of which those that are sent are casts; None where some are shards."""
        self._look_again()
        return None if self._sharded else self._tensors

    def _casts(self) -> bool:
        return self._dtype is not None and any(
            TORCH_DTYPES[spec.dtype] is not tensor.dtype
            for spec, tensor in zip(self._manifest.specs, self._tensors, strict=True)
        )

    def _reshard(self) -> None:
        for part in self._fsdp:
            part.reshard()

    def _look_again(self) -> None:
        """Inspect the module, and take its tensors over where they fit the manifest.

        A change that does not fit is refused at every look until the module fits again: after an
        error nothing of the module is taken over, and the next look starts anew.
        """
        self._reshard()
        if self._found.refresh() or not self._fits:
            self._fits = False
            self._fsdp = find_fsdp(self.module)
            self._reshard()
            self._found.refresh()
            self._take_over()
            self._fits = True
        if self._on_meta:
            raise ManifestMismatchError(
                f"{len(self._on_meta)} tensors have no memory, they are on the meta device "
                f"(offloaded): {shorten(self._on_meta)}; bring them back before send_weights()",
                missing=self._on_meta,
            )

    def _take_over(self) -> None:
        """Take over what was found, in the manifest's order. Raises ManifestMismatchError."""
        found, manifest = self._found, self._manifest
        now = self._describe()
        names, tensors = found.names, found.tensors
        if now.digest != manifest.digest:
            ties = set(map(frozenset, manifest.places().values()))
            if ties != set(map(frozenset, now.places().values())):
                raise self._mismatch(now)
            # A parameter that was removed and set again, as `prune` does, is the last one.
            names = [spec.name for spec in manifest.specs]
            tensors = [found.tensors[now.index[name]] for name in names]
            specs = map(self._spec, names, tensors)
            if tuple(specs) != manifest.specs:
                raise self._mismatch(now)
        self._names, self._tensors = names, tensors
        self._sharded = any(map(is_sharded, tensors))
        # One that is moved into shared memory would leave those that share its memory behind. torch
        # counts the users of a storage, and these may have storages of their own (`from_numpy`): a
        # view makes them count.
        shared = [found.tensors[i] for i in found.tied]
        shared += [tensors[i] for group in find_sharing(tensors) for i in group]
        self._staying = [tensor.detach() for tensor in shared]
        self._on_meta = [n for n, t in zip(names, tensors, strict=True) if t.is_meta]

    def _mismatch(self, now: Manifest) -> ManifestMismatchError:
        changed = changes(self._manifest, now)
        return ManifestMismatchError(
            "the module's tensors are no longer those of connect(): "
            f"{shorten(changed)}; bring them back, or connect again",
            mismatched=changed,
        )

    def _describe(self) -> Manifest:
        found = list(zip(self._found.names, self._found.tensors, strict=True))
        check_sendable(found, self._dtype, or_meta=True)
        specs = tuple(self._spec(name, tensor) for name, tensor in found)
        return Manifest(specs, self._found.aliases)

    def _spec(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor as it is sent: those inside of a tensor of torchao are not cast."""
        return spec_of(name, tensor, None if name in self._found.inner else self._dtype)


class IterableSource:
    """The tensors of a callable that returns fresh `(name, tensor)` pairs for every update.

    Or a state dict, as `model.state_dict` does, whose tied tensors are sent once. The callable is
    called once at `connect` for the manifest; the sender compares each tensor of a later call with
    that. A DTensor is gathered when it is requested, so every rank must yield the same names in the
    same order. `changed` collects the names of tensors that other code changed during iterations,
    as YieldWatch detects it; the reader of `changed` also clears it. `device_types` has the types
    of the devices of the first iteration's tensors. `first` is what the callable has returned
    already, for the manifest.
    """

    def __init__(
        self,
        factory: Callable[[], NamedTensors | Mapping[str, torch.Tensor]],
        *,
        dtype: Dtype | None = None,
        rename: Rename | None = None,
        first: NamedTensors | Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._factory = factory
        self._yields_meta = False
        self._owners: dict[str, str] = {}
        self._rename = partial(renamed, rename=rename_with(rename), owners=self._owners)
        self._dtype = as_dtype("dtype", dtype)
        self.changed: list[str] = []
        self.rounded: dict[str, str] = {}
        self.device_types: set[str] = set()
        self._places = Places()
        given = factory() if first is None else first
        self._aliases: dict[str, str] | None = None
        if isinstance(given, Mapping):
            given = list(checked_pairs(given.items(), self._dtype, expansion=self._expansion()))
            self._aliases = find_ties(given)
            given = [(name, tensor) for name, tensor in given if name not in self._aliases]
        tied = self._aliases or {}
        aliases = {self._rename(a): self._rename(name) for a, name in tied.items()}
        self._manifest = Manifest(self._describe(given), aliases)

    @property
    def manifest(self) -> Manifest:
        """The specs of the first iteration."""
        return self._manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a new iteration, shards gathered."""
        for name, tensor in self.shards():
            yield name, self.gather(name, tensor)

    def shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a new iteration, shards not gathered; see `gather`."""
        watch = YieldWatch()
        last = len(self._manifest.specs) - 1
        try:
            given = self._factory()
            expansion = self._expansion(keeps=isinstance(given, Mapping))
            for i, (name, tensor) in enumerate(self._pairs(given, expansion)):
                sent = self._rename(name)
                watch.note(sent, tensor, expansion.wrappers_of(name) if expansion else ())
                yield sent, tensor
                watch.read()
                if i == last:  # changes at the end of the callable come after the last read
                    self.changed += watch.end()
        finally:
            watch.end()

    def holdings(self) -> Holdings | None:
        """Return the parts that this rank yields, made by a new iteration in each update.

        None where a placement does not say which rows this rank has: one iteration cannot make
        parts and full tensors. None of a subclass that makes others.
        """
        if makes_others(self):
            return None
        places = self._noted()
        if places.gathered:
            return None

        def parts() -> Iterator[torch.Tensor]:
            left = enumerate(places.names)
            at, held = next(left, (0, None))
            for name, tensor in checked(self.shards(), self._manifest, or_meta=self._yields_meta):
                if name != held:
                    continue  # other ranks hold it
                if tensor.is_meta:
                    raise ManifestMismatchError(
                        f"this rank held {name!r} at connect(), and yields it without memory; "
                        "bring it back, or connect again",
                        missing=[name],
                    )
                if is_sharded(tensor):
                    places.check([(at, tensor)])
                yield local_of(tensor)
                at, held = next(left, (0, None))

        # What yields shards gathers none; the tensors of a mapping are all made before the first.
        may_wait = self._aliases is None and not places.sharded
        return Holdings(places.names, places.boxes, parts, stays=False, may_wait=may_wait)

    def _noted(self) -> Places:
        """Return which parts of the tensors this rank yields: those of the first iteration."""
        return self._places

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """Whether `gather` is a collective for this tensor of `shards`."""
        return is_sharded(tensor)

    def gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of a DTensor, cast; others as is. Collective over its mesh."""
        return gather(tensor, self._dtype)

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """Return None: the tensors may be new ones every time."""
        return None

    def _expansion(self, *, keeps: bool = True) -> Expansion | None:
        """Return what replaces tensors of torchao in one iteration; None: they are refused."""
        return Expansion(self._owners, keeps=keeps)

    def _pairs(
        self,
        given: NamedTensors | Mapping[str, torch.Tensor],
        expansion: Expansion | None = None,
    ) -> NamedTensors:
        if not isinstance(given, Mapping):
            return checked_pairs(
                given,
                self._dtype,
                at_once=True,
                or_meta=self._yields_meta,
                expansion=expansion,
            )
        # All of them alive, or memory that is used again looks tied.
        pairs = list(checked_pairs(given.items(), self._dtype, expansion=expansion))
        aliases = find_ties(pairs)
        if self._aliases is not None and aliases != self._aliases:
            changed = sorted(aliases.items() ^ self._aliases.items())
            names = list(dict.fromkeys(alias for alias, _ in changed))
            raise ManifestMismatchError(
                f"other tensors are tied than at connect(): {shorten(names)}; connect again",
                mismatched=names,
            )
        return [(name, tensor) for name, tensor in pairs if name not in aliases]

    def _describe(self, pairs: NamedTensors) -> tuple[TensorSpec, ...]:
        specs = []
        states = {}
        expansion = self._expansion(keeps=False)  # of a callable that makes one after the other
        for name, tensor in checked_pairs(pairs, self._dtype, expansion=expansion):
            self.device_types.add(gathered_device(tensor))
            cast = None if name in self._owners else self._dtype
            specs.append(spec_of(self._rename(name), tensor, cast))
            self._places.note(specs[-1].name, tensor)
            self.rounded |= rounded_by(specs[-1:], [tensor.dtype])
            if keys := state_beside(tensor):
                states[name] = keys
        warn_of_state(states, "sent")
        return tuple(specs)


class SplitSource(IterableSource):
    """An IterableSource of which each rank may hold other tensors.

    `whole` are the names and full shapes of all tensors, on any device, also the meta device: the
    callable is not called for the manifest, and once for `holdings`. `held` has the positions in
    `whole` of those that this rank holds, None for all. The callable yields the others on the meta
    device; `join` gets them from the ranks that hold them.
    """

    def __init__(
        self,
        factory: Callable[[], NamedTensors],
        whole: Sequence[tuple[str, torch.Tensor]],
        held: Sequence[int] | None,
        *,
        dtype: Dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        self.held = held
        self._whole_model = whole
        self._join: Callable[[str, torch.Tensor], torch.Tensor] | None = None
        super().__init__(factory, dtype=dtype, rename=rename)
        self._yields_meta = held is not None

    def _noted(self) -> Places:
        """Return which parts of the tensors this rank yields, as an iteration now shows."""
        places = Places()
        pairs = self._pairs(self._factory())
        named = ((self._rename(name), tensor) for name, tensor in pairs)
        for name, tensor in checked(named, self._manifest, or_meta=self._yields_meta):
            if not tensor.is_meta:
                places.note(name, tensor)
        return places

    def _expansion(self, *, keeps: bool = True) -> None:
        """None: `whole` names tensors as they are."""
        return

    def join(self, share: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Have `share` return each full tensor: a collective of the ranks that hold its parts.

        It is given the tensor's name and what this rank has of it, on the meta device if nothing.
        """
        self._join = share

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """Whether `gather` is a collective for this tensor of `shards`."""
        return self._join is not None or super().is_shared(tensor)

    def gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full tensor, cast where it was sharded; a collective where `is_shared`."""
        if self._join is not None:
            return self._join(name, tensor)
        if tensor.is_meta:
            raise ConfigError(
                f"this rank does not hold {name!r}: a source that is split among ranks goes to "
                "connect() as it is, not inside of another source"
            )
        return super().gather(name, tensor)

    def _describe(self, _: NamedTensors) -> tuple[TensorSpec, ...]:
        specs = tuple(
            spec_of(self._rename(name), tensor, self._dtype) for name, tensor in self._whole_model
        )
        self.rounded = rounded_by(specs, [tensor.dtype for _, tensor in self._whole_model])
        return specs


class DeclaredSource(SplitSource):
    """Tensors of which the ranks hold the parts that they declare.

    `declare` returns the Holding of this rank, the same parts in the same order in every update: a
    list that `stays` the same one, or one that is made of the parameters as they are then. Full
    tensors, for receivers that cannot read from the ranks, are made by `join`, of the `parts` of an
    iteration. The manifest is that of this rank's tensors until `describe` has given those of all
    ranks.
    """

    def __init__(
        self,
        declare: Callable[[], Sequence[Holding]],
        *,
        dtype: Dtype | None = None,
        rename: Rename | None = None,
        first: Sequence[Holding] | None = None,
        stays: bool = False,
    ) -> None:
        listed = declare() if first is None else first
        self._declare = declare
        self._boxes = boxes_of(listed, as_dtype("dtype", dtype))
        self._said = list(map(said_by, listed))
        self._listed = list(listed) if stays else None
        self.parts: Sequence[torch.Tensor] = ()
        whole = tensors_of(listed)
        super().__init__(self._whole, _on_meta(whole), None, dtype=dtype, rename=rename)
        self._yields_meta = True
        self.device_types = {one.tensor.device.type for one in listed}
        self.own = Declared(tensors=whole, device_types=sorted(self.device_types))

    def describe(self, ranks: Sequence[Declared]) -> None:
        """Take over what all ranks have declared; `own` is what this one has.

        Raises ManifestMismatchError where they disagree on a tensor.
        """
        self.device_types = {kind for declared in ranks for kind in declared.device_types}
        self._whole_model = _on_meta(union_of(ranks))
        self._manifest = Manifest(self._describe(()))

    def holdings(self) -> Holdings:
        """Return the parts that this rank declares."""
        return Holdings(self._names(), self._boxes, self._parts, stays=self._listed is not None)

    def made_of(self) -> tuple[list[str], list[torch.Tensor]]:
        """Return the parts, each with the name by which the tensor is sent."""
        return self._names(), self._parts()

    def _names(self) -> list[str]:
        return [self._rename(said.name) for said in self._said]

    def _parts(self) -> list[torch.Tensor]:
        """Return the tensors of the parts as they are now, if those are the ones of `connect`."""
        listed = self._declare()
        same = are_holdings(listed) and len(listed) == len(self._said)
        if not (same and self._listed and all(map(operator.is_, listed, self._listed))):
            now = list(map(said_by, listed)) if are_holdings(listed) else []
            check_same(self._said, now)
        for one in listed:
            check_readable(one.name, one.tensor, self._dtype)
        return [one.tensor for one in listed]

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors without memory: the ranks make each when it is requested."""
        self.parts = self._parts()  # an error here comes before any rank waits for another
        try:
            yield from self._whole_model
        finally:
            self.parts = ()


def _on_meta(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="meta"))
        for name, dtype, shape in tensors
    ]


class StateDictSource(IterableSource):
    """The tensors of a state dict, read for every update; tied tensors once, with aliases."""

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor],
        *,
        dtype: Dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        super().__init__(lambda: state_dict, dtype=dtype, rename=rename)


def rounded_by(specs: Iterable[TensorSpec], given: Iterable[torch.dtype]) -> dict[str, str]:
    """Return the dtypes that tensors have, by name, where a cast to that of the spec may round."""
    return {
        spec.name: str(dtype).removeprefix("torch.")
        for spec, dtype in zip(specs, given, strict=True)
        if TORCH_DTYPES[spec.dtype] is not dtype
        and rounds(str(dtype).removeprefix("torch."), spec.dtype)
    }


def checked_pairs(
    pairs: Iterable[object],
    cast: torch.dtype | None = None,
    *,
    at_once: bool = False,
    or_meta: bool = False,
    expansion: Expansion | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `(name, tensor)` pairs. Raises ConfigError for others.

    An `expansion` replaces tensors of torchao by their inner tensors.

    Tensors that cannot be sent are left out, and named by a ConfigError at the end of all pairs.
    With `at_once` it comes at the first of them, and a freed tensor is a ManifestMismatchError.
    `cast` and `or_meta` as in `check_sendable`.
    """
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise ConfigError(
            f"tensors are a module, a state dict or (name, tensor) pairs, not {pairs!r:.60}"
        )
    refused = []
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ConfigError(
                f"a source yields (name, tensor) pairs, and this one yields a "
                f"{type(pair).__name__}: {pair!r:.60}"
            )
        name, tensor = pair
        if not isinstance(tensor, torch.Tensor):
            raise _no_tensor(name, tensor)
        opened = None if expansion is None else expansion.of(name, tensor, identity)
        for inner, part in ((name, tensor),) if opened is None else opened.named(name):
            if at_once:
                check_readable(inner, part, cast, or_meta=or_meta)
            elif (why := why_unsendable(part, cast, or_meta=or_meta)) is not None:
                refused.append((inner, why))
                continue
            yield inner, part
    if refused:
        raise refusal(refused)


def _no_tensor(name: str, value: object) -> ConfigError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, Mapping | nn.Module):
        advice = f"; give the value of {name!r} itself as the source"
    elif hasattr(value, "__array__"):
        advice = "; convert it with torch.as_tensor"
    else:
        advice = ""
    return ConfigError(f"{name!r} of the source is no tensor but a {kind}{advice}")


class Snapshot:
    """WeightSource of a copy of another source's tensors, in memory that stays.

    The copy has the dtypes that are sent, and lies on the devices of the tensors. It is as large as
    what the source sends: a model, or the boxes of one rank. `take` fills it again, `drop` frees
    it.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.merged: tuple[int, int] | None = None
        self._copies: list[torch.Tensor] = []
        self._is_whole = False

    @classmethod
    def of(cls, manifest: Manifest, tensors: Sequence[torch.Tensor]) -> Snapshot:
        """Return a snapshot whose memory are these tensors, which hold the copy already."""
        made = cls(manifest)
        made._copies, made._is_whole = list(tensors), True
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(tensor.nbytes for tensor in self._copies)

    def take(self, source: WeightSource, check: Callable[[], None]) -> None:
        """Copy the tensors of `source`; the source may change when this returns.

        `check` raises where the copy has to stop. After an error the copy cannot be sent.
        """
        self._is_whole = False
        stable = source.stable_tensors()
        if stable is not None:
            if len(self._copies) != len(stable):  # also where an earlier copy stopped half way
                self._copies = [
                    self._place(spec, tensor)
                    for spec, tensor in zip(self.manifest.specs, stable, strict=True)
                ]
            pairs = list(map(as_integers, self._copies, stable))
            with torch.no_grad():
                torch._foreach_copy_([copy for copy, _ in pairs], [tensor for _, tensor in pairs])
        else:
            for i, (_, tensor) in enumerate(checked(source.tensors(), self.manifest)):
                check()
                if i == len(self._copies):
                    self._copies.append(self._place(self.manifest.specs[i], tensor))
                with torch.no_grad():
                    self._copies[i].copy_(tensor.detach())
        # Another thread reads them, on streams of its own.
        wait_for(tensor.device for tensor in self._copies)
        self._is_whole = True

    def drop(self) -> None:
        """Free the copy."""
        self._is_whole = False
        self._copies = []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the copies."""
        for spec, tensor in zip(self.manifest.specs, self.stable_tensors(), strict=True):
            yield spec.name, tensor

    def stable_tensors(self) -> list[torch.Tensor]:
        """Return the copies. Raises TransferError without a whole copy."""
        if not self._is_whole:
            raise TransferError("there is no whole copy of the weights; send again")
        return self._copies

    def take_merged(self) -> tuple[int, int] | None:
        """Return what was counted when the copy was taken."""
        return self.merged

    def _place(self, spec: TensorSpec, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=tensor.device)


def find_ties(pairs: NamedTensors) -> dict[str, str]:
    """Return `{alias: name}` of tensors that share memory; all must be alive at the same time."""
    first: dict[object, str] = {}
    names = {name: first.setdefault(_memory(tensor), name) for name, tensor in pairs}
    return {name: known for name, known in names.items() if name != known}


def _memory(tensor: torch.Tensor) -> object:
    """Return a key, equal for tied tensors of a state dict, where each is an object of its own."""
    if not is_sharded(tensor):
        return identity(tensor)
    shard = cast("Any", tensor)
    local = local_of(tensor)
    if type(local) not in _PLAIN:
        return id(local)
    # The storage, not its address: a rank whose shards are empty must find the ties of the others.
    where = local.untyped_storage()._cdata, local.storage_offset(), local.dtype, local.stride()
    return *where, tensor.shape, shard.placements, shard.device_mesh


def checked(
    pairs: NamedTensors, manifest: Manifest, *, or_meta: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the pairs, and raise ManifestMismatchError at the first that differs from `manifest`.

    Without this check a source that differs from its own manifest would send wrong bytes, or keep
    the receiver waiting. Raises ConfigError for a tensor that cannot be sent: its bytes would be
    read where it has none. `or_meta` allows tensors that another rank holds.
    """
    specs = iter(manifest.specs)
    for position, (name, tensor) in enumerate(pairs):
        spec = next(specs, None)
        if spec is None:
            raise ManifestMismatchError(
                f"the source yields {name!r} at position {position}, after its manifest's last "
                "tensor; connect again if the model has changed",
                unexpected=[name],
            )
        check_readable(name, tensor, TORCH_DTYPES[spec.dtype], or_meta=or_meta)
        if name != spec.name or tensor.shape != spec.shape or not _fits(tensor.dtype, spec):
            raise _diverges(position, spec, name, tensor)
        yield name, tensor
    left: TensorSpec | None = next(specs, None)
    if left is not None:
        raise ManifestMismatchError(
            f"the source ended before {left.name!r}, which its manifest has",
            missing=[left.name, *(spec.name for spec in specs)],
        )


def _fits(dtype: torch.dtype, spec: TensorSpec) -> bool:
    """Whether a tensor of `dtype` can be sent as `spec`: packing casts floating-point ones only."""
    target = TORCH_DTYPES[spec.dtype]
    return dtype is target or (dtype.is_floating_point and target.is_floating_point)


def _diverges(
    position: int, spec: TensorSpec, name: str, tensor: torch.Tensor
) -> ManifestMismatchError:
    shape = list(tensor.shape)
    found, wanted = f"{name!r} {shape}", f"{spec.name!r} {list(spec.shape)}"
    if name == spec.name and tensor.shape == spec.shape:
        found, wanted = f"{name!r} {dtype_name(tensor.dtype)}{shape}", f"{spec.name!r} {spec}"
    return ManifestMismatchError(
        f"the source diverges from its manifest at position {position}: it yields {found}, the "
        f"manifest has {wanted}; connect again if the model has changed",
        mismatched=[f"{spec.name}: {spec}, yielded {found}"],
    )


def as_source(
    source: object, *, dtype: Dtype | None = None, rename: Rename | None = None
) -> WeightSource:
    """Return a WeightSource for a module, a state dict, a callable, or a WeightSource.

    Also for a list of Holding, a callable that returns one, and an object that an integration knows
    as the source of another system.

    Raises ConfigError for anything else, also for a generator: it is exhausted after one update.
    """
    if isinstance(source, nn.Module):
        made = provided("source")(source, dtype=dtype, rename=rename)
        if made is not None:
            return cast("WeightSource", made)
        return ModuleSource(source, dtype=dtype, rename=rename)
    if isinstance(source, Mapping):
        return StateDictSource(source, dtype=dtype, rename=rename)
    if all(hasattr(source, name) for name in ("manifest", "tensors", "stable_tensors")):
        if dtype is not None or rename is not None:
            raise ConfigError(
                "a WeightSource names and casts its own tensors; leave out dtype/rename"
            )
        return source  # type: ignore[return-value]  # a protocol, checked by its members above
    if (made := provided("source")(source, dtype=dtype, rename=rename)) is not None:
        return cast("WeightSource", made)
    if isinstance(source, list | tuple):
        listed: Sequence[Holding] = source
        return DeclaredSource(lambda: listed, dtype=dtype, rename=rename, stays=True)
    if callable(source):
        first = source()
        if are_holdings(first):
            return DeclaredSource(source, dtype=dtype, rename=rename, first=first)
        return IterableSource(source, dtype=dtype, rename=rename, first=first)
    raise ConfigError(
        f"cannot send from an object of {type(source).__name__}; give an nn.Module, a state dict, "
        "a WeightSource or a callable that returns fresh (name, tensor) pairs for every update"
    )
