"""Messages of a real update, and random damage of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

import weightsync as ws
from weightsync.shm.host_keys import host_key
from weightsync.shm.segment import Segment

Message = tuple[str, bytes]
"""The name of a call, and its body as JSON."""

JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    1 << 31,
    1 << 62,
    1 << 63,
    1 << 70,
    1e308,
    "",
    "\x00",
    "../../etc/passwd",
    "weightsync-" + "0" * 32,
    "float31",
    "gASVKA==",
    "ü" * 2000,
    [],
    {},
    [[]],
    [1] * 20,
    {"kind": "segment"},
    {"a": {"b": [None]}},
)
ALPHABET = '{}[]",:0123456789eE+-.\\ntfulras \x00\xff\u2028'


class Recorder:
    """Records the messages of a sender to `receiver`."""

    def __init__(self, receiver: ws.WeightReceiver) -> None:
        self.receiver = receiver
        self.messages: list[Message] = []

    def __call__(self, message: Mapping[str, Any]) -> object:
        self.messages.append((str(message["call"]), json.dumps(message["body"]).encode()))
        return self.receiver.handle(message)


def whole_update(model: nn.Module, segment: Segment) -> dict[str, Any]:
    """An update_info that carries its own handles: all of `model`, in `segment`."""
    names, dtypes, shapes, handles, at = [], [], [], [], 0
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        segment.tensor(at, flat.numel()).copy_(flat)
        names.append(name)
        dtypes.append(str(tensor.dtype).removeprefix("torch."))
        shapes.append(list(tensor.shape))
        place = {"kind": "segment", "name": segment.name, "nbytes": segment.nbytes, "offset": at}
        handles.append({host_key(): place})
        at += flat.numel()
    return {"names": names, "dtype_names": dtypes, "shapes": shapes, "ipc_handles": handles}


@st.composite
def mutated_json(draw: st.DrawFn, bodies: list[bytes]) -> bytes:
    """A valid body in which some values, keys or bytes are others."""
    body = draw(st.sampled_from(bodies))
    for _ in range(draw(st.integers(1, 3))):
        change = _change_value if draw(st.booleans()) else _change_bytes
        body = change(draw, body)
    return body


@st.composite
def mutated_bytes(draw: st.DrawFn, packets: list[bytes]) -> bytes:
    """A valid packet with some other bytes."""
    packet = draw(st.sampled_from(packets))
    for _ in range(draw(st.integers(1, 4))):
        packet = _change_bytes(draw, packet)
    return packet


random_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
).map(lambda value: json.dumps(value).encode())


def _change_bytes(draw: st.DrawFn, body: bytes) -> bytes:
    at = draw(st.integers(0, len(body)))
    cut = draw(st.integers(0, 8))
    patch = draw(st.binary(max_size=4) | st.text(ALPHABET, max_size=4).map(str.encode))
    how = draw(st.sampled_from(["replace", "truncate", "repeat"]))
    if how == "truncate":
        return body[:at]
    if how == "repeat":
        return body[:at] + body[max(0, at - cut) :]
    return body[:at] + patch + body[at + cut :]


def _change_value(draw: st.DrawFn, body: bytes) -> bytes:
    """Replace some value by junk, or by a value from elsewhere in the message."""
    try:
        root = [json.loads(body)]
    except ValueError:
        return body
    places = list(_places(root))
    holder, key = draw(st.sampled_from(places))
    elsewhere, there = draw(st.sampled_from(places))
    acts = ["junk", "elsewhere", "delete", "add"]
    act = draw(st.sampled_from(acts[:2] if holder is root else acts))
    if act == "junk":
        holder[key] = draw(st.sampled_from(JUNK))
    elif act == "elsewhere":
        holder[key] = copy.deepcopy(elsewhere[there])
    elif act == "delete":
        del holder[key]
    elif isinstance(holder, dict):
        holder[draw(st.text(max_size=8))] = draw(st.sampled_from(JUNK))
    else:
        holder.insert(key, draw(st.sampled_from(JUNK)))
    return json.dumps(root[0]).encode()


def _places(holder: Any) -> Any:
    """Yield the container and the key of every value of the message."""
    keys = holder if isinstance(holder, dict) else range(len(holder))
    for key in keys:
        yield holder, key
        if isinstance(holder[key], dict | list):
            yield from _places(holder[key])


def damaged(body: bytes) -> Iterator[bytes]:
    """A valid body with one value of it replaced, every value in turn by junk and by its likes."""
    for at, (holder, key) in enumerate(_places(json.loads(body))):
        value = holder[key]
        likes: list[Any] = [value[:-1] + "0", value + "0"] if isinstance(value, str) else []
        if isinstance(value, int | float):
            likes = [value + 1, value * 10, value * 1_000_000]
        for other in (*JUNK, *likes):
            root = json.loads(body)
            there, name = next(islice(_places(root), at, None))
            there[name] = other
            yield json.dumps(root).encode()
