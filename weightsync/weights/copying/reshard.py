"""Reshard plans: which receiver reads which bytes from which rank, where both sides hold parts.

Pure data from pure data: no process, no process group, no backend. A *holding* is a box of a tensor
that a rank has, a *want* is a box that a receiver loads. What both have in common is one or a few
*regions*: strided blocks, whatever the number of rows. Tensors whose shapes and boxes are equal
share one *pattern*, so that a plan of a whole model is a table of patterns, a table of the ranks
that own their boxes, and one short entry for each tensor.

**Replicas and overlaps.** Ranks that hold equal boxes of a tensor are replicas, and one of them is
the owner that a host reads from. Boxes of one tensor that overlap without being equal are an error,
even where each wanted element could be taken from a single owner: nothing says that the two ranks
hold the same bytes there. Ranks that give different tensors the same name and the same box, as
experts numbered from 0 on every rank, cannot be told from replicas here. They show as names or
elements that no rank holds.

**Coverage is proved before any byte moves.** Each dimension is cut at the ends of all spans. Cuts
that belong to the same boxes are one cell, and a grid of the cells counts the holdings that hit
each: exactly one for each cell that a receiver wants.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from weightsync.errors import SHOWN_NAMES, ConfigError, ManifestMismatchError, shorten
from weightsync.specs import DTYPE_NBYTES, TensorSpec
from weightsync.weights.copying.shards import Slice, Span

MAX_LOOPS = 3
"""Loops of a region, at most: a block with more of them becomes several regions."""
_FORMAT = b"weightsync reshard plan 1"


class Loop(NamedTuple):
    """One loop of a region: `times` steps of these many bytes in the source and the target."""

    times: int
    source: int
    target: int


class Region(NamedTuple):
    """A strided block: runs of `inner` bytes, from byte `source` of one tensor to `target`.

    Both count from the first element of the local tensor. `loops` go from the outermost inward.
    """

    source: int
    target: int
    inner: int
    loops: tuple[Loop, ...]

    @property
    def runs(self) -> int:
        """The number of contiguous runs."""
        return math.prod(loop.times for loop in self.loops)

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return self.inner * self.runs


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of a tensor in the memory of one process.

    `strides` are those of the local tensor, in elements; None for a contiguous one.
    """

    box: Slice
    strides: tuple[int, ...] | None = None


class Holding(NamedTuple):
    """A box of a tensor that a rank holds; `strides` as in LocalBox."""

    rank: int
    spec: TensorSpec
    box: Slice
    strides: tuple[int, ...] | None = None


class Want(NamedTuple):
    """A box of a tensor that a receiver loads; `strides` as in LocalBox."""

    receiver: int
    spec: TensorSpec
    box: Slice
    strides: tuple[int, ...] | None = None


def inside(box: Slice, shape: tuple[int, ...], origin: Sequence[int]) -> Slice:
    """Return a box of a tensor as a box of a larger one of `shape`, where it begins at `origin`.

    The larger one may have further dimensions before those of the tensor: an expert of a stack.
    """
    outer = len(shape) - len(box.shape)
    indices = (((at, at + 1),) for at in origin[:outer])
    moved = (
        tuple((begin + at, end + at) for begin, end in spans)
        for spans, at in zip(box.spans, origin[outer:], strict=True)
    )
    return Slice(shape, (*indices, *moved))


