"""Tensors of torchao as the plain tensors inside of them, and the description that goes with these.

Such a tensor keeps quantized bytes, scales and zero points in tensors of its own, which its
`__tensor_flatten__` names, beside attributes that say what these mean. It is sent whole: each inner
tensor under the name of the parameter and its own (`layer.weight.qdata`, `layer.weight.scale`), and
a tensor without elements, whose name is the description (weightsync.specs.described_name). Class,
attributes, dtypes and shapes are in it, so two sides whose tensors mean something else have unlike
manifests. torchao is never imported here.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.graph import increment_version

from weightsync.look import version_of
from weightsync.specs import described_name
from weightsync.tensors import PLAIN_CLASSES

_PACKAGE = "torchao"
_OPAQUE = frozenset(
    {
        "CodebookQuantizedPackedTensor",
        "Float8OpaqueTensor",
        "Float8Sparse2x4_1DData1DMetadataTensor",
        "Float8Sparse2x4_2DData2DMetadataTensor",
        "Int4OpaqueTensor",
        "Int4PlainInt32Tensor",
        "Int4PreshuffledTensor",
        "Int4TilePackedTo4dTensor",
        "Int8LutTensor",
        "IntxOpaqueTensor",
        "UIntxBitPackedTensor",
    }
)
"""Classes of torchao 0.18 that pack bytes for the kernel of the processor or device that they are
made on: attributes and shapes may be equal where the packing is not."""
_PLAIN_VALUES = frozenset({str, int, float, bool, type(None), torch.dtype})
_UNCOMPARED = frozenset({"requires_grad"})
"""Fields that say nothing of the values: a trainer may have a gradient where a server has none."""
_NO_VALUES = frozenset({"grad_acc", "main_grad", "main_param"})
"""Attributes that a trainer adds, which hold no part of a weight's value."""
_MAX_DESCRIPTION = 640


class NotFlatError(Exception):
    """A tensor that cannot be sent whole; the text is a clause that says why."""


class InnerTensors:
    """The plain tensors inside of one tensor of torchao, at any depth, and its description.

    `parts` has each by its name below the parameter's, as `qdata`. `marker` is the `uint8[0]` that
    is sent under the description. `wrappers` are the tensor, and those of torchao inside of it: of
    a write to one (`copy_`) torch counts nothing in the tensors that it is carried out on. Raises
    NotFlatError where it cannot be sent whole.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.description, self.parts = _flatten(tensor)
        self.wrappers = list(_wrappers(tensor))
        self._counts = list(map(version_of, self.wrappers))
        self._look: _Look | None = None
        device = next(iter(self.parts.values())).device
        with torch.inference_mode(False):  # torch counts no writes to an inference tensor
            self.marker = torch.empty(0, dtype=torch.uint8, device=device)

    def is_current(self) -> bool:
        """Whether the tensor still has this description, and these very tensors inside.

        Writes to a wrapper since the last call are counted in the tensors inside from now on.
        """
        counts = list(map(version_of, self.wrappers))
        if counts != self._counts:
            self._counts = counts
            for part in self.parts.values():
                if not part.is_inference():
                    increment_version(part)
        try:
            if self._look is not None and self._look.is_same(self._tensor):
                return True
            look = _Look(self._tensor)  # first: what changes in between is seen next time
            description, parts = _flatten(self._tensor)
        except NotFlatError:
            return False
        same = description == self.description and parts.keys() == self.parts.keys()
        same = same and all(parts[key] is self.parts[key] for key in parts)
        self._look = look if same else None
        return same

    def named(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is sent of the parameter `name`, the marker first."""
        yield described_name(name, self.description), self.marker
        for key, tensor in self.parts.items():
            yield f"{name}.{key}", tensor


