"""The stream of each rank: what it sends of the boxes that it holds, and the source of that."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import msgspec
import torch

from weightsync.errors import ConfigError, ManifestMismatchError, TransferError
from weightsync.specs import Manifest
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.copying.rank_streams import RankStream, cut_box, index_in, wants_of
from weightsync.weights.copying.reshard import ReshardPlan, place_whole, plan_reshard
from weightsync.weights.copying.shards import Slice, gather, is_sharded
from weightsync.weights.sources.base import BaseTensors, SourceExtras, SourceMemory, WeightSource
from weightsync.weights.sources.exchange import (
    RankHoldings,
    decode_holdings,
    encode_holdings,
    gathered_from,
    placed_from,
)
from weightsync.weights.sources.holdings import Holdings
from weightsync.wire.offers import WantsInfo


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's host and holdings, for the others; or the reason why it tells no holdings."""

    host: str
    held: bytes = b""
    stays: bool = True
    may_wait: bool = False
    why_not: str = ""


_decode = msgspec.msgpack.Decoder(_Told).decode


def encode_held(holdings: Holdings | None, manifest: Manifest, host: str) -> bytes:
    """Return what a rank tells the others about its holdings, None where its source has none."""
    if holdings is None:
        told = _Told(host=host, why_not="its source only makes full tensors")
    else:
        held = encode_holdings(holdings, manifest)
        told = _Told(host=host, held=held, stays=holdings.stays, may_wait=holdings.may_wait)
    return msgspec.msgpack.encode(told)


@dataclass(frozen=True)
class StreamPlan:
    """Which rank sends which boxes; equal on all ranks. `why_not` says why there is no such plan.

    `streams` are those of all ranks, in their order. `gathered` are the tensors, with the reasons,
    that all ranks make together: rank 0 sends them. `held[r][i]` is the box of rank r that has box
    i of its stream: the same one, unless `cut` has cut it. Only boxes whose memory `stays` are cut.
    `hosts[r]` is the number of rank r's host among those of the ranks. `has_replicas`: a box is
    held by several ranks. `is_replicated`: each rank holds all tensors whole, so that any one of
    them could send for all without a gather.
    """

    streams: Sequence[RankStream] = ()
    gathered: Mapping[str, str] = field(default_factory=dict)
    why_not: str = ""
    digest: str = ""
    held: Sequence[Sequence[Slice]] = ()
    stays: bool = True
    hosts: Sequence[int] = ()
    has_replicas: bool = True
    is_replicated: bool = False

    def cut(self, wants: Sequence[WantsInfo]) -> StreamPlan:
        """Return the plan whose boxes are cut where these receivers' are: each reads its own.

        What the same receivers want follows in a stream, so that no unit of it has more. Ranks on
        unlike hosts begin with what unlike receivers want: all of their links work at once.
        """
        if not (wants and self.streams and self.stays):
            return self
        model = self.streams[0].model
        wanted: list[dict[int, list[Slice]]] = []
        for info in wants:
            by_tensor: dict[int, list[Slice]] = {}
            for index, box in wants_of(info, model, "a receiver"):
                by_tensor.setdefault(index, []).append(box)
            wanted.append(by_tensor)
        known: dict[tuple[Slice, tuple[tuple[Slice, ...], ...]], list[_Part]] = {}
        streams, held = [], []
        for stream, own in zip(self.streams, self.held, strict=True):
            parts: list[tuple[list[int], int, _Part, Slice]] = []
            for index, box, holder in zip(stream.indices, stream.boxes, own, strict=True):
                boxes = tuple(tuple(each.get(index, ())) for each in wanted)
                key = box, boxes
                if key not in known:
                    known[key] = _cut(box, boxes)
                parts += ((sorted(part[1]), index, part, holder) for part in known[key])
            first = self.hosts[stream.rank] * len(wants) // (max(self.hosts) + 1)
            parts.sort(key=partial(_turned, first=first, count=len(wants)))
            indices = [index for _, index, _, _ in parts]
            cut = [part[0] for *_, part, _ in parts]
            streams.append(RankStream(stream.rank, model, indices, cut))
            held.append([holder for *_, holder in parts])
        state = hashlib.blake2b(self.digest.encode(), digest_size=16)
        state.update(msgspec.msgpack.encode(wants))
        return replace(self, streams=streams, held=held, digest=state.hexdigest())


_Part = tuple[Slice, frozenset[int]]


