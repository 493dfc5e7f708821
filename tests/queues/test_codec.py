"""The codec: messages that keep every value's type, request objects with tensors, and damage."""

from __future__ import annotations

import array
import dataclasses
import datetime as dt
import enum
import functools
import gc
import logging
import math
import re
import subprocess
import sys
import time
import tracemalloc
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext
from torch import nn

from tests.queues.tensor_senders import SPAWN, WAIT_S, any_of, comes_true
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ConnectError,
    ProtocolError,
    SegmentError,
    TransferError,
    TransferTimeout,
    WeightSyncError,
)
from weightsync.queues import codec
from weightsync.queues.codec import (
    ALIGNMENT,
    ARRAY,
    BYTES,
    BYTES_INLINE_NBYTES,
    CARRIED,
    DICT,
    INLINE_NBYTES,
    SCALAR,
    SET,
    SETTING,
    TENSOR,
    TUPLE,
    VALUE,
    Frame,
    MessageCodec,
    TensorDecoder,
    TensorEncoder,
    chosen_tensor_ipc,
    pinnable,
    split,
)
from weightsync.queues.tensor_packets import TensorQueueHandle
from weightsync.queues.tensor_queue import TensorIpcReceiver, TensorIpcSender
from weightsync.tensors import DTYPES, contiguous_bytes, tensor_data

SOME_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)


def sent(message: object, codec: MessageCodec | None = None, *, in_place: bool = False) -> Any:
    codec = codec or MessageCodec()
    encoded = codec.encode(message)
    room = bytearray(encoded.nbytes + ALIGNMENT)
    start = -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % ALIGNMENT
    memory = memoryview(room)[start : start + encoded.nbytes]
    encoded.write(memory)
    return codec.decode(*split(memory.toreadonly()), [] if in_place else None)


def same(a: Any, b: Any) -> bool:
    """Compare structures of any depth by type and value; tensors and arrays by their bytes."""
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        alike = (a.dtype, a.shape) == (b.dtype, b.shape)
        return alike and torch.equal(contiguous_bytes(a), contiguous_bytes(b))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def view_of(data: bytes) -> memoryview:
    return memoryview(data)


numbers = st.booleans() | st.integers(-(2**63), 2**64 - 1)
scalars = st.none() | numbers | st.floats() | st.text(st.characters(codec="utf-8"))
shapes = st.lists(st.integers(0, 4), max_size=4)
tensors = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).to(dtype).reshape(shape),
    st.sampled_from(SOME_DTYPES),
    shapes,
)
arrays = st.builds(
    lambda dtype, shape: np.arange(math.prod(shape)).astype(dtype).reshape(shape),
    st.sampled_from(["f4", ">f8", "i2", "?", "c8", "U7", "S5", "M8[s]", "m8[ms]"]),
    shapes,
)
raw = st.binary(max_size=2 * BYTES_INLINE_NBYTES)
leaves: st.SearchStrategy[Any] = st.one_of(
    scalars, tensors, arrays, raw, raw.map(bytearray), st.builds(view_of, raw)
)
hashable = st.none() | numbers | raw | st.tuples(raw, numbers)
messages = st.recursive(
    leaves | st.sets(hashable, max_size=4) | st.frozensets(hashable, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 9) | st.binary(max_size=4), inner)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(messages)
def test_what_is_sent_comes_back_as_what_it_was(message: object) -> None:
    assert same(sent(message), message)


@settings(deadline=None)
@given(messages)
def test_in_place_only_bytes_differ_in_being_views(message: object) -> None:
    assert same(as_views(sent(message, in_place=True)), as_views(message))


