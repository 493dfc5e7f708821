"""Where tensors come from on the trainer, and whether they changed while they were sent."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol, cast

import torch
from torch import nn

from weightsync import optimizer_steps
from weightsync.errors import ConfigError, ManifestMismatchError, shorten
from weightsync.optimizer_steps import StepWindow, storage_address, stored_at
from weightsync.specs import Manifest, TensorSpec, changes
from weightsync.tensors import TORCH_DTYPES, dtype_name, spec_of
from weightsync.weights.module_sink import ModuleTensors, Rename, identity, rename_with
from weightsync.weights.shards import find_fsdp, gather, gather_groups, is_sharded


def groups_of(manifest: Manifest) -> list[range]:
    """Return positions in `manifest` of neighbours that belong to one layer, in order.

    `model.layers.3.mlp.up.weight` belongs to `model.layers.3`: a layer's name ends with the first
    part that is a number. A tensor outside of numbered layers belongs to the module that holds it.
    """
    groups: list[range] = []
    for _, members in groupby(manifest.specs, key=lambda spec: layer_of(spec.name)):
        start = groups[-1].stop if groups else 0
        groups.append(range(start, start + sum(1 for _ in members)))
    return groups


def layer_of(name: str) -> str:
    """Return the name up to its first part of digits, or else the name of the module."""
    parts = name.split(".")
    end = next((i + 1 for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[:end])


_version_of = operator.attrgetter("_version")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_dtype_of = operator.attrgetter("dtype")


class SourceWatch:
    """Compares tensors at the end of a transfer with what they were at its begin.

    Seen: a raised `_version`, another data address or dtype, and a step of a torch optimizer over
    their storage. Not seen: writes that torch does not count (through `.data`, NumPy or another
    process), and operators outside of an optimizer's step that run across the end of the transfer.
    """

    def __init__(self) -> None:
        optimizer_steps.install()
        self._names: Sequence[str] = ()
        self._tensors: Sequence[torch.Tensor] = ()
        self._seen: list[list[object]] = []
        self._window: StepWindow | None = None

    def begin(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Remember `tensors` as they are now; they are kept alive until `end`."""
        self.end()
        self._window = StepWindow()
        self._names, self._tensors = with_shards(names, tensors)
        self._seen = _look(self._tensors)

    def end(self, is_place: Callable[[int, int], bool] = lambda _, __: False) -> list[str]:
        """Return the names of those that changed since `begin`, and forget all.

        `is_place(i, address)` says that the sender itself moved tensor `i` to that address.
        """
        window, self._window = self._window, None
        names, tensors, seen = self._names, self._tensors, self._seen
        self._names, self._tensors, self._seen = (), (), []
        if window is None:
            return []
        stepped = window.close()
        now = _look(tensors)
        changed: set[int] = set()
        if now != seen:
            changed |= set(_differences(seen, now, is_place))
        if stepped:
            written = set[int]().union(*map(stored_at, stepped)) - {0}
            changed |= {i for i, t in enumerate(tensors) if storage_address(t) in written}
        return list(dict.fromkeys(names[i] for i in sorted(changed)))


class YieldWatch:
    """The same for tensors that a callable yields one by one, and may overwrite in between.

    Call `note` after the callable gave a tensor, `read` before it is asked for the next one. What
    the callable itself changes is its own affair: a buffer that it fills again, an adapter that it
    merges and takes out again. No tensor is kept alive. Of those that live no longer than until
    the next one, only steps over their storage are seen; what new tensors were made of is not
    known here.
    """

    def __init__(self) -> None:
        optimizer_steps.install()
        self._window = StepWindow()
        self._noted: dict[int, tuple[str, weakref.ref[torch.Tensor], int]] = {}
        self._last: list[tuple[str, torch.Tensor, int, int]] = []
        self._before: list[tuple[int, weakref.ref[torch.Tensor]]] = []
        self._changed: dict[str, None] = {}

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """The callable yielded this tensor; what it did to the last one before that is its own."""
        for key, find in self._before:
            last = find()
            if last is not None:
                self._noted[key] = self._noted[key][0], find, _version(last)
        self._before.clear()
        for part in _parts(tensor):
            version = _version(part)
            self._last.append((name, part, version, _address(part)))
            find = weakref.ref(part if part._base is None else part._base)
            key = storage_address(part) or id(part)
            self._noted[key] = name, find, version
            self._before.append((key, find))

    def read(self) -> None:
        """The last tensor's bytes were taken."""
        for name, part, version, address in self._last:
            if _version(part) != version or _address(part) != address:
                self._changed[name] = None
        self._last.clear()

    def end(self) -> list[str]:
        """Return the names of those that others changed since they were yielded."""
        self.read()
        written = set[int]().union(*map(stored_at, self._window.close()))
        for address, (name, find, version) in self._noted.items():
            tensor = find()
            if address in written or (tensor is not None and _version(tensor) != version):
                self._changed[name] = None
        self._noted.clear()
        self._before.clear()
        return list(self._changed)


