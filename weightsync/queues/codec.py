"""Codec for messages between processes of a host: msgpack, with large parts in separate buffers.

Two uses share one wire format. `MessageCodec` returns every Python value with its own type.
`TensorEncoder` and `TensorDecoder` are for request objects: msgspec decodes them by the types of
their fields, and their tensors may travel outside the message. Nothing is pickled.
"""

from __future__ import annotations

import array
import ctypes
import dataclasses
import datetime as dt
import enum
import logging
import math
import os
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from operator import index
from pathlib import PosixPath, PurePosixPath
from types import EllipsisType, NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    NoReturn,
    Protocol,
    TypeVar,
    cast,
    get_args,
)
from uuid import UUID

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Ext

from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ProtocolError,
    TransferError,
    TransportError,
    WeightSyncError,
    shorten,
)
from weightsync.shm.buffer_address import buffer_address

if TYPE_CHECKING:
    import torch
    import typing_extensions
    from torch import Tensor as Tensor  # noqa: PLC0414 - exported for other modules

    T = typing_extensions.TypeVar("T", default=Any)
else:  # a stand-in for modules that must not import torch

    class _TensorKind(type):
        def __instancecheck__(cls, value: object) -> bool:
            torch = sys.modules.get("torch")  # without torch there are no tensors
            return torch is not None and isinstance(value, torch.Tensor)

    class Tensor(metaclass=_TensorKind):
        """Stand-in for torch.Tensor in annotations and isinstance checks."""

    T = TypeVar("T")

logger = logging.getLogger(__name__)

Hook = Callable[[Any], Any]
Frame = bytes | bytearray | memoryview

# Extension codes.
TENSOR, ARRAY, SCALAR = 1, 2, 3
"""A `_Part`; a scalar is NumPy's, an array without dimensions."""
BYTES, BYTEARRAY, MEMORYVIEW = 4, 5, 6
"""The place of the bytes, as in a `_Part`."""
BYTES_IN_LINE, CARRIED = 7, 8
"""Raw data: the bytes; a carrier's handle of a tensor."""
TUPLE, SET, FROZENSET, DICT, VALUE = 9, 10, 11, 12, 13
"""A list of the items; of all keys, then all values; of a kind's name, and the plain data."""

_encode = msgspec.msgpack.Encoder().encode
_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""Errors of msgspec and of hooks for a message that cannot be encoded."""
_DAMAGED = (
    msgspec.MsgspecError,
    TypeError,
    ValueError,
    RuntimeError,
    ArithmeticError,
    LookupError,
    AttributeError,
    MemoryError,
    SyntaxError,
)
"""Errors of msgspec, Python, NumPy and torch for data that is invalid for its kind."""


# A message in one piece of memory: a table of sizes, the body, and the aligned buffers.

ALIGNMENT = 64
_COUNTS = struct.Struct("<QQ")
_LARGE_NBYTES = 256 << 10
"""A copy of this size or more releases the GIL."""
BYTES_BODY = _encode(Ext(BYTES, _encode(0)))
"""Body of a message that is a single bytes object, stored in its only buffer."""


class Encoded:
    """An encoded message: `body` is msgpack, `buffers` are views of the sender's data.

    Valid until the sender changes that data.
    """

    __slots__ = ("body", "buffers", "nbytes")

    def __init__(self, body: bytes, buffers: list[memoryview]) -> None:
        self.body = body
        self.buffers = buffers
        self.nbytes = _COUNTS.size + 8 * len(buffers) + len(body)
        for buffer in buffers:
            self.nbytes = _aligned(self.nbytes) + len(buffer)

    def write(self, target: memoryview) -> None:
        """Copy the message into the first `nbytes` bytes of `target`, which is 64-byte aligned."""
        at = _write_head(target, self.body, [*map(len, self.buffers)] if self.buffers else ())
        for buffer in self.buffers:
            at = _aligned(at)
            room = target[at : at + len(buffer)]
            if len(buffer) < _LARGE_NBYTES:
                room[:] = buffer
            else:  # not torch's copy, whose threads wait for each other on busy processors
                ctypes.memmove(buffer_address(room), buffer_address(buffer), len(buffer))
            at += len(buffer)


def _write_head(target: memoryview, body: bytes, sizes: Sequence[int]) -> int:
    """Write the table and the body; return the offset of their end."""
    at = _COUNTS.size + 8 * len(sizes)
    _COUNTS.pack_into(target, 0, len(body), len(sizes))
    if sizes:
        struct.pack_into(f"<{len(sizes)}Q", target, _COUNTS.size, *sizes)
    target[at : at + len(body)] = body
    return at + len(body)


def buffer_offset(body: bytes) -> int:
    """Return the offset of the buffer in a message with this `body` and a single buffer."""
    return _aligned(_COUNTS.size + 8 + len(body))


def write_around(target: memoryview, body: bytes) -> memoryview:
    """Write the table and `body` of a message with one buffer; return the rest of `target`.

    The returned view is the buffer, which the caller fills.
    """
    at = buffer_offset(body)
    _write_head(target, body, [len(target) - at])
    return target[at:]


def split(source: memoryview) -> tuple[memoryview, list[memoryview]]:
    """Return views of the body and the buffers that `Encoded.write` wrote. Raises ProtocolError."""
    try:
        body_nbytes, count = _COUNTS.unpack_from(source)
        sizes = struct.unpack_from(f"<{count}Q", source, _COUNTS.size) if count else ()
    except (struct.error, OverflowError, MemoryError) as exc:
        raise ProtocolError(f"a message of {len(source)} bytes has no table: {exc}") from exc
    at = _COUNTS.size + 8 * count
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


# Tensors, arrays and values of known kinds: what both uses share.

ARRAY_KINDS = "biufcUSMm"
"""NumPy dtype kinds whose bytes are their value."""
_Dtype = Annotated[str, Meta(max_length=32)]
_Shape = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=64)]


class _Part(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor or an array on the wire.

    `place` is where its bytes are: the bytes themselves, the index of a buffer, or the extension
    CARRIED, which is decoded as a tensor (for an array: one of its bytes).
    """

    dtype: _Dtype
    shape: _Shape
    place: Any

    def check(self, itemsize: int, nbytes: int) -> None:
        """Raise ProtocolError unless the shape takes `nbytes` bytes of elements of `itemsize`."""
        needed = math.prod(self.shape) * itemsize
        # A size of zero hides the other sizes, whose product would overflow inside torch.
        if not needed and math.prod(size or 1 for size in self.shape) * itemsize >= 1 << 63:
            raise ProtocolError(f"a message has a tensor of the invalid shape {self.shape}")
        if needed != nbytes:
            raise ProtocolError(
                f"{self.dtype}[{shorten(map(str, self.shape))}] takes {needed} bytes, "
                f"and {nbytes} came"
            )


