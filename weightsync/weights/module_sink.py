"""An `nn.Module` as a sink: weights land beside the model and are swapped in, or land in it."""

from __future__ import annotations

from collections.abc import Iterable
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
from weightsync.specs import Manifest, TensorSpec
from weightsync.weights import slab
from weightsync.weights.buckets import Plan
from weightsync.weights.copier import Memory
from weightsync.weights.dtypes import TORCH_DTYPES, as_bytes, from_bytes, spec_of
from weightsync.weights.fingerprint import mix64, to_hex
from weightsync.weights.loans import uses
from weightsync.weights.sink import Apply, Landing, Verification, WeightSink, check_manifest
from weightsync.weights.source import ModuleTensors

Swap = Literal["auto", "pointer", "copy"]


class ModuleSink(WeightSink):
    """Parameters and persistent buffers of `module`.

    `cast` lets floating-point tensors arrive in another dtype. `swap` says how staged weights are
    put to use: by `pointer` (a microsecond a tensor), or by `copy` where something captured the
    parameters' addresses (CUDA graphs); `auto` copies for compiled modules.
    """

    verification: Verification = "held"

    def __init__(self, module: nn.Module, *, cast: bool = False, swap: Swap = "auto") -> None:
        self.module = module
        self.casts = cast
        self._found = ModuleTensors(module)
        self._described = self._describe()
        self.manifest = self._described
        self.swap = _choose_swap(module) if swap == "auto" else swap
        self._generation = 0
        self.settled()
        self._alone = self._find_alone()

    @property
    def device(self) -> torch.device:
        """The device of the first tensor."""
        return next((t.device for t in self._found.tensors), torch.device("cpu"))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The module's tensors, in the manifest's order."""
        self.refresh()
        return self._found.tensors

    def refresh(self) -> int:
        """Notice parameters that were replaced, moved, cast or offloaded by somebody else."""
        replaced = self._found.refresh()
        if replaced or [t.data_ptr() for t in self._found.tensors] != self._addresses:
            self._described = self._describe()
            self._generation += 1
            self._alone = self._find_alone()
            self.settled()
        if self.manifest is not None and self._described.digest != self.manifest.digest:
            changed = set(self._described.specs) ^ set(self.manifest.specs)
            raise ManifestMismatchError(
                "the receiving module is no longer the one that WeightReceiver was made with: "
                f"{shorten(sorted(f'{spec.name} {spec}' for spec in changed))}; bring it back, or "
                "make a new WeightReceiver"
            )
        return self._generation

    def settled(self) -> None:
        """Remember where the tensors are: whatever moves them later is somebody else."""
        self._addresses = [tensor.data_ptr() for tensor in self._found.tensors]

    def is_alone(self, tensor: torch.Tensor) -> bool:
        """Whether nothing else saw the memory of `tensor` when this sink first looked at it.

        A view that the module keeps of a parameter would show the old weights after a swap by
        pointer, so such tensors are copied over.
        """
        return id(tensor) in self._alone

    def land(self, plan: Plan, apply: Apply) -> Landing:
        """A pair of slabs (staged) or the module's own memory (in place)."""
        check_manifest(self, plan.manifest, partial=True)
        targets = self.targets(plan.manifest)
        if apply == "in_place":
            return _InPlaceLanding(self, plan)
        twins = sum(map(len, self._found.twins.values()))
        whole = sum(map(len, targets)) == len(self.tensors) + twins
        if self.swap == "pointer" and whole:
            return _PointerLanding(self, plan)
        return _CopyLanding(self, plan)

    def staged_nbytes(self, plan: Plan) -> int:
        """One slab beside the model."""
        return plan.nbytes

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
                known[i] = to_hex(mix64(_bytes_of(tensors[i].detach())))
        return {name: known[index[name]] for name in wanted}

    def _describe(self) -> Manifest:
        found = zip(self._found.names, self._found.tensors, strict=True)
        specs = tuple(spec_of(name, tensor) for name, tensor in found)
        return Manifest(specs, self._found.aliases)

    def _find_alone(self) -> set[int]:
        alone: set[int] = set()
        for i, tensor in enumerate(self._found.tensors):
            twins = self._found.twins.get(i, [])
            if _uses_alone(tensor, others=len(twins)):
                alone.update(map(id, [tensor, *twins]))
        return alone

    def _index(self) -> dict[str, int]:
        return dict(self.manifest.index) if self.manifest else {}

    def _wanted(self) -> list[tuple[TensorSpec, tuple[str, ...]]]:
        if self.manifest is None:
            return []
        places = self.manifest.places()
        return [(spec, places[spec.name]) for spec in self.manifest.specs]


