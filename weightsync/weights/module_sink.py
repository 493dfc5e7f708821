"""Modules as sinks: their tensors, whole or sharded, staged beside them or written in place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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
    TORCH_DTYPES,
    as_bytes,
    contiguous_bytes,
    from_bytes,
    is_plain,
    spec_of,
)
from weightsync.weights import arena
from weightsync.weights.checksums import to_hex
from weightsync.weights.copy_plan import Memory, ShardMemory, Share
from weightsync.weights.fingerprint import mix64, part_of
from weightsync.weights.layout import StreamLayout, aligned
from weightsync.weights.shards import Slice, Slicer, is_sharded, local_of
from weightsync.weights.sink import (
    Apply,
    LoadTarget,
    Verification,
    WeightSink,
    check_manifest,
    uses,
)
from weightsync.wire.messages import TensorPart

WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})


Rename = Callable[[str], str] | Mapping[str, str]


def strip_wrappers(name: str) -> str:
    """Drop what DDP, torch.compile and activation checkpointing put into parameter names."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def rename_with(rename: Rename | None) -> Callable[[str], str]:
    """Return a function that maps names; a mapping leaves names it lacks as they are."""
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    table = dict(rename)
    return lambda name: table.get(name, name)


class ModuleTensors:
    """The parameters and persistent buffers of a module, tied ones once, with their names.

    The walk over the module is planned once; `refresh` looks at every place again and walks anew
    only if one holds another tensor, since a walk over 37,000 parameters takes longer than a copy.
    `twins` are further tensor objects over the memory of `tensors[index]`. `modules` are all parts,
    and `wrapped` says that torch.compile wraps one of them.
    """

    def __init__(self, module: nn.Module, *, rename: Rename | None = None) -> None:
        self.module = module
        self._rename = rename_with(rename)
        self._walk()

    def refresh(self) -> bool:
        """Return True when the module changed since the last look; names are then new too."""
        same = all(_holds(table.get(key), tensor) for table, key, tensor in self._places) and all(
            (len(m._parameters), len(m._buffers), len(m._modules)) == sizes
            for m, sizes in self._modules
        )
        same = same and all(table.get(key) is child for table, key, child in self._children)
        same = same and all(
            twin.data_ptr() == self.tensors[i].data_ptr()
            for i, twins in self.twins.items()
            for twin in twins
        )
        if not same:
            self._walk()
        return not same

    def _walk(self) -> None:
        self.names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.twins: dict[int, list[torch.Tensor]] = {}
        self.aliases: dict[str, str] = {}
        self._places: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
        self._children: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []
        self._modules: list[tuple[nn.Module, tuple[int, int, int]]] = []
        self.modules: list[nn.Module] = []
        self.wrapped = False
        first: dict[object, int] = {}
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            self._note_module(module)
            for key, tensor in self._own_tensors(module):
                name = self._rename(strip_wrappers(f"{prefix}.{key}" if prefix else key))
                known = first.setdefault(identity(tensor), len(self.names))
                if known == len(self.names):
                    self.names.append(name)
                    self.tensors.append(tensor)
                elif name != self.names[known]:
                    self.aliases[name] = self.names[known]
                    self._note_twin(known, tensor)

    def _note_twin(self, index: int, tensor: torch.Tensor) -> None:
        """Keep a tensor that is tied by its memory alone: it has a pointer of its own."""
        known = [self.tensors[index], *self.twins.get(index, [])]
        if all(tensor is not other for other in known):
            self.twins.setdefault(index, []).append(tensor)

    def _note_module(self, module: nn.Module) -> None:
        sizes = (len(module._parameters), len(module._buffers), len(module._modules))
        self._modules.append((module, sizes))
        self.modules.append(module)
        self.wrapped = self.wrapped or "_orig_mod" in module._modules
        for key, child in module._modules.items():
            if child is not None:
                self._children.append((module._modules, key, child))

    def _own_tensors(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        transient = module._non_persistent_buffers_set
        tables: tuple[dict[str, torch.Tensor | None], ...] = (
            module._parameters,  # type: ignore[assignment]  # Parameter is a Tensor; dict is invariant
            module._buffers,
        )
        for table in tables:
            for key, tensor in table.items():
                if tensor is not None and not (table is module._buffers and key in transient):
                    self._places.append((table, key, tensor))
                    yield key, tensor


def _holds(found: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    """Whether a place holds `tensor`, perhaps in another form for as long as a forward pass.

    transformers puts the local tensors of a tensor-parallel module in the place of its DTensors
    while that module computes, and nothing in the place of a bias that it adds later.
    """
    if found is tensor:
        return True
    local = getattr(tensor, "_local_tensor", None)
    return local is not None and (found is None or found.data_ptr() == local.data_ptr())


def identity(tensor: torch.Tensor) -> object:
    """The same for tensors that are tied: one object, or two of one shape over the same memory."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


Swap = Literal["auto", "pointer", "copy"]

_COMPILED = operator.attrgetter("_compiled_call_impl")


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor as it is landed here: its spec, and the module's tensors that it goes to."""

    spec: TensorSpec
    targets: list[torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """What a sink lands for one plan; `shares` say what of the stream each place takes, if not all.

    Whole tensors lie as they lie in the stream.
    """

    places: list[Place]
    shares: Sequence[Share] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a slab that holds every place."""
        return sum(aligned(place.spec.nbytes) for place in self.places)

    def memory(self, tensors: Sequence[torch.Tensor], *, flat: bool = False) -> Memory:
        """Memory of `uint8[nbytes]` for each place."""
        if self.shares is None:
            return Memory(tensors, flat)
        return ShardMemory(tensors, flat, self.shares)

    def in_slab(self, device: torch.device) -> Memory:
        """Allocate one slab for all places."""
        buffer = arena.allocate(self.nbytes, device)
        tensors, at = [], 0
        for place in self.places:
            tensors.append(buffer[at : at + place.spec.nbytes])
            at += aligned(place.spec.nbytes)
        return self.memory(tensors, flat=True)


class ModuleSink(WeightSink):
    """Parameters and persistent buffers of `module`.

    `cast` lets floating-point tensors arrive in another dtype. `swap` says how staged weights are
    put to use: by `pointer` (a microsecond a tensor), or by `copy`, which leaves every address as
    it is. `auto` copies on GPUs, where captured graphs keep addresses, and for compiled modules,
    also those compiled later. (Copies on a GPU have not run on one yet.)
    """

    verification: Verification = "held"

    def __init__(self, module: nn.Module, *, cast: bool = False, swap: Swap = "auto") -> None:
        self.module = module
        self.casts = cast
        self._found = ModuleTensors(module)
        self._held = self._hold()
        self._described = self._describe()
        self.manifest = self._described
        self._chooses = swap == "auto"
        self.swap = self._choose_swap() if swap == "auto" else swap
        self._generation = 0
        self.settled()
        self._alone = self._find_alone()

    @property
    def device(self) -> torch.device:
        """The device of the first tensor."""
        return next((t.device for t in self._held), torch.device("cpu"))

    @property
    def ties(self) -> Mapping[str, str]:
        """The tied names that were found, and those that transformers declares.

        Shards of a tied tensor are tensors of their own, since each place is cut in its own way.
        """
        found, known = super().ties, self._described.index
        declared = getattr(self.module, "all_tied_weights_keys", None)
        pairs = declared.items() if isinstance(declared, dict) else ()
        return {**{a: n for a, n in pairs if a in known and n in known}, **found}

    @property
    def gpus(self) -> frozenset[torch.device]:
        """The GPUs of all tensors, as they were last looked at."""
        return self._gpus

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What this process holds of the module's tensors, in the manifest's order."""
        self.refresh()
        return self._held

    def refresh(self) -> int:
        """Notice parameters that were replaced, moved, cast or offloaded by somebody else."""
        replaced = self._found.refresh()
        before, self._held = self._held, self._hold()
        replaced = replaced or not all(map(operator.is_, before, self._held))
        if self._chooses and self.swap == "pointer" and self._choose_swap() == "copy":
            self.swap = "copy"
            replaced = True
        if replaced or [t.data_ptr() for t in self._held] != self._addresses:
            self._described = self._describe()
            self._generation += 1
            self._alone = self._find_alone()
            self.settled()
        if self.manifest is not None and self._described.digest != self.manifest.digest:
            changed = changes(self.manifest, self._described)
            raise ManifestMismatchError(
                "the receiving module is no longer the one that WeightReceiver was made with: "
                f"{shorten(changed)}; bring it back, or make a new WeightReceiver",
                mismatched=changed,
            )
        return self._generation

    def settled(self) -> None:
        """Remember where the tensors are: whatever moves them later is somebody else."""
        self._addresses = [tensor.data_ptr() for tensor in self._held]

    def is_alone(self, tensor: torch.Tensor) -> bool:
        """Whether nothing else saw the memory of `tensor` when this sink first looked at it.

        A view that the module keeps of a parameter would show the old weights after a swap by
        pointer, so such tensors are copied over.
        """
        return id(tensor) in self._alone

    def open_target(self, plan: StreamLayout, apply: Apply) -> LoadTarget:
        """A pair of slabs (staged) or the module's own memory (in place)."""
        check_manifest(self, plan.manifest, partial=True)
        layout = self.layout(plan)
        if apply == "in_place":
            return _InPlaceLanding(self, layout)
        twins = sum(map(len, self._found.twins.values()))
        whole = sum(len(place.targets) for place in layout.places) == len(self.tensors) + twins
        if self.swap == "pointer" and whole:
            return _PointerLanding(self, layout)
        return _CopyLanding(self, layout)

    def staged_nbytes(self, plan: StreamLayout) -> int:
        """One slab beside the model, and what cannot move into the other one."""
        layout = self.layout(plan)
        if self.swap == "copy":
            return layout.nbytes
        staying = [p for p in layout.places if not all(self.moves(t, p.spec) for t in p.targets)]
        return layout.nbytes + sum(aligned(place.spec.nbytes) for place in staying)

    def moves(self, tensor: torch.Tensor, spec: TensorSpec) -> bool:
        """Whether the tensor may be pointed at other memory, which holds bytes of `spec`."""
        return _takes_bytes(tensor, spec, self.device) and self.is_alone(tensor)

    def layout(self, plan: StreamLayout) -> Layout:
        """What is landed of each tensor of `plan`."""
        groups = self.targets(plan.manifest)
        return Layout([Place(*pair) for pair in zip(plan.manifest.specs, groups, strict=True)])

    def targets(self, offered: Manifest) -> list[list[torch.Tensor]]:
        """For each offered tensor the module's tensors that it goes to."""
        wanted = self._wanted()
        groups: list[list[torch.Tensor]] = [[] for _ in offered.specs]
        for i, ((_, names), tensor) in enumerate(zip(wanted, self.tensors, strict=True)):
            source = next((offered.index[n] for n in names if n in offered.index), None)
            if source is not None:
                groups[source] += [tensor, *self._found.twins.get(i, [])]
        return groups

    def checksums(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return mix64 of the tensors in use, aliases included."""
        index = self._index()
        wanted = list(index) if names is None else list(names)
        unknown = [name for name in wanted if name not in index]
        if unknown:
            raise ConfigError(f"no such tensors here: {', '.join(unknown[:10])}")
        tensors = self.tensors
        known: dict[int, str] = {}
        for name in wanted:
            i = index[name]
            if i not in known:
                known[i] = to_hex(mix64(contiguous_bytes(tensors[i])))
        return {name: known[index[name]] for name in wanted}

    def _hold(self) -> list[torch.Tensor]:
        """What this process holds of each tensor that was found."""
        return self._found.tensors

    def _inspect(self) -> None:
        """Look at tensors that are new. Raises ConfigError where this sink cannot hold them."""
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
        self._inspect()
        self._gpus = frozenset(t.device for t in self._held if t.device.type == "cuda")
        found = zip(self._found.names, self._found.tensors, strict=True)
        specs = tuple(spec_of(name, tensor) for name, tensor in found)
        return Manifest(specs, self._found.aliases)

    def _find_alone(self) -> set[int]:
        alone: set[int] = set()
        for i, tensor in enumerate(self._held):
            twins = self._found.twins.get(i, [])
            if _uses_alone(tensor, others=len(twins)):
                alone.update(map(id, [tensor, *twins]))
        return alone

    def _choose_swap(self) -> Swap:
        compiled = any(map(_COMPILED, self._found.modules)) or self._found.wrapped
        return "copy" if compiled or self.gpus else "pointer"

    def _index(self) -> dict[str, int]:
        return dict(self.manifest.index) if self.manifest else {}

    def _wanted(self) -> list[tuple[TensorSpec, tuple[str, ...]]]:
        if self.manifest is None:
            return []
        places = self.manifest.places()
        return [(spec, places[spec.name]) for spec in self.manifest.specs]


def _uses_alone(tensor: torch.Tensor, *, others: int) -> bool:
    """Whether the tensor and `others` tied to it are all that uses its storage."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return False
    # One use is Python's own wrapper of the storage.
    return uses(tensor) <= 2 + others


def _takes_bytes(tensor: torch.Tensor, spec: TensorSpec, device: torch.device) -> bool:
    """Whether the tensor may simply point at bytes of the stream."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and is_plain(tensor, spec)
        and tensor.device == device
    )


class _ModuleLanding(LoadTarget):
    """A landing that knows its module's tensors."""

    def __init__(self, sink: ModuleSink) -> None:
        self._sink = sink
        self._generation = sink.refresh()

    def validate(self) -> None:
        """Raise TransferError when the module changed while the update came in."""
        if self._sink.refresh() != self._generation:
            raise TransferError(
                "the receiving module's tensors were moved or replaced during the update; "
                "send it again"
            )


class _PointerLanding(_ModuleLanding):
    """Two slabs take turns: one is in use, the other takes the next update."""

    def __init__(self, sink: ModuleSink, layout: Layout) -> None:
        super().__init__(sink)
        in_use = _Slab(layout, sink)
        in_use.adopt_current()  # what the module held so far is free before there is a second one
        sink.settled()
        self._slabs = [in_use, _Slab(layout, sink)]
        self._spare = 1
        self.peak_extra_nbytes = layout.nbytes

    @property
    def memory(self) -> Memory:  # type: ignore[override]  # two memories in turn, read-only here
        return self._slabs[self._spare].memory

    def commit(self) -> None:
        self._slabs[self._spare].point()
        self._sink.settled()
        self._spare = 1 - self._spare


class _Slab:
    """All places, and the views of them that the module's tensors can point at."""

    def __init__(self, layout: Layout, sink: ModuleSink) -> None:
        self.memory = layout.in_slab(sink.device)
        self._plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._other: list[tuple[torch.Tensor, torch.Tensor]] = []
        for place, flat in zip(layout.places, self.memory.tensors, strict=True):
            view = from_bytes(flat, place.spec)
            for tensor in place.targets:
                moves = sink.moves(tensor, place.spec)
                (self._plain if moves else self._other).append((tensor, view))

    def adopt_current(self) -> None:
        """Move what is in use into this slab; unusual tensors stay as they are."""
        with torch.no_grad():
            for tensor, view in self._plain:
                view.copy_(tensor)
        for tensor, view in self._plain:
            tensor.data = view

    def point(self) -> None:
        """Make the module use this slab: one pointer a tensor, a copy for unusual ones."""
        for tensor, view in self._plain:
            tensor.data = view
        with torch.no_grad():
            for tensor, view in self._other:
                tensor.copy_(view)


class _CopyLanding(_ModuleLanding):
    """One slab beside the model, copied over at commit."""

    def __init__(self, sink: ModuleSink, layout: Layout) -> None:
        super().__init__(sink)
        self.memory = layout.in_slab(sink.device)
        self.peak_extra_nbytes = layout.nbytes
        self._pairs = [
            (tensor, from_bytes(flat, place.spec))
            for place, flat in zip(layout.places, self.memory.tensors, strict=True)
            for tensor in place.targets
        ]

    def commit(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(
                [tensor.detach() for tensor, _ in self._pairs], [view for _, view in self._pairs]
            )


class _InPlaceLanding(_ModuleLanding):
    """Bytes go straight into the module; unusual tensors through a buffer of their own."""

    in_place = True

    def __init__(self, sink: ModuleSink, layout: Layout) -> None:
        super().__init__(sink)
        self._copied: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        parts: list[torch.Tensor] = []
        for place in layout.places:
            spec, rest = place.spec, place.targets
            first = rest[0].detach()
            if _takes_bytes(rest[0], spec, first.device):
                parts.append(as_bytes(first))
                rest = rest[1:]
            else:
                parts.append(torch.zeros(spec.nbytes, dtype=torch.uint8, device=first.device))
                self.peak_extra_nbytes += spec.nbytes
            view = from_bytes(parts[-1], spec)
            self._copied += [(spec.name, tensor.detach(), view) for tensor in rest]
        self.memory = layout.memory(parts)

    def validate(self) -> None:
        """Copy unusual tensors and second places, and read those back."""
        super().validate()
        different = []
        for name, tensor, view in self._copied:
            tensor.copy_(view)
            if not torch.equal(contiguous_bytes(tensor), contiguous_bytes(view.to(tensor.dtype))):
                different.append(name)
        if different:
            raise VerificationError(names=different)

    def commit(self) -> None:
        pass


class ShardedModuleSink(ModuleSink):
    """Parameters and persistent buffers of a module of which some are DTensors.

    Senders see full tensors, so one stream serves every rank of a tensor-parallel group; each rank
    copies its own slice of it, and no collective runs. Staged memory and swaps are those of
    ModuleSink, over what is held here. Raises ConfigError naming tensors whose placements do not
    say which rows are held (partial sums, unknown placements).
    """

    def layout(self, plan: StreamLayout) -> Layout:
        """A place for each slice of a tensor; tied tensors may hold different ones."""
        places: list[Place] = []
        shares: list[Share] = []
        groups = self.targets(plan.manifest)
        for index, (spec, group) in enumerate(zip(plan.manifest.specs, groups, strict=True)):
            for held, targets in self._by_slice(group).items():
                places.append(Place(TensorSpec(spec.name, spec.dtype, held.local_shape), targets))
                shares.append(Share(index, held.blocks(TORCH_DTYPES[spec.dtype].itemsize)))
        return Layout(places, shares)

    def checksums(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return mix64 of tensors that are whole here.

        Raises ConfigError for the others: a slice does not sum to what the full tensor sums to.
        """
        index = self._index()
        wanted = list(index) if names is None else list(names)
        tensors = self.tensors
        cut = [n for n in wanted if n in index and not self._slice(tensors[index[n]]).is_whole]
        if cut:
            raise ConfigError(
                f"{len(cut)} tensors are sharded, and this process holds a slice of each: "
                f"{shorten(cut)}; ask the server that all workers belong to, or name tensors that "
                "are whole here"
            )
        return super().checksums(wanted)

    def checksum_parts(
        self, names: Iterable[str] | None = None
    ) -> tuple[dict[str, str], dict[str, TensorPart]]:
        """Return mix64 of tensors that are whole here, and the parts of those that are cut."""
        index = self._index()
        tensors = self.tensors
        wanted = list(index) if names is None else list(names)
        parts: dict[str, TensorPart] = {}
        for name in wanted:
            held = tensors[index[name]] if name in index else None
            if held is not None and not self._slice(held).is_whole:
                flat = contiguous_bytes(held)
                parts[name] = part_of(name, flat, self._slice(held), held.element_size())
        return super().checksums([name for name in wanted if name not in parts]), parts

    def _hold(self) -> list[torch.Tensor]:
        return [local_of(tensor) for tensor in self._found.tensors]

    def _inspect(self) -> None:
        """Find the slice of each tensor that is held."""
        slicer = Slicer()
        found = zip(self._found.names, self._found.tensors, self._held, strict=True)
        self._slices = {
            id(held): slicer.slice_of(name, tensor)
            for name, tensor, held in found
            if is_sharded(tensor)
        }

    def _slice(self, held: torch.Tensor) -> Slice:
        return self._slices.get(id(held)) or Slice.whole_of(tuple(held.shape))

    def _by_slice(self, group: list[torch.Tensor]) -> dict[Slice, list[torch.Tensor]]:
        grouped: dict[Slice, list[torch.Tensor]] = {}
        for tensor in group:
            grouped.setdefault(self._slice(tensor), []).append(tensor)
        return grouped