@cache
def _tensors() -> Any:
    """Return weightsync.tensors. Messages without tensors need no torch."""
    from weightsync import tensors  # noqa: PLC0415 - see above

    return tensors


class _Packer:
    """Encoder of one message: replaces values that msgpack does not support by extensions.

    The bytes of a tensor or an array go in line up to `inline_nbytes`. Larger ones are offered to
    `carry`, which returns a handle or None, and go to `buffers` otherwise. `hook` returns plain
    data for values of unknown types, or raises.
    """

    parts = 0

    def __init__(
        self,
        hook: Hook,
        kinds: Mapping[type, _Kind],
        inline_nbytes: int = 0,
        carry: Callable[[Any], bytes | None] | None = None,
    ) -> None:
        self.buffers: list[memoryview] = []
        self._hook = hook
        self._kinds = kinds
        self._inline_nbytes = inline_nbytes
        self._carry = carry

    def pack(self, value: object) -> bytes:
        return msgspec.msgpack.encode(value, enc_hook=self.replace)

    def replace(self, value: Any) -> Any:
        """Return what stands for a value that msgpack does not support: an extension, mostly."""
        kind = self._kinds.get(type(value))
        if kind is None:
            if isinstance(value, Tensor):
                return self.tensor(value)
            if type(value).__module__ == "numpy":
                return self.array(value)
            kind = _family(value)
        plain = NotImplemented if kind is None else kind.to_plain(value)
        if kind is None or plain is NotImplemented:
            return self._hook(value)
        return Ext(VALUE, self.pack([kind.name, plain]))

    def tensor(self, value: torch.Tensor) -> Ext:
        """Return the extension for a tensor. Raises ConfigError for one that cannot be sent."""
        tensors = _tensors()
        name = str(value.dtype).removeprefix("torch.")
        handle = None
        if self._carry is not None:
            tensors.check_dense(value, tensors.DTYPES)
            if value.nbytes > self._inline_nbytes and name in tensors.TORCH_DTYPES:
                handle = self._carry(value)
        place = self.place(tensors.tensor_data(value)) if handle is None else Ext(CARRIED, handle)
        return self._part(TENSOR, name, value.shape, place)

    def array(self, value: Any) -> Any:
        """Return what stands for a NumPy array or scalar."""
        import numpy as np  # noqa: PLC0415 - optional: needed for NumPy values only

        is_scalar = isinstance(value, np.generic)
        # A scalar becomes an array; an empty text gets one character.
        array: Any = np.asarray(value) if is_scalar else value
        if not is_scalar and type(value) is not np.ndarray:
            return self._hook(value)
        if array.dtype.kind not in ARRAY_KINDS or not array.dtype.itemsize:
            return self._hook(value)
        if is_scalar and array.dtype.kind in "SU" and array[()] != value:
            return self._hook(value)  # an array has no zeros at the end of a text
        if is_scalar:
            return self._part(SCALAR, array.dtype.str, (), array.tobytes())
        flat = array.ravel()  # contiguous: a view, or a copy in C order
        data = memoryview(flat.view("u1")).toreadonly() if flat.nbytes else memoryview(b"")
        handle = None
        if self._carry is not None and len(data) > self._inline_nbytes:
            handle = self._carry(_tensors().view_bytes(data, 0, len(data)))
        place = self.place(data) if handle is None else Ext(CARRIED, handle)
        return self._part(ARRAY, array.dtype.str, array.shape, place)

    def place(self, data: memoryview) -> int | memoryview:
        """Return the place of `data` in the message: the data in line, or a buffer's index."""
        if len(data) <= self._inline_nbytes:
            return data
        self.buffers.append(data)
        return len(self.buffers) - 1

    def _part(self, code: int, dtype: str, shape: tuple[int, ...], place: object) -> Ext:
        self.parts += 1
        return Ext(code, _encode((dtype, shape, place)))