def with_shards(
    names: Iterable[str], tensors: Sequence[torch.Tensor]
) -> tuple[Sequence[str], Sequence[torch.Tensor]]:
    """Return the tensors, and beside each DTensor its local shard, which optimizers write."""
    if not any(hasattr(tensor, "_local_tensor") for tensor in tensors):
        return list(names), tensors
    parts = [(name, p) for name, t in zip(names, tensors, strict=True) for p in _parts(t)]
    return [name for name, _ in parts], [tensor for _, tensor in parts]


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    if type(tensor) in _PLAIN:
        return (tensor,)
    local = getattr(tensor, "_local_tensor", None)
    return (tensor,) if local is None else (tensor, local)


def _look(tensors: Sequence[torch.Tensor]) -> list[list[object]]:
    """Versions, addresses and dtypes, each a loop without Python in it where that goes."""
    try:
        versions = list(map(_version_of, tensors))
    except RuntimeError:
        versions = list(map(_version, tensors))
    try:
        addresses = list(map(torch.Tensor.data_ptr, tensors))
    except (RuntimeError, NotImplementedError):
        addresses = list(map(_address, tensors))
    return [versions, addresses, list(map(_dtype_of, tensors))]


def _differences(
    before: list[list[object]], now: list[list[object]], is_place: Callable[[int, int], bool]
) -> Iterator[int]:
    rows = enumerate(zip(zip(*before, strict=True), zip(*now, strict=True), strict=True))
    for i, ((version, address, dtype), (version_now, address_now, dtype_now)) in rows:
        moved = address != address_now and not is_place(i, int(address_now))
        if version != version_now or dtype is not dtype_now or moved:
            yield i


def _version(tensor: torch.Tensor) -> int:
    """Inference tensors have no version."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def _address(tensor: torch.Tensor) -> int:
    """Tensors of some classes have no memory of their own."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


NamedTensors = Iterable[tuple[str, torch.Tensor]]


class WeightSource(Protocol):
    """What a sender sends from.

    `manifest` is asked once, at `connect`. `tensors` is asked once per update and yields full
    tensors in the manifest's order, aliases left out; a sender keeps each alive until its bytes
    are copied. `stable_tensors` is asked once per update too: the same tensors where they live in
    memory that stays (so that they can be registered), or None where they are made on the fly.

    A source whose `stable_tensors` is None may also have `made_of() -> (names, tensors)`: what its
    tensors are made of. An update fails with VerificationError where those change while it is sent.
    """

    @property
    def manifest(self) -> Manifest: ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def stable_tensors(self) -> list[torch.Tensor] | None: ...


