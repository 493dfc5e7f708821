"""Modules as sinks: their tensors, whole or sharded, staged in an arena or written in place."""

from __future__ import annotations

import functools
import operator
import os
import sys
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import nn

from weightsync.errors import (
    ConfigError,
    ManifestMismatchError,
    TransferError,
    VerificationError,
    shorten,
)
from weightsync.specs import Manifest, TensorSpec, changes
from weightsync.tensors import (
    PLAIN_CLASSES,
    TORCH_DTYPES,
    address_of,
    as_bytes,
    contiguous_bytes,
    from_bytes,
    is_plain,
    spec_of,
)
from weightsync.weights.copying import arena
from weightsync.weights.copying.checksums import to_hex
from weightsync.weights.copying.copy_plan import Memory, Share
from weightsync.weights.copying.fingerprint import mix64, part_of
from weightsync.weights.copying.fused import PairCopies
from weightsync.weights.copying.layout import StreamLayout, aligned
from weightsync.weights.copying.shards import Slice, Slicer, is_sharded, local_of
from weightsync.weights.inner_tensors import Expansion, InnerTensors
from weightsync.weights.lines.memory import LineMemory, Marks, new_marks
from weightsync.weights.lines.shard_lines import lines_of, takes_lines
from weightsync.weights.sinks.asleep import GpuMemory, give_back
from weightsync.weights.sinks.base import (
    Apply,
    ArenaTarget,
    LoadTarget,
    Verification,
    WeightSink,
    check_manifest,
    uses,
    write_counts,
)
from weightsync.weights.sinks.frozen import (
    check_frozen,
    check_scripted,
    is_freezing,
    warn_of_freezing,
)
from weightsync.weights.tensor_kinds import (
    Shared,
    check_writable,
    find_sharing,
    lacks_memory,
    overlaps,
    states_beside,
    warn_of_state,
)
from weightsync.wire.messages import TensorPart

WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts of parameter names that DDP, DeepSpeed, torch.compile, activation checkpointing and FSDP1
insert."""

_BLOCK = 128
"""Modules that are asked together."""
_COMPILED = operator.attrgetter("_compiled_call_impl")
_TABLES = operator.attrgetter("_parameters", "_buffers", "_modules")
P = ParamSpec("P")
S = TypeVar("S", bound="ModuleSink")
T = TypeVar("T")

Rename = Callable[[str], str] | Mapping[str, str]
"""Maps a tensor's name to the name it is sent by; a mapping may lack names."""
Wants = Callable[[str], bool]
"""Whether a module's tensor is sent, by its own name."""