def as_views(value: Any) -> Any:
    """Return a message with everything made of bytes as bytes, keys apart."""
    if isinstance(value, memoryview | bytes):
        return bytes(value)
    if isinstance(value, dict):
        return {key: as_views(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(as_views(item) for item in value)
    return value


@pytest.mark.parametrize("nbytes", [4, 1 << 20], ids=["in line", "buffer"])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_parameters_and_gradients_wanted_arrive(nbytes: int, needs_grad: bool) -> None:
    data = torch.randn(nbytes // 4)
    got = sent([nn.Parameter(data, needs_grad), data.clone().requires_grad_(needs_grad)])
    assert [type(tensor) for tensor in got] == [nn.Parameter, torch.Tensor]
    assert all(tensor.requires_grad is needs_grad and tensor.is_leaf for tensor in got)
    assert all(torch.equal(tensor, data) for tensor in got)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(10)[::3],
        torch.tensor([1 + 2j]).conj(),
        torch.ones(1).expand(5),
    ],
    ids=["transposed", "strided", "conjugated", "expanded"],
)
def test_tensors_of_every_kind_of_memory_arrive_contiguous(tensor: torch.Tensor) -> None:
    got = sent(tensor)
    assert type(got) is torch.Tensor
    assert torch.equal(got, tensor.detach())
    assert got.is_contiguous()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_tensors_of_every_dtype_of_torch(dtype: torch.dtype) -> None:
    tensor = any_of(dtype, (2, 3))
    for in_place in (False, True):
        assert same(sent(tensor, in_place=in_place), tensor)
    for inline_nbytes in (0, INLINE_NBYTES):
        frames = TensorEncoder("direct_rpc", inline_nbytes=inline_nbytes).encode(tensor)
        assert len(frames) == 1 + (inline_nbytes == 0)
        assert same(TensorDecoder(torch.Tensor).decode(frames), tensor)


@pytest.mark.gpu
def test_a_tensor_on_a_gpu_arrives_on_the_cpu() -> None:
    got = sent(torch.arange(6, device="cuda").reshape(2, 3).t())
    assert got.device.type == "cpu"
    assert got.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_in_place_a_tensor_is_the_memory_that_came() -> None:
    codec = MessageCodec()
    encoded = codec.encode(torch.zeros(100))
    memory = memoryview(bytearray(encoded.nbytes))
    encoded.write(memory)
    parts = split(memory)
    in_place, copied = codec.decode(*parts, []), codec.decode(*parts)
    memory[-4:] = np.float32(7).tobytes()
    assert (in_place[-1], copied[-1]) == (7, 0)


def test_in_place_nothing_can_be_written_also_in_writable_memory() -> None:
    """A message from a socket is in memory that a view would let the reader change."""
    message = [bytes(2_000), b"small", memoryview(bytes(2_000)), np.ones(1_000)]
    encoded = MessageCodec().encode(message)
    memory = memoryview(bytearray(encoded.nbytes))
    encoded.write(memory)
    got = MessageCodec().decode(*split(memory), [])
    assert all(view.readonly for view in got[:3])
    assert not got[3].flags.writeable


def test_in_place_all_bytes_can_be_released() -> None:
    """Also those that were sent as a memoryview, of which a second view would stay."""
    message = {"a": memoryview(bytes(2_000)), "b": bytes(2_000), "c": [memoryview(b"small")]}
    encoded = MessageCodec().encode(message)
    memory = memoryview(bytearray(encoded.nbytes))
    encoded.write(memory)
    views: list[memoryview] = []
    got = MessageCodec().decode(*split(memory), views)
    assert got == message
    for view in views:
        view.release()
    for view in (got["a"], got["b"], got["c"][0]):
        with pytest.raises(ValueError, match="released memoryview"):
            view[0]


def test_large_parts_are_not_in_the_msgpack() -> None:
    encoded = MessageCodec().encode({"a": bytes(10_000), "b": [torch.zeros(10_000)]})
    assert len(encoded.body) < 100
    assert [len(buffer) for buffer in encoded.buffers] == [10_000, 40_000]


@dataclasses.dataclass
class Sampling:
    temperature: float
    stop: tuple[str, ...] = ()
    image: torch.Tensor | None = None


class Point(msgspec.Struct):
    x: int
    y: int


def test_registered_types_come_back_with_what_they_hold() -> None:
    codec = MessageCodec()
    codec.register(Sampling)
    codec.register(Point)
    codec.register(complex, encode=lambda z: (z.real, z.imag), decode=lambda pair: complex(*pair))
    codec.register(Number, encode=range, decode=lambda plain: Number(len(plain)))
    message = [Sampling(0.5, ("a",), torch.ones(3)), Point(1, 2), {"z": 1 + 2j}, Number(3)]
    got = sent(message, codec)
    assert got[0].stop == ("a",)
    assert torch.equal(got[0].image, torch.ones(3))
    assert got[1:] == message[1:]


def test_who_has_not_registered_the_type_is_told_its_name() -> None:
    codec = MessageCodec()
    codec.register(Point)
    encoded = codec.encode(Point(1, 2))
    with pytest.raises(ProtocolError, match="'Point', which is not registered here"):
        MessageCodec().decode(encoded.body, encoded.buffers)


def test_registering_twice_or_without_hooks_is_refused() -> None:
    codec = MessageCodec()
    codec.register(Point)
    for kind in (int, type(None), dict, bytes, set):
        with pytest.raises(ConfigError, match="is supported without hooks"):
            codec.register(kind, encode=repr, decode=eval)
    with pytest.raises(ConfigError, match="registered already"):
        codec.register(Point)
    with pytest.raises(ConfigError, match="neither a dataclass nor a msgspec Struct"):
        codec.register(object)


class Number(int):
    pass


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"a": [1, object()]}, r"\$\['a'\]\[1\]: builtins.object is no type"),
        ([(1, Point(1, 2))], r"\$\[0\]\[1\]: .*Point is no type"),
        (Number(3), r"\$: .*Number is no type"),
        ({(1, Number): 3}, r"builtins.type is no type"),
        ([{1, memoryview(b"")}], r"\$\[0\]\[.\]: a set holds bytes"),
        ([10**5000], "this message cannot be encoded"),
        ("\ud800", "surrogates not allowed"),
        ([torch.ones(2).to_sparse()], r"\$\[0\]: a torch.sparse_coo tensor .* cannot be sent"),
        (torch.ones(2, device="meta"), "on meta cannot be sent"),
        (torch.ones(2).as_subclass(Subclass), "Subclass of torch.float32 is no type"),
        (np.array([object()]), "numpy.ndarray of object is no type"),
    ],
)
def test_what_cannot_travel_is_refused_with_its_place(message: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        MessageCodec().encode(message)


def test_a_hundred_levels_are_sent() -> None:
    """docs/message-queue.md promises them."""
    nested: Any = 1
    for level in range(100):
        nested = [[nested], (nested,), {"a": nested}, {(1, 2): nested}][level % 4]
    assert sent(nested) == nested


def test_endless_nesting_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="this message cannot be encoded"):
        MessageCodec().encode(loop)


@settings(deadline=None)
@given(st.binary(max_size=200), st.lists(st.binary(max_size=20), max_size=3))
def test_bytes_that_are_no_message_are_a_protocol_error_or_a_message(
    body: bytes, buffers: list[bytes]
) -> None:
    for views in (None, list[memoryview]()):
        with suppress(ProtocolError):
            MessageCodec().decode(body, [memoryview(buffer) for buffer in buffers], views)


@settings(deadline=None)
@given(messages, st.data())
def test_a_damaged_message_is_a_protocol_error_or_a_message(
    message: object, data: st.DataObject
) -> None:
    encoded = MessageCodec().encode(message)
    memory = bytearray(encoded.nbytes)
    encoded.write(memoryview(memory))
    place = data.draw(st.integers(0, len(memory) - 1))
    memory[place] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(memory)))
    for damaged in (memory, memory[:cut]):
        with suppress(ProtocolError):
            MessageCodec().decode(*split(memoryview(bytes(damaged))))


def forged(code: int, content: object) -> bytes:
    """Return a message that is one extension."""
    return msgspec.msgpack.encode(Ext(code, msgspec.msgpack.encode(content)))


ENDLESS = Ext(VALUE, msgspec.msgpack.encode(["py.range", [0, 1 << 60, 1]]))


