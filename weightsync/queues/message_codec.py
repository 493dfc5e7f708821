"""Message codec: msgpack with large parts in separate buffers, written and read in place."""

from __future__ import annotations

import array
import ctypes
import dataclasses
import datetime as dt
import enum
import functools
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from operator import index
from pathlib import Path, PosixPath, PurePath, PurePosixPath
from types import EllipsisType, NoneType
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from weightsync.errors import ConfigError, ProtocolError
from weightsync.shm.buffer_address import buffer_address

if TYPE_CHECKING:
    import torch
    from torch import Tensor as Tensor  # noqa: PLC0414 - exported for other modules
else:  # a stand-in for modules that must not import torch

    class _TensorKind(type):
        def __instancecheck__(cls, value: object) -> bool:
            torch = sys.modules.get("torch")  # without torch there are no tensors
            return torch is not None and isinstance(value, torch.Tensor)

    class Tensor(metaclass=_TensorKind):
        """Stand-in for torch.Tensor in annotations and isinstance checks."""


ALIGNMENT = 64
_COUNTS = struct.Struct("<QQ")
# A copy of this size or more releases the GIL.
_LARGE_NBYTES = 256 << 10


class Encoded:
    """An encoded message: `body` is msgpack, `buffers` are views of the sender's data.

    Valid until the sender changes that data; `kept` keeps the data alive.
    """

    __slots__ = ("body", "buffers", "kept", "nbytes")

    def __init__(self, body: bytes, buffers: list[memoryview], kept: list[object]) -> None:
        self.body = body
        self.buffers = buffers
        self.kept = kept
        self.nbytes = _COUNTS.size + 8 * len(buffers) + len(body)
        for buffer in buffers:
            self.nbytes = _aligned(self.nbytes) + len(buffer)

    def write(self, target: memoryview) -> None:
        """Copy the message into the first `nbytes` bytes of `target`, which is 64-byte aligned."""
        body, buffers = self.body, self.buffers
        _COUNTS.pack_into(target, 0, len(body), len(buffers))
        at = _COUNTS.size
        if buffers:
            struct.pack_into(f"<{len(buffers)}Q", target, at, *map(len, buffers))
            at += 8 * len(buffers)
        target[at : at + len(body)] = body
        at += len(body)
        for buffer in buffers:
            at = _aligned(at)
            copy_bytes(target[at : at + len(buffer)], buffer)
            at += len(buffer)


def buffer_offset(body: bytes) -> int:
    """Return the offset of the buffer in a message with this `body` and a single buffer."""
    return _aligned(_COUNTS.size + 8 + len(body))


def write_around(target: memoryview, body: bytes) -> memoryview:
    """Write the header and `body` of a message with one buffer; return the rest of `target`.

    The returned view is the buffer, which the caller fills.
    """
    at = buffer_offset(body)
    _COUNTS.pack_into(target, 0, len(body), 1)
    struct.pack_into("<Q", target, _COUNTS.size, len(target) - at)
    target[_COUNTS.size + 8 : _COUNTS.size + 8 + len(body)] = body
    return target[at:]