class Boxes:
    """The boxes of one tensor that ranks hold, or that receivers want, and which ones.

    `members[i]` are the numbers of the ranks or receivers with `parts[i]`, ascending. Tensors that
    are placed alike share one object: planning them costs one look at it. Empty boxes are left out.
    Raises ConfigError for a box that is none of a tensor of `shape`.
    """

    __slots__ = ("_hash", "members", "parts", "shape")

    def __init__(self, shape: tuple[int, ...], members: Iterable[tuple[int, LocalBox]]) -> None:
        found: dict[LocalBox, set[int]] = defaultdict(set)
        for member, part in members:
            found[part].add(member)
        for part, known in found.items():
            _check_box(shape, part, sorted(known))
        parts = sorted((p for p in found if math.prod(p.box.local_shape)), key=_order)
        self.shape = shape
        self.parts = tuple(parts)
        self.members = tuple(tuple(sorted(found[part])) for part in parts)
        self._hash = hash((shape, self.parts, self.members))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Boxes)
            and self._hash == other._hash
            and (self.shape, self.parts, self.members) == (other.shape, other.parts, other.members)
        )


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor, and its boxes on one side: those of all ranks, or of all receivers."""

    spec: TensorSpec
    boxes: Boxes


def place(listed: Iterable[Holding | Want]) -> list[Placed]:
    """Return the tensors of holdings, or of wants, with their boxes, in order of their names.

    Raises ManifestMismatchError, naming the ranks, where they disagree on a shape or a dtype.
    """
    by_name: dict[str, list[Holding | Want]] = defaultdict(list)
    for one in listed:
        by_name[one.spec.name].append(one)
    different: list[str] = []
    placed: list[Placed] = []
    known: dict[Hashable, Boxes] = {}
    for name in sorted(by_name):
        found = by_name[name]
        specs: dict[TensorSpec, list[int]] = defaultdict(list)
        for one in found:
            specs[one.spec].append(one[0])
        if len(specs) > 1:
            said = (f"{spec} ({_who(found[0], numbers)})" for spec, numbers in specs.items())
            different.append(f"{name}: {' and '.join(sorted(said))}")
            continue
        spec = found[0].spec
        members = frozenset((one[0], LocalBox(one.box, one.strides)) for one in found)
        key = (spec.shape, members)
        if key not in known:
            try:
                known[key] = Boxes(spec.shape, members)
            except ConfigError as exc:
                raise ConfigError(f"{name}: {exc}") from exc
        placed.append(Placed(spec, known[key]))
    if different:
        raise ManifestMismatchError(
            f"{len(different)} tensors have several shapes or dtypes: "
            f"{shorten(different)}; give each tensor one shape and one dtype everywhere",
            mismatched=different,
        )
    return placed


class Pattern:
    """How the boxes of one side become those of the other, for tensors placed alike.

    `sources` and `targets` are the distinct boxes. `groups` are the sources with equal boxes, by
    their indices; they may differ in their strides. `pairs[j]` are the (group, nbytes) that
    `targets[j]` reads.
    """

    def __init__(
        self, itemsize: int, sources: tuple[LocalBox, ...], targets: tuple[LocalBox, ...]
    ) -> None:
        self.itemsize = itemsize
        self.sources = sources
        self.targets = targets
        by_box: dict[Slice, list[int]] = defaultdict(list)
        for i, part in enumerate(sources):
            by_box[part.box].append(i)
        self.groups = tuple(map(tuple, by_box.values()))
        self.pairs, self.fault = _cover(tuple(by_box), [part.box for part in targets], itemsize)
        meets: _Meets = {}
        self.regions: dict[tuple[int, int], tuple[Region, ...]] = {
            (i, j): _regions(sources[i], target, itemsize, meets)
            for j, target in enumerate(targets)
            for group, _ in self.pairs[j]
            for i in self.groups[group]
        }


@dataclass(frozen=True, slots=True)
class Route:
    """A pattern with the ranks that own its boxes, and the receivers.

    `owners[host][group]` is the (source, rank) that the receivers of a host read, None where they
    read nothing of the group.
    """

    pattern: Pattern
    wanted: Boxes
    owners: Mapping[str, tuple[tuple[int, int] | None, ...]]
    hosts: Mapping[int, str]

    def links(self, receiver: int) -> Iterator[tuple[int, int, int]]:
        """Yield (rank, source, target) of all that a receiver reads."""
        for target, members in enumerate(self.wanted.members):
            if receiver in members:
                yield from self._links(target, receiver)

    def all_links(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (receiver, rank, source, target) of all receivers."""
        for target, members in enumerate(self.wanted.members):
            for receiver in members:
                for link in self._links(target, receiver):
                    yield receiver, *link

    def _links(self, target: int, receiver: int) -> Iterator[tuple[int, int, int]]:
        owners = self.owners[self.hosts.get(receiver, "")]
        for group, _ in self.pattern.pairs[target]:
            owner = owners[group]
            assert owner is not None
            yield owner[1], owner[0], target


