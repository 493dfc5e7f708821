"""The streams of several ranks that together are a model: boxes, and where their bytes belong.

Each rank sends the boxes of which it is the owner as a stream of its own, with a manifest, chunks
and fingerprints like those of a model. A receiver writes every stream to the places of its boxes.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from weightsync.errors import ConfigError, ProtocolError
from weightsync.specs import Manifest, TensorSpec
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.copying.copy_plan import Memory, Share
from weightsync.weights.copying.reshard import (
    Holding,
    LocalBox,
    Loop,
    Region,
    has_common,
    place,
    place_whole,
    plan_reshard,
    regions_between,
)
from weightsync.weights.copying.shards import Block, Slice, Span
from weightsync.wire.offers import BoxInfo, StreamInfo, WantsInfo


class RankStream:
    """The boxes that one rank sends, in the order in which it sends them.

    `manifest` describes them: the name of a tensor, and of a box that is not the only one of its
    tensor here also its spans; the dtype in which it is sent; the shape of the box. Box i is
    `boxes[i]` of tensor `indices[i]` of `model`. Raises ConfigError for boxes of other shapes.
    """

    def __init__(
        self, rank: int, model: Manifest, indices: Sequence[int], boxes: Sequence[Slice]
    ) -> None:
        self.rank = rank
        self.model = model
        self.indices = indices
        self.boxes = boxes
        several = {i for i, count in Counter(indices).items() if count > 1}
        specs = []
        for index, box in zip(indices, boxes, strict=True):
            spec = model.specs[index]
            if box.shape != spec.shape:
                raise ConfigError(f"{spec.name}: a box of {list(box.shape)} is none of {spec}")
            spans = str([list(map(list, each)) for each in box.spans]) if index in several else ""
            specs.append(TensorSpec(spec.name + spans, spec.dtype, box.local_shape))
        self.manifest = Manifest(tuple(specs))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all boxes."""
        return self.manifest.nbytes

    def names(self, of_boxes: Iterable[str]) -> list[str]:
        """Return the names of the tensors to which boxes of these names belong."""
        tensors = self.model.specs
        known = {
            spec.name: tensors[i].name
            for spec, i in zip(self.manifest.specs, self.indices, strict=True)
        }
        return [known.get(name, name) for name in of_boxes]


MAX_CUTS = 64
"""Parts into which wants may cut one box, at most; one with more of them is sent in one part."""


def cut_box(box: Slice, wants: Sequence[Slice]) -> list[tuple[Slice, frozenset[int]]]:
    """Return the parts of a box that the same wants contain, and which ones these are.

    Each part is one run of indices in every dimension, so that it is a view of the box. A box that
    would have more than MAX_CUTS parts is one part of all wants.
    """
    dims: list[list[tuple[Span, frozenset[int]]]] = []
    for dim, spans in enumerate(box.spans):
        ends = sorted({end for want in wants for span in want.spans[dim] for end in span})
        runs: list[tuple[Span, frozenset[int]]] = []
        for begin, end in spans:
            inner = [at for at in ends if begin < at < end]
            for first, last in itertools.pairwise([begin, *inner, end]):
                inside = frozenset(
                    i
                    for i, want in enumerate(wants)
                    if any(a <= first and last <= b for a, b in want.spans[dim])
                )
                if runs and first > begin and runs[-1][1] == inside:
                    runs[-1] = ((runs[-1][0][0], last), inside)
                else:
                    runs.append(((first, last), inside))
        dims.append(runs)
    if math.prod(map(len, dims)) > MAX_CUTS:
        return [(box, frozenset(range(len(wants))))]
    everyone = frozenset(range(len(wants)))
    return [
        (
            Slice(box.shape, tuple((span,) for span, _ in part)),
            everyone.intersection(*(inside for _, inside in part)),
        )
        for part in itertools.product(*dims)
    ]


def index_in(box: Slice, part: Slice) -> tuple[slice, ...]:
    """Return the index of a part, one run in every dimension, in the tensor that holds a box."""
    found = []
    for spans, ((begin, end),) in zip(box.spans, part.spans, strict=True):
        at = 0
        for first, last in spans:
            if first <= begin and end <= last:
                found.append(slice(at + begin - first, at + end - first))
                break
            at += last - first
    return tuple(found)