def _turned(
    part: tuple[list[int], int, _Part, Slice], *, first: int, count: int
) -> tuple[list[int], int]:
    """Return the key by which parts are ordered: those of the receiver `first` come first."""
    receivers, index, *_ = part
    return sorted((i - first) % count for i in receivers), index


def _cut(box: Slice, wants: Sequence[Sequence[Slice]]) -> list[_Part]:
    """Return the parts of a box, and which receivers want each: one may load several boxes."""
    owners = [i for i, boxes in enumerate(wants) for _ in boxes]
    parts = cut_box(box, [each for boxes in wants for each in boxes])
    return [(part, frozenset(owners[i] for i in inside)) for part, inside in parts]


def plan_streams(manifest: Manifest, told: Sequence[bytes]) -> StreamPlan:
    """Return the plan for ranks that told this about their holdings, in the order of the ranks.

    Each box has one owner: of ranks that hold equal ones, that whose host has the fewest bytes so
    far, and on one host that with the fewest itself.
    """
    ranks = list(map(_decode, told))
    for rank, one in enumerate(ranks):
        if one.why_not:
            return StreamPlan(why_not=f"rank {rank}: {one.why_not}")
    held = [decode_holdings(one.held) for one in ranks]
    waiting = [listed for one, listed in zip(ranks, held, strict=True) if one.may_wait]
    if (name := _made_by_several(manifest, waiting)) is not None:
        return StreamPlan(
            why_not=f"{name}: several ranks make it in an iteration, and may wait for each other"
        )
    gathered = gathered_from(manifest, held)
    if gathered and not all(one.stays for one in ranks):
        name, reason = next(iter(gathered.items()))
        return StreamPlan(why_not=f"{name}: {reason}")
    try:
        wants = place_whole([spec for spec in manifest.specs if spec.name not in gathered])
        hosts = {rank: one.host for rank, one in enumerate(ranks)}
        plan = plan_reshard(placed_from(manifest, held), wants, rank_hosts=hosts)
    except (ConfigError, ManifestMismatchError) as exc:
        return StreamPlan(why_not=str(exc))
    streams = []
    for rank, (one, listed) in enumerate(zip(ranks, held, strict=True)):
        owned = _owned(rank, manifest, plan, gathered)
        if not one.stays:  # a source that makes them makes them in its own order
            order = {entry: i for i, entry in enumerate(listed.listed())}
            known = [(order.get(entry, -1), entry) for entry in owned]
            owned = [entry for _, entry in sorted(known, key=itemgetter(0))]
        streams.append(RankStream(rank, manifest, [i for i, _ in owned], [b for _, b in owned]))
    stays = all(one.stays for one in ranks)
    held_boxes = [stream.boxes for stream in streams]
    numbers: dict[str, int] = {}
    held_by: Counter[tuple[int, Slice]] = Counter()
    for listed in held:
        held_by.update(set(listed.listed()))
    return StreamPlan(
        streams,
        gathered,
        digest=plan.digest,
        held=held_boxes,
        stays=stays,
        hosts=[numbers.setdefault(one.host, len(numbers)) for one in ranks],
        has_replicas=bool(gathered) or any(count > 1 for count in held_by.values()),
        is_replicated=not gathered and all(_holds_all(manifest, listed) for listed in held),
    )


def _made_by_several(manifest: Manifest, ranks: Sequence[RankHoldings]) -> str | None:
    """Return the name of a tensor that several of these ranks hold; None where there is none.

    They may have gathered it, each in its iteration. If each of them sent others of these tensors,
    a receiver could wait for one rank, which waits in its collective for another one, whose ring is
    full until the receiver reads on.
    """
    seen: set[int] = set()
    for held in ranks:
        for index in dict.fromkeys(i for i, _ in held.listed()):
            if index in seen:
                return manifest.specs[index].name
            seen.add(index)
    return None


def _holds_all(manifest: Manifest, held: RankHoldings) -> bool:
    """Whether a rank has all tensors, each as one box."""
    specs = manifest.specs
    whole = {i for i, box in held.listed() if box == Slice.whole_of(specs[i].shape)}
    return all(i in whole for i, spec in enumerate(specs) if spec.nbytes)