class _Unpacker:
    """Decoder of one message.

    Tensors, arrays and bytes are copies if `views` is None. Otherwise they are read-only views of
    `buffers`, and those of bytes are also appended to `views`.
    """

    def __init__(
        self,
        buffers: Sequence[Any],
        views: list[memoryview] | None,
        kinds: Mapping[str, _Kind],
    ) -> None:
        self._buffers = buffers
        self._views = views
        self._kinds = kinds
        self.unused: set[int] = set(range(len(buffers))) if buffers else set()

    def extension(self, code: int, data: memoryview) -> Any:
        """Return the value of an extension. Raises ProtocolError, and what the carrier raises."""
        if code == BYTES_IN_LINE:
            return self.bytes_of(data)
        build = _BUILDERS.get(code)
        if build is None:
            raise ProtocolError(f"a message has the unknown extension {code}")
        return build(self, data)

    def items(self, data: memoryview) -> list[Any]:
        """Decode a list. Others are refused: a range, for instance, may have endless items."""
        items = msgspec.msgpack.decode(data, ext_hook=self.extension)
        if type(items) is not list:
            raise ProtocolError(f"a message has a {type(items).__name__} in the place of a list")
        return items

    def check_all_used(self) -> None:
        """Raise ProtocolError for a message with buffers that nothing in it refers to."""
        if self.unused:
            raise ProtocolError(
                f"the message has {len(self._buffers)} buffers, and nothing is in number "
                f"{shorten(map(str, sorted(self.unused)))}"
            )

    def take(self, handle: memoryview) -> torch.Tensor:
        """Return the tensor of a carrier's handle."""
        raise ProtocolError(
            "a tensor of this message is in shared memory, and no tensor queue was given to "
            'read it from; give the decoder one, or set tensor_ipc to "direct_rpc"'
        )

    def keeps(self, view: memoryview) -> bool:
        """Return whether a tensor or an array may be a view of these bytes of the message."""
        return self._views is not None

    def part(self, data: memoryview) -> _Part:
        return msgspec.msgpack.decode(data, type=_Part, ext_hook=self.extension)

    def tensor(self, data: memoryview) -> torch.Tensor:
        part = self.part(data)
        dtype = _tensors().DTYPES.get(part.dtype)
        if dtype is None:
            raise ProtocolError(f"a message has a tensor of the unknown dtype {part.dtype!r}")
        if isinstance(part.place, Tensor):
            tensor: torch.Tensor = part.place
            if tensor.dtype != dtype or list(tensor.shape) != part.shape:
                raise ProtocolError(
                    f"a tensor {part.dtype}{part.shape} arrived as {tensor.dtype} of shape "
                    f"{list(tensor.shape)}"
                )
        else:
            view = self.bytes_at(part.place)
            part.check(dtype.itemsize, len(view))
            tensor = _tensors().tensor_of(view, dtype, part.shape, copy=not self.keeps(view))
        return tensor

    def array(self, data: memoryview) -> Any:
        import numpy as np  # noqa: PLC0415 - optional: needed for NumPy values only

        part = self.part(data)
        dtype = _plain_dtype(part.dtype)
        if not dtype.itemsize:  # NumPy would enlarge such elements, to an array of any size
            raise ProtocolError(f"a message has an array of {dtype}, whose elements have no bytes")
        if isinstance(part.place, Tensor):
            view = part.place.numpy().data.cast("B")
        else:
            view = self.bytes_at(part.place)
        part.check(dtype.itemsize, len(view))
        if not len(view):
            return np.empty(part.shape, dtype)
        found = np.frombuffer(view, dtype).reshape(part.shape)
        return found if self.keeps(view) else found.copy()

    def bytes_of(self, view: memoryview) -> bytes | memoryview:
        """Return bytes, or a read-only view of them in place."""
        if self._views is None:
            return bytes(view)
        view = view.toreadonly()
        self._views.append(view)
        return view

    def buffer(self, data: memoryview) -> memoryview:
        """Return the bytes at an encoded place."""
        return self.bytes_at(msgspec.msgpack.decode(data))

    def view(self, data: memoryview) -> memoryview:
        """Return a view of bytes: in place the one in `views`, because a second one would stay."""
        found = self.bytes_of(self.buffer(data))
        return memoryview(found) if isinstance(found, bytes) else found

    def value(self, data: memoryview) -> Any:
        """Return a value of a known kind or a registered type."""
        name, plain = self.items(data)
        kind = self._kinds.get(name)
        if kind is None:
            raise ProtocolError(
                f"a message has a {name!r}, which is not registered here; register it with the "
                "codec of this side too"
            )
        if type(plain) is range and name in _BY_NAME:  # as in `items`
            raise ProtocolError(f"a message has an invalid {name}: {plain}")
        try:
            return kind.from_plain(plain)
        except ProtocolError:
            raise
        except _DAMAGED as exc:
            raise ProtocolError(f"a message has an invalid {name}: {exc}") from exc

    def pairs(self, data: memoryview) -> dict[Any, Any]:
        items = self.items(data)
        half = len(items) // 2
        return dict(zip(items[:half], items[half:], strict=True))

    def bytes_at(self, place: Any) -> memoryview:
        """Return the bytes at a place: bytes in line, or the index of a buffer."""
        if isinstance(place, bytes):
            return memoryview(place)
        if place not in self.unused:
            raise ProtocolError(
                f"a message refers to buffer {place!r} of {len(self._buffers)}, which is missing "
                "or in use already; it is damaged"
            )
        self.unused.remove(place)
        view: memoryview = self._buffers[place]
        return view if self._views is None else view.toreadonly()