def met_by(stream: RankStream, wants: Sequence[tuple[int, Slice]]) -> list[int]:
    """Return which boxes of a stream have elements that are in these boxes of its model."""
    wanted: dict[int, list[Slice]] = defaultdict(list)
    for index, box in wants:
        wanted[index].append(box)
    known: dict[tuple[Slice, tuple[Slice, ...]], bool] = {}
    found: list[int] = []
    for i, (index, box) in enumerate(zip(stream.indices, stream.boxes, strict=True)):
        key = box, tuple(wanted[index])
        if key not in known:
            known[key] = any(has_common(box, want) for want in key[1])
        if known[key]:
            found.append(i)
    return found


def check_coverage(model: Manifest, streams: Sequence[RankStream]) -> None:
    """Raise ManifestMismatchError unless every element of the model is in exactly one stream.

    ConfigError for boxes that overlap, and for a rank with two streams.
    """
    numbers = Counter(stream.rank for stream in streams)
    if twice := [rank for rank, count in numbers.items() if count > 1]:
        raise ConfigError(f"rank {twice[0]} sends {numbers[twice[0]]} streams, not one")
    holdings = [
        Holding(stream.rank, model.specs[index], box)
        for stream in streams
        for index, box in zip(stream.indices, stream.boxes, strict=True)
    ]
    plan_reshard(place(holdings), place_whole(model.specs))
    held: dict[tuple[str, Slice], int] = {}
    for one in holdings:
        known = held.setdefault((one.spec.name, one.box), one.rank)
        if known != one.rank:
            raise ConfigError(f"{one.spec.name}: ranks {known} and {one.rank} send the same box")


def stream_of(info: StreamInfo, model: Manifest) -> RankStream:
    """Return the stream that a rank announces. Raises ProtocolError where it is damaged."""
    who = f"rank {info.rank}"
    indices, boxes = _listed(who, info.tensors, info.boxes, info.box, model)
    try:
        return RankStream(info.rank, model, indices, boxes)
    except ConfigError as exc:
        raise ProtocolError(f"{who}: {exc}") from exc


def describe_stream(stream: RankStream, path: str, payload: Any) -> StreamInfo:
    """Return what `stream_of` reads."""
    boxes, box = _distinct(stream.boxes)
    return StreamInfo(
        rank=stream.rank,
        path=path,
        tensors=list(stream.indices),
        boxes=boxes,
        box=box,
        payload=payload,
    )


def wants_of(info: WantsInfo, model: Manifest, who: str) -> list[tuple[int, Slice]]:
    """Return the boxes that a receiver loads, by tensor. Raises ProtocolError if it is damaged."""
    wants = list(zip(*_listed(who, info.tensors, info.boxes, info.box, model), strict=True))
    for index, box in wants:
        spec = model.specs[index]
        if box.shape != spec.shape:
            raise ProtocolError(f"{who}: {spec.name}: a box of {list(box.shape)} is none of {spec}")
    return wants


def describe_wants(wants: Sequence[tuple[int, Slice]]) -> WantsInfo:
    """Return what `wants_of` reads."""
    boxes, box = _distinct([each for _, each in wants])
    return WantsInfo(tensors=[index for index, _ in wants], boxes=boxes, box=box)


def _distinct(boxes: Sequence[Slice]) -> tuple[list[BoxInfo], list[int]]:
    """Return the distinct boxes, and the index of each."""
    places: dict[Slice, int] = {}
    box = [places.setdefault(each, len(places)) for each in boxes]
    described = [
        BoxInfo(shape=list(each.shape), spans=[list(spans) for spans in each.spans])
        for each in places
    ]
    return described, box