@pytest.mark.parametrize(
    ("code", "content", "why"),
    [
        (TENSOR, ["float32", [2], 5], "refers to buffer 5 of 1"),
        (TENSOR, ["float32", [-1], 0], "Expected `int` >= 0"),
        (TENSOR, ["float32", ["x"], 0], "Expected `int`, got `str`"),
        (TENSOR, ["float32", [3], 0], "takes 12 bytes, and 8 came"),
        (TENSOR, ["float32", [1 << 62, 1 << 62, 0], b""], "invalid shape"),
        (TENSOR, ["quaternion", [1], 0], "unknown dtype 'quaternion'"),
        (TENSOR, ["float32", [2], [0]], "cannot be decoded"),
        (ARRAY, ["O", [1], 0], "array of object"),
        (ARRAY, ["f4", [1], 0], "takes 4 bytes, and 8 came"),
        (ARRAY, ["f4", [1 << 50], b""], "bytes, and 0 came"),
        (ARRAY, ["S0", [1 << 50], b""], "have no bytes"),  # NumPy makes each one byte
        (ARRAY, ["U0", [1 << 50], b""], "have no bytes"),
        (SCALAR, ["O", [], bytes(8)], "array of object"),
        (SCALAR, ["f4", [], bytes(400)], "takes 4 bytes, and 400 came"),
        (SCALAR, ["f4", [], 1 << 50], "refers to buffer"),
        (BYTES, 1, "refers to buffer 1 of 1"),
        (TUPLE, ENDLESS, "a range in the place of a list"),
        (SET, ENDLESS, "a range in the place of a list"),
        (DICT, ENDLESS, "a range in the place of a list"),
        (DICT, [1], "cannot be decoded"),
        (VALUE, ENDLESS, "a range in the place of a list"),
        (VALUE, ["py.deque", ENDLESS], "invalid py.deque"),
        (VALUE, ["torch.Size", ENDLESS], "invalid torch.Size"),
        (VALUE, ["py.Counter", ENDLESS], "invalid py.Counter"),
        (99, [], "extension 99"),
    ],
)
def test_a_forged_extension_says_what_is_wrong(code: int, content: Any, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        MessageCodec().decode(forged(code, content), [memoryview(bytes(8))])


def test_every_buffer_belongs_to_one_part() -> None:
    part = Ext(BYTES, msgspec.msgpack.encode(0))
    buffers = [memoryview(bytes(2))] * 2
    for body, why in (([part, part], "in use already"), ([part], "nothing is in number 1")):
        with pytest.raises(ProtocolError, match=why):
            MessageCodec().decode(msgspec.msgpack.encode(body), buffers)


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Corner(NamedTuple):
    x: int
    data: torch.Tensor


Couple = namedtuple("Couple", ["a", "b"])  # noqa: PYI024  # the other way of making one


class Spot(Couple):
    """A named tuple with a method, as it is usually written."""

    def total(self) -> Any:
        return self.a + self.b


def with_attribute() -> Spot:
    spot = Spot(1, 2)
    spot.color = "red"  # type: ignore[attr-defined]
    return spot


UTC = dt.UTC
MOMENT = dt.datetime(2026, 11, 22, 9, 30, 1, 5, tzinfo=UTC)
KINDS: list[Any] = [
    np.float32(1.5),
    np.float64(math.pi),
    np.int64(-7),
    np.uint8(7),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.str_("word"),
    np.str_(""),
    np.bytes_(b"word"),
    np.datetime64("2026-11-22"),
    np.dtype("<f4"),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cpu"),
    torch.device("cuda:1"),
    torch.strided,
    torch.channels_last,
    slice(1, None, 2),
    slice(None),
    range(1, 10, 3),
    ...,
    1 + 2j,
    2**64,
    -(2**200),
    Color.RED,
    Level.LOW,
    Word.YES,
    Right.READ,
    Right.READ | Right.WRITE,
    Couple(1, (2, "x")),
    Spot(1, 2),
    MOMENT,
    MOMENT.replace(tzinfo=None, fold=1),
    MOMENT.date(),
    MOMENT.time(),
    dt.timedelta(days=-1, microseconds=5),
    Decimal("1.10"),
    Fraction(1, 3),
    uuid.UUID(int=5),
    Path("/tmp/a b"),
    PurePosixPath("x/y"),
    OrderedDict(b=1, a=2),
    Counter("hello"),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {1: 2}),
    deque([1, 2], maxlen=3),
    array.array("d", [1.0, 2.0]),
    {(1, "a"): 1, Level.LOW: 2, frozenset({3}): 3, np.int64(4): 4, b"x": 5, 2**70: 6},
    {(1, b"x" * 600): Path("a")},
    {2**70: -(2**70)},
    {Corner, int} - {Corner, int},
    {np.float32(1), Color.RED, (1, b"y" * 600)},
]
NATIVE = (enum.Enum, dt.date, dt.time, dt.timedelta, Decimal, uuid.UUID, tuple, set, dict)
"""What the codec of requests, which goes by the types of fields, leaves to msgpack's own rules."""