_BUILDERS: dict[int, Callable[[_Unpacker, memoryview], Any]] = {
    TENSOR: lambda unpacker, data: unpacker.tensor(data),
    ARRAY: _Unpacker.array,
    SCALAR: lambda unpacker, data: unpacker.array(data)[()],
    BYTES: lambda unpacker, data: unpacker.bytes_of(unpacker.buffer(data)),
    BYTEARRAY: lambda unpacker, data: bytearray(unpacker.buffer(data)),
    MEMORYVIEW: _Unpacker.view,
    CARRIED: lambda unpacker, data: unpacker.take(data),
    TUPLE: lambda unpacker, data: tuple(unpacker.items(data)),
    SET: lambda unpacker, data: set(unpacker.items(data)),
    FROZENSET: lambda unpacker, data: frozenset(unpacker.items(data)),
    DICT: _Unpacker.pairs,
    VALUE: _Unpacker.value,
}


# Values of known kinds, as plain data and back.


@dataclass(frozen=True, slots=True)
class _Kind:
    """`to_plain` returns the argument of `from_plain`: plain data, other known values, tensors.

    It returns NotImplemented for a value that would not come back as it was.
    """

    name: str
    to_plain: Hook
    from_plain: Hook


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
    return _DTYPE if numpy is not None and isinstance(value, numpy.dtype) else None


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


def _from_enum(value: enum.Enum) -> Any:
    where = _dotted(type(value))
    if where is None:
        return NotImplemented
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


def _from_named_tuple(value: Any) -> Any:
    where, fields = _dotted(type(value)), _fields(type(value))
    if where is None or fields is None or len(fields) != len(value):
        return NotImplemented
    if getattr(value, "__dict__", None):
        return NotImplemented  # the attributes would be lost
    return [*where, list(value)]


def _to_named_tuple(plain: Any) -> Any:
    module, name, items = plain
    kind = _class(module, name)
    fields = _fields(kind)
    if fields is None or len(fields) != len(items):
        raise ProtocolError(f"{module}.{name} is no named tuple of {len(items)} fields")
    return tuple.__new__(kind, items)


def _plain_dtype(name: object) -> Any:
    """Return NumPy's dtype of this name. Raises ProtocolError unless its bytes are its value."""
    import numpy as np  # noqa: PLC0415 - as above

    dtype = np.dtype(str(name))
    if dtype.kind not in ARRAY_KINDS:
        raise ProtocolError(f"a message has an array of {dtype}, which has no plain bytes")
    return dtype


def _bytes(value: object) -> bytes:
    """Return `bytes(value)` for bytes-like values only; `bytes(n)` of a number makes n zeros."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise ProtocolError(f"a message has a {type(value).__name__} in the place of bytes")
    return bytes(value)


def _dict(value: object) -> dict[Any, Any]:
    """Return a dict unchanged. Others are refused: `dict([r])` makes a list of a range `r`."""
    if not isinstance(value, dict):
        raise ProtocolError(f"a message has a {type(value).__name__} in the place of a dict")
    return value


def _torch_kind(kind: str, to_plain: Hook) -> _Kind:
    """Return the kind of torch's Size and device, which are called, or of named constants."""

    def from_plain(plain: Any) -> Any:
        import torch  # noqa: PLC0415 - optional: needed for values of torch only

        named = getattr(torch, kind)
        if to_plain is not _name_in_torch:
            return named(plain)
        found = vars(torch).get(str(plain))
        if not isinstance(found, named):
            raise ProtocolError(f"torch.{plain} is no {kind} of the torch installed here")
        return found

    return _Kind(f"torch.{kind}", to_plain, from_plain)


def _name_in_torch(value: object) -> str:
    return str(value).removeprefix("torch.")


def _from_moment(value: Any) -> Any:
    if value.tzinfo is not None and type(value.tzinfo) is not dt.timezone:
        return NotImplemented  # the time zone's rules would be lost
    return [value.isoformat(), value.fold]


def _to_moment(kind: type[dt.datetime | dt.time]) -> Hook:
    return lambda plain: kind.fromisoformat(plain[0]).replace(fold=plain[1])


_FACTORIES = {
    kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool, bytes)
}


def _from_default_dict(value: defaultdict[Any, Any]) -> Any:
    factory = value.default_factory
    if factory is not None and factory not in _FACTORIES.values():
        return NotImplemented
    return [None if factory is None else factory.__name__, dict(value)]


def _to_default_dict(plain: Any) -> defaultdict[Any, Any]:
    name, items = plain
    return defaultdict(None if name is None else _FACTORIES[name], _dict(items))


