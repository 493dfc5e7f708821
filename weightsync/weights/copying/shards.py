"""Slices that a rank holds of DTensors, and the gathering of full tensors from their shards."""

from __future__ import annotations

import itertools
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from weightsync.errors import ConfigError
from weightsync.tensors import sent_dtype

Span = tuple[int, int]
"""Begin and end (exclusive) along one dimension, in elements."""


@dataclass(frozen=True, slots=True)
class Block:
    """`height` rows of `width` bytes, at byte `source` of a full tensor and `target` of a shard.

    The strides are bytes from row to row.
    """

    source: int
    target: int
    width: int
    height: int
    source_stride: int
    target_stride: int

    def within(self, begin: int, end: int) -> Iterator[Block]:
        """Yield the parts between bytes `begin` and `end` of the full tensor, cut rows apart."""
        first = max(0, (begin - self.source - self.width) // self.source_stride + 1)
        last = min(self.height, -((self.source - end) // self.source_stride))
        if first < last and self.source + first * self.source_stride < begin:
            yield self._row(first, begin, end)
            first += 1
        tail = first < last and self.source + (last - 1) * self.source_stride + self.width > end
        whole = last - first - tail
        if whole > 0:
            yield self._rows(first, whole)
        if tail:
            yield self._row(last - 1, begin, end)

    def _rows(self, first: int, height: int) -> Block:
        source = self.source + first * self.source_stride
        target = self.target + first * self.target_stride
        return Block(source, target, self.width, height, self.source_stride, self.target_stride)

    def _row(self, i: int, begin: int, end: int) -> Block:
        row = self._rows(i, 1)
        start, stop = max(row.source, begin), min(row.source + self.width, end)
        target, width = row.target + start - row.source, stop - start
        return Block(start, target, width, 1, self.source_stride, self.target_stride)


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a full tensor of `shape` that one process holds: spans for each dimension.

    The spans are in the order in which the shard holds them.
    """

    shape: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]

    @classmethod
    def whole_of(cls, shape: tuple[int, ...]) -> Slice:
        """Return the slice that is all of a tensor."""
        return cls(shape, tuple(((0, size),) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        return tuple(sum(end - begin for begin, end in spans) for spans in self.spans)

    @property
    def is_whole(self) -> bool:
        """Whether the shard is the full tensor."""
        return all(map(self._is_whole, range(len(self.shape))))

    def parts(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yield the index in the full tensor and in the shard of each part without a gap."""
        dims = [
            [
                (slice(begin, begin + length), slice(at, at + length))
                for begin, at, length in self._placed(dim)
            ]
            for dim in range(len(self.shape))
        ]
        for part in itertools.product(*dims):
            yield tuple(full for full, _ in part), tuple(own for _, own in part)

    def pieces(self, shard: torch.Tensor, elements: int) -> Iterator[tuple[torch.Tensor, Slice]]:
        """Yield parts of a shard of about as many elements at most, and the slice of each.

        Each is a view of the shard.
        """
        dim = next((d for d, size in enumerate(shard.shape) if size > 1), None)
        if dim is None or shard.numel() <= elements:
            yield shard, self
            return
        rows = max(1, elements * shard.shape[dim] // shard.numel())
        for begin, at, length in self._placed(dim):
            for first in range(0, length, rows):
                count = min(rows, length - first)
                span = (begin + first, begin + first + count)
                spans = (*self.spans[:dim], (span,), *self.spans[dim + 1 :])
                part = shard.narrow(dim, at + first, count)
                yield from Slice(self.shape, spans).pieces(part, elements)

    def blocks(self, itemsize: int) -> tuple[Block, ...]:
        """Return where the shard's bytes are in the full tensor; both are contiguous."""
        local = self.local_shape
        if not math.prod(local):
            return ()
        dim = self._last_cut(len(self.shape))
        if dim is None:
            nbytes = math.prod(self.shape) * itemsize
            return (Block(0, 0, nbytes, 1, nbytes, nbytes),)
        inner = math.prod(self.shape[dim + 1 :]) * itemsize
        strides = self.shape[dim] * inner, local[dim] * inner
        columns = [(a * inner, b * inner, n * inner) for a, b, n in self._placed(dim)]
        return tuple(
            Block(row * strides[0] + a, at * strides[1] + b, width, height, *strides)
            for row, at, height in self._rows(dim)
            for a, b, width in columns
        )

    def _rows(self, upto: int) -> list[tuple[int, int, int]]:
        """Return the slice of the first `upto` dimensions, flattened to one, as runs of elements.

        Each entry is (index in the tensor, index in the shard, length).
        """
        dim = self._last_cut(upto)
        if dim is None:
            return [(0, 0, math.prod(self.shape[:upto]))]
        inner = math.prod(self.shape[dim + 1 : upto])
        size, held = self.shape[dim], self.local_shape[dim]
        return [
            (((row + i) * size + a) * inner, ((at + i) * held + b) * inner, n * inner)
            for row, at, count in self._rows(dim)
            for i in range(count)
            for a, b, n in self._placed(dim)
        ]

    def _placed(self, dim: int) -> Iterator[tuple[int, int, int]]:
        """Yield (index in the tensor, index in the shard, length) of each span."""
        at = 0
        for begin, end in self.spans[dim]:
            yield begin, at, end - begin
            at += end - begin

    def _last_cut(self, upto: int) -> int | None:
        """Return the last of the first `upto` dimensions that is not held in full."""
        return next((d for d in reversed(range(upto)) if not self._is_whole(d)), None)

    def _is_whole(self, dim: int) -> bool:
        return not self.shape[dim] or self.spans[dim] == ((0, self.shape[dim]),)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a DTensor, split or replicated."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter)  # fast: called for every tensor and update
    return not plain and hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def is_member(tensor: torch.Tensor) -> bool:
    """Whether this process is a member of the mesh of a DTensor; True of other tensors."""
    return not is_sharded(tensor) or cast("Any", tensor).device_mesh.get_coordinate() is not None


def holds_shards(module: nn.Module) -> bool:
    """Whether a parameter or buffer of `module` is a DTensor."""
    return any(map(is_sharded, module.parameters())) or any(map(is_sharded, module.buffers()))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, the object with which it computes; others as is.

    Not `to_local()`, which makes a new tensor where gradients are recorded.
    """
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]  # a DTensor's


def slice_key(tensor: torch.Tensor, ranks: int) -> str | None:
    """Return what identifies the slice of the full tensor that this process holds.

    Equal in all processes that hold the same slice, "" for a full tensor. None where no other one
    of the trainer's `ranks` holds it, or where that is not known (partial sums).
    """
    if not is_sharded(tensor):
        return ""
    mesh, placements = cast("Any", tensor).device_mesh, cast("Any", tensor).placements
    copies = any(_is(p, "is_replicate") and mesh.size(dim) > 1 for dim, p in enumerate(placements))
    if not copies and mesh.size() >= ranks:
        return None
    try:
        splits = _splits("", tensor)
    except ConfigError:
        return None
    cuts = [
        [(repr(split.placement), split.parts, split.at) for split in each if split.parts > 1]
        for each in splits
    ]
    return repr(cuts) if any(cuts) else ""


class Slicer:
    """Derives the slices of DTensors; equal splits once, since models repeat their layers."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[tuple[Span, ...], ...]] = {}

    def slice_of(self, name: str, tensor: torch.Tensor) -> Slice:
        """Return the slice of the full tensor that `tensor` holds in this process.

        Raises ConfigError, naming tensor and placement, where that is not known.
        """
        shape = tuple(tensor.shape)
        if not is_sharded(tensor):
            return Slice.whole_of(shape)
        splits = _splits(name, tensor)
        found = Slice(shape, tuple(map(self._spans, [len(shape)] * len(shape), shape, splits)))
        held = tuple(local_of(tensor).shape)
        if found.local_shape != held:
            raise ConfigError(
                f"{name}: {tensor.placements} of {list(shape)} hold {list(found.local_shape)} "  # type: ignore[attr-defined]  # a DTensor's
                f"here, but its local tensor is {list(held)}; shard it with distribute_tensor"
            )
        return found

    def slice_at(
        self,
        name: str,
        shape: tuple[int, ...],
        mesh: Sequence[int],
        placements: Sequence[Any],
        coordinate: Sequence[int],
        order: Sequence[int] | None = None,
    ) -> Slice:
        """Return the slice that the member at `coordinate` of a mesh of sizes `mesh` holds.

        Needs no process group. `order` are the mesh dimensions in the order in which they split.
        Raises ConfigError, naming tensor and placement, where the slice is not known.
        """
        if not len(mesh) == len(placements) == len(coordinate) or any(
            not 0 <= at < size for at, size in zip(coordinate, mesh, strict=True)
        ):
            raise ConfigError(
                f"{name}: a mesh of {list(mesh)} has no member at {list(coordinate)} with the "
                f"placements {list(placements)}; give a coordinate and a placement for each size"
            )
        order = range(len(mesh)) if order is None else order
        splits = _splits_at(name, len(shape), mesh, placements, coordinate, order)
        return Slice(shape, tuple(map(self._spans, [len(shape)] * len(shape), shape, splits)))

    def _spans(self, ndim: int, size: int, splits: list[_Split]) -> tuple[Span, ...]:
        if not splits:
            return ((0, size),)
        key = (ndim, size, *((type(s.placement), repr(s.placement), s.parts) for s in splits))
        if key not in self._known:
            self._known[key] = tuple(map(_consecutive, _indices(ndim, size, splits)))
        at = 0
        for split in splits:
            at = at * split.parts + split.at
        return self._known[key][at]


@dataclass(frozen=True, slots=True)
class _Split:
    """A dimension cut by `placement` into `parts`, of which this process holds part `at`."""

    placement: Any
    parts: int
    at: int


def _splits(name: str, tensor: Any) -> list[list[_Split]]:
    """Return for each dimension its splits, in the order in which they apply."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(f"{name}: this process is not a member of the tensor's mesh {mesh}")
    sizes = [mesh.size(dim) for dim in range(len(tensor.placements))]
    order = _in_order(tensor)
    return _splits_at(name, tensor.ndim, sizes, tensor.placements, coordinate, order)


def _splits_at(
    name: str,
    ndim: int,
    mesh: Sequence[int],
    placements: Sequence[Any],
    coordinate: Sequence[int],
    order: Sequence[int],
) -> list[list[_Split]]:
    splits: list[list[_Split]] = [[] for _ in range(ndim)]
    for mesh_dim in order:
        placement = placements[mesh_dim]
        if _is(placement, "is_replicate"):
            continue
        if _is(placement, "is_partial") or not hasattr(placement, "_split_tensor"):
            kind = "partial sums" if _is(placement, "is_partial") else "an unknown placement"
            raise ConfigError(
                f"{name}: {placement!r} is {kind}, so this process holds no known rows of it; "
                "redistribute it to Shard or Replicate, or receive through a load_weights hook"
            )
        if not -ndim <= placement.dim < ndim:
            raise ConfigError(f"{name}: {placement!r} splits a dimension that the tensor lacks")
        split = _Split(placement, mesh[mesh_dim], coordinate[mesh_dim])
        splits[placement.dim % ndim].append(split)
    return splits


def _in_order(tensor: Any) -> list[int]:
    """Return the mesh dimensions in the order in which they split; newer torch stores an order."""
    order = getattr(getattr(tensor, "_spec", None), "shard_order", None) or ()
    named = [mesh_dim for entry in order for mesh_dim in entry.mesh_dims]
    return [*named, *(d for d in range(len(tensor.placements)) if d not in named)]


def _is(placement: object, question: str) -> bool:
    """Call a method of a placement that returns a bool; False where it has none."""
    ask = getattr(placement, question, None)
    return bool(ask and ask())


def _indices(ndim: int, size: int, splits: list[_Split]) -> list[torch.Tensor]:
    """Return the indices of a dimension that each part of it holds, the last split fastest.

    The placements themselves split a tensor of indices, as they split weights.
    """
    held = [torch.arange(size)]
    for split in splits:
        shards: list[torch.Tensor] = []
        for indices in held:
            shape = [1] * ndim
            shape[split.placement.dim] = indices.numel()
            cut, _ = split.placement._split_tensor(
                indices.view(shape), split.parts, with_padding=False, contiguous=False
            )
            shards += (shard.reshape(-1) for shard in cut)
        held = shards
    return held


def _consecutive(indices: torch.Tensor) -> tuple[Span, ...]:
    """Return the spans of consecutive numbers."""
    if not indices.numel():
        return ()
    last = (indices.diff() != 1).nonzero().reshape(-1)
    begins = torch.cat((indices[:1], indices[last + 1])).tolist()
    ends = torch.cat((indices[last], indices[-1:])).tolist()
    return tuple((begin, end + 1) for begin, end in zip(begins, ends, strict=True))


def gathered_device(tensor: torch.Tensor) -> str:
    """Return the type of the device of what `gather` makes of a tensor."""
    return cast("Any", tensor).device_mesh.device_type if is_sharded(tensor) else tensor.device.type


def gather(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the full tensor of a DTensor, on the device of its mesh; others as they are.

    Collective over the mesh. Every rank casts its shard to `dtype` first, so that fewer bytes are
    sent and no tensor exists in two dtypes. Partial sums are not cast.
    """
    if not is_sharded(tensor):
        return tensor.detach()
    shard = cast("Any", tensor.detach())
    partial = any(placement.is_partial() for placement in shard.placements)
    target = shard.dtype if partial else sent_dtype(shard.dtype, dtype)
    # Collectives of a mesh run on its device, also for shards offloaded to the host.
    device = shard.device_mesh.device_type
    moved = shard.to(dtype=target) if shard.device.type == device else shard.to(device, target)
    full: torch.Tensor = moved.full_tensor()
    return full


def gather_groups(
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    groups: Iterable[range],
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield full tensors by name; a group is gathered when its first tensor is requested.

    The generator drops each tensor when the next is requested: the peak is one group, and the
    tensors that the consumer keeps.
    """
    for group in groups:
        made: deque[torch.Tensor] = deque()
        with torch.no_grad():
            made.extend(gather(tensors[i], dtype) for i in group)
        for i in group:
            yield names[i], made.popleft()


def find_fsdp(module: nn.Module) -> list[Any]:
    """Return the submodules that `fully_shard` manages; the caller calls `reshard` on each.

    After a forward pass without a backward, or with `reshard_after_forward=False`, gathered copies
    replace the parameters. They are plain tensors, perhaps in the compute dtype, and the next
    optimizer step does not update them. Raises ConfigError for FullyShardedDataParallel.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    parts = list(module.modules())
    if any(isinstance(part, fsdp.FullyShardedDataParallel) for part in parts):
        raise ConfigError(
            "the model is wrapped in FullyShardedDataParallel, whose parameters are flat pieces "
            "without names: give it to connect() itself, shard it with fully_shard, or give a "
            "callable that yields (name, full tensor) on every rank"
        )
    return [part for part in parts if isinstance(part, fsdp.FSDPModule)]


def fsdp_buffers(parts: Iterable[Any]) -> list[torch.Tensor]:
    """Return the flat buffers from which the modules of `find_fsdp` gather their parameters.

    The shard of a parameter is a view of its buffer, which is padded. Empty where torch keeps them
    under another name: a shard whose memory has a user that is not known stays where it is.
    """
    found: list[torch.Tensor] = []
    for part in parts:
        state = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # of newer torch
        groups = [getattr(state, "_fsdp_param_group", None)] if groups is None else groups
        for group in groups:
            for param in getattr(group, "fsdp_params", ()):
                buffer = getattr(param, "_sharded_param_data", None)
                if type(buffer) is torch.Tensor:
                    found.append(buffer)
    return found