class _Look:
    """The attributes that a description was made of, to see quickly that they are the same.

    A server is inspected several times in an update, and a description takes 50 us to make. Where
    a class derives what `__tensor_flatten__` returns from something else, it is made every time.
    """

    def __init__(self, tensor: Any) -> None:
        inner, attributes = _taken_apart(tensor)
        own = vars(tensor)
        self._is_complete = all(
            type(part) in PLAIN_CLASSES and own.get(name) is part for name, part in inner.items()
        ) and all(
            own[key] is value if key in own else key in ("dtype", "shape")
            for key, value in attributes.items()
        )
        self._class = type(tensor)
        self._own = dict(own)
        self._parts = list(inner.values()) if self._is_complete else []
        self._forms = _forms([tensor, *self._parts])
        self._texts = {
            key: _text(key, own[key])
            for key in attributes
            if self._is_complete and key in own and not _is_constant(own[key])
        }

    def is_same(self, tensor: Any) -> bool:
        """Whether nothing has changed; False also where that is not known."""
        own = vars(tensor)
        return (
            self._is_complete
            and type(tensor) is self._class
            and own.keys() == self._own.keys()
            and all(own[key] is value for key, value in self._own.items())
            and _forms([tensor, *self._parts]) == self._forms
            and all(_text(key, own[key]) == text for key, text in self._texts.items())
        )


def _is_constant(value: object) -> bool:
    return type(value) in _PLAIN_VALUES or isinstance(value, enum.Enum | torch.Size)


