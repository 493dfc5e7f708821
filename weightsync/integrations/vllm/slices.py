"""Tensors of which a worker has one box, and a recording of the boxes that a `load_weights` reads.

A worker of a tensor-parallel engine is given whole tensors, and its loaders narrow them to its own
part. Here the loaders run once on tensors without memory, and what they read is recorded: of each
tensor a box. The recording is proved by running them on tensors of positions, whole and sliced.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from weightsync.errors import TransferError, text_of
from weightsync.integrations.vllm.writes import (
    Place,
    WriteWatch,
    computes_from,
    places_of,
    storage_of,
)
from weightsync.specs import Manifest, TensorSpec
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.copying.boxes import Boxes
from weightsync.weights.copying.layout import aligned
from weightsync.weights.copying.shards import Slice, Span

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""A `load_weights`: takes `(name, tensor)` pairs."""

_PROOF_NBYTES = 256 << 20
"""Bytes of the whole tensors that are proved in one call; a larger tensor has a call of its own."""

_MOVES = frozenset(
    (
        torch.ops.aten.copy_,
        torch.ops.aten._to_copy,
        torch.ops.aten.clone,
        torch.ops.aten.contiguous,
        torch.ops.aten.cat,
        torch.ops.aten.stack,
    )
)
"""Operations that move elements and do not look at them."""

_EXACT = {
    torch.float64: 1 << 53,
    torch.float32: 1 << 24,
    torch.float16: 1 << 11,
    torch.bfloat16: 1 << 8,
    torch.float8_e4m3fn: 1 << 4,
    torch.float8_e5m2: 1 << 3,
    torch.int64: 1 << 53,
    torch.int32: 1 << 30,
    torch.int16: 1 << 14,
    torch.int8: 1 << 6,
    torch.uint8: 1 << 7,
}
"""The numbers from 0 to these are exact in a dtype."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the sizes of elements, in bytes."""