@pytest.mark.parametrize("value", KINDS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_value_comes_back_as_what_it_was(value: Any, in_place: bool) -> None:
    got = sent([value, {"k": value}], in_place=in_place)
    for back in (got[0], got[1]["k"]):
        assert type(back) is type(value)
        assert back == value
        assert repr(back) == repr(value) or isinstance(value, set)


@pytest.mark.parametrize(
    "value",
    [value for value in KINDS if not isinstance(value, NATIVE) and not isinstance(value, int)],
    ids=lambda value: type(value).__name__,
)
def test_requests_carry_what_msgpack_has_no_word_for(value: Any) -> None:
    frames = TensorEncoder("direct_rpc").encode([value, {"k": value}])
    got = TensorDecoder().decode(frames)
    for back in (got[0], got[1]["k"]):
        if isinstance(value, np.float64 | np.str_ | np.bytes_ | deque):
            assert list(back) == list(value) if isinstance(value, deque) else back == value
            continue
        assert type(back) is type(value)
        assert back == value


def test_tensors_and_arrays_travel_inside_values() -> None:
    point = Corner(1, torch.arange(4.0))
    for in_place in (False, True):
        got = sent(deque([point]), in_place=in_place)[0]
        assert type(got) is Corner
        assert torch.equal(got.data, point.data)


class Crop(msgspec.Struct):
    pixels: np.ndarray
    crop: slice
    dtype: torch.dtype
    shape: torch.Size


@pytest.mark.parametrize("shape", [(0,), (3, 2), (100, 100)])
def test_fields_of_requests_are_arrays_slices_and_dtypes(shape: tuple[int, ...]) -> None:
    for order in ("C", "F"):
        pixels = np.ones(shape, "f8", order=order)
        pixels.flags.writeable = order == "C"
        frames = TensorEncoder("direct_rpc").encode(
            Crop(pixels, slice(1, 2), torch.float16, torch.Size(shape))
        )
        got = TensorDecoder(Crop).decode(frames)
        assert np.array_equal(got.pixels, pixels)
        assert (got.pixels.dtype, got.crop, got.dtype) == (pixels.dtype, slice(1, 2), torch.float16)
        assert got.shape == torch.Size(shape)
        assert len(frames) == 1 + (pixels.nbytes > 4096)  # a large one is not in the message
    wrong = msgspec.structs.replace(got, crop=range(3))
    with pytest.raises(ProtocolError, match="slice"):
        TensorDecoder(Crop).decode(TensorEncoder("direct_rpc").encode(wrong))


def local_enum() -> object:
    class Local(enum.Enum):
        A = 1

    return Local.A


@pytest.mark.parametrize(
    "value",
    [
        local_enum(),
        MOMENT.replace(tzinfo=ZoneInfo("UTC")),
        defaultdict(local_enum),
        np.void(b"xx"),
        np.array([object()]),
        np.bytes_(b"a\0"),  # an array would lose the zero
        np.str_("a\0"),
        print,
        with_attribute(),
        memoryview(array.array("d", [1.0])),
        memoryview(bytes(4)).cast("B", (2, 2)),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"register it with the codec|as bytes"):
        sent([value])


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("os.system", "true"),
        ("py.enum", ["subprocess", "Popen", "x"]),
        ("py.enum", ["builtins", "int", "x"]),
        ("py.enum", ["no.such.module", "X", "x"]),
        ("py.enum", [__name__, "Color", "NONE"]),
        ("py.enum", [__name__, "Color.RED.__class__", "RED"]),
        ("py.namedtuple", [__name__, "Corner", [1]]),
        ("py.namedtuple", ["builtins", "tuple", []]),
        ("torch.dtype", "nn"),
        ("torch.dtype", ["x"]),
        ("torch.device", "nowhere"),
        ("py.datetime", "2026"),
        ("py.slice", 3),
        ("py.Fraction", [1, 0]),
        ("py.Decimal", "x"),
        ("py.defaultdict", ["eval", {}]),
        ("py.array", ["?", b""]),
        ("py.array", ["b", 1 << 50]),  # bytes(1 << 50) would be as many zeros
        ("py.enum", ["sys", 5, "x"]),
        ("py.enum", [5, "x", "x"]),
        ("py.UUID", 5),
        ("py.Fraction", ["1e5000", 1]),
    ],
)
def test_values_that_are_none_are_errors_of_the_message(name: str, plain: Any) -> None:
    with pytest.raises(ProtocolError, match=r"a message has|is no"):
        MessageCodec().decode(forged(VALUE, [name, plain]), [])


@pytest.mark.parametrize("name", ["py.Counter", "py.OrderedDict", "py.defaultdict"])
def test_a_dictionary_is_not_made_of_a_list(name: str) -> None:
    """`dict` would make a list of each item, and a range has items without end."""
    pairs = [Ext(VALUE, msgspec.msgpack.encode(["py.range", [0, 1_000_000, 1]]))]
    plain = {"py.Counter": pairs, "py.OrderedDict": [pairs], "py.defaultdict": [None, pairs]}
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="a message has a list in the place of a dict"):
            MessageCodec().decode(forged(VALUE, [name, plain[name]]), [])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_codec_may_have_its_own_rule_for_a_kind() -> None:
    codec = MessageCodec()
    codec.register(slice, encode=lambda s: s.stop, decode=slice)
    assert sent(slice(5), codec) == slice(5)


WAYS = ["direct_rpc", "torch_shm"]
SMALL, LARGE = 8, INLINE_NBYTES + 64


class Image(msgspec.Struct, frozen=True, kw_only=True):
    pixels: torch.Tensor
    grid: torch.Tensor | None = None


@dataclass
class Position:
    offset: int
    mask: torch.Tensor | None = None


class Request(msgspec.Struct, kw_only=True):
    request_id: str
    prompt: list[int] = []
    embeddings: torch.Tensor | None = None
    images: list[Image] = []
    media: dict[str, Any] = {}
    positions: list[Position] = []


Pair = tuple[TensorEncoder, TensorDecoder[Any]]


@pytest.fixture(scope="module")
def queue() -> Iterator[TensorIpcReceiver]:
    with TensorIpcReceiver() as made:
        yield made


@pytest.fixture
def sender(queue: TensorIpcReceiver) -> Iterator[TensorIpcSender]:
    with TensorIpcSender(queue.handle, max_nbytes=32 << 20) as made:
        yield made


@pytest.fixture(params=WAYS)
def encoder(request: pytest.FixtureRequest, sender: TensorIpcSender) -> TensorEncoder:
    return TensorEncoder(request.param, lambda: sender)


def read(frames: list[Frame], kind: Any = None, queue: TensorIpcReceiver | None = None) -> Any:
    return TensorDecoder(kind, queue).decode(frames)


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


