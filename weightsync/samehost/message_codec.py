"""Messages as msgpack with their large parts beside it, to be written and read in place.

A message is made of None, bool, int, float, str, bytes, bytearray, memoryview, list, tuple, dict,
set, frozenset, strided torch tensors, numpy arrays of plain numbers, the kinds of message_values,
and types registered by both sides. Every one of these comes back as what it was; anything else is
refused when it is encoded, since msgpack alone would quietly turn tuples into lists and objects
into dicts. Nothing is ever unpickled.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

import msgspec

from weightsync.errors import ConfigError, ProtocolError
from weightsync.samehost.message_parts import Encoded
from weightsync.samehost.message_values import ARRAY_KINDS, array_dtype, from_plain, to_plain
from weightsync.samehost.tensor_kind import Tensor

if TYPE_CHECKING:
    import torch

INLINE_NBYTES = 512
"""Bytes objects up to this size travel inside the msgpack."""
_PLAIN = frozenset({NoneType, bool, int, float, str})
_TENSOR, _ARRAY, _BYTES, _BYTES_INLINE, _BYTEARRAY, _MEMORYVIEW = 1, 2, 3, 4, 5, 6
_TUPLE, _SET, _FROZENSET, _REGISTERED, _DICT, _VALUE = 7, 8, 9, 10, 11, 12
_MAX_DIMENSIONS = 64

# A view of a tensor's bytes: without numpy, for every dtype, and no new ctypes type for each size.
_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_READ_ONLY = 0x100

_WRONG = (TypeError, ValueError, AttributeError, ArithmeticError, MemoryError)
Hook = Callable[[Any], Any]
BYTES_BODY = msgspec.msgpack.encode(msgspec.msgpack.Ext(_BYTES, msgspec.msgpack.encode([0])))
"""The body of a message that is one bytes object, its only buffer."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Registered:
    name: str
    kind: type
    encode: Hook
    decode: Hook


class MessageCodec:
    """Turns objects into messages and back. Both sides register the same types by the same names.

    Safe to use from several threads once everything is registered.
    """

    def __init__(self) -> None:
        self._by_kind: dict[type, _Registered] = {}
        self._by_name: dict[str, _Registered] = {}

    def register(
        self,
        kind: type,
        *,
        name: str | None = None,
        encode: Hook | None = None,
        decode: Hook | None = None,
    ) -> None:
        """Let objects of exactly this type pass: `encode(obj)` is any message, `decode` undoes it.

        A dataclass or msgspec Struct needs no hooks: its fields travel and its constructor is
        called with them. Raises ConfigError for others, for a name that is taken, and for types
        that messages carry as they are.
        """
        if kind in _BUILT_IN:
            raise ConfigError(
                f"{kind.__qualname__} travels as it is, so hooks for it would never be called"
            )
        name = name or kind.__qualname__
        if name in self._by_name or kind in self._by_kind:
            raise ConfigError(f"{kind.__qualname__} or the name {name!r} is registered already")
        if encode is None or decode is None:
            encode, decode = _field_hooks(kind)
        entry = _Registered(name, kind, encode, decode)
        self._by_kind[kind] = entry
        self._by_name[name] = entry

    def encode(self, message: object) -> Encoded:
        """Return `message` encoded, its large parts as views. Raises ConfigError with the path."""
        packer = _Packer(self._by_kind)
        try:
            try:
                body = msgspec.msgpack.encode(packer.lift(message))
            except OverflowError:  # rare, so only now are integers looked at one by one
                packer = _Packer(self._by_kind, plain=_PLAIN - {int})
                body = msgspec.msgpack.encode(packer.lift(message))
        except _Foreign as exc:
            path = _path_to(message, exc.args[0]) or "inside a registered type"
            raise ConfigError(f"{path}: {exc.args[1]}") from None
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise ConfigError(f"this cannot be put into a message: {exc}") from exc
        return Encoded(body, packer.buffers, packer.kept)

    def decode(
        self,
        body: memoryview | bytes,
        buffers: Sequence[memoryview],
        views: list[memoryview] | None = None,
    ) -> Any:
        """Return the message, copied out; with `views`, in place. Raises ProtocolError.

        In place, bytes outside sets become read-only memoryviews, also put into `views` for the
        caller to release; tensors and arrays are views that nobody may write to.
        """
        unpacker = _Unpacker(self._by_name, buffers, views)
        try:
            return unpacker.decode(body)
        except ProtocolError:
            raise
        except (msgspec.MsgspecError, IndexError, RecursionError, *_WRONG) as exc:
            raise ProtocolError(f"a message cannot be decoded: {exc}") from exc