def _built(kind: type, arguments: Hook) -> _Kind:
    """Return the kind of a type whose values are made by calling it with `arguments(value)`."""
    return _Kind(f"py.{kind.__name__}", arguments, lambda plain: kind(*plain))


def _to_tensor(plain: Any) -> Any:
    """Return a tensor as a leaf that requires gradients."""
    tensor, needs_grad = plain
    return tensor.requires_grad_(needs_grad)


def _to_parameter(plain: Any) -> Any:
    import torch  # noqa: PLC0415 - optional: needed for values of torch only

    return torch.nn.Parameter(*plain)


_NEEDS_GRAD = _Kind("torch.Tensor", lambda v: v, _to_tensor)
_PARAMETER = _Kind("torch.nn.Parameter", lambda v: v, _to_parameter)
_ENUM = _Kind("py.enum", _from_enum, _to_enum)
_NAMED_TUPLE = _Kind("py.namedtuple", _from_named_tuple, _to_named_tuple)
_DTYPE = _Kind(
    "numpy.dtype", lambda v: v.str if v.kind in ARRAY_KINDS else NotImplemented, _plain_dtype
)
_BY_TYPE: dict[type, _Kind] = {
    int: _built(int, lambda v: [str(v)]),  # more than 64 bits
    complex: _built(complex, lambda v: [v.real, v.imag]),
    slice: _built(slice, lambda v: [v.start, v.stop, v.step]),
    range: _built(range, lambda v: [v.start, v.stop, v.step]),
    EllipsisType: _built(EllipsisType, lambda _: []),
    Decimal: _built(Decimal, lambda v: [str(v)]),
    # Its constructor would also take a text, whose exponent may be of any size.
    Fraction: _Kind(
        "py.Fraction", lambda v: [v.numerator, v.denominator], lambda p: Fraction(*map(index, p))
    ),
    UUID: _built(UUID, lambda v: [v.hex]),
    dt.datetime: _Kind("py.datetime", _from_moment, _to_moment(dt.datetime)),
    dt.time: _Kind("py.time", _from_moment, _to_moment(dt.time)),
    dt.date: _built(dt.date, lambda v: [v.year, v.month, v.day]),
    dt.timedelta: _built(dt.timedelta, lambda v: [v.days, v.seconds, v.microseconds]),
    PosixPath: _built(PosixPath, lambda v: [str(v)]),
    PurePosixPath: _built(PurePosixPath, lambda v: [str(v)]),
    OrderedDict: _Kind(
        "py.OrderedDict", lambda v: [dict(v)], lambda p: OrderedDict(*map(_dict, p))
    ),
    Counter: _Kind("py.Counter", dict, lambda p: Counter(_dict(p))),
    defaultdict: _Kind("py.defaultdict", _from_default_dict, _to_default_dict),
    deque: _Kind("py.deque", lambda v: [v.maxlen, *v], lambda p: deque(p[1:], p[0])),
    array.array: _Kind(
        "py.array", lambda v: [v.typecode, v.tobytes()], lambda p: array.array(p[0], _bytes(p[1]))
    ),
}
_BY_NAME: dict[str, _Kind] = {
    kind.name: kind
    for kind in (
        *_BY_TYPE.values(),
        *(_ENUM, _NAMED_TUPLE, _DTYPE, _NEEDS_GRAD, _PARAMETER),
        *(_torch_kind("Size", list), _torch_kind("device", str)),
        *(_torch_kind(kind, _name_in_torch) for kind in ("dtype", "layout", "memory_format")),
    )
}


# Messages that keep the type of every value.

BYTES_INLINE_NBYTES = 512
"""Bytes objects up to this size are stored inside the msgpack body."""
_PLAIN = frozenset({NoneType, bool, int, float, str})


class MessageCodec:
    """Encodes objects as messages and decodes them. Both sides register the same types and names.

    Safe to use from several threads after the last `register`.
    """

    def __init__(self) -> None:
        self._by_type = dict(_BY_TYPE)
        self._by_name = dict(_BY_NAME)

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
        if kind in _PLAIN or kind in _LIFTERS:
            raise ConfigError(
                f"{kind.__qualname__} is supported without hooks, which would never be called"
            )
        name = name or kind.__qualname__
        if name in self._by_name or self._by_type.get(kind) is not _BY_TYPE.get(kind):
            raise ConfigError(f"{kind.__qualname__} or the name {name!r} is registered already")
        if encode is None or decode is None:
            encode, decode = _field_hooks(kind)
        self._by_type[kind] = self._by_name[name] = _Kind(name, encode, decode)

    def encode(self, message: object) -> Encoded:
        """Encode `message`, with views of its large parts.

        Raises ConfigError with the path to an object that cannot be encoded.
        """
        packer = _ExactPacker(_refuse, self._by_type)
        try:
            try:
                body = packer.pack(message)
            except OverflowError:  # rare, so integers are checked one by one only now
                packer = _ExactPacker(_refuse, self._by_type)
                packer.plain, packer.keys = _PLAIN - {int}, _PLAIN - {int} | {bytes}
                body = packer.pack(message)
        except _UnsupportedError as exc:
            path = _path_to(message, exc.args[0]) or "inside a registered type"
            raise ConfigError(f"{path}: {exc.args[1]}") from None
        except _UNENCODABLE as exc:
            raise ConfigError(f"this message cannot be encoded: {exc}") from exc
        return Encoded(body, packer.buffers)

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
        unpacker = _Unpacker(buffers, views, self._by_name)
        try:
            message = msgspec.msgpack.decode(body, ext_hook=unpacker.extension)
            unpacker.check_all_used()
        except ProtocolError:
            raise
        except _DAMAGED as exc:
            raise ProtocolError(f"this message cannot be decoded: {exc}") from exc
        return message


