"""Parts of tensors that the user says this rank holds."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import msgspec
import torch

from weightsync.errors import ConfigError, ManifestMismatchError, shorten
from weightsync.tensors import dtype_name
from weightsync.weights.copying.layout import layer_of
from weightsync.weights.copying.reshard import show_box
from weightsync.weights.copying.shards import Slice, Span, is_sharded
from weightsync.weights.tensor_kinds import why_unsendable


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """A part of a tensor that this rank holds, for `connect([Holding(...), ...], ...)`.

    For trainers whose parameters are neither whole nor DTensors, as those of Megatron: `name` is
    the name that receivers have, and `tensor` may be a view of a larger parameter. Other ranks hold
    the rest. Ranks that hold the same part are replicas.

    Args:
        name: the tensor's name, as it is sent.
        shape: the shape of the full tensor.
        spans: for each dimension the `(begin, end)` that this rank holds, or several of these in
            the order in which `tensor` has them.
        tensor: the elements of the part.
    """

    name: str
    shape: Sequence[int]
    spans: Sequence[Span | Sequence[Span]]
    tensor: torch.Tensor


def are_holdings(given: object) -> TypeGuard[Sequence[Holding]]:
    """Whether `given` is a list of holdings. A rank that holds nothing has an empty one."""
    return isinstance(given, list | tuple) and (not given or isinstance(given[0], Holding))


def boxes_of(given: Sequence[object], dtype: torch.dtype | None) -> list[Slice]:
    """Return the boxes of holdings. `dtype` is the one in which tensors are sent, if it is given.

    Raises ConfigError, naming all of them, for holdings that are not right.
    """
    boxes: list[Slice] = []
    wrong: list[str] = []
    said: dict[str, tuple[object, ...]] = {}
    seen: set[tuple[str, Slice]] = set()
    for one in given:
        if not (isinstance(one, Holding) and isinstance(one.name, str)):
            raise ConfigError(
                f"{one!r:.60} is among the weightsync.Holding of a list; a list has holdings "
                "alone, and (name, tensor) pairs come from a callable"
            )
        why = _why_not(one, dtype)
        if why is None:
            box = _box_of(one)
            boxes.append(box)
            spec = (box.shape, one.tensor.dtype)
            if said.setdefault(one.name, spec) != spec:
                why = "has another shape or dtype in another holding of this rank"
            elif (one.name, box) in seen and one.tensor.numel():
                why = f"{show_box(box.spans)} is listed twice"
            seen.add((one.name, box))
        if why is not None:
            wrong.append(f"{one.name}: {why}")
    if wrong:
        raise ConfigError(f"{len(wrong)} holdings are not right: {shorten(wrong)}")
    return boxes


def _why_not(one: Holding, dtype: torch.dtype | None) -> str | None:
    """Return what is wrong with a holding; None where nothing is."""
    given: object = one.tensor
    if not isinstance(given, torch.Tensor):
        return f"its tensor is a {type(given).__name__}"
    if is_sharded(one.tensor):
        return "its tensor is a DTensor, which tells its part itself: give its local tensor"
    if (why := why_unsendable(one.tensor, dtype)) is not None:
        return f"its tensor is {why.what} (give {why.instead})"
    try:
        box = _box_of(one)
    except (TypeError, ValueError):
        return (
            f"its shape is {one.shape!r:.60} and its spans are {one.spans!r:.60}; give sizes, and "
            "a (begin, end) or several for each dimension"
        )
    if not _fits(box):
        return f"{show_box(box.spans)} is no part of {list(box.shape)}"
    if tuple(one.tensor.shape) != box.local_shape:
        return (
            f"its tensor is {list(one.tensor.shape)}, and {show_box(box.spans)} is "
            f"{list(box.local_shape)}"
        )
    return None


def _box_of(one: Holding) -> Slice:
    """Return the box of a holding. Raises TypeError or ValueError for other shapes and spans."""
    shape = tuple(map(operator.index, one.shape))
    dims = []
    for given in one.spans:
        spans = list(given)
        single = len(spans) == 2 and all(hasattr(end, "__index__") for end in spans)
        listed: Iterable[Span] = [spans] if single else spans  # type: ignore[list-item, assignment]  # told apart here
        dims.append(tuple((operator.index(begin), operator.index(end)) for begin, end in listed))
    return Slice(shape, tuple(dims))


def _fits(box: Slice) -> bool:
    """Whether the spans are within the shape, and none of a dimension overlap."""
    if len(box.spans) != len(box.shape):
        return False
    for size, spans in zip(box.shape, box.spans, strict=True):
        ends = [0]
        for begin, end in sorted(spans):
            if not ends[-1] <= begin <= end:
                return False
            ends.append(end)
        if ends[-1] > size:
            return False
    return True


class Said(NamedTuple):
    """The facts of a holding as text, which every update compares."""

    name: str
    shape: str
    spans: str
    tensor: str


def said_by(one: Holding) -> Said:
    """Return the facts of a holding."""
    tensor = f"{one.tensor.dtype} {tuple(one.tensor.shape)}"
    return Said(one.name, str(one.shape), str(one.spans), tensor)


def check_same(before: Sequence[Said], now: Sequence[Said]) -> None:
    """Raise ManifestMismatchError, naming tensors, where the holdings of a rank have changed."""
    if list(before) == list(now):
        return
    changed = sorted({said.name for said in set(before).symmetric_difference(now)})
    listed = shorten(changed) if changed else "their order"
    raise ManifestMismatchError(
        f"the holdings of this rank are not those of connect(): {listed}; declare the same parts "
        "in the same order, or connect again",
        mismatched=changed,
    )


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of which a rank declares parts: name, dtype and full shape of each.

    `device_types` are the types of their devices.
    """

    tensors: list[tuple[str, str, tuple[int, ...]]]
    device_types: list[str]


def tensors_of(given: Sequence[Holding]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return name, dtype and full shape of each tensor of which there are holdings, once."""
    found = {
        one.name: (one.name, dtype_name(one.tensor.dtype), tuple(map(operator.index, one.shape)))
        for one in given
    }
    return list(found.values())


def union_of(ranks: Sequence[Declared]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return the tensors of all ranks, those of a layer together.

    Raises ManifestMismatchError, naming the ranks, where they disagree on a tensor.
    """
    found: dict[str, dict[tuple[str, str, tuple[int, ...]], list[int]]] = defaultdict(dict)
    layers: dict[str, int] = {}
    for rank, declared in enumerate(ranks):
        for tensor in declared.tensors:
            layers.setdefault(layer_of(tensor[0]), len(layers))
            found[tensor[0]].setdefault(tensor, []).append(rank)
    different = [
        f"{name}: "
        + " and ".join(
            f"{dtype}{list(shape)} (rank {shorten(map(str, numbers))})"
            for (_, dtype, shape), numbers in said.items()
        )
        for name, said in found.items()
        if len(said) > 1
    ]
    if different:
        raise ManifestMismatchError(
            f"the ranks declare other shapes or dtypes of {len(different)} tensors: "
            f"{shorten(different)}; a tensor has one shape and one dtype on all ranks",
            mismatched=different,
        )
    tensors = [next(iter(said)) for said in found.values()]
    return sorted(tensors, key=lambda tensor: layers[layer_of(tensor[0])])