def _forms(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    with torch._C.DisableTorchFunctionSubclass():
        return [(tensor.dtype, tensor.shape) for tensor in tensors]


class Expansion:
    """Replaces tensors of torchao by what is inside of them; others, and refused ones, stay.

    `owners` has the parameter of each name that was made. Wrappers around the same memory, as a
    state dict has for tied parameters, get one marker, so that they are found to be tied. One
    object is for one iteration over the tensors, since memory is used again.

    `wrappers` has those of the parameters; unless it `keeps` them, of the last one.
    """

    def __init__(self, owners: dict[str, str] | None = None, *, keeps: bool = True) -> None:
        self.owners: dict[str, str] = {} if owners is None else owners
        self.wrappers: dict[str, list[torch.Tensor]] = {}
        self._keeps = keeps
        self._markers: dict[Hashable, torch.Tensor] = {}

    def wrappers_of(self, name: str) -> list[torch.Tensor]:
        """Return the tensors on which torch counts writes to the inner tensor of this name."""
        return self.wrappers.get(self.owners.get(name, ""), [])

    def of(
        self, name: str, tensor: torch.Tensor, key: Callable[[torch.Tensor], object]
    ) -> InnerTensors | None:
        """Return what is inside of the parameter `name`; None where it is sent as it is, or not.

        `key` returns equal objects for tied tensors.
        """
        if not self._keeps:
            self.wrappers.clear()
        if not is_of_torchao(tensor):
            return None
        try:
            found = InnerTensors(tensor)
        except NotFlatError:
            return None
        same = (found.description, *(key(part) for part in found.parts.values()))
        found.marker = self._markers.setdefault(same, found.marker)
        self.owners.update((inner, name) for inner, _ in found.named(name))
        self.wrappers[name] = found.wrappers
        return found


def renamed(name: str, rename: Callable[[str], str], owners: Mapping[str, str]) -> str:
    """Return the name that is sent: of an inner tensor, the parameter's own name is renamed."""
    owner = owners.get(name)
    return rename(name) if owner is None else f"{rename(owner)}{name[len(owner) :]}"


def is_of_torchao(tensor: torch.Tensor) -> bool:
    """Whether torchao made the class of a tensor, or a class that it is derived from."""
    cls = type(tensor)
    return cls not in PLAIN_CLASSES and any(_is_of_package(base) for base in cls.__mro__)


def why_not_whole(tensor: torch.Tensor) -> str | None:
    """Return why a tensor of torchao is not sent whole; None where it is."""
    try:
        _flatten(tensor)
    except NotFlatError as exc:
        return str(exc)
    return None


def holds_tensor(value: object) -> bool:
    """Whether a value is a tensor, or an object or a collection with one directly in it."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        inner: Iterable[object] = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    else:
        inner = getattr(value, "__dict__", {}).values()
    return any(isinstance(each, torch.Tensor) for each in inner)


def _is_of_package(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == _PACKAGE


def _flatten(tensor: Any) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the description of a tensor, and the plain tensors inside of it by their names."""
    cls = type(tensor)
    opaque = next((base.__name__ for base in cls.__mro__ if base.__name__ in _OPAQUE), None)
    if opaque is not None:
        raise NotFlatError("it is packed for the processor that it was made on")
    inner, attributes = _taken_apart(tensor)
    if not inner:
        raise NotFlatError("__tensor_flatten__ names no tensors")
    told = {*inner, *attributes, *_NO_VALUES}
    beside = [key for key, value in vars(tensor).items() if key not in told and holds_tensor(value)]
    if beside:
        raise NotFlatError(f"it keeps {beside[0]} beside what __tensor_flatten__ names")
    entries = [f"{cls.__module__}.{cls.__qualname__}"]
    entries.append(f"values={_form(tensor)}")
    entries += [f"{key}={_text(key, value)}" for key, value in sorted(attributes.items())]
    parts: dict[str, torch.Tensor] = {}
    for key, value in inner.items():
        if type(value) in PLAIN_CLASSES and value.layout is torch.strided:
            parts[key] = value
            entries.append(f"{key}={_form(value)}")
        elif isinstance(value, torch.Tensor) and is_of_torchao(value):
            description, below = _flatten(value)
            parts.update({f"{key}.{name}": part for name, part in below.items()})
            entries.append(f"{key}=({description.replace('; ', ', ')})")
        else:
            layout = f"{value.layout} " if isinstance(value, torch.Tensor) else ""
            raise NotFlatError(f"its {key} is a {layout}{type(value).__name__}")
    return _shortened("; ".join(entries)), parts


def _wrappers(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor of torchao, and those inside of it, at any depth."""
    yield tensor
    for part in _taken_apart(tensor)[0].values():
        if is_of_torchao(part):
            yield from _wrappers(part)


def _taken_apart(tensor: Any) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return what is inside of a tensor, and its attributes, both by their names."""
    try:
        names, context = tensor.__tensor_flatten__()
        inner = {str(name): getattr(tensor, name) for name in names}
    except Exception as exc:  # a foreign class, whatever it raises
        raise NotFlatError(f"it has no __tensor_flatten__ ({type(exc).__name__})") from exc
    if isinstance(context, Mapping):
        return inner, {str(key): value for key, value in context.items()}
    return inner, {"context": context}


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _text(name: str, value: Any) -> str:
    """Return a text that is equal for equal values of an attribute, in every process.

    Raises NotFlatError for a value that is not plain: its text might not tell all of it.
    """
    cls = type(value)
    if cls in _PLAIN_VALUES:
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{cls.__qualname__}.{value.name}"
    if isinstance(value, torch.device):
        return "device"  # where it is, which may differ
    if cls is list:
        return f"[{', '.join(_text(name, each) for each in value)}]"
    if cls in (tuple, torch.Size):
        return f"({', '.join(_text(name, each) for each in value)})"
    fields: Iterable[str] | None = None
    if isinstance(value, tuple):
        fields = getattr(cls, "_fields", None)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
    elif cls is dict and all(type(key) is str for key in value):
        return f"{{{', '.join(f'{k!r}: {_text(name, value[k])}' for k in sorted(value))}}}"
    if fields is None:
        raise NotFlatError(f"its attribute {name} has a {cls.__qualname__}, which is not compared")
    listed = [
        f"{field}={_text(f'{name}.{field}', getattr(value, field))}"
        for field in fields
        if field not in _UNCOMPARED
    ]
    return f"{cls.__qualname__}({', '.join(listed)})"


def _shortened(text: str) -> str:
    """Return a text of a name's length: of a long one the beginning, and a hash of all of it."""
    if len(text) <= _MAX_DESCRIPTION:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return f"{text[:_MAX_DESCRIPTION]}... {digest}"