class TestRoundTrip:
    def test_a_whole_request(self, encoder: TensorEncoder, queue: TensorIpcReceiver) -> None:
        request = Request(
            request_id="r",
            prompt=[1, 2],
            embeddings=floats(LARGE),
            images=[Image(pixels=floats(3, LARGE), grid=torch.tensor([1, 2, 3]))],
            media={
                "video": [[floats(LARGE), floats(2)], []],
                "audio": {"wave": floats(LARGE), "rate": 16_000},
            },
            positions=[Position(3, torch.ones(LARGE, dtype=torch.bool)), Position(4)],
        )
        got = read(encoder.encode(request, "r"), Request, queue)
        assert (got.request_id, got.prompt) == ("r", [1, 2])
        assert same(got.embeddings, request.embeddings)
        assert same(got.images[0].pixels, request.images[0].pixels)
        assert same(got.images[0].grid, request.images[0].grid)
        assert same(got.media, request.media)
        assert same(got.positions[0].mask, request.positions[0].mask)
        assert (got.positions[0].offset, got.positions[1]) == (3, Position(4))
        assert queue.pending == 0

    @pytest.mark.parametrize("shape", [(), (0, 4), (3, 2), (2, 3, LARGE)], ids=str)
    def test_every_shape(
        self, encoder: TensorEncoder, queue: TensorIpcReceiver, shape: tuple[int, ...]
    ) -> None:
        tensor = any_of(torch.bfloat16, shape)
        assert same(read(encoder.encode(tensor), torch.Tensor, queue), tensor)

    @pytest.mark.parametrize("rows", [3, 3000])
    def test_tensors_that_are_not_contiguous(
        self, encoder: TensorEncoder, queue: TensorIpcReceiver, rows: int
    ) -> None:
        wide = torch.arange(rows * 8.0).view(rows, 8)
        message = {"t": wide.t(), "strided": wide[1:, ::3], "expanded": wide[:, :1].expand(rows, 5)}
        assert same(read(encoder.encode(message), None, queue), message)

    @settings(max_examples=60, deadline=None)
    @given(
        message=st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(1 << 63), (1 << 64) - 1)
            | st.text(max_size=20)
            | st.sampled_from([0, 1, 7, SMALL, LARGE]).map(lambda n: torch.arange(float(n)))
            | st.sampled_from([LARGE]).map(lambda n: torch.ones(n, dtype=torch.bfloat16)),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(st.text(max_size=5), inner, max_size=4)
            ),
            max_leaves=12,
        ),
        way=st.sampled_from(WAYS),
    )
    def test_any_nesting_keeps_its_structure(
        self, queue: TensorIpcReceiver, message: Any, way: str
    ) -> None:
        with TensorIpcSender(queue.handle) as sender:
            encoder = TensorEncoder(way, lambda: sender)
            assert same(read(encoder.encode(message), None, queue), message)

    def test_own_types_go_through_hooks(self) -> None:
        encoder = TensorEncoder("direct_rpc", enc_hook=lambda value: [value.real, value.imag])
        frames = encoder.encode([1 + 2j, torch.ones(2)])
        decoder = TensorDecoder(
            tuple[complex, torch.Tensor], dec_hook=lambda kind, value: kind(*value)
        )
        number, tensor = decoder.decode(frames)
        assert number == 1 + 2j
        assert same(tensor, torch.ones(2))

    def test_a_hook_may_read_a_message_within(self) -> None:
        encoder = TensorEncoder("direct_rpc")
        inner = encoder.encode([7, torch.ones(LARGE)])

        def hook(kind: type, value: Any) -> Any:
            if isinstance(value, int):
                return kind(value)
            return decoder.decode([value, inner[1]])[0]

        decoder = TensorDecoder(tuple[complex, torch.Tensor], dec_hook=hook)
        number, tensor = decoder.decode(encoder.encode([inner[0], torch.zeros(LARGE)]))
        assert number == 7
        assert same(tensor, torch.zeros(LARGE))

    def test_several_threads_may_use_one_codec(self, queue: TensorIpcReceiver) -> None:
        encoder, decoder = TensorEncoder("direct_rpc"), TensorDecoder()

        def go(number: int) -> bool:
            message = [torch.full((LARGE,), number), number, torch.full((2,), number)]
            return same(decoder.decode(encoder.encode(message)), message)

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(go, range(200)))


class TestWays:
    def test_small_ones_stand_in_line(self, sender: TensorIpcSender) -> None:
        for way in WAYS:
            frames = TensorEncoder(way, lambda: sender).encode([torch.ones(SMALL)])
            assert len(frames) == 1
            assert same(read(frames), [torch.ones(SMALL)])

    def test_large_ones_are_frames_that_copy_nothing(self) -> None:
        tensors = [floats(LARGE), floats(2, LARGE)]
        main, *rest = TensorEncoder("direct_rpc").encode(tensors)
        assert len(main) < 100
        assert [memoryview(frame).nbytes for frame in rest] == [4 * LARGE, 8 * LARGE]
        tensors[0][0] = 77.0
        assert same(read([main, *rest]), tensors)

    def test_large_ones_go_through_the_queue(
        self, sender: TensorIpcSender, queue: TensorIpcReceiver
    ) -> None:
        tensor = floats(LARGE)
        frames = TensorEncoder("torch_shm", lambda: sender).encode([tensor], key="r")
        assert len(frames) == 1
        assert len(frames[0]) < 200
        assert same(read(frames, None, queue), [tensor])

    def test_large_arrays_go_where_large_tensors_go(
        self, encoder: TensorEncoder, queue: TensorIpcReceiver
    ) -> None:
        array = np.arange(LARGE, dtype=">f8").reshape(2, -1)
        array.flags.writeable = False
        main, *rest = encoder.encode([array])
        assert len(main) < 200
        got = read([main, *rest], None, queue)
        assert same(got, [array])
        assert got[0].flags.writeable

    def test_the_key_reaches_whoever_cleans_up(
        self, sender: TensorIpcSender, queue: TensorIpcReceiver
    ) -> None:
        frames = TensorEncoder("torch_shm", lambda: sender).encode([floats(LARGE)], key="aborted")
        while not queue.cleanup_request_tensors("aborted"):  # it has not arrived yet
            time.sleep(0.01)
        with pytest.raises(TransferError, match="request was cleaned up"):
            read(frames, None, queue)

    def test_the_size_is_a_setting(self) -> None:
        tensor = torch.ones(10)
        assert len(TensorEncoder("direct_rpc", inline_nbytes=40).encode(tensor)) == 1
        assert len(TensorEncoder("direct_rpc", inline_nbytes=39).encode(tensor)) == 2

    def test_writable_frames_are_used_as_they_are(self) -> None:
        main, frame = TensorEncoder("direct_rpc").encode(floats(LARGE))
        buffer = bytearray(frame)
        tensor = read([main, buffer])
        tensor.zero_()
        assert not any(buffer)
        before = bytes(frame)
        copy = read([main, before])
        copy.zero_()
        assert any(before)

    @pytest.mark.parametrize("frame", [b"", memoryview(array.array("f"))], ids=["bytes", "view"])
    def test_a_frame_may_be_empty(self, frame: Frame) -> None:
        assert same(read([forged(TENSOR, ["float32", [0, 2], 0]), frame]), torch.ones(0, 2))

    def test_frames_at_odd_addresses_are_copied(self) -> None:
        original = floats(LARGE)
        main, frame = TensorEncoder("direct_rpc").encode(original)
        shifted = memoryview(bytearray(b"x") + bytes(frame))[1:]
        tensor = read([main, shifted])
        assert tensor.data_ptr() % 4 == 0
        assert same(tensor, original)

    def test_only_memory_of_the_cpu_is_pinned(self) -> None:
        assert pinnable(torch.ones(1))
        assert not pinnable(torch.ones(1, device="meta"))
        assert not pinnable(torch.ones(0))
        decoder = TensorDecoder(None, pin_memory=True)
        got = decoder.decode(TensorEncoder("direct_rpc").encode([torch.ones(3), floats(LARGE)]))
        assert all(tensor.is_pinned() == torch.cuda.is_available() for tensor in got)