class _Foreign(Exception):
    """An object that no message may contain, and why."""


class _Packer:
    """One message being taken apart."""

    def __init__(
        self, registered: dict[type, _Registered], plain: frozenset[type] = _PLAIN
    ) -> None:
        self.buffers: list[memoryview] = []
        self.kept: list[object] = []
        self._registered = registered
        self._plain = plain
        self._keys = plain | {bytes}
        self._in_set = False

    def lift(self, value: Any) -> Any:
        """Return `value` with all that msgpack has no exact word for replaced by extensions."""
        kind = type(value)
        if kind in self._plain:
            return value
        if kind is dict:
            return self._lift_dict(value)
        if kind is list:
            if self._plain.issuperset(map(type, value)):
                return value
            return [self.lift(item) for item in value]
        if kind is tuple:
            return self._extension(_TUPLE, list(value))
        if kind in _SETS:
            return self._lift_set(value, _SETS[kind])
        if kind in _BYTES_LIKE:
            return self._lift_bytes(value, _BYTES_LIKE[kind])
        return self._lift_object(value, kind)

    def _lift_object(self, value: Any, kind: type) -> Any:
        entry = self._registered.get(kind)
        if entry is not None:
            return self._extension(_REGISTERED, [entry.name, entry.encode(value)])
        if isinstance(value, Tensor):
            return self._lift_tensor(value)
        if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
            return self._lift_array(value)
        if kind is int and -(1 << 63) <= value < 1 << 64:
            return value
        plain = to_plain(value)
        if plain is not None:
            return self._extension(_VALUE, list(plain))
        raise _Foreign(
            value,
            f"{kind.__module__}.{kind.__qualname__} is nothing that a message may contain; "
            "register it with the codec, on both sides",
        )

    def _extension(self, code: int, value: Any) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(self.lift(value)))

    def _lift_dict(self, value: dict[Any, Any]) -> dict[Any, Any] | msgspec.msgpack.Ext:
        if not self._keys.issuperset(map(type, value)):
            return self._lift_pairs(value)
        if self._plain.issuperset(map(type, value.values())):
            return value
        return {key: self.lift(item) for key, item in value.items()}

    def _lift_pairs(self, value: dict[Any, Any]) -> msgspec.msgpack.Ext:
        outer, self._in_set = self._in_set, True
        try:
            keys = [self.lift(key) for key in value]
        finally:
            self._in_set = outer
        pairs = [keys, [self.lift(item) for item in value.values()]]
        return msgspec.msgpack.Ext(_DICT, msgspec.msgpack.encode(pairs))

    def _lift_set(self, value: Any, code: int) -> msgspec.msgpack.Ext:
        outer, self._in_set = self._in_set, True
        try:
            return self._extension(code, list(value))
        finally:
            self._in_set = outer

    def _lift_bytes(self, value: Any, code: int) -> Any:
        if self._in_set:  # where a view, in place, would have no hash
            if code == _MEMORYVIEW:
                raise _Foreign(value, "a set holds bytes, not views of them")
            return value
        if code == _BYTES and len(value) <= INLINE_NBYTES:
            return msgspec.msgpack.Ext(_BYTES_INLINE, value)
        if code == _MEMORYVIEW and (value.format != "B" or value.ndim != 1):
            raise _Foreign(
                value,
                f"a memoryview of format {value.format!r} and {value.ndim} dimensions would come "
                'back as one of bytes; send view.cast("B"), or an array',
            )
        if code == _MEMORYVIEW and not value.c_contiguous:
            value = value.tobytes()
        return self._place(code, [], memoryview(value), value)

    def _lift_tensor(self, value: torch.Tensor) -> msgspec.msgpack.Ext:
        import torch  # noqa: PLC0415  # messages without tensors need none

        name = str(value.dtype).removeprefix("torch.")
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or name not in _dtypes():
            raise _Foreign(value, f"a {type(value).__name__} of {value.dtype} cannot travel")
        if value.layout is not torch.strided or value.device.type == "meta":
            raise _Foreign(value, f"a tensor ({value.layout}, {value.device}) has no plain bytes")
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        nbytes = plain.numel() * plain.element_size()
        view = _memory(plain.data_ptr(), nbytes, _READ_ONLY) if nbytes else memoryview(b"")
        return self._place(_TENSOR, [name, list(value.shape)], view, plain)

    def _lift_array(self, value: Any) -> msgspec.msgpack.Ext:
        if value.dtype.kind not in ARRAY_KINDS or not value.dtype.itemsize:
            raise _Foreign(value, f"an array of {value.dtype} has no plain bytes")
        flat = value.ravel()  # contiguous: a view, or a copy in C order
        view = memoryview(flat.view("u1")) if flat.nbytes else memoryview(b"")
        return self._place(_ARRAY, [value.dtype.str, list(value.shape)], view, flat)

    def _place(
        self, code: int, about: list[Any], view: memoryview, owner: object
    ) -> msgspec.msgpack.Ext:
        about.append(len(self.buffers))
        self.buffers.append(view.cast("B") if view.nbytes else memoryview(b""))
        self.kept.append(owner)
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(about))