@dataclass(frozen=True, slots=True)
class _Window:
    """A strided view of a contiguous tensor, as a range of indices in each dimension of it.

    `steps` are, for each dimension of the view, the dimension of the tensor along which it goes and
    the indices between two elements; None where it does not move.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    steps: tuple[tuple[int, int] | None, ...]

    @classmethod
    def of(cls, shape: Sequence[int], view: torch.Tensor) -> Self | None:
        """Return the window of `view`, whose storage is a contiguous tensor of `shape`.

        None where it goes over the end of a dimension, as a flattened tensor does.
        """
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        begin, rest = [], int(view.storage_offset())
        for stride in strides:
            index, rest = divmod(rest, stride)
            begin.append(index)
        last = list(begin)
        steps: list[tuple[int, int] | None] = []
        for count, stride in zip(view.size(), view.stride(), strict=True):
            if count == 1 or stride == 0:
                steps.append(None)
                continue
            dims = [dim for dim, size in enumerate(shape) if size > 1 and strides[dim] <= stride]
            if not dims or stride % strides[dims[0]]:
                return None
            dim, step = dims[0], stride // strides[dims[0]]
            last[dim] += (count - 1) * step
            steps.append((dim, step))
        if any(at >= size for at, size in zip(last, shape, strict=True)):
            return None
        return cls(tuple(begin), tuple(at + 1 for at in last), tuple(steps))

    def inside(self, box: Slice) -> tuple[int, list[int]] | None:
        """Return offset and strides of the view in a contiguous tensor that holds a box of it.

        None where the box has not all of it in one piece.
        """
        local = box.local_shape
        strides = [math.prod(local[dim + 1 :]) for dim in range(len(local))]
        offset = 0
        for spans, first, end, stride in zip(box.spans, self.begin, self.end, strides, strict=True):
            at = 0
            for begin, stop in spans:
                if begin <= first and end <= stop:
                    offset += (at + first - begin) * stride
                    break
                at += stop - begin
            else:
                return None
        moved = [0 if step is None else strides[step[0]] * step[1] for step in self.steps]
        return offset, moved


class UnreadError(TransferError):
    """`load_weights` reads elements that it did not read when what it reads was recorded."""


class SlicedTensor(torch.Tensor):
    """A tensor of which one box is held. Its views are sliced, too; other operations read the box.

    Raises TransferError where an operation reads elements outside of the box, or writes to it.
    """

    label: str
    view_of: torch.Tensor
    box: Slice
    held: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # so torch says

    @classmethod
    def of(cls, label: str, held: torch.Tensor, box: Slice) -> SlicedTensor:
        """Return the tensor of which `held` (contiguous, of `box.local_shape`) is a box."""
        view = torch.empty(box.shape, dtype=held.dtype, device="meta")
        return cls._viewed(label, view, held, box)

    @classmethod
    def _viewed(
        cls, label: str, view: torch.Tensor, held: torch.Tensor, box: Slice
    ) -> SlicedTensor:
        made: SlicedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            view.size(),
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            device=held.device,
        )
        made.label, made.view_of, made.held, made.box = label, view, held, box
        return made

    def part(self) -> torch.Tensor:
        """Return the view of the held box that this is. Raises TransferError where it is not."""
        if not self.view_of.numel():
            return self.held.new_empty(self.view_of.size())
        window = _Window.of(self.box.shape, self.view_of)
        found = window.inside(self.box) if window is not None else None
        if found is None or self.view_of.dtype is not self.held.dtype:
            raise UnreadError(
                f"{self.label}: load_weights reads elements that it did not read when what it "
                "reads was recorded; they were not received"
            )
        offset, strides = found
        return self.held.as_strided(
            self.view_of.size(), strides, self.held.storage_offset() + offset
        )

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes tensor_contents
        return f"SlicedTensor({self.label}, {list(self.size())}, box={self.box.spans})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function without a class
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(target, cls) for target in _targets(func, args, kwargs)):
            raise TransferError(f"load_weights writes to a tensor that it is given ({func})")
        if _may_be_view(func) and isinstance(args[0], cls):
            first = args[0]
            bare = tree_map_only(cls, lambda each: each.view_of, (args, kwargs))
            result = func(*bare[0], **bare[1])
            if _shares(result, first.view_of):
                return tree_map_only(
                    torch.Tensor,
                    lambda view: cls._viewed(first.label, view, first.held, first.box),
                    result,
                )
        parts = tree_map_only(cls, lambda each: each.part(), (args, kwargs))
        return func(*parts[0], **parts[1])


def _targets(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operation writes to."""
    if func._schema.is_mutable:
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield args[i] if i < len(args) else kwargs.get(argument.name)


@cache
def _may_be_view(func: Any) -> bool:
    """Whether what an operation returns may be a view of its argument."""
    schema = func._schema
    return not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)


def _shares(result: Any, source: torch.Tensor) -> bool:
    """Whether all tensors in `result` have the storage of `source`."""
    tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
    storage = storage_of(source)
    return bool(tensors) and all(storage_of(each) == storage for each in tensors)


@dataclass(slots=True)
class Reads:
    """The indices of one tensor that a loader read.

    `spans` has for each dimension the indices that were read, in order and apart. `places` are the
    tensors of the model that elements came to. `reason` says why all of it is needed, "" if not.
    `trace` has what was done: the operations, the views that they read, and where these landed.
    """

    spec: TensorSpec
    spans: list[list[Span]] = field(default_factory=list)
    places: set[str] = field(default_factory=set)
    reason: str = ""
    trace: list[Hashable] = field(default_factory=list)

    def note(self, view: torch.Tensor) -> None:
        """Add what is read through a view."""
        if not view.numel():
            return
        window = _Window.of(self.spec.shape, view)
        if window is None:
            self.refuse(f"a view of {list(view.size())} is no box of it")
            return
        self.spans = self.spans or [[] for _ in self.spec.shape]
        for dim, span in enumerate(zip(window.begin, window.end, strict=True)):
            self.spans[dim] = _joined([*self.spans[dim], span])

    def refuse(self, reason: str) -> None:
        """Note why all of the tensor is needed; the first reason is kept."""
        self.reason = self.reason or reason

    @property
    def box(self) -> Slice | None:
        """The box that was read; None where nothing was."""
        shape = self.spec.shape
        if self.reason or not self.spec.nbytes or not shape:
            return Slice.whole_of(shape)
        if not self.spans:
            return None
        return Slice(shape, tuple(map(tuple, self.spans)))


