"""The tensors of a module, under the names that its receivers know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

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