def strip_wrappers(name: str) -> str:
    """Remove the names of wrapper modules from a parameter's name."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def rename_with(rename: Rename | None) -> Callable[[str], str]:
    """Return a function that maps names; names that a mapping lacks stay as they are."""
    if rename is None:
        return lambda name: name
    if callable(rename):
        return partial(_renamed, rename)
    if not isinstance(rename, Mapping):
        raise ConfigError(
            f"rename is a mapping of names or a callable, not {rename!r}; to remove a prefix: "
            f"lambda name: name.removeprefix({rename!r})"
        )
    table = dict(rename)
    return partial(_renamed, lambda name: table.get(name, name))


def _renamed(rename: Callable[[str], object], name: str) -> str:
    """Return the name that `rename` gives to `name`. Raises ConfigError if it is no text."""
    renamed = rename(name)
    if not isinstance(renamed, str):
        raise ConfigError(
            f"rename makes {renamed!r:.60} of {name!r}; it returns the name to send, or the "
            "same one"
        )
    return renamed


class ModuleTensors:
    """The parameters and persistent buffers of a module with their names, tied ones once.

    The module is walked once, and again only where `refresh` finds a change: a walk over 37,000
    parameters takes longer than a copy. `tied[i]` are further tensor objects over the memory of
    `tensors[i]`. `aliases` maps a tied name to the name of its tensor. `modules` are all
    submodules; `compiled` says that torch.compile was called with one. With `wants` only the
    tensors of which it takes the module's own name are found.

    With `opens`, tensors of torchao are found as their inner tensors, where these can be sent:
    `inner` has the names of all that were made of them.
    """

    compiled: bool

    def __init__(
        self,
        module: nn.Module,
        *,
        rename: Rename | None = None,
        wants: Wants | None = None,
        opens: bool = False,
    ) -> None:
        self.module = module
        self._rename = rename_with(rename)
        self._wants = wants
        self._opens = opens
        self._walk()

    @property
    def wrappers(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors of torchao, of which inner ones were found, with the names of parameters."""
        listed = self._expansion.wrappers.items()
        return [(name, wrapper) for name, wrappers in listed for wrapper in wrappers]

    @property
    def inner(self) -> Container[str]:
        """The names of inner tensors, and of their descriptions."""
        return self._expansion.owners

    def refresh(self, *, notes_compiled: bool = False) -> bool:
        """Return True when the module changed since the last call; all attributes are then new.

        `compiled` is as it was without `notes_compiled`, if nothing else changed.
        """
        same = True
        for block in self._blocks:
            same = same and block.is_same()
            self.compiled = self.compiled or (notes_compiled and block.is_compiled())
        same = same and all(
            other.data_ptr() == self.tensors[i].data_ptr()
            for i, others in self.tied.items()
            for other in others
        )
        same = same and all(opened.is_current() for opened in self._opened)
        if not same:
            # Made apart: where the walk fails, everything stays as it was, and is found again.
            found = ModuleTensors(
                self.module, rename=self._rename, wants=self._wants, opens=self._opens
            )
            self.__dict__.update(vars(found))
        return not same

    def _walk(self) -> None:
        self.names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.tied: dict[int, list[torch.Tensor]] = {}
        self.aliases: dict[str, str] = {}
        self._blocks: list[_Places] = []
        self.modules: list[nn.Module] = []
        self.compiled = False
        self._expansion = Expansion()
        self._opened: list[InnerTensors] = []
        first: dict[object, int] = {}
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            self._note_module(module)
            for key, held in self._own_tensors(module):
                own = strip_wrappers(f"{prefix}.{key}" if prefix else key)
                if self._wants is not None and not self._wants(own):
                    continue
                for name, tensor in self._parts_of(self._rename(own), held):
                    known = first.setdefault(identity(tensor), len(self.names))
                    if known == len(self.names):
                        self.names.append(name)
                        self.tensors.append(tensor)
                    elif name != self.names[known]:
                        self.aliases[name] = self.names[known]
                        self._note_tied(known, tensor)

    def _parts_of(self, name: str, held: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Return what is sent of a parameter: itself, or its inner tensors."""
        opened = self._expansion.of(name, held, identity) if self._opens else None
        if opened is None:
            return ((name, held),)
        self._opened.append(opened)
        return opened.named(name)

    def _note_tied(self, index: int, tensor: torch.Tensor) -> None:
        """Keep a tensor object that shares only the memory of `tensors[index]`, not the object."""
        known = [self.tensors[index], *self.tied.get(index, [])]
        if all(tensor is not other for other in known):
            self.tied.setdefault(index, []).append(tensor)

    def _note_module(self, module: nn.Module) -> None:
        if not len(self.modules) % _BLOCK:
            self._blocks.append(_Places())
        self._blocks[-1].add(module)
        self.modules.append(module)
        self.compiled = self.compiled or "_orig_mod" in module._modules or bool(_COMPILED(module))
        for key, child in module._modules.items():
            self._blocks[-1].note(module._modules, key, child)

    def _own_tensors(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        transient = module._non_persistent_buffers_set
        tables: tuple[dict[str, torch.Tensor | None], ...] = (
            module._parameters,  # type: ignore[assignment]  # Parameter is a Tensor; dict is invariant
            module._buffers,
        )
        for table in tables:
            for key, tensor in table.items():
                if table is module._buffers and key in transient:
                    continue
                self._blocks[-1].note(table, key, tensor)
                if tensor is not None:
                    yield key, tensor


class _Places:
    """Some modules, and what is in each place of their tables.

    So few that what one question brings into the caches is there for the next one: in a model of
    thousands of modules each is a few cache lines here and there.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._all_tables: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._tables: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._held: list[torch.Tensor | nn.Module | None] = []

    def add(self, module: nn.Module) -> None:
        """Add a module, whose places are noted next."""
        tables = _TABLES(module)
        self._modules.append(module)
        self._all_tables += tables
        self._sizes += map(len, tables)

    def note(self, table: dict[str, Any], key: str, held: torch.Tensor | nn.Module | None) -> None:
        """Note what is in one place of a module that was added."""
        self._tables.append(table)
        self._keys.append(key)
        self._held.append(held)

    def is_same(self) -> bool:
        """Whether the modules have the same tables, with the same in them. No loop in Python."""
        tables = chain.from_iterable(map(_TABLES, self._modules))
        same = all(map(operator.is_, tables, self._all_tables))
        return (same and list(map(len, self._all_tables)) == self._sizes) and (
            all(map(operator.is_, self._found(), self._held))
            or all(map(_holds, self._found(), self._held))
        )

    def is_compiled(self) -> bool:
        """Whether the `compile` of any of the modules was called."""
        return any(map(_COMPILED, self._modules))

    def _found(self) -> Iterator[object]:
        return map(dict.get, self._tables, self._keys)


def _holds(found: Any, held: torch.Tensor | nn.Module | None) -> bool:
    """Whether a place holds the object, or the form of it that replaces it in a forward pass.

    While a tensor-parallel module computes, transformers replaces its DTensors by their local
    tensors, and a bias that it adds later by None.
    """
    if found is held or not isinstance(held, torch.Tensor):
        return found is held
    local = getattr(held, "_local_tensor", None)
    return local is not None and (found is None or found.data_ptr() == local.data_ptr())


def _lazily(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Whether torch conjugates, and whether it negates what it reads of the tensor's memory.

    Negated are complex tensors, and imaginary parts, whose elements do not follow each other. Other
    tensors are not asked: both calls let other threads run, in each of thousands of tensors.
    """
    if tensor.is_contiguous() and tensor.numel() > 1 and not tensor.dtype.is_complex:
        return False, False
    return tensor.is_conj(), tensor.is_neg()


def identity(tensor: torch.Tensor) -> object:
    """Return a key, equal for tied tensors: one object, or equal views of the same memory."""
    plain = type(tensor) in PLAIN_CLASSES and tensor.layout is torch.strided
    # Freed tensors, as those on the meta device, all have the address 0.
    address = address_of(tensor) if plain and not tensor.is_nested else 0
    if not address or not tensor.numel():
        return id(tensor)
    return address, tensor.dtype, tensor.shape, tensor.stride(), _lazily(tensor)


Swap = Literal["auto", "pointer", "copy"]
"""How a commit puts staged weights to use; see ModuleSink."""


@dataclass(frozen=True, slots=True)
class Destination:
    """One tensor as this process loads it: its spec, and the module's tensors that receive it."""

    spec: TensorSpec
    targets: list[torch.Tensor]


@dataclass(frozen=True)
class Destinations:
    """The destinations of one manifest's tensors in a sink.

    Without `shares` there is one for each tensor of the stream. Else destination i holds the
    blocks `shares[i]`.
    """

    tensors: list[Destination]
    shares: Sequence[Share] | None = None

    @property
    def specs(self) -> list[TensorSpec]:
        """The specs of all destinations, in order."""
        return [destination.spec for destination in self.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of an arena that holds all of them."""
        return sum(aligned(destination.spec.nbytes) for destination in self.tensors)

    def in_arena(self, buffer: torch.Tensor) -> Memory:
        """Return the memory of all in an arena; whole tensors have the stream's offsets in it."""
        tensors, at = [], 0
        for destination in self.tensors:
            tensors.append(buffer[at : at + destination.spec.nbytes])
            at += aligned(destination.spec.nbytes)
        return Memory(tensors, flat=True, shares=self.shares)


def _locked(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], T]:
    """Run a method of a sink with its lock."""

    @functools.wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lock:
            result = method(self, *args, **kwargs)
        return result  # noqa: RET504  # an interrupt at a `return` inside would leave the lock taken

    return run


class ModuleSink(WeightSink):
    """The sink of a module: its parameters and persistent buffers.

    `cast` accepts floating-point tensors of another dtype. `swap` says how a commit puts staged
    weights to use: `pointer` points the module's tensors at them (a microsecond for each tensor),
    `copy` copies them over, so that no address changes. `auto` means `copy` on GPUs, because
    captured graphs keep addresses, and for compiled modules, also those compiled later; else
    `pointer`.

    Thread-safe: `lock` guards what is known of the module's tensors, and their pointers while they
    are set. It is not held while tensors are read.

    Of a tensor of torchao the inner tensors are written to, by either swap: the tensor itself stays
    the same object. What is offered has to have its class and attributes (docs/quantized.md).

    Raises ConfigError for a module with DTensors; ShardedModuleSink takes those.
    """

    verification: Verification = "held"
    sleeps = True

    def __init__(self, module: nn.Module, *, cast: bool = False, swap: Swap = "auto") -> None:
        check_scripted(module)
        check_frozen(module)
        warn_of_freezing(module)
        self.lock = threading.RLock()
        self.module = module
        self.casts = cast
        self._gpu_memory = GpuMemory()
        self._found = ModuleTensors(module, opens=True)
        check_writable(self._named())
        self._held = self._hold()
        self._described = self._describe()
        self.manifest = self._described
        warn_of_state(states_beside(self._named()), "written", self._found.modules)
        self._chooses = swap == "auto"
        self.swap = self._choose_swap() if swap == "auto" else swap
        self._generation = 0
        self.address_changes = 0
        self.settled()
        self._sharing = self._find_sharing()
        self._alone = self._find_alone({})
        with _fork:
            _sinks.add(self)

    def let_cast(self, names: frozenset[str]) -> None:
        """Cast these tensors from now on, and no others."""
        if names != self.may_cast:
            self.may_cast = names
            self.__dict__.pop("_differences", None)

    @property
    def device(self) -> torch.device:
        """The device of the first tensor; the CPU for a module without tensors."""
        return next((t.device for t in self._held), torch.device("cpu"))

    @property
    @_locked
    def ties(self) -> Mapping[str, str]:
        """The tied names that were found, and those that transformers declares.

        The shards of tied tensors share no memory, so only the declaration tells that they are
        tied.
        """
        found, known = super().ties, self._described.index
        declared = getattr(self.module, "all_tied_weights_keys", None)
        pairs = declared.items() if isinstance(declared, dict) else ()
        return {**{a: n for a, n in pairs if a in known and n in known}, **found}

    @property
    def gpus(self) -> frozenset[torch.device]:
        """The GPUs of all tensors at the last `refresh`."""
        return self._gpus

    @property
    def generation(self) -> int:
        """The result of the last `refresh`."""
        return self._generation

    @property
    @_locked
    def tensors(self) -> list[torch.Tensor]:
        """The module's tensors in the manifest's order: of DTensors, the local tensors."""
        self.refresh()
        return self._held

    def stamps(self, *, looks: bool = True) -> list[int] | None:
        """Return torch's counts of the writes to the module's tensors, tied ones included.

        None where a tensor has no count. Unless it `looks`, of the tensors of the last `refresh`.
        """
        with self.lock:
            if looks:
                self.refresh()
            counted = self._counted()
        return write_counts(counted)

    def _counted(self) -> list[torch.Tensor]:
        """Return the tensors on which torch counts writes to those of the module."""
        wrappers = [wrapper for _, wrapper in self._found.wrappers]
        return [*self._held, *map(local_of, self._tied()), *wrappers]

    def _tied(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(self._found.tied.values())

    @_locked
    def refresh(self) -> int:
        """Detect tensors that other code replaced, moved, cast or offloaded.

        Returns a number that changes with every such change; load targets opened under another
        number are of no use. Raises ManifestMismatchError where the manifest changed.
        """
        replaced = self._found.refresh(notes_compiled=self._chooses)
        before, self._held = self._held, self._hold()
        try:
            self._note_changes(before, replaced=replaced)
        except Exception:
            self._held = before  # the next call inspects the module again
            raise
        if self.manifest is not None and self._described.digest != self.manifest.digest:
            changed = changes(self.manifest, self._described)
            raise ManifestMismatchError(
                "the receiving module is no longer the one that WeightReceiver was made with: "
                f"{shorten(changed)}; bring it back, or make a new WeightReceiver",
                mismatched=changed,
            )
        return self._generation

    def _note_changes(self, before: Sequence[torch.Tensor], *, replaced: bool) -> None:
        """Inspect the tensors where any of them is not the one of `before`, or has moved."""
        replaced = replaced or not all(map(operator.is_, before, self._held))
        if self._chooses and self.swap == "pointer" and self._choose_swap() == "copy":
            check_frozen(self.module)
            self.swap = "copy"
            replaced = True
        elif is_freezing():
            check_frozen(self.module)
        if replaced or _addresses_of(self._held) != self._addresses:
            known = zip(before, self._addresses, strict=True)
            alone = {id(t): address for t, address in known if self.is_alone(t)}
            self._described = self._describe()
            self._generation += 1
            self._sharing = self._find_sharing()
            self._alone = self._find_alone(alone)
            self.settled()

    @_locked
    def settled(self, addresses: list[int] | None = None) -> None:
        """Record the tensors' addresses, so that `refresh` sees when other code moves them.

        Called whenever this sink itself has moved tensors: `address_changes` counts that, for
        load targets that were made for the addresses of before. `addresses` are where it moved
        them, if that is known; else each is asked.
        """
        self._addresses = _addresses_of(self._held) if addresses is None else addresses
        self.address_changes += 1

    def addresses(self) -> list[int]:
        """Return the addresses of the tensors, as recorded last."""
        return self._addresses

    def is_alone(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of `tensor` had no other user when this sink first inspected it.

        After a swap by pointer, a view that the module keeps of a parameter would show the old
        weights. Such parameters are copied over instead.
        """
        return id(tensor) in self._alone

    @property
    def shares_memory(self) -> bool:
        """Whether `is_sharing` is true of any tensor."""
        return bool(self._sharing)

    def is_sharing(self, tensor: torch.Tensor) -> bool:
        """Whether another tensor, not tied to `tensor`, reaches into its memory.

        Each update is to have values for them that agree (`LoadTarget.shared`). They are written by
        copies, so that they go on sharing memory.
        """
        return id(tensor) in self._sharing

    @_locked
    def open_target(self, layout: StreamLayout, apply: Apply) -> LoadTarget:
        """Return arenas for staged weights, or the module's own memory (`in_place`).

        Raises ManifestMismatchError for tensors without a place, TransferError without room.
        """
        check_manifest(self, layout.manifest, partial=True)
        generation = self.refresh()  # before the tensors are listed: it is older, if any differs
        destinations = self.destinations(layout)
        if apply == "in_place":
            return _InPlaceTarget(self, generation, destinations)
        tied = sum(map(len, self._found.tied.values()))
        whole = (
            sum(len(destination.targets) for destination in destinations.tensors)
            == len(self.tensors) + tied
        )
        if self.swap == "pointer" and whole:
            return _PointerTarget(self, generation, layout, destinations)
        return _CopyTarget(self, generation, layout, destinations)

    @_locked
    def staged_nbytes(self, layout: StreamLayout) -> int:
        """Return the bytes of one arena, and of the tensors that cannot be pointed at it."""
        destinations = self.destinations(layout)
        if self.swap == "copy":
            return destinations.nbytes
        staying = [
            p for p in destinations.tensors if not all(self.moves(t, p.spec) for t in p.targets)
        ]
        return destinations.nbytes + sum(
            aligned(destination.spec.nbytes) for destination in staying
        )

    def moves(self, tensor: torch.Tensor, spec: TensorSpec) -> bool:
        """Whether the tensor may be pointed at other memory that holds the bytes of `spec`."""
        return _takes_bytes(tensor, spec, self.device) and self.is_alone(tensor)

    @_locked
    def destinations(self, layout: StreamLayout) -> Destinations:
        """Return the destinations of the tensors of `layout`."""
        groups = self.targets(layout.manifest)
        return Destinations(
            [Destination(*pair) for pair in zip(layout.manifest.specs, groups, strict=True)]
        )

    @_locked
    def targets(self, offered: Manifest) -> list[list[torch.Tensor]]:
        """Return for each offered tensor the module's tensors that receive it.

        Raises ManifestMismatchError for tensors that cannot be written to.
        """
        tensors, wanted = self.tensors, self._described
        places = wanted.places()
        groups: list[list[torch.Tensor]] = [[] for _ in offered.specs]
        for i, (spec, tensor) in enumerate(zip(wanted.specs, tensors, strict=True)):
            names = places[spec.name]
            source = next((offered.index[n] for n in names if n in offered.index), None)
            if source is not None:
                groups[source] += [tensor, *self._found.tied.get(i, [])]
        fixed = [
            spec.name
            for spec, group in zip(offered.specs, groups, strict=True)
            if not all(map(_is_writable, group))
        ]
        if fixed:
            raise ManifestMismatchError(
                f"{len(fixed)} tensors of the receiving module cannot be written to, they have no "
                f"memory (offloaded) or elements that share it (expanded): {shorten(fixed)}; bring "
                "them back",
                mismatched=fixed,
            )
        return groups

    def fall_asleep(self, level: int) -> None:
        """Give memory that nothing but the module's tensors uses back.

        Tensors on the host are where level 1 would move them.
        """
        with self.lock:
            alone = [tensor for tensor in self._held if self.is_alone(tensor)]
        on_gpus = [tensor for tensor in alone if tensor.device.type != "cpu"]
        self._gpu_memory.fall_asleep(on_gpus, keep=level == 1)
        if level > 1:
            give_back(alone)

    def wake_up(self) -> None:
        self._gpu_memory.wake_up()

    def in_use(self, manifest: Manifest) -> list[torch.Tensor] | None:
        """Return the module's tensors that `manifest` names."""
        return [_readable(group[0]) for group in self.targets(manifest)]

    def checksums(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return mix64 of the tensors in use by name, aliases included.

        Raises ConfigError for names that the module does not have.
        """
        held = self._tensors_of(names)
        known: dict[int, str] = {}
        for tensor in held.values():
            if id(tensor) not in known:
                known[id(tensor)] = to_hex(mix64(contiguous_bytes(tensor)))
        return {name: known[id(tensor)] for name, tensor in held.items()}

    @_locked
    def _tensors_of(self, names: Iterable[str] | None) -> dict[str, torch.Tensor]:
        """Return the tensors in use by name, aliases included; see `checksums`."""
        tensors, index = self.tensors, self._described.index
        wanted = list(index) if names is None else list(names)
        unknown = [name for name in wanted if name not in index]
        if unknown:
            raise ConfigError(f"no such tensors here: {', '.join(unknown[:10])}")
        freed = [name for name in wanted if lacks_memory(tensors[index[name]])]
        if freed:
            raise ManifestMismatchError(
                f"{len(freed)} tensors of the receiving module have no memory (offloaded): "
                f"{shorten(freed)}; bring them back",
                mismatched=freed,
            )
        return {name: tensors[index[name]] for name in wanted}

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        return zip(self._found.names, self._found.tensors, strict=True)

    def _hold(self) -> list[torch.Tensor]:
        """Return the tensors that this process holds."""
        return self._found.tensors

    def _inspect(self) -> None:
        """Inspect new tensors. Raises ConfigError where this sink cannot load into them."""
        sharded = [
            name
            for name, tensor in zip(self._found.names, self._found.tensors, strict=True)
            if is_sharded(tensor)
        ]
        if sharded:
            raise ConfigError(
                f"{len(sharded)} tensors of the module are sharded (DTensor): {shorten(sharded)}; "
                "give the module itself to WeightReceiver, or a ShardedModuleSink"
            )

    def _describe(self) -> Manifest:
        check_writable(self._named(), or_overlapping=True)
        self._inspect()
        self._gpus = frozenset(t.device for t in self._held if t.device.type == "cuda")
        found = zip(self._found.names, self._found.tensors, strict=True)
        specs = tuple(spec_of(name, tensor) for name, tensor in found)
        return Manifest(specs, self._found.aliases)

    def _find_sharing(self) -> set[int]:
        """Return the ids of tensors of which another one shares memory without being tied."""
        tied = self._found.tied
        return {
            id(tensor)
            for group in find_sharing(self._held)
            for i in group
            for tensor in (self._held[i], *map(local_of, tied.get(i, [])), *tied.get(i, []))
        }

    def _find_alone(self, known: Mapping[int, int]) -> set[int]:
        """Return the ids of tensors whose memory has no other user.

        `known` are those that had none before, with their addresses. A tensor that is still there
        is not inspected again, since it shares an arena with the others by now, unless a buffer
        that is not persistent uses that arena.
        """
        alone: set[int] = set()
        viewed = (
            {_storage_of(t) for m in self._found.modules for t in _transient(m)} if known else ()
        )
        for i, tensor in enumerate(self._held):
            tied = self._found.tied.get(i, [])
            stays = id(tensor) in known and known[id(tensor)] == tensor.data_ptr()
            if (stays and _storage_of(tensor) not in viewed) or _uses_alone(
                tensor, others=len(tied)
            ):
                alone.update(map(id, [tensor, *tied]))
        return alone - self._sharing  # not counted, where both have a storage of their own

    def _choose_swap(self) -> Swap:
        return "copy" if self._found.compiled or self.gpus else "pointer"


def _transient(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the module's own buffers that are not persistent."""
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers.get(name)
        if buffer is not None:
            yield buffer


def _storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage, 0 for a tensor without one of its own."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def _uses_alone(tensor: torch.Tensor, *, others: int) -> bool:
    """Whether only the tensor and `others` tensors tied to it use its storage."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return False
    # One use is the Python wrapper of the storage.
    return uses(tensor) <= 2 + others


def _is_writable(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory, and a place of its own in it for each element."""
    return not (lacks_memory(tensor) or overlaps(tensor))


def _takes_bytes(tensor: torch.Tensor, spec: TensorSpec, device: torch.device) -> bool:
    """Whether the bytes of `spec`, without a cast, can be the memory of the tensor."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and is_plain(tensor, spec)
        and tensor.device == device
    )


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its history; through a new one where torch would refuse views."""
    if write_counts([tensor]) is not None:
        return tensor.detach()
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        storage = tensor.untyped_storage()
        return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


class _ModuleTarget(LoadTarget):
    """A load target that detects that other code has changed the module since `generation`."""

    def __init__(self, sink: ModuleSink, generation: int, destinations: Destinations) -> None:
        self._sink = sink
        self._generation = generation
        self._address_changes = sink.address_changes
        self._stamps: list[int] | None = None
        self._note_sharing(destinations)

    def _note_sharing(self, destinations: Destinations) -> None:
        listed = enumerate(destinations.tensors if self._sink.shares_memory else ())
        self._sharing = [
            (i, destination.spec, tensor)
            for i, destination in listed
            for tensor in destination.targets
            if self._sink.is_sharing(tensor)
        ]

    def shared(self) -> Sequence[Shared]:
        if not self._sharing or self.memory is None:
            return ()
        parts = self.memory.tensors
        return [
            Shared(spec.name, tensor, from_bytes(parts[i], spec))
            for i, spec, tensor in self._sharing
        ]

    def note_commit(self) -> None:
        """Note that the module holds the bytes of this target from now on."""
        self._stamps = self._sink.stamps(looks=False)

    def is_in_use(self) -> bool:
        return self._stamps is not None and self._stamps == self._sink.stamps() and self.is_current

    def forget(self) -> None:
        self._stamps = None

    @property
    def is_current(self) -> bool:
        return self._sink.generation == self._generation

    def validate(self) -> None:
        """Inspect the module. Raises TransferError where the bytes do not fit it any more."""
        if self._sink.refresh() != self._generation:
            self.follow()

    def follow(self) -> None:
        """Have `commit` write to the tensors that the module has now, for this update only."""
        raise _moved()


def _addresses_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def _moved() -> TransferError:
    return TransferError(
        "the receiving module's tensors were moved or replaced during the update; send it again"
    )


class _StagedTarget(_ModuleTarget):
    """A load target whose bytes are beside the module until the commit."""

    def __init__(
        self, sink: ModuleSink, generation: int, layout: StreamLayout, destinations: Destinations
    ) -> None:
        super().__init__(sink, generation, destinations)
        self._layout = layout
        # Not the destinations, which would keep tensors that other code has replaced.
        self._specs, self._shares = destinations.specs, destinations.shares

    def follow(self) -> None:
        """Assign the staged bytes to the module's present tensors.

        The next update opens another target, since this one is not current any more. Raises
        TransferError where this process holds other slices now.
        """
        self._address_changes = self._sink.address_changes
        now = self._sink.destinations(self._layout)
        if now.shares != self._shares or now.specs != self._specs:
            raise _moved()
        self._note_sharing(now)
        self.assign(now)

    @abstractmethod
    def assign(self, destinations: Destinations) -> None:
        """Have `commit` write to these destinations."""


class _PointerTarget(_StagedTarget):
    """Two arenas in turn: the module uses one, the next update is written to the other.

    For a delta the spare arena catches up with the one in use: it lacks the lines of the last
    update, or all of them (`_behind` is None).
    """

    def __init__(
        self, sink: ModuleSink, generation: int, layout: StreamLayout, destinations: Destinations
    ) -> None:
        super().__init__(sink, generation, layout, destinations)
        in_use = _Arena(destinations, sink)
        in_use.adopt_current()  # frees the module's own memory before the second allocation
        sink.settled()
        self._arenas = [in_use, _Arena(destinations, sink)]
        self._spare = 1
        # The addresses of the module's tensors when they point at each arena.
        self._places: list[list[int] | None] = [sink.addresses(), None]
        self._behind: Marks | None = None
        self.peak_extra_nbytes = destinations.nbytes
        self.takes_deltas = takes_lines(in_use.memory)

    def catch_up(self, layout: StreamLayout) -> LineMemory | None:
        in_use, spare = self._arenas[1 - self._spare], self._arenas[self._spare]
        if not (self.takes_deltas and self.is_in_use()):
            return None
        if not spare.has_storage_alone():  # before its addresses are used
            spare.take_new_storage()
            self._behind = None
        target, current = spare.lines_of(layout), in_use.lines_of(layout)
        if target is None or current is None:
            return None
        if self._behind is None or not spare.is_unused():
            self._behind = None
        if self._behind is None or self._behind.any():
            target.copy_from(current, self._behind)
        self._behind = new_marks(target.lines)
        return target

    def is_unused(self) -> bool:
        """Whether only this target uses the spare arena.

        A user may have kept views of it while it was in use, and have given them back to the
        module since.
        """
        return self.is_current and self._arenas[self._spare].is_unused()

    def begin(self) -> None:
        self.written = None
        if not self._arenas[self._spare].has_storage_alone():
            self._arenas[self._spare].take_new_storage()

    def assign(self, destinations: Destinations) -> None:
        self._places = [None, None]
        self._arenas[self._spare].assign(destinations, self._sink)

    @property
    def memory(self) -> Memory:  # type: ignore[override]  # two memories in turn, read-only here
        return self._arenas[self._spare].memory

    def undo(self) -> Callable[[], None] | None:
        put_back = self._arenas[self._spare].undo()
        if put_back is None:
            return None

        def undo() -> None:
            with self._sink.lock:
                put_back()
                self._sink.settled()
            self._spare = 1 - self._spare
            self._stamps = self._behind = None  # the next update sends the whole model

        return undo

    def commit(self) -> None:
        with self._sink.lock:  # another thread may inspect the module
            self._arenas[self._spare].point()
            self._sink.settled(self._places[self._spare])
            self._places[self._spare] = self._sink.addresses()
        self._spare = 1 - self._spare
        self._behind = self.written
        self.note_commit()

    def forget(self) -> None:
        super().forget()
        self._behind = None

    def staged(self) -> Sequence[torch.Tensor]:
        spare = self._arenas[self._spare]  # the other one is that of the module's tensors
        return spare.memory.tensors if self.is_unused() else ()

    def discard(self) -> None:
        written = self.written
        self._behind = None if written is None or self._behind is None else self._behind | written


class _Arena:
    """Memory for all tensors, and the views of it at which the module's tensors can point."""

    def __init__(self, destinations: Destinations, sink: ModuleSink) -> None:
        self._buffer = arena.allocate(destinations.nbytes, sink.device)
        self._former: list[torch.Tensor] = []
        self._users_of_buffer = _users(self._buffer)
        self._lines: tuple[StreamLayout, int, LineMemory] | None = None
        self.memory = destinations.in_arena(self._buffer)
        self.assign(destinations, sink)
        self._own = self._storage()

    def assign(self, destinations: Destinations, sink: ModuleSink) -> None:
        """Make views of the memory for the tensors of these destinations."""
        self._plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._other: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.inference_mode(False):  # else parameters become inference tensors for good
            views = list(map(from_bytes, self.memory.tensors, destinations.specs))
        for destination, view in zip(destinations.tensors, views, strict=True):
            for tensor in destination.targets:
                moves = sink.moves(tensor, destination.spec) and tensor.device == view.device
                moves = moves and sink.swap == "pointer"
                (self._plain if moves else self._other).append((tensor, view))

    def is_unused(self) -> bool:
        """Whether nothing but this object uses the memory, through any storage."""
        address, _ = self._own
        self._former = [
            buffer
            for buffer in self._former
            if buffer.data_ptr() == address and _users(buffer) > self._users_of_buffer
        ]
        return not self._former and self.has_storage_alone()

    def has_storage_alone(self) -> bool:
        """Whether nothing else has the storage or views of it, and torch has not moved it."""
        return self._storage() == self._own

    def take_new_storage(self) -> None:
        """Use the same memory through a storage that nothing else has.

        torch moves the storage of a tensor that a user shares, at any time, with all its views.
        """
        buffer = arena.with_new_storage(self._buffer)
        if buffer is self._buffer:
            return
        self._former.append(self._buffer)
        self._buffer = buffer
        self.memory.use_views(_views(buffer, self.memory.tensors))
        for pairs in (self._plain, self._other):
            views = _views(buffer, [view for _, view in pairs])
            pairs[:] = [(tensor, view) for (tensor, _), view in zip(pairs, views, strict=True)]
        self._own = self._storage()

    def _storage(self) -> tuple[int, int]:
        """Return the address of the storage, and the number of its users."""
        return self._buffer.data_ptr(), _users(self._buffer)

    def lines_of(self, layout: StreamLayout) -> LineMemory | None:
        """Return the lines of the memory; None where it has none that a delta can be written to."""
        known, address = self._lines, self._buffer.data_ptr()
        if known is not None and known[0] is layout and known[1] == address:
            return known[2]
        found = lines_of(layout, self.memory)
        # Others have views of their own of the memory, which would then be in use.
        keeps = found is not None and found.is_flat
        self._lines = (layout, address, found) if keeps and found is not None else None
        return found

    def adopt_current(self) -> None:
        """Move the module's weights into this arena, except tensors that cannot move."""
        with torch.no_grad():
            for tensor, view in self._plain:
                view.copy_(tensor)
        for tensor, view in self._plain:
            tensor.data = view

    def undo(self) -> Callable[[], None] | None:
        """Keep what `point` replaces, and return what puts it back; None without room."""
        former = [(tensor, tensor.data) for tensor, _ in self._plain]
        copied = _copies_of(tensor for tensor, _ in self._other)

        def undo() -> None:
            for tensor, data in former:
                tensor.data = data
            _copy_back(copied or ())

        return None if copied is None else undo

    def point(self) -> None:
        """Make the module use this arena: set pointers, and copy to tensors that cannot move."""
        for tensor, view in self._plain:
            tensor.data = view
        with torch.no_grad():
            for tensor, view in self._other:
                tensor.copy_(view)


def _copies_of(
    tensors: Iterable[torch.Tensor],
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Return each tensor with a copy of it, None where memory has no room for the copies."""
    listed = [tensor.detach() for tensor in tensors]
    sizes: dict[torch.device, int] = {}
    for tensor in listed:
        sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.nbytes
    if not all(arena.fits(nbytes, device) for device, nbytes in sizes.items()):
        return None
    return [(tensor, tensor.clone()) for tensor in listed]


def _copy_back(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, copy in copies:
            tensor.copy_(copy)


def _users(tensor: torch.Tensor) -> int:
    """Return `uses` and the number of references to the storage's Python object."""
    return uses(tensor) + sys.getrefcount(tensor.untyped_storage())


def _views(buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """View the storage of `buffer` as these tensors view another one."""
    storage = buffer.untyped_storage()
    with torch.inference_mode(False):
        return [
            torch.empty(0, dtype=t.dtype, device=t.device).set_(
                storage, t.storage_offset(), t.shape, t.stride()
            )
            for t in like
        ]


class _CopyTarget(ArenaTarget, _StagedTarget):
    """One arena beside the model, copied over at commit."""

    def __init__(
        self, sink: ModuleSink, generation: int, layout: StreamLayout, destinations: Destinations
    ) -> None:
        super().__init__(sink, generation, layout, destinations)
        buffer = arena.allocate(destinations.nbytes, sink.device)
        self.memory = self._arena = destinations.in_arena(buffer)
        self.peak_extra_nbytes = destinations.nbytes
        self.takes_deltas = takes_lines(self._arena)
        self.assign(destinations)

    def is_unused(self) -> bool:
        """Whether the module was the same at its last inspection; nothing else has this memory."""
        return self.is_current

    def assign(self, destinations: Destinations) -> None:
        pairs = [
            (tensor, from_bytes(flat, destination.spec))
            for destination, flat in zip(destinations.tensors, self._arena.tensors, strict=True)
            for tensor in destination.targets
        ]
        self._copies = PairCopies(pairs)
        self._targets = [tensor for tensor, _ in pairs]

    def undo(self) -> Callable[[], None] | None:
        copies = _copies_of(self._targets)

        def undo() -> None:
            _copy_back(copies or ())
            self.holds_commit(False)
            self._stamps = None

        return None if copies is None else undo

    def commit(self) -> None:
        if self._address_changes != self._sink.address_changes:
            # A target of the whole model has moved the tensors, perhaps in this same commit.
            self.follow()
        self.holds_commit()
        self._copies.enqueue()
        self.note_commit()

    def is_in_use(self) -> bool:
        return _ModuleTarget.is_in_use(self)

    def forget(self) -> None:
        super().forget()
        self._stamps = None


class _InPlaceTarget(_ModuleTarget):
    """The module's own memory; a buffer for each tensor that is strided, cast or not plain.

    Also for tensors that share memory, whose values are compared with each other.
    """

    in_place = True

    def __init__(self, sink: ModuleSink, generation: int, destinations: Destinations) -> None:
        super().__init__(sink, generation, destinations)
        self._copied: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        parts: list[torch.Tensor] = []
        for destination in destinations.tensors:
            spec, rest = destination.spec, destination.targets
            first = rest[0].detach()
            if _takes_bytes(rest[0], spec, first.device) and not sink.is_sharing(rest[0]):
                parts.append(as_bytes(first))
                rest = rest[1:]
            else:
                parts.append(torch.zeros(spec.nbytes, dtype=torch.uint8, device=first.device))
                self.peak_extra_nbytes += spec.nbytes
            view = from_bytes(parts[-1], spec)
            self._copied += [(spec.name, tensor.detach(), view) for tensor in rest]
        self.memory = Memory(parts, shares=destinations.shares)
        self.takes_deltas = takes_lines(self.memory)

    @property
    def is_current(self) -> bool:
        return super().is_current and self._address_changes == self._sink.address_changes

    def catch_up(self, layout: StreamLayout) -> LineMemory | None:
        if not (self.takes_deltas and self.is_in_use()) or self.memory is None:
            return None
        return lines_of(layout, self.memory)

    def begin(self) -> None:
        self.written = None

    def discard(self) -> None:
        self._stamps = None

    def validate(self) -> None:
        """Copy from the buffers, and to tied tensors; read those copies back.

        Raises VerificationError, naming tensors whose copies differ, and TransferError.
        """
        super().validate()
        different = []
        for name, tensor, view in self._copied:
            tensor.copy_(view)
            if not torch.equal(contiguous_bytes(tensor), contiguous_bytes(view.to(tensor.dtype))):
                different.append(name)
        if different:
            raise VerificationError(names=different)

    def commit(self) -> None:
        self.note_commit()


class ShardedModuleSink(ModuleSink):
    """The sink of a module with DTensors.

    Its manifest has full tensors, so one stream serves every rank of a tensor-parallel group. Each
    rank copies its own slices; no collective runs. Staging and swaps are those of ModuleSink, for
    the local tensors. Raises ConfigError naming tensors whose placements do not say which rows this
    process holds (partial sums, unknown placements).
    """

    @_locked
    def destinations(self, layout: StreamLayout) -> Destinations:
        """Return a destination for each slice; tied tensors may hold different slices."""
        tensors: list[Destination] = []
        shares: list[Share] = []
        groups = self.targets(layout.manifest)
        for index, (spec, group) in enumerate(zip(layout.manifest.specs, groups, strict=True)):
            for held, targets in self._by_slice(group).items():
                tensors.append(
                    Destination(TensorSpec(spec.name, spec.dtype, held.local_shape), targets)
                )
                itemsize = TORCH_DTYPES[spec.dtype].itemsize
                shares.append(Share(index, held.blocks(itemsize), held))
        return Destinations(tensors, shares)

    @_locked
    def boxes(self, offered: Manifest) -> list[tuple[int, Slice]] | None:
        """Return the slices that this process holds; tied tensors may hold different slices."""
        found = [
            (index, held)
            for index, group in enumerate(self.targets(offered))
            for held in self._by_slice(group)
        ]
        return None if all(held.is_whole for _, held in found) else found

    @_locked
    def parts_in_use(self, manifest: Manifest) -> list[tuple[int, Slice, torch.Tensor]]:
        """Return the parts that this process holds of these tensors."""
        return [
            (index, held, _readable(targets[0]))
            for index, group in enumerate(self.targets(manifest))
            for held, targets in self._by_slice(group).items()
        ]

    def checksums(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return mix64 of tensors that this process holds in full.

        Raises ConfigError for the others, since a slice has another fingerprint than its tensor.
        """
        wanted = None if names is None else list(names)
        cut = list(self._cut(wanted))
        if cut:
            raise ConfigError(
                f"{len(cut)} tensors are sharded, and this process holds a slice of each: "
                f"{shorten(cut)}; ask the server that all workers belong to, or name tensors that "
                "this process holds in full"
            )
        return super().checksums(wanted)

    def checksum_parts(
        self, names: Iterable[str] | None = None
    ) -> tuple[dict[str, str], dict[str, TensorPart]]:
        """Return mix64 of tensors held in full, and the parts of the others' fingerprints."""
        with self.lock:
            held = self._tensors_of(names)
            cut = self._cut(held)
        whole = super().checksums([name for name in held if name not in cut])
        parts = {
            name: part_of(name, contiguous_bytes(held[name]), part, held[name].element_size())
            for name, part in cut.items()
        }
        return whole, parts

    @_locked
    def _cut(self, names: Iterable[str] | None) -> dict[str, Slice]:
        """Return the slices that this process holds of those of `names` that it holds in part."""
        slices = {name: self._slice(tensor) for name, tensor in self._tensors_of(names).items()}
        return {name: held for name, held in slices.items() if not held.is_whole}

    def _hold(self) -> list[torch.Tensor]:
        return [local_of(tensor) for tensor in self._found.tensors]

    def _counted(self) -> list[torch.Tensor]:
        """A write through a DTensor is counted there, one to its local tensor at that one."""
        return [*super()._counted(), *self._found.tensors, *self._tied()]

    def _inspect(self) -> None:
        """Derive the slice that this process holds of each DTensor."""
        slicer = Slicer()
        found = zip(self._found.names, self._found.tensors, self._held, strict=True)
        self._slices = {
            id(held): slicer.slice_of(name, tensor)
            for name, tensor, held in found
            if is_sharded(tensor)
        }
        self.holds_parts = not all(held.is_whole for held in self._slices.values())
        self.fetchable = not self.holds_parts

    def _slice(self, held: torch.Tensor) -> Slice:
        return self._slices.get(id(held)) or Slice.whole_of(tuple(held.shape))

    def _by_slice(self, group: list[torch.Tensor]) -> dict[Slice, list[torch.Tensor]]:
        grouped: dict[Slice, list[torch.Tensor]] = {}
        for tensor in group:
            grouped.setdefault(self._slice(tensor), []).append(tensor)
        return grouped


_sinks: weakref.WeakSet[ModuleSink] = weakref.WeakSet()
_fork = threading.RLock()
"""Taken by a fork, and to add a sink: a fork looks at all of them."""
_locks: list[threading.RLock] = []


def _before_fork() -> None:
    """Take the locks of all sinks: a child could never take one that another thread holds."""
    _fork.acquire()
    for sink in list(_sinks):
        sink.lock.acquire()
        _locks.append(sink.lock)


def _after_fork() -> None:
    while _locks:
        _locks.pop().release()
    _fork.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