class Carrier:
    """A carrier that works in memory, and can be told to fail."""

    def __init__(self, *errors: WeightSyncError | None) -> None:
        self.errors = list(errors)
        self.held: dict[bytes, torch.Tensor] = {}

    def put(self, tensor: torch.Tensor, key: str | None) -> bytes:
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        handle = f"{key}/{len(self.held)}".encode()
        self.held[handle] = tensor
        return handle

    def take_back(self, handle: bytes) -> None:
        del self.held[handle]

    def take(self, handle: bytes) -> torch.Tensor:
        return self.held.pop(handle)

    def drop(self, handle: bytes) -> None:
        del self.held[handle]


class TestFallback:
    def warnings(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [record.message for record in caplog.records if record.levelno == logging.WARNING]

    def test_without_a_queue(self, caplog: pytest.LogCaptureFixture) -> None:
        encoder = TensorEncoder("torch_shm")
        assert encoder.tensor_ipc == "direct_rpc"
        assert encoder.fallback_reason == "no tensor queue was given"
        for _ in range(3):
            assert len(encoder.encode(floats(LARGE))) == 2
        assert self.warnings(caplog) == [
            "tensors are sent in their messages, not in shared memory: no tensor queue was given"
        ]

    def test_where_the_queue_cannot_be_reached(self, caplog: pytest.LogCaptureFixture) -> None:
        elsewhere = TensorQueueHandle(address="0" * 32, host="HOST-elsewhere")
        encoder = TensorEncoder("torch_shm", functools.partial(TensorIpcSender, elsewhere))
        assert encoder.tensor_ipc == "direct_rpc"
        assert "they share no memory" in str(encoder.fallback_reason)
        assert len(self.warnings(caplog)) == 1
        tensor = floats(LARGE)
        assert same(read(encoder.encode(tensor)), tensor)

    @pytest.mark.parametrize(
        "error", [BackendUnavailableError("no memory is shared"), ConnectError("it is gone")]
    )
    def test_when_it_stops_working(
        self, caplog: pytest.LogCaptureFixture, error: WeightSyncError
    ) -> None:
        carrier = Carrier(None, error)
        encoder = TensorEncoder("torch_shm", lambda: carrier)
        tensors = [floats(LARGE) for _ in range(4)]
        frames = encoder.encode(tensors, "r")
        assert (len(frames), len(carrier.held)) == (4, 1)
        assert (encoder.tensor_ipc, encoder.fallback_reason) == ("direct_rpc", str(error))
        assert len(self.warnings(caplog)) == 1
        assert same(TensorDecoder(None, carrier).decode(frames), tensors)

    @pytest.mark.parametrize("error", [TransferTimeout("it is full"), SegmentError("too large")])
    def test_for_one_tensor_without_room(
        self, caplog: pytest.LogCaptureFixture, error: WeightSyncError
    ) -> None:
        carrier = Carrier(error, None, error)
        encoder = TensorEncoder("torch_shm", lambda: carrier)
        tensors = [floats(LARGE) for _ in range(4)]
        frames = encoder.encode(tensors, "r")
        assert (len(frames), len(carrier.held), encoder.crowded_out) == (3, 2, 2)
        assert (encoder.tensor_ipc, encoder.fallback_reason) == ("torch_shm", None)
        assert len(self.warnings(caplog)) == 1
        assert same(TensorDecoder(None, carrier).decode(frames), tensors)

    def test_a_queue_that_is_closed_under_it(self) -> None:
        with TensorIpcReceiver() as receiver:
            sender = TensorIpcSender(receiver.handle)
            encoder = TensorEncoder("torch_shm", lambda: sender)
        tensor = floats(LARGE)
        assert same(read(encoder.encode(tensor)), tensor)
        assert "the tensor receiver is gone" in str(encoder.fallback_reason)

    def test_the_setting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(SETTING, raising=False)
        assert chosen_tensor_ipc() == "torch_shm"
        monkeypatch.setenv(SETTING, "direct_rpc")
        assert chosen_tensor_ipc() == "direct_rpc"
        assert chosen_tensor_ipc("torch_shm") == "torch_shm"
        assert TensorEncoder().fallback_reason is None
        with pytest.raises(ConfigError, match="tensor_ipc is 'zeromq'; wanted"):
            TensorEncoder("zeromq")
        monkeypatch.setenv(SETTING, "on")
        with pytest.raises(ConfigError, match=f"{SETTING} is 'on'; wanted"):
            TensorEncoder()


class TestFailures:
    def test_what_cannot_be_encoded_leaves_nothing_behind(self) -> None:
        carrier = Carrier()
        encoder = TensorEncoder("torch_shm", lambda: carrier)
        for bad in (
            object(),
            torch.eye(2).to_sparse(),
            torch.empty(2, dtype=torch.bits8),
            1 << 70,
        ):
            with pytest.raises(ConfigError, match="this message cannot be encoded"):
                encoder.encode([floats(LARGE), bad])
            assert not carrier.held

    @pytest.mark.parametrize("kind", [dict[str, int], list[torch.Tensor], tuple[torch.Tensor, int]])
    def test_what_cannot_be_decoded_leaves_nothing_behind(self, kind: Any) -> None:
        carrier = Carrier()
        encoder = TensorEncoder("torch_shm", lambda: carrier)
        frames = encoder.encode([floats(LARGE), "no tensor", floats(LARGE)])
        assert len(carrier.held) == 2
        with pytest.raises(ProtocolError, match="this message cannot be decoded: Expected"):
            TensorDecoder(kind, carrier).decode(frames)
        assert not carrier.held

    def test_many_tensors_take_linear_time(self) -> None:
        carrier = Carrier()
        encoder = TensorEncoder("torch_shm", lambda: carrier, inline_nbytes=0)
        frames = encoder.encode([torch.ones(1)] * 20_000)
        started = time.thread_time()
        assert len(TensorDecoder(None, carrier).decode(frames)) == 20_000
        assert time.thread_time() - started < 1.0  # 0.05 s; 4 s with a new set for each

    def test_only_tensors_that_were_not_taken_are_dropped(self) -> None:
        dropped: list[bytes] = []

        class Recording(Carrier):
            def drop(self, handle: bytes) -> None:
                dropped.append(handle)

        carrier = Recording()
        frames = TensorEncoder("torch_shm", lambda: carrier).encode(
            [floats(LARGE), "no tensor", floats(LARGE)], "key"
        )
        with pytest.raises(ProtocolError, match="Expected"):
            TensorDecoder(list[torch.Tensor], carrier).decode(frames)
        assert dropped == [b"key/1"]

    def test_a_message_has_a_limit_of_tensors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        encoder, decoder = TensorEncoder("direct_rpc"), TensorDecoder(None)
        frames = encoder.encode([torch.ones(1)] * 3)
        monkeypatch.setattr(codec, "MAX_TENSORS", 2)
        with pytest.raises(ProtocolError, match="at most 2 tensors, this has more"):
            decoder.decode(frames)
        with pytest.raises(ConfigError, match="it has 3 tensors, and may have 2"):
            encoder.encode([torch.ones(1)] * 3)
        assert len(decoder.decode(encoder.encode([torch.ones(1)] * 2))) == 2

    def test_the_queue_drops_them_too(
        self, sender: TensorIpcSender, queue: TensorIpcReceiver
    ) -> None:
        encoder = TensorEncoder("torch_shm", lambda: sender)
        frames = encoder.encode([floats(1 << 16), "no tensor", floats(1 << 16)])
        with pytest.raises(ProtocolError):
            read(frames, list[torch.Tensor], queue)
        assert comes_true(lambda: sender.pool.blocks_in_use == 0)
        with pytest.raises(ConfigError):
            encoder.encode([floats(1 << 16), object()])
        later = sender.send_tensor(torch.ones(1))
        queue.recv_tensor(later)
        assert sender.pool.blocks_in_use == 0

    def test_a_tensor_that_is_another_is_refused(self) -> None:
        carrier = Carrier()
        frames = TensorEncoder("torch_shm", lambda: carrier).encode(floats(LARGE))
        carrier.held = dict.fromkeys(carrier.held, torch.ones(3))
        with pytest.raises(ProtocolError, match=r"arrived as torch.float32 of shape \[3\]"):
            TensorDecoder(None, carrier).decode(frames)
        frames = TensorEncoder("torch_shm", lambda: carrier).encode(floats(LARGE))
        carrier.held = dict.fromkeys(carrier.held, floats(LARGE).view(torch.int32))
        with pytest.raises(ProtocolError, match=r"arrived as torch\.int32 of shape"):
            TensorDecoder(None, carrier).decode(frames)

    def test_a_field_that_is_no_tensor_is_named(self) -> None:
        raw = msgspec.msgpack.encode({"request_id": "r", "images": [{"pixels": 3}]})
        with pytest.raises(ProtocolError, match=r"a tensor, got `int` - at `\$.images\[0\]"):
            read([raw], Request)

    def test_shared_memory_without_a_queue_to_read_it(self, sender: TensorIpcSender) -> None:
        frames = TensorEncoder("torch_shm", lambda: sender).encode(floats(LARGE))
        with pytest.raises(ProtocolError, match="no tensor queue was given to read it from"):
            read(frames)

    def test_a_message_that_is_too_long(self) -> None:
        decoder = TensorDecoder(None, max_message_nbytes=100)
        with pytest.raises(ProtocolError, match="may have 100 bytes, this has 10"):
            decoder.decode(TensorEncoder("direct_rpc").encode("x" * 99))

    @pytest.mark.parametrize(
        ("tensor", "frames", "message"),
        [
            ((TENSOR, ["float32", [2], 0]), [b"x" * 7], "float32[2] takes 8 bytes, and 7 came"),
            ((TENSOR, ["float32", [2], 0]), [], "buffer 0 of 0, which is missing"),
            ((TENSOR, ["float32", [2], 1]), [b"x" * 8], "buffer 1 of 1, which is missing"),
            ((TENSOR, ["float32", [2], -1]), [b"x" * 8], "buffer -1 of 1, which is missing"),
            ((TENSOR, ["float32", [1] * 65, 0]), [b"x" * 8], "length <= 64"),
            ((TENSOR, ["float32", [2], 0]), [b"x" * 8, b"y"], "nothing is in number 1"),
            ((TENSOR, ["int8", [3], b"12"]), [], "int8[3] takes 3 bytes, and 2 came"),
            ((TENSOR, ["int8", [3]]), [], "this message cannot be decoded"),
            ((CARRIED, "no handle"), [], "no handle of a tensor in a queue"),
            ((99, 1), [], "a message has the unknown extension 99"),
        ],
    )
    def test_each_lie_is_told(
        self,
        queue: TensorIpcReceiver,
        tensor: tuple[int, object],
        frames: list[bytes],
        message: str,
    ) -> None:
        code, content = tensor
        with pytest.raises(ProtocolError) as caught:
            read([forged(code, content), *frames], None, queue)
        assert message in str(caught.value)

    @settings(max_examples=300, deadline=None)
    @given(data=st.data())
    def test_damaged_messages_are_refused_or_read(
        self, queue: TensorIpcReceiver, data: st.DataObject
    ) -> None:
        request = Request(
            request_id="r", embeddings=torch.ones(3), media={"x": [torch.ones(LARGE)]}
        )
        frames = [bytearray(frame) for frame in TensorEncoder("direct_rpc").encode(request)]
        main = frames[0]
        for _ in range(data.draw(st.integers(1, 4))):
            main[data.draw(st.integers(0, len(main) - 1))] = data.draw(st.integers(0, 255))
        del main[data.draw(st.integers(1, len(main))) :]
        try:
            got = read(list(frames), data.draw(st.sampled_from([Request, None])), queue)
        except WeightSyncError:
            return
        if isinstance(got, Request) and got.embeddings is not None:
            assert got.embeddings.numel() * got.embeddings.element_size() == 12

    @settings(max_examples=300, deadline=None)
    @given(frames=st.lists(st.binary(max_size=60), max_size=3))
    def test_nonsense_is_refused_or_read(
        self, queue: TensorIpcReceiver, frames: list[bytes]
    ) -> None:
        for kind in (Request, None):
            try:
                read(list(frames), kind, queue)
            except WeightSyncError:
                continue

    def test_deep_nesting_is_refused(self) -> None:
        with pytest.raises(ProtocolError, match="this message cannot be decoded"):
            read([b"\x91" * 100_000])
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(ConfigError, match="this message cannot be encoded"):
            TensorEncoder("direct_rpc").encode(deep)


class TestTensorData:
    @pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
    def test_the_bytes(self, shape: tuple[int, ...]) -> None:
        tensor = any_of(torch.bfloat16, shape)
        data = tensor_data(tensor)
        assert (data.format, data.ndim, data.readonly) == ("B", 1, True)
        assert bytes(data) == bytes(contiguous_bytes(tensor).tolist())

    def test_it_is_a_view_that_keeps_the_memory(self) -> None:
        tensor = torch.arange(5, dtype=torch.uint8)
        data = tensor_data(tensor)
        tensor[1] = 200
        assert data[1] == 200
        expected = tensor.tolist()
        del tensor
        gc.collect()
        torch.full((5,), 9, dtype=torch.uint8)
        assert list(data) == expected

    def test_rows_that_lie_apart_are_copied(self) -> None:
        tensor = torch.arange(6, dtype=torch.uint8).view(2, 3).t()
        assert list(tensor_data(tensor)) == [0, 3, 1, 4, 2, 5]

    def test_other_tensors_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="cannot be sent"):
            tensor_data(torch.empty(2, dtype=torch.bits8))