def _shown(tensor: torch.Tensor) -> Hashable:
    """Return what tells a view of a tensor from others of equal tensors."""
    shape, strides = tuple(tensor.size()), tuple(tensor.stride())
    return tensor.dtype, shape, strides, tensor.storage_offset()


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order, those that touch or overlap as one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


@dataclass(frozen=True)
class Sliced(Boxes):
    """The boxes that a worker reads of a manifest's tensors.

    `whole` has the tensors that it reads whole because their boxes are not known, with the reasons.
    """

    whole: Mapping[str, str]

    def saves(self, manifest: Manifest) -> bool:
        """Whether the boxes are at most nine tenths of the tensors."""
        return 10 * self.nbytes(manifest) <= 9 * sum(aligned(s.nbytes) for s in manifest.specs)


def boxes_of(manifest: Manifest, reads: Mapping[str, Reads]) -> Sliced:
    """Return what was read of the tensors of a manifest."""
    boxes = [(i, reads[spec.name].box) for i, spec in enumerate(manifest.specs)]
    whole = {name: each.reason for name, each in reads.items() if each.reason}
    return Sliced([(i, box) for i, box in boxes if box is not None], whole)


class ReadRecorder(WriteWatch):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Records what operations read of the tensors that it follows, which have no memory.

    A tensor is needed whole where an operation computes with its elements, and does not only move
    them, or writes to it. `places` are those of the model's tensors, by their storage.
    """

    def __init__(self, places: dict[int, Place]) -> None:
        super().__init__(places)
        self.reads: dict[str, Reads] = {}
        self._sources: dict[int, str] = {}
        self._moved: defaultdict[int, set[str]] = defaultdict(set)
        self._landed: defaultdict[int, set[str]] = defaultdict(set)
        self._kept: list[torch.Tensor] = []

    def follow(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor without memory, of which all reads are recorded from now on."""
        made = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
        storage = storage_of(made)
        if storage is not None:
            self._kept.append(made)  # or another tensor may get its storage's address
            self._sources[storage] = spec.name
            self.reads.setdefault(spec.name, Reads(spec))
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        targets = [t for t in _targets(func, args, kwargs) if isinstance(t, torch.Tensor)]
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if _may_be_view(func) and given and _shares(result, given[0]):
            return result
        names: set[str] = set()
        for tensor in given:
            names |= self._note_given(func, tensor, written=any(tensor is t for t in targets))
        if func.overloadpacket not in _MOVES:
            self._refuse_computed(names, func)
        elif names:
            leaves = targets or tree_leaves(result)
            for tensor in leaves:
                if isinstance(tensor, torch.Tensor):
                    self._note_moved(tensor, names)
        return result

    def _note_given(self, func: Any, tensor: torch.Tensor, *, written: bool) -> set[str]:
        """Note an argument of an operation; return the tensors whose elements are in it."""
        storage = storage_of(tensor)
        if storage is None:
            return set()
        names = set(self._moved.get(storage, ()))
        source = self._sources.get(storage)
        if source is not None:
            names.add(source)
            if written:
                self.reads[source].refuse(f"load_weights writes to it ({func})")
            else:
                self.reads[source].note(tensor)
        if not written or computes_from(func):
            self._refuse_computed(self._landed.get(storage, ()), func)
        for name in names:
            self.reads[name].trace.append((str(func), _shown(tensor)))
        return names

    def _note_moved(self, tensor: torch.Tensor, names: set[str]) -> None:
        """Note that elements of the tensors `names` are now in `tensor`."""
        place, storage = self.place_of(tensor), storage_of(tensor)
        if storage is None:
            return
        landed = None if place is None else _shown(place.tensor)
        for name in names:
            self.reads[name].trace.append((landed, _shown(tensor)))
        if place is None:
            self._kept.append(tensor)
            self._moved[storage] |= names
            return
        self._landed[storage] |= names
        for name in names:
            self.reads[name].places.add(str(place))

    def _refuse_computed(self, names: Iterable[str], func: Any) -> None:
        for name in names:
            self.reads[name].refuse(f"load_weights computes with it ({func})")