def split(source: memoryview) -> tuple[memoryview, list[memoryview]]:
    """Return views of the body and the buffers that `Encoded.write` wrote. Raises ProtocolError."""
    try:
        body_nbytes, count = _COUNTS.unpack_from(source)
        at = _COUNTS.size + 8 * count
        sizes = struct.unpack_from(f"<{count}Q", source, _COUNTS.size) if count else ()
    except (struct.error, OverflowError, MemoryError) as exc:
        raise ProtocolError(f"a message of {len(source)} bytes has no table: {exc}") from exc
    body = source[at : at + body_nbytes]
    at += body_nbytes
    buffers = []
    for size in sizes:
        at = _aligned(at)
        buffers.append(source[at : at + size])
        at += size
    if at != len(source):
        raise ProtocolError(f"the parts of a message have {at} bytes, it has {len(source)}")
    return body, buffers


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy `source` to `target`, of the same size; a large copy releases the GIL.

    torch's copy is not used, because its worker threads wait for each other on busy processors.
    """
    nbytes = len(source)
    if nbytes < _LARGE_NBYTES:
        target[:] = source
    else:
        ctypes.memmove(buffer_address(target), buffer_address(source), nbytes)


ARRAY_KINDS = "biufcUSMm"
"""NumPy dtype kinds whose bytes are their value."""
_VALUE_ERRORS = (
    TypeError,
    ValueError,
    RuntimeError,
    ArithmeticError,
    LookupError,
    AttributeError,
    MemoryError,
    SyntaxError,
)
"""Errors of Python, NumPy and torch for plain data that is invalid for its kind."""
_FACTORIES = (list, dict, set, tuple, int, float, str, bool, bytes)


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


def to_plain(value: object) -> tuple[str, Any] | None:
    """Return the kind's name and the argument of `from_plain`; None for values of no known kind.

    The argument may hold other values of these kinds, tensors and bytes.
    """
    kind = _BY_TYPE.get(type(value)) or _family(value)
    plain = None if kind is None else kind.to_plain(value)
    return None if kind is None or plain is None else (kind.name, plain)


def from_plain(name: str, plain: Any) -> Any:
    """Return the value of kind `name`. Raises ProtocolError for an unknown kind or bad data."""
    kind = _BY_NAME.get(name)
    if kind is None:
        raise ProtocolError(f"a message has a value of the unknown kind {name!r}")
    try:
        return kind.from_plain(plain)
    except ProtocolError:
        raise
    except _VALUE_ERRORS as exc:
        raise ProtocolError(f"a message has an invalid {name}: {exc}") from exc


def _family(value: object) -> _Kind | None:
    """Return the kind of a value whose exact type is not in `_BY_TYPE`, None if there is none."""
    if isinstance(value, enum.Enum):
        return _ENUM
    if _fields(type(value)) is not None:
        return _NAMED_TUPLE
    torch = sys.modules.get("torch")  # without torch there are no values of its types
    if torch is not None and vars(torch).get(type(value).__name__) is type(value):
        return _BY_NAME.get(f"torch.{type(value).__name__}")
    numpy = sys.modules.get("numpy")  # as above
    if numpy is None:
        return None
    if isinstance(value, numpy.generic):
        return _SCALAR
    if isinstance(value, numpy.dtype):
        return _DTYPE
    return _NUMPY_ARRAY if type(value) is numpy.ndarray else None


def _dotted(kind: type) -> list[str] | None:
    """Return module and name of a class that can be imported by them, else None."""
    names = [kind.__module__, kind.__qualname__]
    try:
        return names if _class(*names) is kind else None
    except ProtocolError:
        return None


def _class(module: object, name: object) -> Any:
    if not (isinstance(module, str) and isinstance(name, str)):
        raise ProtocolError(f"a message has a value of {module!r}.{name!r}, which names no class")
    found: Any = sys.modules.get(module)
    for part in name.split("."):  # not getattr: that could run code
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if not isinstance(found, type):
        raise ProtocolError(
            f"a message has a value of {module}.{name}, which is no class of a module imported "
            "here; import it, or register the class with the codec on both sides"
        )
    return found


def _from_enum(value: enum.Enum) -> list[Any] | None:
    where = _dotted(type(value))
    if where is None:
        return None
    # A combination of flags has no name in some versions of Python.
    by_value = isinstance(value, enum.Flag)
    return [*where, value.value if by_value else value.name]


def _to_enum(plain: Any) -> Any:
    module, name, member = plain
    kind = _class(module, name)
    if not issubclass(kind, enum.Enum):
        raise ProtocolError(f"{module}.{name} is no enumeration")
    if issubclass(kind, enum.Flag):
        return kind(member)
    return kind.__members__[member]


def _fields(kind: type) -> tuple[str, ...] | None:
    """Return the field names of a named tuple class or its subclass; else None."""
    if not issubclass(kind, tuple):
        return None
    found = next((vars(one)["_fields"] for one in kind.__mro__ if "_fields" in vars(one)), None)
    return found if isinstance(found, tuple) else None


def _from_named_tuple(value: Any) -> list[Any] | None:
    where, fields = _dotted(type(value)), _fields(type(value))
    if where is None or fields is None or len(fields) != len(value):
        return None
    if getattr(value, "__dict__", None):
        return None  # the attributes would be lost
    return [*where, list(value)]


def _to_named_tuple(plain: Any) -> Any:
    module, name, items = plain
    kind = _class(module, name)
    fields = _fields(kind)
    if fields is None or len(fields) != len(items):
        raise ProtocolError(f"{module}.{name} is no named tuple of {len(items)} fields")
    return tuple.__new__(kind, items)


def _from_scalar(value: Any) -> list[Any] | None:
    return [value.dtype.str, value.tobytes()] if value.dtype.kind in ARRAY_KINDS else None


def _to_scalar(plain: Any) -> Any:
    import numpy as np  # noqa: PLC0415  # optional: needed for NumPy values only

    dtype, data = plain_dtype(plain[0]), _bytes(plain[1])
    if not dtype.itemsize:
        return dtype.type()  # an empty string
    if len(data) != dtype.itemsize:
        raise ProtocolError(f"a message has a {dtype} in {len(data)} bytes")
    return np.frombuffer(data, dtype)[0]


def _from_array(value: Any) -> list[Any] | None:
    if value.dtype.kind not in ARRAY_KINDS or not value.dtype.itemsize:
        return None
    flat = value.ravel()
    data = flat.view("u1") if flat.nbytes else flat[:0].astype("u1")
    import torch  # noqa: PLC0415  # an array is sent as a tensor

    tensor = torch.from_numpy(data if data.flags.writeable else data.copy())
    return [value.dtype.str, list(value.shape), tensor]


def _to_array(plain: Any) -> Any:
    import numpy as np  # noqa: PLC0415  # as above

    name, shape, data = plain
    dtype = array_dtype(name)
    if str(data.dtype) != "torch.uint8" or data.numel() != math.prod(shape) * dtype.itemsize:
        raise ProtocolError(f"an array of {dtype}{shape} came in {data.numel()} x {data.dtype}")
    return data.numpy().view(dtype).reshape(shape) if data.numel() else np.empty(shape, dtype)


def plain_dtype(name: object) -> Any:
    """Return NumPy's dtype of this name. Raises ProtocolError unless its bytes are its value."""
    import numpy as np  # noqa: PLC0415  # as above

    dtype = np.dtype(str(name))
    if dtype.kind not in ARRAY_KINDS:
        raise ProtocolError(f"a message has an array of {dtype}, which has no plain bytes")
    return dtype