class ModuleSource:
    """Parameters and persistent buffers of an `nn.Module`; tied parameters once, as aliases.

    `dtype` casts floating-point tensors on the way, `rename` maps names. Parameters that are
    sharded over ranks (DTensor, as `fully_shard` makes them) are gathered one decoder layer at a
    time, on every rank of their mesh, and `fully_shard` modules are resharded first. Raises
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
        self._fsdp = find_fsdp(module)
        self._reshard()
        self._found = ModuleTensors(module, rename=rename)
        self._sharded = any(map(is_sharded, self._found.tensors))
        self._manifest = self._describe()
        self._groups = groups_of(self._manifest)

    @property
    def manifest(self) -> Manifest:
        """Names, dtypes as sent, and full shapes."""
        return self._manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors as they are, not yet cast; sharded ones cast and gathered.

        A group is gathered when its first tensor is asked for.
        """
        self._look_again()
        names, tensors = self._found.names, self._found.tensors
        if self._sharded:
            yield from gather_groups(names, tensors, self._groups, self._dtype)
            return
        for name, tensor in zip(names, tensors, strict=True):
            yield name, tensor.detach()

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """The module's own tensors, unless a cast or a gather makes new ones."""
        self._look_again()
        return None if self._sharded or self._casts() else self._found.tensors

    def made_of(self) -> tuple[list[str], list[torch.Tensor]]:
        """The module's own tensors, shards as they are, with the names that they are sent by."""
        self._look_again()
        return self._found.names, self._found.tensors

    def _casts(self) -> bool:
        return self._dtype is not None and any(
            TORCH_DTYPES[spec.dtype] is not tensor.dtype
            for spec, tensor in zip(self._manifest.specs, self._found.tensors, strict=True)
        )

    def _reshard(self) -> None:
        for part in self._fsdp:
            part.reshard()

    def _look_again(self) -> None:
        self._reshard()
        if self._found.refresh():
            self._fsdp = find_fsdp(self.module)
            self._reshard()
            self._found.refresh()
            self._sharded = any(map(is_sharded, self._found.tensors))
            now = self._describe()
            if now.digest != self._manifest.digest:
                changed = changes(self._manifest, now)
                raise ManifestMismatchError(
                    "the module's tensors are no longer those of connect(): "
                    f"{shorten(changed)}; bring them back, or connect again",
                    mismatched=changed,
                )
        if self._on_meta:
            raise ManifestMismatchError(
                f"{len(self._on_meta)} tensors have no memory, they are on the meta device "
                f"(offloaded): {shorten(self._on_meta)}; bring them back before send_weights()",
                missing=self._on_meta,
            )

    def _describe(self) -> Manifest:
        found = zip(self._found.names, self._found.tensors, strict=True)
        self._on_meta = [name for name, tensor in found if tensor.is_meta]
        specs = tuple(
            spec_of(name, tensor, self._dtype)
            for name, tensor in zip(self._found.names, self._found.tensors, strict=True)
        )
        return Manifest(specs, self._found.aliases)


class IterableSource:
    """A callable that returns a fresh iterable of `(name, full tensor)` for every update.

    It is iterated once at `connect` for the manifest; the sender compares every later iteration
    with that as it flows. A DTensor is gathered when it is asked for, so every rank has to
    yield the same names in the same order. `changed` are the tensors that the last iteration found
    changed by others, as `YieldWatch` sees it.
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
        self._dtype = dtype
        self.changed: list[str] = []
        self._manifest = Manifest(
            tuple(spec_of(self._rename(name), tensor, dtype) for name, tensor in factory())
        )

    @property
    def manifest(self) -> Manifest:
        """What the first iteration yielded."""
        return self._manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a fresh iteration, shards gathered."""
        for name, tensor in self.shards():
            yield name, self.gather(tensor)

    def shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a fresh iteration as it is; `gather` makes its shards whole."""
        self.changed = []
        watch = YieldWatch()
        last = len(self._manifest.specs) - 1
        try:
            for i, (name, tensor) in enumerate(self._factory()):
                sent = self._rename(name)
                watch.note(sent, tensor)
                yield sent, tensor
                watch.read()
                if i == last:  # what the callable does at its own end changes nothing that was sent
                    self.changed = watch.end()
        finally:
            watch.end()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of a shard, cast; others as they are. Collective over its mesh."""
        return gather(tensor, self._dtype)

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
    names = {name: first.setdefault(_memory(tensor), name) for name, tensor in pairs}
    return {name: known for name, known in names.items() if name != known}


def _memory(tensor: torch.Tensor) -> object:
    """The same for tied tensors of a state dict, where each has an object of its own."""
    if not is_sharded(tensor):
        return identity(tensor)
    shard = cast("Any", tensor)
    local = identity(shard.to_local())
    return local, tensor.shape, shard.placements, shard.device_mesh


def checked(pairs: NamedTensors, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the pairs while they are those of `manifest`; else raise ManifestMismatchError.

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
    """Floating-point tensors are cast to what was announced as they are packed; others never."""
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