def _owned(
    rank: int, manifest: Manifest, plan: ReshardPlan, gathered: Mapping[str, str]
) -> list[tuple[int, Slice]]:
    """Return the tensors and boxes that a rank sends, in the manifest's order."""
    by_route: dict[int, list[Slice]] = {}
    found: list[tuple[int, Slice]] = []
    for spec, entry in zip(plan.specs, plan.entries, strict=True):
        if entry not in by_route:
            route = plan.routes[entry]
            sources = [i for owner, i, _ in route.links(0) if owner == rank]
            by_route[entry] = [route.pattern.sources[i].box for i in sources]
        boxes = by_route[entry]
        if boxes:
            index = manifest.index[spec.name]
            found += ((index, box) for box in boxes)
    if rank == 0:  # and what no rank holds: gathered tensors, and those without elements
        found += (
            (i, Slice.whole_of(spec.shape))
            for i, spec in enumerate(manifest.specs)
            if spec.name in gathered or not spec.nbytes
        )
    return sorted(found, key=lambda one: (one[0], one[1].spans))


class _Bases(NamedTuple):
    """The tensors in whose memory the boxes of a stream are.

    `bases` are places in the holdings, or -1 where a box, by its index, is one itself. `where[i]`
    is the base of box i, and its first byte there.
    """

    bases: list[tuple[int, int]]
    where: list[tuple[int, int]]