def _choose_swap(module: nn.Module) -> Swap:
    compiled = any(
        getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod")
        for m in module.modules()
    )
    return "copy" if compiled else "pointer"


def _uses_alone(tensor: torch.Tensor, *, others: int) -> bool:
    """Whether the tensor and `others` tied to it are all that uses its storage."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return False
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor.numel() * tensor.element_size()
    # One use is Python's own wrapper of the storage.
    return whole and uses(tensor) <= 2 + others


def _is_plain(tensor: torch.Tensor, spec: TensorSpec, device: torch.device) -> bool:
    """Whether the tensor may simply point at bytes of the stream."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.is_contiguous()
        and tensor.dtype is TORCH_DTYPES[spec.dtype]
        and tensor.device == device
    )


class _ModuleLanding(Landing):
    """A landing that knows its module's tensors."""

    def __init__(self, sink: ModuleSink) -> None:
        self._sink = sink
        self._generation = sink.refresh()

    def settle(self) -> None:
        """Raise TransferError when the module changed while the update came in."""
        if self._sink.refresh() != self._generation:
            raise TransferError(
                "the receiving module's tensors were moved or replaced during the update; "
                "send it again"
            )


class _PointerLanding(_ModuleLanding):
    """Two slabs take turns: one is in use, the other takes the next update."""

    def __init__(self, sink: ModuleSink, plan: Plan) -> None:
        super().__init__(sink)
        self._slabs = [_Slab(plan, sink) for _ in range(2)]
        self._slabs[0].adopt_current()
        sink.settled()
        self._spare = 1
        self.peak_extra_nbytes = plan.nbytes

    @property
    def memory(self) -> Memory:  # type: ignore[override]  # two memories in turn, read-only here
        return self._slabs[self._spare].memory

    def commit(self) -> None:
        self._slabs[self._spare].point()
        self._sink.settled()
        self._spare = 1 - self._spare


class _Slab:
    """A whole stream, and the views of it that the module's tensors can point at."""

    def __init__(self, plan: Plan, sink: ModuleSink) -> None:
        device = sink.device
        self.memory = Memory.of_stream(plan, slab.allocate(plan.nbytes, device))
        self._plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._other: list[tuple[torch.Tensor, torch.Tensor]] = []
        for spec, flat, group in zip(
            plan.manifest.specs, self.memory.tensors, sink.targets(plan.manifest), strict=True
        ):
            view = from_bytes(flat, spec)
            for tensor in group:
                plain = _is_plain(tensor, spec, device) and sink.is_alone(tensor)
                (self._plain if plain else self._other).append((tensor, view))

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

    def __init__(self, sink: ModuleSink, plan: Plan) -> None:
        super().__init__(sink)
        self.memory = Memory.of_stream(plan, slab.allocate(plan.nbytes, sink.device))
        self.peak_extra_nbytes = plan.nbytes
        self._pairs = [
            (tensor, from_bytes(flat, spec))
            for spec, flat, group in zip(
                plan.manifest.specs, self.memory.tensors, sink.targets(plan.manifest), strict=True
            )
            for tensor in group
        ]

    def commit(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(
                [tensor.detach() for tensor, _ in self._pairs], [view for _, view in self._pairs]
            )


class _InPlaceLanding(_ModuleLanding):
    """Bytes go straight into the module; unusual tensors through a buffer of their own."""

    in_place = True

    def __init__(self, sink: ModuleSink, plan: Plan) -> None:
        super().__init__(sink)
        self._copied: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        places: list[torch.Tensor] = []
        for spec, group in zip(plan.manifest.specs, sink.targets(plan.manifest), strict=True):
            first = group[0].detach()
            if _is_plain(group[0], spec, first.device):
                places.append(as_bytes(first))
                rest = group[1:]
            else:
                places.append(torch.zeros(spec.nbytes, dtype=torch.uint8, device=first.device))
                self.peak_extra_nbytes += spec.nbytes
                rest = group
            view = from_bytes(places[-1], spec)
            self._copied += [(spec.name, tensor.detach(), view) for tensor in rest]
        self.memory = Memory(places)

    def settle(self) -> None:
        """Copy unusual tensors and second places, and read those back."""
        super().settle()
        different = []
        for name, tensor, view in self._copied:
            tensor.copy_(view)
            if not torch.equal(_bytes_of(tensor), _bytes_of(view.to(tensor.dtype))):
                different.append(name)
        if different:
            raise VerificationError(names=different)

    def commit(self) -> None:
        pass


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return as_bytes(tensor.contiguous())