def array_dtype(name: object) -> Any:
    """Return the dtype of an array's elements. Raises ProtocolError for an item size of 0.

    NumPy would enlarge such elements, so a short message could make an array of any size.
    """
    dtype = plain_dtype(name)
    if not dtype.itemsize:
        raise ProtocolError(f"a message has an array of {dtype}, whose elements have no bytes")
    return dtype


def _bytes(value: object) -> bytes:
    """Return `bytes(value)` for bytes-like values only; `bytes(n)` of a number makes n zeros."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise ProtocolError(f"a message has a {type(value).__name__} in the place of bytes")
    return bytes(value)


def _of_torch(name: str) -> Callable[[Any], Any]:
    def make(plain: Any) -> Any:
        import torch  # noqa: PLC0415  # optional: needed for values of torch only

        return getattr(torch, name)(plain)

    return make


def _torch_constant(kind: str) -> Callable[[Any], Any]:
    def find(name: Any) -> Any:
        import torch  # noqa: PLC0415  # as above

        found = vars(torch).get(str(name))
        if not isinstance(found, getattr(torch, kind)):
            raise ProtocolError(f"torch.{name} is no {kind} of the torch installed here")
        return found

    return find


def _name_in_torch(value: object) -> str:
    return str(value).removeprefix("torch.")


def _from_moment(value: Any) -> list[Any] | None:
    if value.tzinfo is not None and type(value.tzinfo) is not dt.timezone:
        return None  # the time zone's rules would be lost
    return [value.isoformat(), value.fold]


def _from_default_dict(value: defaultdict[Any, Any]) -> list[Any] | None:
    factory = value.default_factory
    if factory is not None and factory not in _FACTORIES:
        return None
    return [None if factory is None else factory.__name__, dict(value)]


def _to_default_dict(plain: Any) -> defaultdict[Any, Any]:
    name, items = plain
    named: dict[str, Any] = {factory.__name__: factory for factory in _FACTORIES}
    return defaultdict(None if name is None else named[name], items)


_ENUM = _Kind("enum", _from_enum, _to_enum)
_NAMED_TUPLE = _Kind("namedtuple", _from_named_tuple, _to_named_tuple)
_SCALAR = _Kind("numpy scalar", _from_scalar, _to_scalar)
_NUMPY_ARRAY = _Kind("numpy array", _from_array, _to_array)
_DTYPE = _Kind("numpy dtype", lambda v: v.str if v.kind in ARRAY_KINDS else None, plain_dtype)

_BY_TYPE: dict[type, _Kind] = {
    int: _Kind("int", str, int),  # more than 64 bits
    complex: _Kind("complex", lambda v: [v.real, v.imag], lambda p: complex(*p)),
    slice: _Kind("slice", lambda v: [v.start, v.stop, v.step], lambda p: slice(*p)),
    range: _Kind("range", lambda v: [v.start, v.stop, v.step], lambda p: range(*p)),
    EllipsisType: _Kind("Ellipsis", lambda _: True, lambda _: ...),
    Decimal: _Kind("Decimal", str, Decimal),
    Fraction: _Kind(
        "Fraction", lambda v: [v.numerator, v.denominator], lambda p: Fraction(*map(index, p))
    ),
    UUID: _Kind("UUID", lambda v: v.hex, UUID),
    dt.datetime: _Kind(
        "datetime",
        _from_moment,
        lambda p: dt.datetime.fromisoformat(p[0]).replace(fold=p[1]),
    ),
    dt.time: _Kind("time", _from_moment, lambda p: dt.time.fromisoformat(p[0]).replace(fold=p[1])),
    dt.date: _Kind("date", lambda v: v.isoformat(), dt.date.fromisoformat),
    dt.timedelta: _Kind(
        "timedelta",
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda p: dt.timedelta(*p),
    ),
    PosixPath: _Kind("Path", str, Path),
    PurePosixPath: _Kind("PurePath", str, PurePath),
    OrderedDict: _Kind("OrderedDict", dict, OrderedDict),
    Counter: _Kind("Counter", dict, Counter),
    defaultdict: _Kind("defaultdict", _from_default_dict, _to_default_dict),
    deque: _Kind("deque", lambda v: [list(v), v.maxlen], lambda p: deque(*p)),
    array.array: _Kind(
        "array", lambda v: [v.typecode, v.tobytes()], lambda p: array.array(p[0], _bytes(p[1]))
    ),
}
_TORCH_KINDS = (
    _Kind("torch.Size", list, _of_torch("Size")),
    _Kind("torch.device", str, _of_torch("device")),
    *(
        _Kind(f"torch.{kind}", _name_in_torch, _torch_constant(kind))
        for kind in ("dtype", "layout", "memory_format")
    ),
)
_BY_NAME: dict[str, _Kind] = {
    kind.name: kind
    for kind in (
        *_BY_TYPE.values(),
        *_TORCH_KINDS,
        _ENUM,
        _NAMED_TUPLE,
        _SCALAR,
        _NUMPY_ARRAY,
        _DTYPE,
    )
}


INLINE_NBYTES = 512
"""Bytes objects up to this size are stored inside the msgpack body."""
_PLAIN = frozenset({NoneType, bool, int, float, str})
_TENSOR, _ARRAY, _BYTES, _BYTES_INLINE, _BYTEARRAY, _MEMORYVIEW = 1, 2, 3, 4, 5, 6
_TUPLE, _SET, _FROZENSET, _REGISTERED, _DICT, _VALUE = 7, 8, 9, 10, 11, 12
_MAX_DIMENSIONS = 64

# Makes a view of a tensor's bytes, for every dtype, without numpy or a ctypes type per size.
_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_READ_ONLY = 0x100

_WRONG = (TypeError, ValueError, AttributeError, ArithmeticError, MemoryError)
Hook = Callable[[Any], Any]
BYTES_BODY = msgspec.msgpack.encode(msgspec.msgpack.Ext(_BYTES, msgspec.msgpack.encode([0])))
"""Body of a message that is a single bytes object, stored in its only buffer."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Registered:
    name: str
    kind: type
    encode: Hook
    decode: Hook