class Read(NamedTuple):
    """The regions that a receiver reads from one rank for one of its boxes of a tensor."""

    name: str
    rank: int
    receiver: int
    source: LocalBox
    target: LocalBox
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class ReshardPlan:
    """Which receiver reads which regions from which rank. Equal inputs give equal plans.

    `entries[i]` is the index of the route of `specs[i]`; tensors are in order of their names.
    """

    patterns: tuple[Pattern, ...]
    routes: tuple[Route, ...]
    specs: tuple[TensorSpec, ...]
    entries: array[int]

    def reads(self, receiver: int) -> Iterator[Read]:
        """Yield all that a receiver reads, tensor by tensor."""
        links: dict[int, list[tuple[int, int, int]]] = {}
        for spec, entry in zip(self.specs, self.entries, strict=True):
            route = self.routes[entry]
            if entry not in links:
                links[entry] = list(route.links(receiver))
            pattern = route.pattern
            for rank, i, j in links[entry]:
                source, target = pattern.sources[i], pattern.targets[j]
                regions = pattern.regions[i, j]
                yield Read(spec.name, rank, receiver, source, target, regions)

    def reads_of(self, name: str, receiver: int) -> Iterator[Read]:
        """Yield what a receiver reads of one tensor."""
        at = bisect_left(self.specs, name, key=lambda spec: spec.name)
        route = self.routes[self.entries[at]]
        pattern = route.pattern
        for rank, i, j in route.links(receiver):
            source, target = pattern.sources[i], pattern.targets[j]
            yield Read(name, rank, receiver, source, target, pattern.regions[i, j])

    @cached_property
    def totals(self) -> Totals:
        """Regions, and bytes by link."""
        uses = Counter(self.entries)
        regions = runs = 0
        by_link: Counter[tuple[int, int]] = Counter()
        for entry, count in uses.items():
            route = self.routes[entry]
            sizes = {
                key: (len(found), sum(r.runs for r in found), sum(r.nbytes for r in found))
                for key, found in route.pattern.regions.items()
            }
            for receiver, rank, i, j in route.all_links():
                size = sizes[i, j]
                regions += count * size[0]
                runs += count * size[1]
                by_link[rank, receiver] += count * size[2]
        return Totals(regions, runs, dict(by_link))

    @cached_property
    def digest(self) -> str:
        """Hash of the plan, as 32 hex digits: equal where all regions and owners are."""
        state = hashlib.blake2b(_FORMAT, digest_size=16)
        known = {id(pattern): i for i, pattern in enumerate(self.patterns)}
        for pattern in self.patterns:
            state.update(repr((pattern.itemsize, pattern.sources, pattern.targets)).encode())
            for key, regions in pattern.regions.items():
                flat = array("q", (*key, len(regions)))
                for region in regions:
                    flat.extend((*region[:3], *chain.from_iterable(region.loops)))
                state.update(flat.tobytes())
        for route in self.routes:
            used = {r: route.hosts.get(r, "") for r in chain.from_iterable(route.wanted.members)}
            described = (
                known[id(route.pattern)],
                route.wanted.members,
                sorted(route.owners.items()),
                sorted(used.items()),
            )
            state.update(repr(described).encode())
        for spec in self.specs:
            state.update(f"{spec.name}\0{spec.dtype}\0{spec.shape}\0".encode())
        state.update(self.entries.tobytes())
        return state.hexdigest()


@dataclass(frozen=True, slots=True)
class Totals:
    """Sizes of a plan: regions, contiguous runs in them, and bytes by (rank, receiver)."""

    regions: int
    runs: int
    nbytes: Mapping[tuple[int, int], int]


def place_whole(specs: Iterable[TensorSpec]) -> list[Placed]:
    """Return the wants of one receiver of whole tensors, in this order."""
    known: dict[tuple[int, ...], Boxes] = {}
    for spec in specs:
        if spec.shape not in known:
            known[spec.shape] = Boxes(spec.shape, [(0, LocalBox(Slice.whole_of(spec.shape)))])
    return [Placed(spec, known[spec.shape]) for spec in specs]


