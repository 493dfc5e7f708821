"""Ordinary values of Python, NumPy and torch that msgpack has no word for, as plain data and back.

MessageCodec uses these rules for every value, so that each comes back as what it was or is refused
when it is sent. TensorEncoder uses them for what msgspec has no rule of its own for: enumerations,
tuples, sets, dates, Decimal and UUID go by the types of fields there. Decoding runs nothing that
the message names: classes of enumerations and named tuples are looked up in modules that this
process has imported already, and only their values are made.
"""

from __future__ import annotations

import array
import datetime as dt
import enum
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from operator import index
from pathlib import Path, PosixPath, PurePath, PurePosixPath
from types import EllipsisType
from typing import Any
from uuid import UUID

from weightsync.errors import ProtocolError

ARRAY_KINDS = "biufcUSMm"
"""NumPy's kinds of dtypes whose bytes are their value."""
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
"""What Python, NumPy and torch raise for plain data that is no value of the kind named."""
_FACTORIES = (list, dict, set, tuple, int, float, str, bool, bytes)


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


def to_plain(value: object) -> tuple[str, Any] | None:
    """Return a kind's name and what `from_plain` makes the value of; None for other values.

    What is returned may hold other values of these kinds, tensors and bytes.
    """
    kind = _BY_TYPE.get(type(value)) or _family(value)
    plain = None if kind is None else kind.to_plain(value)
    return None if kind is None or plain is None else (kind.name, plain)


def from_plain(name: str, plain: Any) -> Any:
    """Return the value. Raises ProtocolError for unknown names and what is no such value."""
    kind = _BY_NAME.get(name)
    if kind is None:
        raise ProtocolError(f"a message has a {name!r}, which is no kind of value known here")
    try:
        return kind.from_plain(plain)
    except ProtocolError:
        raise
    except _VALUE_ERRORS as exc:
        raise ProtocolError(f"a message has a {name} that is none: {exc}") from exc


def _family(value: object) -> _Kind | None:
    """Return the kind of a value whose exact type is not in the table."""
    if isinstance(value, enum.Enum):
        return _ENUM
    if _fields(type(value)) is not None:
        return _NAMED_TUPLE
    torch = sys.modules.get("torch")  # what is one of its values was made by it
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
    """Return module and name of a class that can be found by them, else None."""
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
    # Flags that are several have no name of their own in every version of Python.
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
    """Return the fields of a class of named tuples, or of one derived from it; else None."""
    if not issubclass(kind, tuple):
        return None
    found = next((vars(one)["_fields"] for one in kind.__mro__ if "_fields" in vars(one)), None)
    return found if isinstance(found, tuple) else None


def _from_named_tuple(value: Any) -> list[Any] | None:
    where, fields = _dotted(type(value)), _fields(type(value))
    if where is None or fields is None or len(fields) != len(value):
        return None
    if getattr(value, "__dict__", None):
        return None  # its attributes would be lost
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
    import numpy as np  # noqa: PLC0415  # optional: who is sent one of its values has it

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
    import torch  # noqa: PLC0415  # an array travels as a tensor

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
    """Return NumPy's dtype of this name. Raises ProtocolError unless bytes are its value."""
    import numpy as np  # noqa: PLC0415  # as above

    dtype = np.dtype(str(name))
    if dtype.kind not in ARRAY_KINDS:
        raise ProtocolError(f"a message has an array of {dtype}, which has no plain bytes")
    return dtype


def array_dtype(name: object) -> Any:
    """Return the dtype of an array's elements. Raises ProtocolError for those without bytes.

    NumPy would make them larger, and of a few bytes of a message an array of any size.
    """
    dtype = plain_dtype(name)
    if not dtype.itemsize:
        raise ProtocolError(f"a message has an array of {dtype}, whose elements have no bytes")
    return dtype


def _bytes(value: object) -> bytes:
    """Return bytes as bytes; of a number, `bytes` would make as many zeros."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise ProtocolError(f"a message has a {type(value).__name__} in the place of bytes")
    return bytes(value)


def _of_torch(name: str) -> Callable[[Any], Any]:
    def make(plain: Any) -> Any:
        import torch  # noqa: PLC0415  # only who is sent one of its values needs it

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
        return None  # its rules would be lost
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
    int: _Kind("int", str, int),  # one of more than 64 bits
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