_BUILT_IN = _PLAIN | {dict, list, tuple, set, frozenset, bytes, bytearray, memoryview}
_SETS: dict[type, int] = {set: _SET, frozenset: _FROZENSET}
_BYTES_LIKE: dict[type, int] = {bytes: _BYTES, bytearray: _BYTEARRAY, memoryview: _MEMORYVIEW}


class _Unpacker:
    """One message being put together."""

    def __init__(
        self,
        registered: dict[str, _Registered],
        buffers: Sequence[memoryview],
        views: list[memoryview] | None,
    ) -> None:
        self._registered = registered
        self._buffers = buffers
        self._views = views
        self._copy = views is None

    def decode(self, data: memoryview | bytes) -> Any:
        return msgspec.msgpack.decode(data, ext_hook=self._extension)

    def _extension(self, code: int, data: memoryview) -> Any:
        if code == _BYTES_INLINE:
            return self._handed(data)
        build = _BUILDERS.get(code)
        if build is None:
            raise ProtocolError(f"a message has an extension {code}, which is none of ours")
        return build(self, self.decode(data))

    def buffer(self, index: int) -> memoryview:
        if not 0 <= index < len(self._buffers):
            raise ProtocolError(
                f"a message refers to buffer {index} of {len(self._buffers)}; it is damaged"
            )
        return self._buffers[index]

    def bytes_like(self, about: Any) -> bytes | memoryview:
        return self._handed(self.buffer(about[0]))

    def view(self, about: Any) -> memoryview:
        found = self.bytes_like(about)
        return memoryview(found) if isinstance(found, bytes) else found

    def _handed(self, view: memoryview) -> bytes | memoryview:
        if self._views is None:
            return bytes(view)
        view = view.toreadonly()
        self._views.append(view)
        return view

    def tensor(self, about: Any) -> torch.Tensor:
        import torch  # noqa: PLC0415  # as above

        name, shape, index = about
        if name not in _dtypes():
            raise ProtocolError(f"a message has a tensor of dtype {name!r}, unknown to this torch")
        dtype, view = _dtypes()[name], self.buffer(index)
        _check_shape(shape, dtype.itemsize, len(view))
        if not len(view):
            return torch.empty(shape, dtype=dtype)
        tensor = torch.frombuffer(view, dtype=dtype)
        if self._copy or tensor.data_ptr() % dtype.itemsize:
            kept, tensor = tensor, torch.empty(tensor.shape, dtype=dtype)
            ctypes.memmove(tensor.data_ptr(), kept.data_ptr(), len(view))
        return tensor.view(shape)

    def array(self, about: Any) -> Any:
        import numpy as np  # noqa: PLC0415  # optional: only who sends arrays needs it

        kind, shape, index = about
        dtype, view = array_dtype(kind), self.buffer(index)
        _check_shape(shape, dtype.itemsize, len(view))
        if not len(view):
            return np.empty(shape, dtype)
        array = np.frombuffer(view.toreadonly(), dtype).reshape(shape)
        return array.copy() if self._copy else array

    def registered(self, about: Any) -> Any:
        name, plain = about
        entry = self._registered.get(name)
        if entry is None:
            known = ", ".join(self._registered) or "none"
            raise ProtocolError(
                f"a message has a {name!r}, which is not registered here (known: {known}); "
                "register it with the codec of this side too"
            )
        return entry.decode(plain)