def _listed(
    who: str, tensors: Sequence[int], boxes: Sequence[BoxInfo], box: Sequence[int], model: Manifest
) -> tuple[list[int], list[Slice]]:
    """Return tensors and boxes that a peer lists. Raises ProtocolError where they are none."""
    if len(tensors) != len(box):
        raise ProtocolError(
            f"{who} lists {len(tensors)} boxes and places {len(box)}; they must be equally many"
        )
    if any(i >= len(model.specs) for i in tensors) or any(i >= len(boxes) for i in box):
        raise ProtocolError(f"{who} lists a box of no tensor, or without spans")
    slices = [Slice(tuple(each.shape), tuple(map(tuple, each.spans))) for each in boxes]
    for each in slices:
        fits = len(each.spans) == len(each.shape) and all(
            0 <= begin <= end <= size
            for size, spans in zip(each.shape, each.spans, strict=True)
            for begin, end in spans
        )
        if not fits:
            raise ProtocolError(f"{who} lists {each.spans} of a tensor of {each.shape}")
    return list(tensors), [slices[i] for i in box]


class StreamPlaces:
    """Where the boxes of one stream belong in the memory of a model, or of its shards.

    `memory` has a place for each box, as the load target of the stream. It is derived once for
    fixed memory, which the caller keeps alive: on the host the views have storages of their own, so
    that they are no users of it.
    """

    def __init__(self, stream: RankStream, model: Memory) -> None:
        places = list(self._places(stream, model))
        if all(whole for *_, whole in places) and len(places) == len(stream.boxes):
            parts = [
                flat[blocks[0].target : blocks[0].target + blocks[0].width] if blocks else flat[:0]
                for _, flat, blocks, _ in places
            ]
            self.memory = Memory(parts)
        else:
            shares = [Share(i, tuple(blocks)) for i, _, blocks, _ in places]
            self.memory = Memory([flat for _, flat, _, _ in places], shares=shares)

    def _places(
        self, stream: RankStream, model: Memory
    ) -> Iterator[tuple[int, torch.Tensor, list[Block], bool]]:
        """Yield (box, memory, blocks, whether the one block is all of the box) of each place."""
        targets = _targets(stream.model, model)
        for i, (index, box) in enumerate(zip(stream.indices, stream.boxes, strict=True)):
            spec = stream.manifest.specs[i]
            itemsize = TORCH_DTYPES[spec.dtype].itemsize
            for flat, target in targets[index]:
                regions = regions_between(LocalBox(box), LocalBox(target), itemsize)
                blocks = [block for region in regions for block in _blocks(region)]
                whole = not spec.nbytes or (
                    len(blocks) == 1 and blocks[0].height == 1 and blocks[0].width == spec.nbytes
                )
                if blocks or whole:
                    yield i, flat, blocks, whole


def _targets(model: Manifest, memory: Memory) -> dict[int, list[tuple[torch.Tensor, Slice]]]:
    """Return the memory of each tensor by its index, and the box that each memory holds."""
    found: dict[int, list[tuple[torch.Tensor, Slice]]] = defaultdict(list)
    if memory.shares is None:
        for i, (flat, spec) in enumerate(zip(memory.tensors, model.specs, strict=True)):
            found[i].append((_view(flat), Slice.whole_of(spec.shape)))
        return found
    for flat, share in zip(memory.tensors, memory.shares, strict=True):
        if share.box is None:
            raise ConfigError(f"{model.specs[share.index].name}: its shards have no known boxes")
        found[share.index].append((_view(flat), share.box))
    return found


def _blocks(region: Region) -> Iterator[Block]:
    """Yield the rows of a region; of a region of several loops a block for each outer step."""
    inner = region.inner
    *outer, last = region.loops or (Loop(1, inner, inner),)
    for step in range(math.prod(loop.times for loop in outer)):
        source, target, rest = region.source, region.target, step
        for loop in reversed(outer):
            rest, at = divmod(rest, loop.times)
            source, target = source + at * loop.source, target + at * loop.target
        yield Block(source, target, inner, last.times, last.source, last.target)


def _view(flat: torch.Tensor) -> torch.Tensor:
    """View `uint8[nbytes]` in host memory through a storage that is no user of that memory."""
    if flat.device.type != "cpu" or not flat.numel():
        return flat
    array = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    return torch.frombuffer(array, dtype=torch.uint8)