def record(
    model: nn.Module, load: Load, given: Sequence[tuple[str, TensorSpec]]
) -> dict[str, Reads]:
    """Return what `load` reads of tensors, by the names of their specs, on tensors without memory.

    `given` are the names under which it gets them. Writes to tensors of `model` without memory are
    lost; the caller takes care of the others. Raises what `load` raises.
    """
    with ReadRecorder(places_of(model)) as recorder:
        load((name, recorder.follow(spec)) for name, spec in given)
    return dict(recorder.reads)


def prove(model: nn.Module, load: Load, given: Sequence[tuple[str, Reads]]) -> None:
    """Refuse the reads of tensors that `load` does not put in the same places when it has the box.

    It gets each tensor whole and as the box that it read, with numbers of positions as elements, in
    the dtype of the tensor; of large numbers the digits, one after the other. What it writes goes
    to other memory. It needs memory for the largest whole tensor, and twice what it loads of it.

    Of tensors that were read and written alike, as those of several decoder layers, one is proved.
    """
    alike: defaultdict[tuple[Any, ...], list[tuple[str, Reads]]] = defaultdict(list)
    dtypes = {str(place): place.tensor.dtype for place in places_of(model).values()}
    for name, reads in given:
        box = reads.box
        if box is not None and not box.is_whole:
            found = {TORCH_DTYPES[reads.spec.dtype]}
            found |= {dtypes[place] for place in reads.places if place in dtypes}
            key = frozenset(found), reads.spec.shape, box, tuple(reads.trace)
            alike[key].append((name, reads))
    batch: list[tuple[str, Reads]] = []
    kind: frozenset[torch.dtype] = frozenset()
    nbytes = 0
    for key, tensors in alike.items():
        size = tensors[0][1].spec.nbytes
        if batch and (nbytes + size > _PROOF_NBYTES or key[0] != kind):
            _prove(model, load, batch, kind)
            batch, nbytes = [], 0
        kind = key[0]
        batch.append(tensors[0])
        nbytes += size
    _prove(model, load, batch, kind)
    for tensors in alike.values():
        if reason := tensors[0][1].reason:
            for _, reads in tensors:
                reads.refuse(reason)


def _prove(
    model: nn.Module, load: Load, batch: Sequence[tuple[str, Reads]], dtypes: frozenset[torch.dtype]
) -> None:
    """Prove the tensors of one call; if one of several is not proved, each half of them."""
    if not batch:
        return
    try:
        reason = _difference(model, load, batch, dtypes)
    except Exception as exc:  # noqa: BLE001  # a model's code may raise anything
        reason = f"load_weights raised {type(exc).__name__}: {text_of(exc)}"
    if not reason:
        return
    if len(batch) == 1:
        batch[0][1].refuse(f"its box was not proved: {reason}")
        return
    half = len(batch) // 2
    _prove(model, load, batch[:half], dtypes)
    _prove(model, load, batch[half:], dtypes)


