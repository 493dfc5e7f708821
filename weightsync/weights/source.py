"""Where tensors come from on the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import nn

from weightsync.errors import ConfigError, ManifestMismatchError, shorten
from weightsync.specs import Manifest, TensorSpec
from weightsync.weights.dtypes import spec_of

NamedTensors = Iterable[tuple[str, torch.Tensor]]

WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})


class WeightSource(Protocol):
    """What a sender sends from.

    `manifest` is asked once, at `connect`. `tensors` is asked once per update and yields full
    tensors in the manifest's order, aliases left out; a sender keeps each alive until its bytes
    are copied. `stable_tensors` is asked once per update too: the same tensors where they live in
    memory that stays (so that they can be registered), or None where they are made on the fly.
    """

    @property
    def manifest(self) -> Manifest: ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def stable_tensors(self) -> list[torch.Tensor] | None: ...


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
    `twins` are further tensor objects over the memory of `tensors[index]`.
    """

    def __init__(self, module: nn.Module, *, rename: Rename | None = None) -> None:
        self.module = module
        self._rename = rename_with(rename)
        self._walk()

    def refresh(self) -> bool:
        """Return True when the module changed since the last look; names are then new too."""
        same = all(table.get(key) is tensor for table, key, tensor in self._places) and all(
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
        first: dict[object, int] = {}
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            self._note_module(module)
            for key, tensor in self._own_tensors(module):
                name = self._rename(strip_wrappers(f"{prefix}.{key}" if prefix else key))
                known = first.setdefault(_identity(tensor), len(self.names))
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


def _identity(tensor: torch.Tensor) -> object:
    """The same for tensors that are tied: one object, or two of one shape over the same memory."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class ModuleSource:
    """Parameters and persistent buffers of an `nn.Module`; tied parameters once, as aliases.

    `dtype` casts floating-point tensors on the way, `rename` maps names. Raises
    ManifestMismatchError when the module's tensors are no longer those of `connect`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        self.module = module
        self._dtype = dtype
        self._found = ModuleTensors(module, rename=rename)
        self._manifest = self._describe()

    @property
    def manifest(self) -> Manifest:
        """Names, dtypes as sent, and shapes."""
        return self._manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors as they are, not yet cast."""
        self._look_again()
        for name, tensor in zip(self._found.names, self._found.tensors, strict=True):
            yield name, tensor.detach()

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """The module's own tensors, unless a cast makes new ones."""
        self._look_again()
        casts = (
            any(
                spec.dtype != spec_of(spec.name, tensor).dtype
                for spec, tensor in zip(self._manifest.specs, self._found.tensors, strict=True)
            )
            if self._dtype
            else False
        )
        return None if casts else self._found.tensors

    def _look_again(self) -> None:
        if not self._found.refresh():
            return
        now = self._describe()
        if now.digest != self._manifest.digest:
            changed = set(now.specs) ^ set(self._manifest.specs)
            raise ManifestMismatchError(
                "the module's tensors are no longer those of connect(): "
                f"{', '.join(sorted(str(spec.name) for spec in changed)[:10])}; connect again"
            )

    def _describe(self) -> Manifest:
        sharded = [
            n
            for n, t in zip(self._found.names, self._found.tensors, strict=True)
            if hasattr(t, "full_tensor")
        ]
        if sharded:
            raise ConfigError(
                f"{len(sharded)} parameters are sharded (DTensor): {shorten(sharded)}; give a "
                "callable that yields (name, parameter.full_tensor()), and send from rank 0"
            )
        specs = tuple(
            spec_of(name, tensor, self._dtype)
            for name, tensor in zip(self._found.names, self._found.tensors, strict=True)
        )
        return Manifest(specs, self._found.aliases)


class IterableSource:
    """A callable that returns a fresh iterable of `(name, full tensor)` for every update.

    It is iterated once at `connect` for the manifest; the sender compares every later iteration
    with that as it flows.
    """

    def __init__(
        self,
        factory: Callable[[], NamedTensors],
        *,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        self._factory = factory
        self._rename = rename_with(rename)
        self._manifest = Manifest(
            tuple(spec_of(self._rename(name), tensor, dtype) for name, tensor in factory())
        )

    @property
    def manifest(self) -> Manifest:
        """What the first iteration yielded."""
        return self._manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a fresh iteration."""
        for name, tensor in self._factory():
            yield self._rename(name), tensor

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """None: the tensors may be new ones every time."""
        return None


class StateDictSource(IterableSource):
    """A mapping of names to tensors, read anew for every update; tied tensors once, as aliases."""

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        self._aliases = find_ties(state_dict.items())
        super().__init__(
            lambda: ((n, t) for n, t in state_dict.items() if n not in self._aliases),
            dtype=dtype,
            rename=rename,
        )
        aliases = {self._rename(a): self._rename(name) for a, name in self._aliases.items()}
        self._manifest = Manifest(self._manifest.specs, aliases)


def find_ties(pairs: NamedTensors) -> dict[str, str]:
    """Map each name to the first of the same memory. Only for tensors that all live at once."""
    first: dict[object, str] = {}
    names = {name: first.setdefault(_identity(tensor), name) for name, tensor in pairs}
    return {name: known for name, known in names.items() if name != known}


def checked(pairs: NamedTensors, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the pairs while names and shapes are those of `manifest`; else ManifestMismatchError.

    So a source that disagrees with what it announced is an error that names the first divergent
    tensor, and not wrong bytes or a receiver that waits for ever.
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
        if name != spec.name or tensor.shape != spec.shape:
            found = f"{name!r} {list(tensor.shape)}"
            raise ManifestMismatchError(
                f"the source diverges from its manifest at position {position}: it yields "
                f"{found}, the manifest has {spec.name!r} {list(spec.shape)}; "
                "connect again if the model has changed",
                mismatched=[f"{spec.name}: {spec}, yielded {found}"],
            )
        yield name, tensor
    left: TensorSpec | None = next(specs, None)
    if left is not None:
        raise ManifestMismatchError(
            f"the source ended before {left.name!r}, which its manifest has",
            missing=[left.name, *(spec.name for spec in specs)],
        )


def as_source(
    source: object, *, dtype: torch.dtype | None = None, rename: Rename | None = None
) -> WeightSource:
    """Return a WeightSource for a module, a state dict, a callable or a WeightSource.

    Raises ConfigError for anything else, a bare generator above all: it runs dry after one update.
    """
    if isinstance(source, nn.Module):
        return ModuleSource(source, dtype=dtype, rename=rename)
    if isinstance(source, Mapping):
        return StateDictSource(source, dtype=dtype, rename=rename)
    if all(hasattr(source, name) for name in ("manifest", "tensors", "stable_tensors")):
        if dtype is not None or rename is not None:
            raise ConfigError(
                "a WeightSource names and casts its own tensors; leave out dtype/rename"
            )
        return source  # type: ignore[return-value]  # a protocol, checked by its members above
    if callable(source):
        return IterableSource(source, dtype=dtype, rename=rename)
    raise ConfigError(
        f"cannot send from a {type(source).__name__}; give an nn.Module, a state dict, a "
        "WeightSource or a callable that returns fresh (name, tensor) pairs for every update"
    )