class _UnsupportedError(Exception):
    """Internal error: an object that a message cannot contain, and the reason."""


def _refuse(value: object) -> NoReturn:
    kind = type(value)
    dtype = f" of {value.dtype}" if hasattr(value, "dtype") else ""
    raise _UnsupportedError(
        value,
        f"{kind.__module__}.{kind.__qualname__}{dtype} is no type that a message may contain; "
        "register it with the codec, on both sides",
    )


class _ExactPacker(_Packer):
    """Encoder of a message whose values keep their types: msgspec gets only types of its own."""

    plain, keys = _PLAIN, _PLAIN | {bytes}
    _in_set = False

    def pack(self, value: object) -> bytes:
        return _encode(self.lift(value))

    def lift(self, value: Any) -> Any:
        """Return `value` with everything that msgpack cannot represent replaced by extensions."""
        kind = type(value)
        if kind in self.plain:
            return value
        lifter = _LIFTERS.get(kind)
        if lifter is not None:
            return lifter(self, value)
        if kind is int and -(1 << 63) <= value < 1 << 64:
            return value
        return self.replace(value)

    def tensor(self, value: torch.Tensor) -> Ext:
        if type(value) not in _tensors().PLAIN_CLASSES:
            _refuse(value)
        is_parameter = type(value).__name__ == "Parameter"  # of the two classes
        if is_parameter or value.requires_grad:
            kind = _PARAMETER if is_parameter else _NEEDS_GRAD
            return Ext(VALUE, self.pack([kind.name, [value.detach(), value.requires_grad]]))
        try:
            return super().tensor(value)
        except ConfigError as exc:
            raise _UnsupportedError(value, str(exc)) from exc

    def lift_items(self, value: Any) -> Any:
        if self.plain.issuperset(map(type, value)):
            return value
        return [self.lift(item) for item in value]

    def lift_dict(self, value: dict[Any, Any]) -> dict[Any, Any] | Ext:
        if not self.keys.issuperset(map(type, value)):
            items = [*self.lift_hashable(value), *map(self.lift, value.values())]
            return Ext(DICT, _encode(items))
        if self.plain.issuperset(map(type, value.values())):
            return value
        return {key: self.lift(item) for key, item in value.items()}

    def lift_hashable(self, items: Iterable[Any]) -> list[Any]:
        """Lift keys, or the items of a set. Their bytes stay msgpack's: a view has no hash."""
        outer, self._in_set = self._in_set, True
        lifted = [self.lift(item) for item in items]
        self._in_set = outer
        return lifted

    def lift_tuple(self, value: tuple[Any, ...]) -> Ext:
        return Ext(TUPLE, _encode(self.lift_items(value)))

    def lift_bytes(self, value: bytes) -> Any:
        if self._in_set:
            return value
        if len(value) <= BYTES_INLINE_NBYTES:
            return Ext(BYTES_IN_LINE, value)
        return Ext(BYTES, _encode(self.place(memoryview(value))))

    def lift_bytearray(self, value: bytearray) -> Any:
        return value if self._in_set else Ext(BYTEARRAY, _encode(self.place(memoryview(value))))

    def lift_view(self, value: memoryview) -> Ext:
        if self._in_set:
            raise _UnsupportedError(value, "a set holds bytes, not views of them")
        if value.format != "B" or value.ndim != 1:
            raise _UnsupportedError(
                value,
                f"a memoryview of format {value.format!r} and {value.ndim} dimensions would be "
                'decoded as bytes; send view.cast("B"), or an array',
            )
        plain = value if value.contiguous else memoryview(bytes(value))
        return Ext(MEMORYVIEW, _encode(self.place(plain)))


_LIFTERS: dict[type, Callable[[_ExactPacker, Any], Any]] = {
    dict: _ExactPacker.lift_dict,
    list: _ExactPacker.lift_items,
    tuple: _ExactPacker.lift_tuple,
    set: lambda packer, value: Ext(SET, _encode(packer.lift_hashable(value))),
    frozenset: lambda packer, value: Ext(FROZENSET, _encode(packer.lift_hashable(value))),
    bytes: _ExactPacker.lift_bytes,
    bytearray: _ExactPacker.lift_bytearray,
    memoryview: _ExactPacker.lift_view,
}


def _field_hooks(kind: type) -> tuple[Hook, Hook]:
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.init]
    elif issubclass(kind, Struct):
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


# Request objects whose tensors may travel outside the message.

TensorIpc = Literal["direct_rpc", "torch_shm"]