def _difference(
    model: nn.Module, load: Load, batch: Sequence[tuple[str, Reads]], dtypes: frozenset[torch.dtype]
) -> str:
    """Return how what is loaded of boxes differs from that of whole tensors, "" if it does not."""
    unknown = [str(dtype) for dtype in dtypes if dtype not in _EXACT]
    if unknown:
        return f"no numbers of positions in {', '.join(sorted(unknown))}"
    # Elements of one dtype are moved bit by bit; a cast keeps the numbers that both can hold.
    casts = len(dtypes) > 1
    bits = min(_EXACT[d].bit_length() - 1 if casts else 8 * d.itemsize for d in dtypes)
    starts = [0]
    for _, reads in batch:
        starts.append(starts[-1] - -math.prod(reads.spec.shape) // _BLOCK * _BLOCK)
    for shift in range(0, starts[-1].bit_length(), bits):
        wholes: list[tuple[str, torch.Tensor]] = []
        boxes: list[tuple[str, torch.Tensor]] = []
        for (name, reads), start in zip(batch, starts, strict=False):
            whole = _digits(reads.spec, start, shift, bits, casts=casts)
            wholes.append((name, whole))
            boxes.append((name, cut(name, whole, reads.box)))
        wanted, found = _written(model, load, wholes), _written(model, load, boxes)
        differ = [
            name
            for name in wanted.keys() | found.keys()
            if name not in wanted
            or name not in found
            or not torch.equal(wanted[name].view(torch.uint8), found[name].view(torch.uint8))
        ]
        if differ:
            return f"{min(differ)} gets other elements than of the whole tensor"
    return ""


def cut(name: str, whole: torch.Tensor, box: Slice | None) -> SlicedTensor:
    """Return a copy of the box of a tensor, as a sliced tensor; None: of nothing."""
    if box is None:
        return nothing_of(name, tuple(whole.shape), whole.dtype)
    held = torch.empty(box.local_shape, dtype=whole.dtype)
    for part, own in box.parts():
        held[own] = whole[part]
    return SlicedTensor.of(name, held, box)


def nothing_of(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> SlicedTensor:
    """Return a sliced tensor of which nothing is held."""
    box = Slice(shape, tuple(() for _ in shape))
    return SlicedTensor.of(name, torch.empty(box.local_shape, dtype=dtype, device=device), box)


_BLOCK = 1 << 16
"""Elements of which the digits are made at once."""


def _digits(spec: TensorSpec, start: int, shift: int, bits: int, *, casts: bool) -> torch.Tensor:
    """Return a tensor whose element i is a digit of the number `start + i`: the bits from `shift`.

    As bits of the dtype, or with `casts` as a number. `start` is a multiple of _BLOCK.
    """
    made = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
    flat = made.view(-1)
    mask = (1 << bits) - 1
    low = torch.arange(_BLOCK) >> min(shift, 62) & (mask if bits < 63 else -1)
    if not casts:
        flat = flat.view(_BITS[made.element_size()])
    for begin in range(0, flat.numel(), _BLOCK):
        block = flat[begin : begin + _BLOCK]
        high = (start + begin) >> shift & mask
        block.copy_(low[: block.numel()] | (high if bits < 63 else start + begin))
    return made


def _written(
    model: nn.Module, load: Load, pairs: list[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return what `load` writes to the tensors of a model, which keep what they have."""
    with _Scratch(places_of(model)) as scratch:
        load(iter(pairs))
    return dict(scratch.memory)


class _Scratch(WriteWatch):  # type: ignore[no-untyped-call]  # as above
    """Carries out on other memory what is written to the tensors of a model, and read of them."""

    def __init__(self, places: dict[int, Place]) -> None:
        super().__init__(places)
        self.memory: dict[str, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _may_be_view(func):
            return func(*args, **kwargs)
        target = next(iter(_targets(func, args, kwargs)), None)
        if isinstance(target, torch.Tensor) and self.place_of(target) is None:
            target = None
        moved_args, moved_kwargs = tree_map_only(torch.Tensor, self._moved, (args, kwargs))
        result = func(*moved_args, **moved_kwargs)
        return result if target is None else target

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same view of the memory that stands in for a tensor of the model."""
        place = self.place_of(tensor)
        if place is None:
            return tensor
        name, size = str(place), tensor.element_size()
        if name not in self.memory:
            count = tensor.untyped_storage().nbytes() // size
            memory = torch.full((count * size,), 255, dtype=torch.uint8)
            self.memory[name] = memory.view(tensor.dtype)
        return self.memory[name].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