def plan_reshard(
    held: Iterable[Placed],
    wanted: Iterable[Placed],
    *,
    rank_hosts: Mapping[int, str] | None = None,
    receiver_hosts: Mapping[int, str] | None = None,
) -> ReshardPlan:
    """Return the plan by which each receiver reads the boxes that it wants.

    All receivers of a host read a box from one owner: a rank of that host if one holds the box,
    else the replica whose host has the fewest bytes planned so far, and of equal ones the rank with
    the fewest. Hosts are named for this alone; receivers without a host are on one of their own.
    The order of the arguments does not change the plan.

    Raises ManifestMismatchError for tensors that only one side has, shapes or dtypes that differ,
    and elements that no rank holds; ConfigError for boxes that overlap without being equal.
    """
    holds = {one.spec.name: one for one in held}
    wants = {one.spec.name: one for one in wanted}
    classes = _classes(holds, wants)
    geometry: dict[tuple[LocalBox, ...], int] = {}
    numbers: dict[int, int] = {}
    known: dict[tuple[int, ...] | tuple[Hashable, ...], Pattern] = {}
    tasks: list[_Task] = []
    hosts = dict(receiver_hosts or {})
    for (shape, dtype, have, want), names in classes.items():
        itemsize = DTYPE_NBYTES[dtype]
        for boxes in (have, want):
            if id(boxes) not in numbers:
                numbers[id(boxes)] = geometry.setdefault(boxes.parts, len(geometry))
        key = (shape, itemsize, numbers[id(have)], numbers[id(want)])
        if key not in known:
            known[key] = Pattern(itemsize, have.parts, want.parts)
        tasks.append(_Task(known[key], have, want, names, hosts))
    _raise_faults(tasks)
    _choose_owners(tasks, dict(rank_hosts or {}))
    return _assemble(tasks, holds)


def regions_between(source: LocalBox, target: LocalBox, itemsize: int) -> tuple[Region, ...]:
    """Return what two boxes of one tensor share; none where they have no element in common."""
    return _regions(source, target, itemsize, {})