class StreamSource:
    """WeightSource of one rank's stream: its own boxes, as they lie in memory, without a gather.

    The boxes are cast to the dtypes of the stream where it is sent. `gather` makes the tensors that
    no rank can tell its part of. Raises ManifestMismatchError where the rank holds other boxes than
    at `connect`.
    """

    def __init__(
        self, source: WeightSource, plan: StreamPlan, rank: int, holdings: Holdings
    ) -> None:
        self.stream = plan.streams[rank]
        self.manifest = self.stream.manifest
        self._source = source
        self._holdings = holdings
        self._gathered = list(plan.gathered)
        self._sends_gathered = rank == 0
        self._made: dict[str, torch.Tensor] = {}
        held: dict[tuple[str, Slice], int] = {}
        for i, key in enumerate(zip(holdings.names, holdings.boxes, strict=True)):
            held.setdefault(key, i)
        specs = self.stream.model.specs
        self._names = [specs[index].name for index in self.stream.indices]
        boxes = plan.held[rank]
        self._places = [held.get(key, -1) for key in zip(self._names, boxes, strict=True)]
        self._inside = [
            None if part == box else index_in(box, part)
            for box, part in zip(boxes, self.stream.boxes, strict=True)
        ]
        self._is_cut = any(inside is not None for inside in self._inside)
        self._has_views = self._is_cut or holdings.bases is not None
        self._where: _Bases | None = None
        self._views: list[weakref.ref[torch.Tensor]] = []
        self._dtypes = [TORCH_DTYPES[spec.dtype] for spec in self.manifest.specs]

    def gather(self, meet: Callable[[], None]) -> None:
        """Make the tensors that no rank can tell its part of. Collective if there are any.

        `meet` is called before: it waits for the other ranks, and raises where one has failed.
        """
        if not self._gathered:
            return
        found = SourceExtras(self._source).made_of()
        pairs = dict(zip(*found, strict=True)) if found is not None else {}
        tensors = [pairs[name] for name in self._gathered]
        meet()
        for name, tensor in zip(self._gathered, tensors, strict=True):
            full = gather(tensor)
            if not self._sends_gathered:
                continue
            known = self._made.get(name)
            if known is None or known.shape != full.shape or known.dtype is not full.dtype:
                self._made[name] = full.detach().clone()
            else:  # in memory that stays, which may be registered
                with torch.no_grad():
                    known.copy_(full)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the boxes of this rank, not cast."""
        if self._holdings.stays:
            for spec, tensor in zip(self.manifest.specs, self._read(), strict=True):
                yield spec.name, tensor.detach()
            return
        # A source that makes them makes all, in its own order, which is that of the stream.
        # Its boxes are not cut: parts of one that follow each other later would have to be kept.
        sent = {place: i for i, place in enumerate(self._places) if place >= 0}
        at = 0
        for place, (_, tensor) in enumerate(self._holdings.pairs()):
            if place in sent:
                yield from self._empty(at, sent[place])
                at = sent[place] + 1
                yield self.manifest.specs[sent[place]].name, tensor.detach()
        yield from self._empty(at, len(self._places))

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """Return the boxes of this rank; None where one is cast, or made for each update."""
        if not self._holdings.stays:
            return None
        held = self._read()
        same = all(t.dtype is dtype for t, dtype in zip(held, self._dtypes, strict=True))
        return held if same else None

    def cast_tensors(self) -> list[torch.Tensor] | None:
        """Return the boxes of which those that are sent are casts; None if they are made."""
        return self._read() if self._holdings.stays else None

    def made_of(self) -> tuple[Sequence[str], Sequence[torch.Tensor]] | None:
        """Return the names of the tensors, and this rank's boxes of them.

        If they are made: of what, as far as the source tells.
        """
        if not self._holdings.stays:
            return SourceExtras(self._source).made_of()
        return self._names, self._read()

    def counting(self) -> list[tuple[str, torch.Tensor]]:
        """Return the DTensors whose local tensors are sent; none of a source that makes others.

        And what the source counts writes on.
        """
        found = SourceExtras(self._source).made_of() if self._holdings.stays else None
        pairs = zip(*found, strict=True) if found is not None else ()
        dtensors = [(n, t) for n, t in pairs if is_sharded(t) and n not in self._gathered]
        return [*dtensors, *SourceMemory(self._source).counting()]

    def buffers(self) -> Sequence[torch.Tensor]:
        """Return tensors that use the memory of the boxes, and follow when it is moved."""
        return self._holdings.buffers()

    @property
    def rounded(self) -> Mapping[str, str]:
        """The tensors that the source rounds."""
        return SourceExtras(self._source).rounded

    @property
    def belong_together(self) -> Mapping[str, str]:
        """The tensors that are sent together."""
        return SourceExtras(self._source).belong_together

    @property
    def changed(self) -> Sequence[str]:
        """The tensors that the source found to have changed while it was sent."""
        return SourceExtras(self._source).changed

    def bases(self) -> BaseTensors | None:
        """Return the tensors in whose memory the boxes are; None where these are no views.

        Which ones these are, and where the boxes are in them, is that of the first call.
        """
        if not self._holdings.stays or not self._has_views:
            return None
        held = self._holdings.tensors() if self._holdings.bases is None else self._holdings.bases()
        if self._where is None:
            self._where = self._find_bases(held)
        if any(place < 0 for place, _ in self._where.bases):
            boxes = self._read()
            bases = [held[p] if p >= 0 else boxes[i] for p, i in self._where.bases]
        else:
            bases = [held[place] for place, _ in self._where.bases]
        return BaseTensors(bases, self._where.where)

    def views(self) -> list[torch.Tensor]:
        """Return the views of the bases that are in use now: they follow when those are moved."""
        found = (find() for find in self._views)
        return [view for view in found if view is not None]

    def _find_bases(self, held: Sequence[torch.Tensor]) -> _Bases:
        found = _Bases([], [])
        known: dict[int, int] = {}
        for i, (place, box) in enumerate(zip(self._places, self._read(), strict=True)):
            # What is no run of bytes in its base is copied into one.
            apart = place < 0 or not (box.is_contiguous() and held[place].is_contiguous())
            base = box if apart else held[place]
            at = known.setdefault(-1 - i if apart else id(base), len(found.bases))
            if at == len(found.bases):
                found.bases.append((-1 if apart else place, i))
            offset = int(box.storage_offset()) - int(base.storage_offset())
            found.where.append((at, offset * box.element_size()))
        return found

    def _read(self) -> list[torch.Tensor]:
        """Return this rank's boxes, gathered tensors as they were last made."""
        tensors = self._holdings.tensors()
        found = [
            tensors[place] if place >= 0 else self._made_of(i, name)
            for i, (place, name) in enumerate(zip(self._places, self._names, strict=True))
        ]
        if self._is_cut:
            found = [
                tensor if inside is None else tensor[inside]
                for tensor, inside in zip(found, self._inside, strict=True)
            ]
        if self._has_views:
            self._views = [find for find in self._views if find() is not None]
            self._views += map(weakref.ref, found)
        return found

    def _empty(self, begin: int, end: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors without elements, of which no rank holds a box."""
        for i in range(begin, end):
            yield self.manifest.specs[i].name, self._blank(i)

    def _made_of(self, i: int, name: str) -> torch.Tensor:
        """Return a gathered tensor as it was last made, or one without elements.

        Raises TransferError for a box with elements that this rank has nowhere.
        """
        made = self._made.get(name)
        return self._blank(i) if made is None else made

    def _blank(self, i: int) -> torch.Tensor:
        spec = self.manifest.specs[i]
        if spec.nbytes:
            raise TransferError(f"{spec.name}: this rank sends it, and has nothing of it")
        return torch.zeros(spec.shape, dtype=self._dtypes[i])