_BUILDERS: dict[int, Callable[[_Unpacker, Any], Any]] = {
    _TENSOR: _Unpacker.tensor,
    _ARRAY: _Unpacker.array,
    _BYTES: _Unpacker.bytes_like,
    _BYTEARRAY: lambda unpacker, about: bytearray(unpacker.buffer(about[0])),
    _MEMORYVIEW: _Unpacker.view,
    _TUPLE: lambda _, items: tuple(items),
    _SET: lambda _, items: set(items),
    _FROZENSET: lambda _, items: frozenset(items),
    _REGISTERED: _Unpacker.registered,
    _DICT: lambda _, pairs: dict(zip(*pairs, strict=True)),
    _VALUE: lambda _, about: from_plain(*about),
}


@functools.cache
def _dtypes() -> dict[str, torch.dtype]:
    """Return the dtypes that travel, by name; torch is shown read-only memory from here on."""
    import torch  # noqa: PLC0415  # as above

    from weightsync.samehost import tensor_bytes  # noqa: F401, PLC0415  # spends torch's warning

    return {
        str(value).removeprefix("torch."): value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and "q" not in str(value) and "bits" not in str(value)
    }


def _check_shape(shape: Any, itemsize: int, nbytes: int) -> None:
    if (
        len(shape) > _MAX_DIMENSIONS
        or any(size < 0 for size in shape)
        or math.prod(size or 1 for size in shape) * itemsize >= 1 << 63
    ):
        raise ProtocolError(f"a message has a tensor of shape {str(shape)[:80]}")
    if math.prod(shape) * itemsize != nbytes:
        raise ProtocolError(
            f"a message has a tensor of shape {shape}, {itemsize} bytes an element, and "
            f"{nbytes} bytes for it; it is damaged"
        )


def _field_hooks(kind: type) -> tuple[Hook, Hook]:
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.init]
    elif issubclass(kind, msgspec.Struct):
        names = list(kind.__struct_fields__)
    else:
        raise ConfigError(
            f"{kind.__qualname__} is neither a dataclass nor a msgspec Struct; "
            "give encode and decode"
        )

    def encode(value: Any) -> dict[str, Any]:
        return {name: getattr(value, name) for name in names}

    return encode, lambda fields: kind(**fields)


def _path_to(value: object, wanted: object, path: str = "$") -> str | None:
    """Return where in a message an object stands, None if only a hook knows."""
    if value is wanted:
        return path
    items: list[tuple[object, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        items = list(enumerate(value))
    found = (_path_to(item, wanted, f"{path}[{key!r}]") for key, item in items)
    return next((place for place in found if place is not None), None)
