"""Ordinary values come back as what they were, through both codecs, or are refused when sent."""

from __future__ import annotations

import array
import datetime as dt
import enum
import math
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
import torch

from tests.queues.test_message_codec import sent
from weightsync.errors import ConfigError, ProtocolError
from weightsync.queues.message_codec import MessageCodec, from_plain
from weightsync.queues.tensor_codec import TensorDecoder, TensorEncoder


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    data: torch.Tensor


Pair = namedtuple("Pair", ["a", "b"])  # noqa: PYI024  # the other way of making one


class Spot(Pair):
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
    Pair(1, (2, "x")),
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
    {Point, int} - {Point, int},
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
    point = Point(1, torch.arange(4.0))
    for in_place in (False, True):
        got = sent(deque([point]), in_place=in_place)[0]
        assert type(got) is Point
        assert torch.equal(got.data, point.data)


class Request(msgspec.Struct):
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
            Request(pixels, slice(1, 2), torch.float16, torch.Size(shape))
        )
        got = TensorDecoder(Request).decode(frames)
        assert np.array_equal(got.pixels, pixels)
        assert (got.pixels.dtype, got.crop, got.dtype) == (pixels.dtype, slice(1, 2), torch.float16)
        assert got.shape == torch.Size(shape)
        assert len(frames) == 1 + (pixels.nbytes > 4096)  # a large one is not in the message
    wrong = msgspec.structs.replace(got, crop=range(3))
    with pytest.raises(ProtocolError, match="slice"):
        TensorDecoder(Request).decode(TensorEncoder("direct_rpc").encode(wrong))


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
        print,
        with_attribute(),
        memoryview(array.array("d", [1.0])),
        memoryview(bytes(4)).cast("B", (2, 2)),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"register it with the codec|no plain bytes|as bytes"):
        sent([value])


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("os.system", "true"),
        ("enum", ["subprocess", "Popen", "x"]),
        ("enum", ["builtins", "int", "x"]),
        ("enum", ["no.such.module", "X", "x"]),
        ("enum", [__name__, "Color", "NONE"]),
        ("enum", [__name__, "Color.RED.__class__", "RED"]),
        ("namedtuple", [__name__, "Point", [1]]),
        ("namedtuple", ["builtins", "tuple", []]),
        ("numpy scalar", ["O", b"12345678"]),
        ("numpy scalar", ["f8", b"1"]),
        ("numpy array", ["f8", [1 << 40], torch.zeros(0, dtype=torch.uint8)]),
        ("numpy array", ["f8", [1], torch.zeros(1, dtype=torch.float64)]),
        ("torch.dtype", "nn"),
        ("torch.dtype", ["x"]),
        ("torch.device", "nowhere"),
        ("datetime", "2026"),
        ("slice", 3),
        ("Fraction", [1, 0]),
        ("Decimal", "x"),
        ("defaultdict", ["eval", {}]),
        ("array", ["?", b""]),
        ("array", ["b", 1 << 50]),  # bytes(1 << 50) would be as many zeros
        ("numpy scalar", ["f4", 1 << 50]),
        ("numpy scalar", ["f4", bytes(400)]),
        ("numpy array", ["S0", [1 << 50], torch.zeros(0, dtype=torch.uint8)]),
        ("numpy array", ["f4", [1], 5]),
        ("enum", ["sys", 5, "x"]),
        ("enum", [5, "x", "x"]),
        ("UUID", 5),
        ("Fraction", ["1e5000", 1]),
    ],
)
def test_values_that_are_none_are_errors_of_the_message(name: str, plain: Any) -> None:
    with pytest.raises(ProtocolError, match=r"a message has|is no|came in"):
        from_plain(name, plain)


def test_a_codec_may_have_its_own_rule_for_a_kind() -> None:
    codec = MessageCodec()
    codec.register(slice, encode=lambda s: s.stop, decode=slice)
    assert sent(slice(5), codec) == slice(5)


def test_the_shape_of_an_array_makes_no_memory() -> None:
    """NumPy makes elements of no bytes one byte each."""
    for code, kind, shape in (
        (2, "S0", [1 << 50]),
        (2, "U0", [1 << 50]),
        (1, "float32", [1 << 62, 1 << 62, 0]),
        (1, "float32", ["x", 1 << 50]),
    ):
        body = msgspec.msgpack.encode(
            msgspec.msgpack.Ext(code, msgspec.msgpack.encode([kind, shape, 0]))
        )
        with pytest.raises(ProtocolError, match=r"have no bytes|of shape|cannot be decoded"):
            MessageCodec().decode(body, [memoryview(b"")])