def send_requests(queue: TensorQueueHandle, address: str, way: str) -> None:
    """Be an API server: send three requests, and the tensors of a fourth that is never sent."""
    encoder = TensorEncoder(way, lambda: TensorIpcSender(queue))
    with zmq.Context() as context, context.socket(zmq.PUSH) as pipe:
        pipe.connect(address)
        for number in range(3):
            image = Image(pixels=torch.full((3, LARGE), float(number)))
            request = Request(request_id=f"r{number}", images=[image, image])
            pipe.send_multipart(encoder.encode(request, request.request_id), copy=False)
        pipe.close(linger=int(WAIT_S * 1000))
        encoder.encode([floats(LARGE)], "never sent")


class TestBetweenProcesses:
    @pytest.mark.parametrize("way", WAYS)
    def test_requests_reach_an_engine_core(self, way: str) -> None:
        process = None
        with (
            TensorIpcReceiver(grace_s=0.1) as receiver,
            zmq.Context() as context,
            context.socket(zmq.PULL) as pipe,
        ):
            try:
                pipe.bind("tcp://127.0.0.1:0")
                address = pipe.getsockopt(zmq.LAST_ENDPOINT)
                assert isinstance(address, bytes)
                where = address.decode().rstrip("\0")
                process = SPAWN.Process(target=send_requests, args=(receiver.handle, where, way))
                process.start()
                decoder = TensorDecoder(Request, receiver)
                for number in range(3):
                    assert pipe.poll(int(WAIT_S * 1000))
                    frames = pipe.recv_multipart(copy=False)
                    assert len(frames) == (3 if way == "direct_rpc" else 1)
                    request = decoder.decode([memoryview(frame.buffer) for frame in frames])
                    assert request.request_id == f"r{number}"
                    for image in request.images:
                        assert same(image.pixels, torch.full((3, LARGE), float(number)))
                process.join(WAIT_S)
                assert process.exitcode == 0
                assert comes_true(lambda: receiver.pending == 0)
            finally:
                if process is not None:
                    process.kill()
                    process.join(WAIT_S)