def copy_regions(regions: Iterable[Region], source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy regions from one local tensor to another, each with the strides of its LocalBox."""
    for region in regions:
        counts = (*(loop.times for loop in region.loops), region.inner)
        from_strides = (*(loop.source for loop in region.loops), 1)
        to_strides = (*(loop.target for loop in region.loops), 1)
        view = _bytes(target, region.target, counts, to_strides)
        view.copy_(_bytes(source, region.source, counts, from_strides))


def _bytes(
    tensor: torch.Tensor, begin: int, counts: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """View bytes of a tensor's memory, from byte `begin` after its first element."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    memory.set_(tensor.untyped_storage())
    begin += int(tensor.storage_offset()) * tensor.element_size()
    return memory.as_strided(counts, strides, begin)


def _order(part: LocalBox) -> tuple[object, ...]:
    return part.box.spans, part.strides or ()


def _who(one: Holding | Want, numbers: Iterable[int]) -> str:
    return _named("rank" if isinstance(one, Holding) else "receiver", numbers)


def _named(kind: str, numbers: Iterable[int]) -> str:
    listed = sorted(set(numbers))
    plural = "s" if len(listed) > 1 else ""
    return f"{kind}{plural} {shorten(map(str, listed))}"


def show_box(spans: Sequence[Sequence[Span]]) -> str:
    """Return a box as in an index: `[0:4, 2:3+5:6]`."""
    dims = (
        "+".join(f"{begin}:{end}" for begin, end in dim[:SHOWN_NAMES])
        + ("+..." if len(dim) > SHOWN_NAMES else "")
        for dim in spans
    )
    return f"[{', '.join(dims)}]"


def _check_box(shape: tuple[int, ...], part: LocalBox, numbers: list[int]) -> None:
    box, strides = part.box, part.strides
    bad = box.shape != shape or len(box.spans) != len(shape)
    for size, spans in zip(shape, box.spans, strict=False):
        ordered = sorted(spans)
        ends = [0, *(end for _, end in ordered)]
        bad = bad or ends[-1] > size or any(b > e for b, e in ordered)
        bad = bad or any(begin < end for (begin, _), end in zip(ordered, ends, strict=False))
    if bad:
        raise ConfigError(
            f"{show_box(box.spans)} (of {shorten(map(str, numbers))}) is no box of a tensor of "
            f"{list(shape)}: give spans within the shape that do not overlap, for each dimension"
        )
    if strides is None:
        return
    if len(strides) != len(shape) or _repeats(box.local_shape, strides):
        raise ConfigError(
            f"the strides {list(strides)} (of {shorten(map(str, numbers))}) are not those of a "
            f"local tensor of {list(box.local_shape)} with each element in a place of its own"
        )


def _repeats(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may have the same place. True for some strange, valid strides."""
    end = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= end:
                return True
            end += stride * (size - 1)
    return False


class _Key(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    held: Boxes
    wanted: Boxes


def _classes(holds: Mapping[str, Placed], wants: Mapping[str, Placed]) -> dict[_Key, list[str]]:
    """Return the names of tensors that are placed alike, in their order."""
    if holds.keys() != wants.keys():
        raise ManifestMismatchError(
            missing=sorted(wants.keys() - holds.keys()),
            unexpected=sorted(holds.keys() - wants.keys()),
        )
    found: dict[_Key, list[str]] = {}
    different: list[str] = []
    for name in sorted(holds):
        have, want = holds[name], wants[name]
        spec = have.spec
        if spec != want.spec:
            different.append(f"{name}: offered {spec}, wanted {want.spec}")
            continue
        key = _Key(spec.shape, spec.dtype, have.boxes, want.boxes)
        names = found.get(key)
        if names is None:
            if not have.boxes.shape == want.boxes.shape == spec.shape:
                raise ConfigError(f"{name}: its boxes are of another shape than {spec}")
            found[key] = [name]
        else:
            names.append(name)
    if different:
        raise ManifestMismatchError(mismatched=different)
    return found


class _Fault(NamedTuple):
    """A fault of a pattern: boxes that overlap, or cells of a target that are missing."""

    box: tuple[tuple[Span, ...], ...]
    groups: tuple[int, ...] = ()
    target: int = -1


def _cover(
    sources: Sequence[Slice], targets: Sequence[Slice], itemsize: int
) -> tuple[tuple[tuple[tuple[int, int], ...], ...], _Fault | None]:
    """Return the (source, nbytes) that each target reads, or what is wrong.

    A grid of cells counts the sources that hit each, and keeps the last of them.
    """
    if not targets:
        return (), None
    cuts = [_Cells(chain(sources, targets), dim) for dim in range(len(targets[0].shape))]
    hits = np.zeros([len(cut.cells) for cut in cuts], np.int32)
    owner = np.full(hits.shape, -1, np.int32)
    places = [_place(cuts, box) for box in sources]
    for i, at in enumerate(places):
        hits[at] += 1
        owner[at] = i
    none: tuple[tuple[tuple[int, int], ...], ...] = ((),) * len(targets)
    if hits.max(initial=0) > 1:
        return none, _overlap(cuts, places, hits)
    pairs = []
    for j, box in enumerate(targets):
        owners = owner[_place(cuts, box)]
        found = np.unique(owners).tolist()
        if found[0] < 0:
            cell = np.argwhere(owners < 0)[0].tolist()
            missing = (
                tuple(cut.cells[cut.of[spans][i]])
                for cut, spans, i in zip(cuts, box.spans, cell, strict=True)
            )
            return none, _Fault(tuple(missing), target=j)
        pairs.append(tuple((i, _common(sources[i], box) * itemsize) for i in found))
    return tuple(pairs), None


class _Cells:
    """The cells of one dimension: parts of it that the same boxes hold, each as its spans.

    `of` are the indices of the cells of each list of spans.
    """

    def __init__(self, boxes: Iterable[Slice], dim: int) -> None:
        lists = list(dict.fromkeys(box.spans[dim] for box in boxes))
        ends = sorted({end for spans in lists for span in spans for end in span})
        hit: list[list[int]] = [[] for _ in ends]
        for number, spans in enumerate(lists):
            for begin, end in spans:
                for at in range(bisect_left(ends, begin), bisect_left(ends, end)):
                    hit[at].append(number)
        cells: dict[tuple[int, ...], list[Span]] = {}
        for at, numbers in enumerate(hit):
            if numbers:
                cells.setdefault(tuple(numbers), []).append((ends[at], ends[at + 1]))
        self.cells = list(cells.values())
        indices: list[list[int]] = [[] for _ in lists]
        for i, hitting in enumerate(cells):
            for number in hitting:
                indices[number].append(i)
        self.of = dict(zip(lists, indices, strict=True))


def _place(cuts: Sequence[_Cells], box: Slice) -> tuple[npt.NDArray[np.int64], ...]:
    return np.ix_(*(cut.of[spans] for cut, spans in zip(cuts, box.spans, strict=True)))


def _overlap(cuts: Sequence[_Cells], places: Sequence[Any], hits: npt.NDArray[np.int32]) -> _Fault:
    """Return the boxes that hit the first cell with several hits."""
    first = np.argwhere(hits > 1)[0].tolist()
    cell = tuple(tuple(cut.cells[i]) for cut, i in zip(cuts, first, strict=True))
    groups = []
    for i, place in enumerate(places):
        alone = np.zeros_like(hits)
        alone[place] = 1
        if alone[tuple(first)]:
            groups.append(i)
    return _Fault(cell, groups=tuple(groups))


def has_common(one: Slice, other: Slice) -> bool:
    """Whether two boxes of a tensor share an element."""
    return _common(one, other) > 0


def _common(one: Slice, other: Slice) -> int:
    """Return the number of elements in both boxes."""
    return math.prod(
        sum(length for _, _, length in _segments(a, b))
        for a, b in zip(one.spans, other.spans, strict=True)
    )


class _Run(NamedTuple):
    """`times` pieces of `length` indices of a dimension, with their places on both sides."""

    source: int
    target: int
    length: int
    times: int
    source_step: int
    target_step: int


_Meets = dict[tuple[tuple[Span, ...], tuple[Span, ...]], tuple[_Run, ...]]


def _segments(source: Sequence[Span], target: Sequence[Span]) -> list[tuple[int, int, int]]:
    """Return (index in the source, index in the target, length) of what two lists share."""
    if len(source) == len(target) == 1:  # nearly all are
        (a, b), (c, d) = source[0], target[0]
        begin, end = max(a, c), min(b, d)
        return [(begin - a, begin - c, end - begin)] if begin < end else []
    found, theirs = [], _placed(target)
    at = 0
    for begin, end, place in _placed(source):
        while at < len(theirs) and theirs[at][1] <= begin:
            at += 1
        i = at
        while i < len(theirs) and theirs[i][0] < end:
            first, last = max(begin, theirs[i][0]), min(end, theirs[i][1])
            found.append((place + first - begin, theirs[i][2] + first - theirs[i][0], last - first))
            i += 1
    return sorted(found)


def _placed(spans: Sequence[Span]) -> list[tuple[int, int, int]]:
    """Return (begin, end, index in the local tensor) of spans, in order of their begin."""
    at, found = 0, []
    for begin, end in spans:
        if begin < end:
            found.append((begin, end, at))
        at += end - begin
    return sorted(found)


def _runs(source: tuple[Span, ...], target: tuple[Span, ...]) -> tuple[_Run, ...]:
    """Return what two lists of spans share: neighbours joined, and equal distances counted."""
    joined: list[tuple[int, int, int]] = []
    for a, b, length in _segments(source, target):
        if joined:
            c, d, before = joined[-1]
            if (c + before, d + before) == (a, b):
                joined[-1] = (c, d, before + length)
                continue
        joined.append((a, b, length))
    runs: list[_Run] = []
    for a, b, length in joined:
        if runs and length == runs[-1].length:
            last = runs[-1]
            if last.times == 1 and b > last.target:
                step = (a - last.source, b - last.target)
                runs[-1] = last._replace(times=2, source_step=step[0], target_step=step[1])
                continue
            ahead = (
                last.source + last.times * last.source_step,
                last.target + last.times * last.target_step,
            )
            if last.times > 1 and ahead == (a, b):
                runs[-1] = last._replace(times=last.times + 1)
                continue
        runs.append(_Run(a, b, length, 1, 0, 0))
    return tuple(runs)


def _regions(
    source: LocalBox, target: LocalBox, itemsize: int, meets: _Meets
) -> tuple[Region, ...]:
    """Return what two boxes share as strided blocks."""
    from_strides, to_strides = _strides(source, itemsize), _strides(target, itemsize)
    dims = []
    for key in zip(source.box.spans, target.box.spans, strict=True):
        if key not in meets:
            meets[key] = _runs(*key)
        dims.append(meets[key])
    found: list[Region] = []
    for runs in product(*dims):
        begin = end = 0
        loops: list[Loop] = []
        inner = itemsize
        for run, a, b in zip(
            reversed(runs), reversed(from_strides), reversed(to_strides), strict=True
        ):
            begin += run.source * a
            end += run.target * b
            for loop in (
                Loop(run.length, a, b),
                Loop(run.times, run.source_step * a, run.target_step * b),
            ):
                if loop.times == 1:
                    continue
                if not loops and loop.source == loop.target == inner:
                    inner *= loop.times
                elif loops and _continues(loops[-1], loop):
                    loops[-1] = loops[-1]._replace(times=loops[-1].times * loop.times)
                else:
                    loops.append(loop)
        found += _limited(Region(begin, end, inner, tuple(reversed(loops))))
    return tuple(found)


def _continues(within: Loop, loop: Loop) -> bool:
    """Whether a loop around `within` goes on where that ends, on both sides."""
    return (loop.source, loop.target) == (
        within.times * within.source,
        within.times * within.target,
    )


def _limited(region: Region) -> Iterator[Region]:
    """Yield the region, as several where it has too many loops: the shortest loop apart."""
    if len(region.loops) <= MAX_LOOPS:
        yield region
        return
    shortest = min(region.loops, key=lambda loop: loop.times)
    at = region.loops.index(shortest)
    rest = region.loops[:at] + region.loops[at + 1 :]
    for i in range(shortest.times):
        begin, end = region.source + i * shortest.source, region.target + i * shortest.target
        yield from _limited(Region(begin, end, region.inner, rest))


def _strides(part: LocalBox, itemsize: int) -> list[int]:
    """Return the strides of a local tensor in bytes."""
    if part.strides is not None:
        return [stride * itemsize for stride in part.strides]
    strides, stride = [], itemsize
    for size in reversed(part.box.local_shape):
        strides.append(stride)
        stride *= size
    return strides[::-1]


class _Task:
    """Tensors that are placed alike; `owners` and `assigned` are set by `_choose_owners`.

    `owners[v]` are those of variant `v`, and tensor `i` has variant `i % len(owners)`.
    """

    def __init__(
        self,
        pattern: Pattern,
        held: Boxes,
        wanted: Boxes,
        names: Sequence[str],
        hosts: Mapping[int, str],
    ) -> None:
        self.pattern, self.held, self.wanted, self.names = pattern, held, wanted, names
        self.hosts = hosts
        self.candidates = [
            sorted((rank, i) for i in group for rank in held.members[i]) for group in pattern.groups
        ]
        self.owners: list[dict[str, tuple[tuple[int, int] | None, ...]]] = []

    def needs(self) -> dict[str, list[int]]:
        """Return the bytes of each group that the receivers of each host read of one tensor."""
        needs: dict[str, list[int]] = {}
        for pairs, members in zip(self.pattern.pairs, self.wanted.members, strict=True):
            for host, count in Counter(self.hosts.get(r, "") for r in members).items():
                need = needs.setdefault(host, [0] * len(self.candidates))
                for group, nbytes in pairs:
                    need[group] += count * nbytes
        return dict(sorted(needs.items()))

    def variants(self, needs: Mapping[str, list[int]], rank_hosts: Mapping[int, str]) -> int:
        """Return how many variants share the tensors evenly among all replicas."""
        most = 1
        for group, candidates in enumerate(self.candidates):
            if len(candidates) == 1:
                continue
            near = Counter(rank_hosts.get(rank) for rank, _ in candidates)
            reading = [host for host, need in needs.items() if need[group]]
            most = max([most, *(near[host] for host in reading)])
            if far := sum(not near[host] for host in reading):
                most = max(most, len(candidates) // math.gcd(len(candidates), far))
        return min(most, len(self.names))


def _raise_faults(tasks: Sequence[_Task]) -> None:
    """Raise what is wrong with the boxes, for all tensors at once."""
    holes: list[str] = []
    overlaps: list[str] = []
    for task in tasks:
        fault = task.pattern.fault
        if fault is None:
            continue
        if fault.groups:
            said = " and ".join(
                f"{_named('rank', [r for r, _ in task.candidates[g]])} as {show_box(box.spans)}"
                for g in fault.groups[:SHOWN_NAMES]
                for box in [task.pattern.sources[task.pattern.groups[g][0]].box]
            )
            overlaps += (f"{name}{show_box(fault.box)} is held by {said}" for name in task.names)
        else:
            readers = _named("receiver", task.wanted.members[fault.target])
            ranks = _named("rank", [r for one in task.candidates for r, _ in one] or [])
            said = f"is wanted by {readers} and held by none of {ranks}"
            if not task.candidates:
                said = f"is wanted by {readers} and held by no rank"
            holes += (f"{name}{show_box(fault.box)} {said}" for name in task.names)
    if overlaps:
        raise ConfigError(
            f"{len(overlaps)} tensors are held in boxes that overlap without being equal, so that "
            f"nothing says whose elements are right: {shorten(overlaps)}; hold each element in one "
            "box, or in equal boxes on several ranks"
        )
    if holes:
        raise ManifestMismatchError(
            f"{len(holes)} tensors have elements that no rank holds: {shorten(holes)}; list the "
            "holdings of all ranks, with the names that the receivers have",
            mismatched=holes,
        )


class _Load:
    """Bytes that each rank sends in the plan so far, and each host of ranks."""

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self.hosts = hosts
        self._ranks: Counter[int] = Counter()
        self._hosts: Counter[str] = Counter()

    def add(self, rank: int, nbytes: int) -> None:
        self._ranks[rank] += nbytes
        if rank in self.hosts:
            self._hosts[self.hosts[rank]] += nbytes

    def of(self, rank: int) -> tuple[int, int]:
        """Return what is least of the best owner: its host's bytes, then its own."""
        host = self.hosts.get(rank)
        return 0 if host is None else self._hosts[host], self._ranks[rank]


def _choose_owners(tasks: Sequence[_Task], rank_hosts: Mapping[int, str]) -> None:
    """Set the owners of each task: near ones, else those with the fewest bytes so far."""
    planned = _Load(rank_hosts)
    needs = [task.needs() for task in tasks]
    for task, need in zip(tasks, needs, strict=True):
        for group, candidates in enumerate(task.candidates):
            if len(candidates) == 1:
                nbytes = sum(one[group] for one in need.values())
                planned.add(candidates[0][0], nbytes * len(task.names))
    # Large ones first, because small ones level out what is left. What counts are the tensors that
    # get one owner: all tensors of a task may be many small ones.
    shares: list[tuple[int, str, int, int, int]] = []
    for at, (task, by_host) in enumerate(zip(tasks, needs, strict=True)):
        nbytes, variants = sum(map(sum, by_host.values())), task.variants(by_host, rank_hosts)
        task.owners += ({} for _ in range(variants))
        for variant in range(variants):
            count = len(range(variant, len(task.names), variants))
            shares.append((-nbytes * count, task.names[0], at, variant, count))
    for _, _, at, variant, count in sorted(shares):
        task = tasks[at]
        for host, wanted in needs[at].items():
            task.owners[variant][host] = _owners(task.candidates, wanted, count, host, planned)


def _owners(
    choices: Sequence[list[tuple[int, int]]],
    need: Sequence[int],
    count: int,
    host: str,
    planned: _Load,
) -> tuple[tuple[int, int] | None, ...]:
    """Return (source, rank) of each group for one host, and count the bytes of `count` tensors."""
    owners: list[tuple[int, int] | None] = []
    for candidates, nbytes in zip(choices, need, strict=True):
        if not nbytes:
            owners.append(None)
            continue
        rank, source = candidates[0]
        if len(candidates) > 1:
            near = [one for one in candidates if planned.hosts.get(one[0]) == host]
            rank, source = min(near or candidates, key=lambda one: (planned.of(one[0]), one))
            planned.add(rank, nbytes * count)
        owners.append((source, rank))
    return tuple(owners)


def _assemble(tasks: Sequence[_Task], held: Mapping[str, Placed]) -> ReshardPlan:
    patterns: dict[int, Pattern] = {}
    routes: list[Route] = []
    entries: dict[str, int] = {}
    for task in tasks:
        patterns.setdefault(id(task.pattern), task.pattern)
        first, variants = len(routes), len(task.owners)
        routes += (Route(task.pattern, task.wanted, owners, task.hosts) for owners in task.owners)
        entries.update((name, first + i % variants) for i, name in enumerate(task.names))
    names = sorted(entries)
    return ReshardPlan(
        tuple(patterns.values()),
        tuple(routes),
        tuple(held[name].spec for name in names),
        array("I", map(entries.__getitem__, names)),
    )