SETTING = "WEIGHTSYNC_TENSOR_IPC"
"""Environment variable with the default of `tensor_ipc`."""
INLINE_NBYTES = 4096
MAX_TENSORS = 1 << 16
MAX_MESSAGE_NBYTES = 1 << 28
"""Maximum bytes of a message with its in-line tensors, without its auxiliary frames."""


class TensorPutter(Protocol):
    """Sends tensors outside the message, for the encoder: `TensorIpcSender`, for example."""

    def put(self, tensor: torch.Tensor, key: str | None) -> bytes:
        """Send a tensor under `key` and return its handle, which is opaque to the codec.

        Raises BackendUnavailableError or TransportError for a permanent failure, TransferError for
        a failure with this tensor only.
        """

    def take_back(self, handle: bytes) -> None:
        """Undo a `put` when its message will not be sent."""


class TensorTaker(Protocol):
    """Receives tensors outside the message, for the decoder: `TensorIpcReceiver`, for example."""

    def take(self, handle: bytes) -> torch.Tensor:
        """Return the tensor of a handle that the other side's `put` returned."""

    def drop(self, handle: bytes) -> None:
        """Drop the tensor of a handle when its message could not be decoded."""


def chosen_tensor_ipc(setting: str | None = None) -> TensorIpc:
    """Return `setting`, or the value of WEIGHTSYNC_TENSOR_IPC, or "torch_shm".

    Raises ConfigError for an unknown value.
    """
    value = setting or os.environ.get(SETTING) or "torch_shm"
    if value not in get_args(TensorIpc):
        where = "tensor_ipc" if setting else SETTING
        raise ConfigError(f'{where} is {value!r}; wanted "direct_rpc" or "torch_shm"')
    return cast(TensorIpc, value)


class TensorEncoder:
    """Encodes request objects. Thread-safe.

    With `torch_shm`, the constructor calls `open_carrier` once. If that or a later `put` fails
    permanently, tensors are sent in the message from then on. A warning is logged once, and
    `tensor_ipc` and `fallback_reason` show the change. Values that the codec does not support go
    to `enc_hook`, which returns plain data.
    """

    def __init__(
        self,
        tensor_ipc: str | None = None,
        open_carrier: Callable[[], TensorPutter] | None = None,
        *,
        inline_nbytes: int = INLINE_NBYTES,
        enc_hook: Hook | None = None,
    ) -> None:
        self.tensor_ipc = chosen_tensor_ipc(tensor_ipc)
        """How large tensors are sent now; "direct_rpc" after a fallback."""
        self._inline_nbytes = inline_nbytes
        self._enc_hook = enc_hook or _no_hook
        self._carrier: TensorPutter | None = None
        self._warned = False
        self.fallback_reason: str | None = None
        self.crowded_out = 0
        """Number of tensors sent in the message because shared memory was full at that moment."""
        if self.tensor_ipc == "direct_rpc":
            return
        if open_carrier is None:
            self._fall_back("no tensor queue was given")
            return
        try:
            self._carrier = open_carrier()
        except (BackendUnavailableError, TransportError, TransferError) as exc:
            self._fall_back(str(exc))

    def encode(self, message: object, key: str | None = None) -> list[Frame]:
        """Return the frames of a message: the msgpack body, then auxiliary frames in order.

        `key` goes to the carrier with each tensor, so that the tensors can be cleaned up by key.
        Frames may view the message's tensors: do not change these until the frames are sent. Raises
        ConfigError for an object that cannot be encoded; no tensor stays in the carrier then.
        """
        carried: list[tuple[TensorPutter, bytes]] = []
        carry = None if self._carrier is None else partial(self._carry, key, carried)
        packer = _Packer(self._enc_hook, _BY_TYPE, self._inline_nbytes, carry)
        try:
            body = msgspec.msgpack.encode(message, enc_hook=packer.replace)
            if packer.parts > MAX_TENSORS:
                raise ValueError(f"it has {packer.parts} tensors, and may have {MAX_TENSORS}")
        except BaseException as exc:
            for carrier, handle in carried:
                with suppress(WeightSyncError):
                    carrier.take_back(handle)
            if isinstance(exc, _UNENCODABLE):
                raise ConfigError(f"this message cannot be encoded: {exc}") from exc
            raise
        return [body, *packer.buffers]

    def _carry(
        self, key: str | None, carried: list[tuple[TensorPutter, bytes]], tensor: torch.Tensor
    ) -> bytes | None:
        """Return the carrier's handle and note it; None if no carrier could take the tensor."""
        carrier = self._carrier
        if carrier is None:
            return None
        try:
            carried.append((carrier, carrier.put(tensor, key)))
        except (BackendUnavailableError, TransportError) as exc:
            self._fall_back(str(exc))
        except TransferError as exc:
            self.crowded_out += 1
            if not self._warned:
                self._warned = True
                logger.warning("a tensor is sent in its message, not in shared memory: %s", exc)
        else:
            return carried[-1][1]
        return None

    def _fall_back(self, reason: str) -> None:
        self._carrier = None
        self.tensor_ipc = "direct_rpc"
        if self.fallback_reason is None:
            self.fallback_reason = reason
            logger.warning("tensors are sent in their messages, not in shared memory: %s", reason)


def _no_hook(value: object) -> NoReturn:
    kind = type(value).__name__
    raise TypeError(f"{kind} is neither plain data nor a tensor; give enc_hook")


