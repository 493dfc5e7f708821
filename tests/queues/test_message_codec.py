from __future__ import annotations

import dataclasses
import math
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import ConfigError, ProtocolError
from weightsync.queues.message_codec import ALIGNMENT, INLINE_NBYTES, MessageCodec, split

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)


def sent(message: object, codec: MessageCodec | None = None, *, in_place: bool = False) -> Any:
    codec = codec or MessageCodec()
    encoded = codec.encode(message)
    room = bytearray(encoded.nbytes + ALIGNMENT)
    start = -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % ALIGNMENT
    memory = memoryview(room)[start : start + encoded.nbytes]
    encoded.write(memory)
    return codec.decode(*split(memory.toreadonly()), [] if in_place else None)


def same(a: Any, b: Any) -> bool:
    """Equality that looks at types, and into tensors and arrays."""
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return bool(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b))
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
    st.sampled_from(DTYPES),
    shapes,
)
arrays = st.builds(
    lambda dtype, shape: np.arange(math.prod(shape)).astype(dtype).reshape(shape),
    st.sampled_from(["f4", ">f8", "i2", "?", "c8", "U7", "S5", "M8[s]", "m8[ms]"]),
    shapes,
)
raw = st.binary(max_size=2 * INLINE_NBYTES)
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


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(10)[::3],
        torch.nn.Parameter(torch.ones(3)),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(1).expand(5),
    ],
    ids=["transposed", "strided", "parameter", "conjugated", "expanded"],
)
def test_tensors_of_every_kind_of_memory_arrive_plain(tensor: torch.Tensor) -> None:
    got = sent(tensor)
    assert type(got) is torch.Tensor
    assert torch.equal(got, tensor.detach())
    assert got.is_contiguous()


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
    got = sent([Sampling(0.5, ("a",), torch.ones(3)), Point(1, 2), {"z": 1 + 2j}], codec)
    assert got[0].stop == ("a",)
    assert torch.equal(got[0].image, torch.ones(3))
    assert got[1:] == [Point(1, 2), {"z": 1 + 2j}]


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


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"a": [1, object()]}, r"\$\['a'\]\[1\]: builtins.object is no type"),
        ([(1, Point(1, 2))], r"\$\[0\]\[1\]: .*Point is no type"),
        (Number(3), r"\$: .*Number is no type"),
        ({(1, Number): 3}, r"builtins.type is no type"),
        ([{1, memoryview(b"")}], r"\$\[0\]\[.\]: a set holds bytes"),
        ([10**5000], "cannot be encoded as a message"),
        ("\ud800", "surrogates not allowed"),
        (torch.ones(2).to_sparse(), "has no plain bytes"),
        (torch.ones(2, device="meta"), "has no plain bytes"),
        (np.array([object()]), "array of object has no plain bytes"),
    ],
)
def test_what_cannot_travel_is_refused_with_its_place(message: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        MessageCodec().encode(message)


def test_endless_nesting_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="cannot be encoded as a message"):
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


@pytest.mark.parametrize(
    ("extension", "why"),
    [
        ((1, ["float32", [2], 5]), "refers to buffer 5 of 1"),
        ((1, ["float32", [-1], 0]), "tensor of shape"),
        ((1, ["float32", [3], 0]), "8 bytes for it"),
        ((1, ["quaternion", [1], 0]), "unknown to this torch"),
        ((2, ["O", [1], 0]), "array of object"),
        ((99, []), "extension 99"),
    ],
)
def test_a_forged_extension_says_what_is_wrong(extension: tuple[int, Any], why: str) -> None:
    code, about = extension
    body = msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(about)))
    with pytest.raises(ProtocolError, match=why):
        MessageCodec().decode(body, [memoryview(bytes(8))])
