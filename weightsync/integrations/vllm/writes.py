"""Detection of direct writes: counts what torch writes to the tensors of a model's layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

TensorKey = tuple[str, str]
"""A layer of the model, and the name of its tensor."""

FROM_FORMER = "it is computed from its former weights, which vLLM's reload does not have"

_FILLS = (torch.ops.aten.fill_, torch.ops.aten.zero_)
_OVERWRITES = frozenset(
    (
        *_FILLS,
        torch.ops.aten.copy_,
        torch.ops.aten.index_copy_,
        torch.ops.aten.index_fill_,
        torch.ops.aten.index_put_,
        torch.ops.aten.masked_fill_,
        torch.ops.aten.masked_scatter_,
        torch.ops.aten.scatter_,
    )
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the model is."""

    path: str
    layer: nn.Module
    name: str
    tensor: torch.Tensor

    @property
    def numel(self) -> int:
        return loaded_numel(self.tensor)

    @property
    def key(self) -> TensorKey:
        return self.path, self.name

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


def loaded_numel(tensor: torch.Tensor) -> int:
    """Return the number of elements that are loaded, without padding that vLLM declares."""
    return int(getattr(tensor, "weight_loader_numel", tensor.numel()))


def places_of(model: nn.Module) -> dict[int, Place]:
    """Return the place of each tensor of the layers, by the storage that its views share."""
    found: dict[int, Place] = {}
    for path, layer in model.named_modules():
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            storage = None if tensor is None else storage_of(tensor)
            if tensor is not None and storage is not None:
                found.setdefault(storage, Place(path, layer, name, tensor))
    return found


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return what identifies a tensor's storage while it lives, without memory too."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, ValueError, NotImplementedError):  # not initialized, or a wrapper
        return None


class WriteWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Sees the operations that write to tensors whose storage has a place."""

    def __init__(self, places: dict[int, Place]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.places = places

    def place_of(self, tensor: object) -> Place | None:
        """Return the place of the storage that a tensor views; None for all other values."""
        if not isinstance(tensor, torch.Tensor):
            return None
        storage = storage_of(tensor)
        return None if storage is None else self.places.get(storage)

    def written(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[tuple[Place, torch.Tensor]]:
        """Return the tensors that an operation writes to, and their places."""
        found = []
        for i, name in _outputs(func):
            target = args[i] if i < len(args) else kwargs.get(name)
            place = self.place_of(target)
            if place is not None and isinstance(target, torch.Tensor):
                found.append((place, target))
        return found


@cache
def _outputs(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the arguments that an operation of torch writes to: position and name."""
    schema = func._schema
    if not schema.is_mutable:
        return ()
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def computes_from(func: Any) -> bool:
    """Whether an operation makes what it writes to a tensor of what the tensor had."""
    written = [a for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    returned = all(argument.kwarg_only for argument in written)  # out=
    return not returned and func.overloadpacket not in _OVERWRITES


def copied_numel(func: Any, args: Sequence[Any], target: torch.Tensor) -> int:
    """Return the number of elements that an operation writes to `target`; 0 for a whole fill.

    A loader may clear a whole tensor before it copies a part of it.
    """
    numel = target.numel()
    if func.overloadpacket in _FILLS:
        storage = target.untyped_storage().nbytes() // max(1, target.element_size())
        return numel if numel < storage else 0
    if func.overloadpacket is torch.ops.aten.copy_:
        return numel
    sources = [a.numel() for a in args[1:] if isinstance(a, torch.Tensor)]
    return min(numel, max(sources, default=numel))


class WriteCounter(WriteWatch):  # type: ignore[no-untyped-call]  # as above
    """Counts the elements that are written to each tensor of a model, and writes nothing.

    For a dry run: the sources have no memory, the tensors of the model may have.
    """

    def __init__(self, places: dict[int, Place], refused: Callable[[Place, str], None]) -> None:
        super().__init__(places)
        self.counts: defaultdict[TensorKey, int] = defaultdict(int)
        self.touched: set[TensorKey] = set()
        self.on_write: Callable[[TensorKey], None] = lambda _: None
        self.in_loader = False
        self._refused = refused
        self._kept: list[torch.Tensor] = []

    def stand_in(self, place: Place, tensor: torch.Tensor) -> None:
        """Count what is written to `tensor` as written to a place."""
        storage = storage_of(tensor)
        if storage is not None:
            self._kept.append(tensor)  # or another tensor may get its storage's address
            self.places[storage] = place

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = self.written(func, args, kwargs)
        if not written:
            return func(*args, **kwargs)
        bare_args, bare_kwargs = tree_map_only(torch.Tensor, _without_memory, (args, kwargs))
        try:
            func(*bare_args, **bare_kwargs)
        except RuntimeError as exc:
            if self.in_loader:
                raise
            self._refused(written[0][0], str(exc))
        for place, target in written:
            key = place.key
            if computes_from(func) and key not in self.touched and not self.in_loader:
                self._refused(place, FROM_FORMER)
            self.touched.add(key)
            self.on_write(key)
            self.counts[key] = min(place.numel, self.counts[key] + copied_numel(func, args, target))
        return written[0][1]


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and dtype on the meta device."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