class MessageCodec:
    """Encodes objects as messages and decodes them. Both sides register the same types and names.

    Safe to use from several threads after the last `register`.
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
        """Register a type: `encode(obj)` returns any object that a message may contain.

        `decode` is the inverse of `encode`. Subclasses are not included. A dataclass or msgspec
        Struct needs no hooks: its fields are sent, and its constructor is called with them. Raises
        ConfigError for other types without hooks, for a name that is taken, and for types that
        messages support without registration.
        """
        if kind in _BUILT_IN:
            raise ConfigError(
                f"{kind.__qualname__} is supported without hooks, which would never be called"
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
        """Encode `message`, with views of its large parts.

        Raises ConfigError with the path to an object that cannot be encoded.
        """
        packer = _Packer(self._by_kind)
        try:
            try:
                body = msgspec.msgpack.encode(packer.lift(message))
            except OverflowError:  # rare, so integers are checked one by one only now
                packer = _Packer(self._by_kind, plain=_PLAIN - {int})
                body = msgspec.msgpack.encode(packer.lift(message))
        except _UnsupportedError as exc:
            path = _path_to(message, exc.args[0]) or "inside a registered type"
            raise ConfigError(f"{path}: {exc.args[1]}") from None
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise ConfigError(f"this object cannot be encoded as a message: {exc}") from exc
        return Encoded(body, packer.buffers, packer.kept)

    def decode(
        self,
        body: memoryview | bytes,
        buffers: Sequence[memoryview],
        views: list[memoryview] | None = None,
    ) -> Any:
        """Return the message, as a copy, or in place if `views` is given. Raises ProtocolError.

        In place, bytes outside sets become read-only memoryviews, which are also appended to
        `views` for the caller to release. Tensors and arrays are views that must not be written.
        """
        unpacker = _Unpacker(self._by_name, buffers, views)
        try:
            return unpacker.decode(body)
        except ProtocolError:
            raise
        except (msgspec.MsgspecError, IndexError, RecursionError, *_WRONG) as exc:
            raise ProtocolError(f"a message cannot be decoded: {exc}") from exc


class _UnsupportedError(Exception):
    """Internal error: an object that a message cannot contain, and the reason."""


class _Packer:
    """Encoder of one message: collects its large parts in `buffers`."""

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
        """Return `value` with everything that msgpack cannot represent replaced by extensions."""
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
        raise _UnsupportedError(
            value,
            f"{kind.__module__}.{kind.__qualname__} is no type that a message may contain; "
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
        if self._in_set:  # a view that is decoded in place has no hash
            if code == _MEMORYVIEW:
                raise _UnsupportedError(value, "a set holds bytes, not views of them")
            return value
        if code == _BYTES and len(value) <= INLINE_NBYTES:
            return msgspec.msgpack.Ext(_BYTES_INLINE, value)
        if code == _MEMORYVIEW and (value.format != "B" or value.ndim != 1):
            raise _UnsupportedError(
                value,
                f"a memoryview of format {value.format!r} and {value.ndim} dimensions would be "
                'decoded as bytes; send view.cast("B"), or an array',
            )
        if code == _MEMORYVIEW and not value.c_contiguous:
            value = value.tobytes()
        return self._place(code, [], memoryview(value), value)

    def _lift_tensor(self, value: torch.Tensor) -> msgspec.msgpack.Ext:
        import torch  # noqa: PLC0415  # messages without tensors need no torch

        name = str(value.dtype).removeprefix("torch.")
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or name not in _dtypes():
            raise _UnsupportedError(
                value, f"a {type(value).__name__} of {value.dtype} cannot be sent"
            )
        if value.layout is not torch.strided or value.device.type == "meta":
            raise _UnsupportedError(
                value, f"a tensor ({value.layout}, {value.device}) has no plain bytes"
            )
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        nbytes = plain.numel() * plain.element_size()
        view = _memory(plain.data_ptr(), nbytes, _READ_ONLY) if nbytes else memoryview(b"")
        return self._place(_TENSOR, [name, list(value.shape)], view, plain)

    def _lift_array(self, value: Any) -> msgspec.msgpack.Ext:
        if value.dtype.kind not in ARRAY_KINDS or not value.dtype.itemsize:
            raise _UnsupportedError(value, f"an array of {value.dtype} has no plain bytes")
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
    """Decoder of one message."""

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
            return self._bytes_of(data)
        build = _BUILDERS.get(code)
        if build is None:
            raise ProtocolError(f"a message has the unknown extension {code}")
        return build(self, self.decode(data))

    def buffer(self, index: int) -> memoryview:
        if not 0 <= index < len(self._buffers):
            raise ProtocolError(
                f"a message refers to buffer {index} of {len(self._buffers)}; it is damaged"
            )
        return self._buffers[index]

    def bytes_like(self, about: Any) -> bytes | memoryview:
        return self._bytes_of(self.buffer(about[0]))

    def view(self, about: Any) -> memoryview:
        found = self.bytes_like(about)
        return memoryview(found) if isinstance(found, bytes) else found

    def _bytes_of(self, view: memoryview) -> bytes | memoryview:
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
        import numpy as np  # noqa: PLC0415  # optional: needed for arrays only

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
    """Return the dtypes that messages carry, by name.

    Loads torch, without its warning on read-only buffers.

    More than `tensors.TORCH_DTYPES`, the dtypes of weights: also complex32 and integers of fewer
    bits than a byte.
    """
    import torch  # noqa: PLC0415  # as above

    from weightsync import tensors  # noqa: F401, PLC0415  # its import silences the warning

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
        raise ProtocolError(f"a message has a tensor of shape {str(shape)[:80]}, which is invalid")
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
    """Return the path of an object in a message, None if it lies inside a registered type."""
    if value is wanted:
        return path
    items: list[tuple[object, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        items = list(enumerate(value))
    found = (_path_to(item, wanted, f"{path}[{key!r}]") for key, item in items)
    return next((place for place in found if place is not None), None)