def test_the_page_says_what_works() -> None:
    page = Path(__file__).parents[2] / "docs" / "tensor-queue.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    sent = floats(3, LARGE)
    names: dict[str, Any] = {
        "TensorIpcReceiver": TensorIpcReceiver,
        "TensorIpcSender": TensorIpcSender,
        "TensorEncoder": TensorEncoder,
        "TensorDecoder": TensorDecoder,
        "Request": Request,
        "request": Request(request_id="request-8", embeddings=sent),
        "pixels": sent,
    }
    try:
        for block in blocks:
            exec(block, names)
        assert same(names["pixels"], sent)
        assert same(names["request"].embeddings, sent)
        assert len(names["frames"]) == 1
    finally:
        names["sender"].close()
        names["receiver"].close()


def test_messages_without_tensors_load_no_torch() -> None:
    program = """
import sys
from weightsync.queues.codec import MessageCodec, TensorDecoder, TensorEncoder
message = {"a": [1, (2, b"x"), 1 + 2j], "b": bytes(1000)}
encoded = MessageCodec().encode(message)
assert MessageCodec().decode(encoded.body, encoded.buffers) == message
frames = TensorEncoder("direct_rpc").encode([1, slice(2)])
assert TensorDecoder().decode(frames) == [1, slice(2)]
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=WAIT_S)