class TensorDecoder(Generic[T]):
    """Decodes messages as `kind`, or as plain data and tensors. Thread-safe.

    Fields may be typed `torch.Tensor`, also inside lists and dicts. Type a field `Any` if it holds
    either a tensor or a list of tensors. `pin_memory` pins CPU tensors where CUDA is available.
    `dec_hook` makes other types from plain data.
    """

    def __init__(
        self,
        kind: type[T] | None = None,
        carrier: TensorTaker | None = None,
        *,
        pin_memory: bool = False,
        dec_hook: Callable[[type, Any], Any] | None = None,
        max_message_nbytes: int = MAX_MESSAGE_NBYTES,
    ) -> None:
        self._carrier = carrier
        self._pin = False
        if pin_memory:
            from weightsync.cuda import devices  # noqa: PLC0415 - needed for pinned memory only

            self._pin = devices.is_available()
        self._dec_hook = dec_hook
        self._max_nbytes = max_message_nbytes
        self._kind: Any = Any if kind is None else kind
        msgspec.msgpack.Decoder(self._kind)  # raises TypeError for a kind that cannot be decoded

    def decode(self, frames: Sequence[Frame] | Frame) -> T:
        """Decode `frames`, as made by `encode`.

        Tensors are views of writable auxiliary frames and copies of read-only ones. Raises
        ProtocolError for an invalid message, and what the carrier raises. In both cases no tensor
        of the message stays in the carrier, unless the message is longer than `max_message_nbytes`:
        then it is not read at all, and the carrier drops its tensors by their key.
        """
        if isinstance(frames, Frame):
            frames = [frames]
        if not frames:
            raise ProtocolError("a message has at least one frame")
        body, *buffers = frames
        nbytes = memoryview(body).nbytes
        if nbytes > self._max_nbytes:
            raise ProtocolError(f"a message may have {self._max_nbytes} bytes, this has {nbytes}")
        call = _RequestUnpacker(buffers, self._carrier, pin=self._pin)
        try:
            message: T = msgspec.msgpack.decode(
                body, type=self._kind, ext_hook=call.extension, dec_hook=self._convert
            )
            call.check_all_used()
        except BaseException as exc:
            call.drop_rest(body)
            if isinstance(exc, _DAMAGED) and not isinstance(exc, WeightSyncError):
                raise ProtocolError(f"this message cannot be decoded: {exc}") from exc
            raise
        return message

    def _convert(self, kind: Any, value: Any) -> Any:
        if isinstance(kind, type) and isinstance(value, kind):
            return value  # a tensor, or another value that came as an extension
        torch = sys.modules.get("torch")  # without torch there are no values of its types
        if torch is not None and kind is torch.Size and isinstance(value, list):
            return torch.Size(value)  # a tuple, which msgpack encodes as an array
        tensors = (Tensor,) if torch is None else (Tensor, torch.Tensor)
        if isinstance(kind, type) and issubclass(kind, tensors):
            raise ValueError(f"Expected a tensor, got `{type(value).__name__}`")
        if self._dec_hook is None:
            raise ValueError(f"{kind} can be decoded with a dec_hook only")
        return self._dec_hook(kind, value)


class _RequestUnpacker(_Unpacker):
    """Decoder of one request: its buffers are its own, and a carrier may have its tensors."""

    _parts = 0

    def __init__(self, buffers: list[Frame], carrier: TensorTaker | None, *, pin: bool) -> None:
        super().__init__(buffers, None, _BY_NAME)
        self._carrier = carrier
        self._pin = pin
        self._taken: set[bytes] = set()

    def bytes_at(self, place: Any) -> memoryview:
        view = memoryview(super().bytes_at(place))
        return view if len(view) == view.nbytes else view.cast("B")

    def keeps(self, view: memoryview) -> bool:
        return not view.readonly

    def part(self, data: memoryview) -> _Part:
        self._parts += 1
        if self._parts > MAX_TENSORS:
            raise ProtocolError(f"a message has at most {MAX_TENSORS} tensors, this has more")
        return super().part(data)

    def tensor(self, data: memoryview) -> torch.Tensor:
        tensor = super().tensor(data)
        return tensor.pin_memory() if self._pin and pinnable(tensor) else tensor

    def take(self, handle: memoryview) -> torch.Tensor:
        if self._carrier is None:
            return super().take(handle)
        tensor = self._carrier.take(bytes(handle))
        self._taken.add(bytes(handle))
        return tensor

    def drop_rest(self, body: Frame) -> None:
        """Drop the tensors in the carrier that this failed message did not take."""
        carrier = self._carrier
        if carrier is None:
            return

        def drop(code: int, data: memoryview) -> None:
            if code == CARRIED and bytes(data) not in self._taken:
                with suppress(WeightSyncError):
                    carrier.drop(bytes(data))
            elif code not in (CARRIED, BYTES_IN_LINE):
                search(data)

        def search(data: Frame) -> None:
            with suppress(*_DAMAGED):
                msgspec.msgpack.decode(data, ext_hook=drop)

        search(body)


def pinnable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be pinned: it is on the CPU and not empty."""
    return tensor.device.type == "cpu" and tensor.numel() > 0
