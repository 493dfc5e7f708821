"""Reshard plans: the bytes that they copy, what they refuse, and that all ranks make the same."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.crew import crew
from tests.soak.sizes import sizes
from tests.weights.meshes import member, shard
from weightsync.errors import ConfigError, ManifestMismatchError
from weightsync.specs import TensorSpec
from weightsync.tensors import TORCH_DTYPES, as_bytes
from weightsync.weights.copying.reshard import (
    MAX_LOOPS,
    Boxes,
    Holding,
    LocalBox,
    Loop,
    Placed,
    Region,
    ReshardPlan,
    Want,
    copy_regions,
    inside,
    place,
    plan_reshard,
)
from weightsync.weights.copying.shards import Slice, Slicer, local_of

DTYPES = ("uint8", "bfloat16", "float32", "complex128", "float8_e4m3fn", "bool")


@dataclass(frozen=True)
class Side:
    """A mesh, and the placements of each tensor on it."""

    mesh: tuple[int, ...]
    placements: dict[str, tuple[Placement, ...]]

    @property
    def members(self) -> list[tuple[int, ...]]:
        return list(product(*map(range, self.mesh)))


@dataclass(frozen=True)
class Case:
    specs: tuple[TensorSpec, ...]
    held: Side
    wanted: Side
    turned: frozenset[tuple[str, str, int]]
    """Tensors whose local memory is transposed: `held` or `wanted`, name, rank or receiver."""

    def local(self, side: str, spec: TensorSpec, number: int) -> LocalBox:
        of: Side = getattr(self, side)
        placements = of.placements[spec.name]
        box = Slicer().slice_at(spec.name, spec.shape, of.mesh, placements, of.members[number])
        if (side, spec.name, number) not in self.turned or math.prod(box.local_shape) < 2:
            return LocalBox(box)
        return LocalBox(
            box, tuple(torch.empty(box.local_shape[::-1]).permute(reverse(box)).stride())
        )

    def holdings(self) -> list[Holding]:
        return [
            Holding(rank, spec, *box_of(self.local("held", spec, rank)))
            for spec in self.specs
            for rank in range(len(self.held.members))
        ]

    def wants(self) -> list[Want]:
        return [
            Want(receiver, spec, *box_of(self.local("wanted", spec, receiver)))
            for spec in self.specs
            for receiver in range(len(self.wanted.members))
        ]

    def plan(self) -> ReshardPlan:
        return plan_reshard(place(self.holdings()), place(self.wants()))


def box_of(part: LocalBox) -> tuple[Slice, tuple[int, ...] | None]:
    return part.box, part.strides


def reverse(box: Slice) -> list[int]:
    return list(range(len(box.shape)))[::-1]


@st.composite
def sides(draw: st.DrawFn, specs: Sequence[TensorSpec], *, replicas: bool = True) -> Side:
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    assume(math.prod(mesh) <= 8)
    placements = {}
    for spec in specs:
        one: st.SearchStrategy[Placement] = st.just(Replicate())
        if spec.shape:
            dims = st.integers(0, len(spec.shape) - 1)
            cuts = st.one_of(
                st.builds(Shard, dims),
                st.builds(_StridedShard, dims, split_factor=st.integers(1, 4)),
            )
            one = st.one_of(one, cuts) if replicas else cuts
        placements[spec.name] = tuple(draw(st.lists(one, min_size=len(mesh), max_size=len(mesh))))
    return Side(mesh, placements)


@st.composite
def cases(draw: st.DrawFn, *, replicas: bool = True) -> Case:
    shapes = st.lists(st.integers(0, 9), min_size=0 if replicas else 1, max_size=4).map(tuple)
    specs = tuple(
        TensorSpec(f"t{i}", draw(st.sampled_from(DTYPES)), draw(shapes))
        for i in range(draw(st.integers(1, 3)))
    )
    held, wanted = draw(sides(specs, replicas=replicas)), draw(sides(specs))
    every = [("held", s.name, r) for s in specs for r in range(len(held.members))]
    every += [("wanted", s.name, r) for s in specs for r in range(len(wanted.members))]
    turned = draw(st.sets(st.sampled_from(every), max_size=4))
    return Case(specs, held, wanted, frozenset(turned))


def random_tensor(spec: TensorSpec, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(0, 256, (spec.nbytes,), generator=generator, dtype=torch.uint8)
    if spec.dtype == "bool":
        flat = flat % 2
    return flat.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


def cut(full: torch.Tensor, part: LocalBox) -> torch.Tensor:
    """Return the local tensor of a box, by indexing."""
    local = full
    for dim, spans in enumerate(part.box.spans):
        rows = [i for begin, end in spans for i in range(begin, end)]
        local = local.index_select(dim, torch.tensor(rows, dtype=torch.int64))
    if part.strides is None:
        return local.clone(memory_format=torch.contiguous_format)
    return empty(part, full.dtype).copy_(local)


def empty(part: LocalBox, dtype: torch.dtype) -> torch.Tensor:
    """Return memory for a box, in the middle of other memory."""
    shape = part.box.local_shape
    count = math.prod(shape)
    flat = torch.full((count + 7,), 1, dtype=torch.uint8).to(dtype)
    if part.strides is None:
        return flat[3 : 3 + count].view(shape)
    return flat.as_strided(shape, part.strides, 3)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(as_bytes(tensor.contiguous()).numpy().tobytes())


def run(case: Case, plan: ReshardPlan) -> None:
    """Execute a plan, and compare what each receiver gets with the full tensors."""
    full = {spec.name: random_tensor(spec, seed) for seed, spec in enumerate(case.specs)}
    ranks = [
        {spec.name: cut(full[spec.name], case.local("held", spec, rank)) for spec in case.specs}
        for rank in range(len(case.held.members))
    ]
    for receiver in range(len(case.wanted.members)):
        parts = {spec.name: case.local("wanted", spec, receiver) for spec in case.specs}
        targets = {n: empty(part, full[n].dtype) for n, part in parts.items()}
        copied: Counter[str] = Counter()
        for read in plan.reads(receiver):
            assert read.target == parts[read.name]
            assert read.receiver == receiver
            assert all(len(region.loops) <= MAX_LOOPS for region in read.regions)
            copy_regions(read.regions, ranks[read.rank][read.name], targets[read.name])
            copied[read.name] += sum(region.nbytes for region in read.regions)
        for name, target in targets.items():
            assert raw(target) == raw(cut(full[name], parts[name])), name
            # All are right, and there are as many bytes: each was copied once.
            assert copied[name] == target.numel() * target.element_size()


@sizes(quick=300, whole=3000)
def test_every_byte_arrives_once(size: int) -> None:
    @settings(max_examples=size, deadline=None)
    @given(cases())
    def check(case: Case) -> None:
        run(case, case.plan())

    check()


@st.composite
def scattered(draw: st.DrawFn, size: int) -> list[Slice]:
    """Boxes of a vector that together are all of it: spans in any order, often as far apart."""
    owners = draw(st.lists(st.integers(0, 2), min_size=size // 2, max_size=size // 2))
    step = draw(st.integers(1, 3))
    spans: list[list[tuple[int, int]]] = [[], [], []]
    for at in range(0, size, step):
        spans[owners[at // step % len(owners)]].append((at, min(at + step, size)))
    kept = [draw(st.permutations(one)) if draw(st.booleans()) else one for one in spans]
    return [Slice((size,), (tuple(one),)) for one in kept]


@sizes(quick=200, whole=3000)
def test_spans_in_any_order(size: int) -> None:
    @settings(max_examples=size, deadline=None)
    @given(st.integers(2, 40).flatmap(lambda n: st.tuples(scattered(n), scattered(n))))
    def check(sides: tuple[list[Slice], list[Slice]]) -> None:
        held, wanted = sides
        spec = TensorSpec("t", "int16", held[0].shape)
        full = torch.arange(spec.shape[0], dtype=torch.int16)
        plan = made(
            [Holding(rank, spec, box) for rank, box in enumerate(held)],
            [Want(receiver, spec, box) for receiver, box in enumerate(wanted)],
        )
        for receiver, box in enumerate(wanted):
            target = torch.full(box.local_shape, -1, dtype=torch.int16)
            for read in plan.reads(receiver):
                source = cut(full, LocalBox(held[read.rank]))
                copy_regions(read.regions, source, target)
            assert torch.equal(target, cut(full, LocalBox(box)))

    check()


@sizes(quick=60, whole=1000)
def test_a_missing_box_is_named(size: int) -> None:
    @settings(max_examples=size, deadline=None)
    @given(cases(), st.randoms(use_true_random=False))
    def check(case: Case, chance: random.Random) -> None:
        holdings = case.holdings()
        boxes = sorted(
            {(h.spec.name, h.box.spans) for h in holdings if math.prod(h.box.local_shape)}
        )
        assume(boxes)
        name, spans = chance.choice(boxes)
        left = [h for h in holdings if (h.spec.name, h.box.spans) != (name, spans)]
        if any(h.spec.name == name for h in left):
            with pytest.raises(ManifestMismatchError, match=rf"{name}\[.* by receivers? [0-9]"):
                plan_reshard(place(left), place(case.wants()))
        else:
            with pytest.raises(ManifestMismatchError, match=f"1 missing: {name}"):
                plan_reshard(place(left), place(case.wants()))
        run(case, case.plan())

    check()


@sizes(quick=60, whole=1000)
def test_boxes_that_overlap_are_named(size: int) -> None:
    @settings(max_examples=size, deadline=None)
    @given(cases(), st.randoms(use_true_random=False))
    def check(case: Case, chance: random.Random) -> None:
        holdings = case.holdings()
        large = [h for h in holdings if math.prod(h.box.local_shape) > 1]
        assume(large)
        one = chance.choice(large)
        dim = chance.choice([d for d, n in enumerate(one.box.local_shape) if n > 1])
        spans = list(one.box.spans)
        begin, end = spans[dim][0]
        spans[dim] = ((begin, end - 1),) if end - begin > 1 else spans[dim][1:]
        part = Slice(one.box.shape, tuple(spans))
        stranger = Holding(99, one.spec, part)
        equal = [h for h in holdings if h.spec == one.spec and h.box == part]
        assume(not equal)
        with pytest.raises(ConfigError, match=rf"{one.spec.name}\[.*\brank 99\b") as raised:
            plan_reshard(place([*holdings, stranger]), place(case.wants()))
        assert f"rank{'s' if len(same(holdings, one)) > 1 else ''} " in str(raised.value)
        run(case, case.plan())

    check()


def same(holdings: Sequence[Holding], one: Holding) -> set[int]:
    return {h.rank for h in holdings if (h.spec, h.box) == (one.spec, one.box)}


@settings(max_examples=60, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(case: Case, chance: random.Random) -> None:
    holdings, wants = case.holdings(), case.wants()
    first = case.plan()
    chance.shuffle(holdings)
    chance.shuffle(wants)
    held, wanted = place(holdings), place(wants)
    chance.shuffle(held)
    chance.shuffle(wanted)
    again = plan_reshard(held, wanted)
    assert again.digest == first.digest
    for receiver in range(len(case.wanted.members)):
        assert list(again.reads(receiver)) == list(first.reads(receiver))


@settings(max_examples=60, deadline=None)
@given(cases(replicas=False))
def test_a_tensor_is_planned_alone_as_among_others(case: Case) -> None:
    held, wanted = place(case.holdings()), place(case.wants())
    together = plan_reshard(held, wanted)
    for receiver in range(len(case.wanted.members)):
        alone = [
            read
            for pair in zip(held, wanted, strict=True)
            for read in plan_reshard([pair[0]], [pair[1]]).reads(receiver)
        ]
        assert [read[3:] for read in together.reads(receiver)] == [read[3:] for read in alone]


def holding(rank: int, rows: tuple[int, int], *, of: int = 8, name: str = "w") -> Holding:
    return Holding(rank, TensorSpec(name, "float32", (of, 4)), Slice((of, 4), ((rows,), ((0, 4),))))


def want(receiver: int, *, of: int = 8, name: str = "w") -> Want:
    return Want(receiver, TensorSpec(name, "float32", (of, 4)), Slice.whole_of((of, 4)))


def made(holdings: Sequence[Holding], wants: Sequence[Want], **hosts: Any) -> ReshardPlan:
    return plan_reshard(place(holdings), place(wants), **hosts)


def test_another_plan_has_another_digest() -> None:
    plans = [
        made([holding(0, (0, 8))], [want(0)]),
        made([holding(1, (0, 8))], [want(0)]),
        made([holding(0, (0, 8))], [want(1)]),
        made([holding(0, (0, 4)), holding(1, (4, 8))], [want(0)]),
        made([holding(1, (0, 4)), holding(0, (4, 8))], [want(0)]),
        made([holding(0, (0, 9), of=9)], [want(0, of=9)]),
        made([holding(0, (0, 8), name="v")], [want(0, name="v")]),
        made([holding(0, (0, 8))], [want(0)], receiver_hosts={0: "a"}),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)


class TestRegions:
    def only(self, plan: ReshardPlan, receiver: int = 0) -> tuple[Region, ...]:
        (read,) = plan.reads(receiver)
        return read.regions

    def between(self, source: LocalBox, target: LocalBox) -> tuple[Region, ...]:
        spec = TensorSpec("w", "bfloat16", source.box.shape)
        held = [Placed(spec, Boxes(spec.shape, [(0, source)]))]
        return self.only(plan_reshard(held, [Placed(spec, Boxes(spec.shape, [(0, target)]))]))

    def test_equal_boxes_are_one_run(self) -> None:
        whole = LocalBox(Slice.whole_of((4, 6, 8)))
        assert self.between(whole, whole) == (Region(0, 0, 4 * 6 * 8 * 2, ()),)

    def test_rows_are_not_expanded(self) -> None:
        columns = LocalBox(Slice((1000, 8), (((0, 1000),), ((2, 5),))))
        found = self.between(LocalBox(Slice.whole_of((1000, 8))), columns)
        assert found == (Region(4, 0, 6, (Loop(1000, 16, 6),)),)

    def test_equal_distances_are_one_region(self) -> None:
        strided = tuple((begin, begin + 2) for begin in range(0, 60, 6))
        target = LocalBox(Slice((60, 3), (strided, ((0, 3),))))
        found = self.between(LocalBox(Slice.whole_of((60, 3))), target)
        assert found == (Region(0, 0, 12, (Loop(10, 36, 12),)),)

    def test_neighbours_are_one_run(self) -> None:
        source = LocalBox(Slice((9,), (((0, 2), (2, 5), (5, 9)),)))
        target = LocalBox(Slice((9,), (((0, 4), (4, 9)),)))
        assert self.between(source, target) == (Region(0, 0, 18, ()),)

    def test_more_loops_are_several_regions(self) -> None:
        every = (((0, 1), (2, 3)),) * 3
        target = LocalBox(Slice((3, 3, 3, 5), (*every, ((1, 4),))), (2000, 200, 20, 2))
        found = self.between(LocalBox(Slice.whole_of((3, 3, 3, 5))), target)
        assert len(found) == 2
        assert sum(region.runs for region in found) == 2 * 2 * 2 * 3

    def test_a_local_tensor_may_be_a_strided_view(self) -> None:
        spec = TensorSpec("w", "float32", (4, 6))
        memory = torch.arange(100, dtype=torch.float32)
        view = memory.as_strided((4, 6), (13, 2), 5)
        target = torch.zeros(4, 6)
        part = LocalBox(Slice.whole_of((4, 6)), tuple(view.stride()))
        held = [Placed(spec, Boxes(spec.shape, [(0, part)]))]
        wanted = [Placed(spec, Boxes(spec.shape, [(0, LocalBox(part.box))]))]
        copy_regions(self.only(plan_reshard(held, wanted)), view, target)
        assert torch.equal(target, view)

    def test_a_copy_beyond_the_memory_is_refused(self) -> None:
        with pytest.raises(RuntimeError, match="out of bounds"):
            copy_regions([Region(0, 0, 8, (Loop(3, 8, 8),))], torch.zeros(4), torch.zeros(6))


class TestOwners:
    def test_replicas_share_the_work(self) -> None:
        names = [f"layers.{i}.w" for i in range(30)]
        holdings = [holding(rank, (0, 8), name=name) for rank in (3, 5, 9) for name in names]
        plan = made(holdings, [want(0, name=name) for name in names])
        assert plan.totals.nbytes == {(rank, 0): 10 * 128 for rank in (3, 5, 9)}

    def test_replicas_of_unequal_tensors_have_nearly_equal_bytes(self) -> None:
        counts = {f"t{i}": 1 + (i * 7) % 40 for i in range(50)}
        holdings = [holding(r, (0, n), of=n, name=t) for t, n in counts.items() for r in range(4)]
        plan = made(holdings, [want(0, of=n, name=t) for t, n in counts.items()])
        found = plan.totals.nbytes.values()
        assert max(found) - min(found) <= 40 * 16

    @pytest.mark.parametrize(
        ("lengths", "ranks", "most"),
        [
            ([9, 7, 5], 2, 12),
            ([94, 47, 47, 47, 47], 4, 94),
            ([71, 35, 35, 35, 35], 3, 71),
            ([29, 25, 29, 25, 29, 25, 25, 87, 29], 4, 87),
            ([20, 55, 43, 20, 43, 43, 20], 4, 63),
        ],
    )
    def test_no_replica_has_much_more_than_another(
        self, lengths: list[int], ranks: int, most: int
    ) -> None:
        """Many small tensors of one shape weigh less than one large one: they have many owners."""
        specs = [TensorSpec(f"t{i}", "uint8", (n,)) for i, n in enumerate(lengths)]
        whole = [Slice.whole_of(spec.shape) for spec in specs]
        held = [Holding(r, s, b) for r in range(ranks) for s, b in zip(specs, whole, strict=True)]
        plan = made(held, [Want(0, s, b) for s, b in zip(specs, whole, strict=True)])
        nbytes: Counter[int] = Counter()
        for read in plan.reads(0):
            nbytes[read.rank] += sum(region.nbytes for region in read.regions)
        assert sum(nbytes.values()) == sum(lengths)
        assert max(nbytes.values()) == most

    def test_a_rank_of_the_receivers_host_is_read(self) -> None:
        holdings = [holding(rank, (0, 8)) for rank in range(4)]
        plan = made(
            holdings,
            [want(receiver) for receiver in range(3)],
            rank_hosts={0: "a", 1: "a", 2: "b", 3: "c"},
            receiver_hosts={0: "b", 1: "c", 2: "d"},
        )
        ranks = {r: read.rank for r in range(3) for read in plan.reads(r)}
        assert (ranks[0], ranks[1]) == (2, 3)
        assert ranks[2] in (0, 1)

    def test_the_receivers_of_a_host_read_a_box_from_one_rank(self) -> None:
        holdings = [holding(rank, (0, 8)) for rank in range(4)]
        hosts = {receiver: f"host{receiver // 4}" for receiver in range(8)}
        plan = made(holdings, [want(r) for r in range(8)], receiver_hosts=hosts)
        by_host: dict[str, set[int]] = defaultdict(set)
        for receiver, host in hosts.items():
            by_host[host] |= {read.rank for read in plan.reads(receiver)}
        assert [len(ranks) for ranks in by_host.values()] == [1, 1]
        assert by_host["host0"] != by_host["host1"]

    def test_ranks_that_have_much_to_send_are_spared(self) -> None:
        holdings = [holding(0, (0, 80), of=80, name="large")]
        holdings += [holding(rank, (0, 8), name="small") for rank in (0, 1)]
        plan = made(holdings, [want(0, of=80, name="large"), want(0, name="small")])
        assert {read.name: read.rank for read in plan.reads(0)} == {"large": 0, "small": 1}


class TestRefused:
    def test_a_hole(self) -> None:
        holdings = [holding(0, (0, 3)), holding(2, (5, 8))]
        with pytest.raises(ManifestMismatchError) as raised:
            made(holdings, [want(7), want(9)])
        told = "w[3:5, 0:4] is wanted by receivers 7, 9 and held by none of ranks 0, 2"
        assert raised.value.mismatched == (told,)
        assert told in str(raised.value)

    def test_an_overlap(self) -> None:
        holdings = [holding(0, (0, 5)), holding(1, (4, 8)), holding(3, (4, 8))]
        with pytest.raises(ConfigError) as raised:
            made(holdings, [want(0)])
        told = "w[4:5, 0:4] is held by rank 0 as [0:5, 0:4] and ranks 1, 3 as [4:8, 0:4]"
        assert told in str(raised.value)

    def test_experts_that_every_rank_counts_from_zero(self) -> None:
        """Two ranks with two experts each, both by the names of the first two."""
        names = [f"experts.{i}.w" for i in range(4)]
        holdings = [holding(rank, (0, 8), name=name) for rank in (0, 1) for name in names[:2]]
        with pytest.raises(ManifestMismatchError) as raised:
            made(holdings, [want(0, name=name) for name in names])
        assert raised.value.missing == ("experts.2.w", "experts.3.w")

    def test_experts_that_every_rank_counts_from_zero_in_a_stack(self) -> None:
        spec = TensorSpec("experts", "float32", (4, 8))
        half = Slice((4, 8), (((0, 2),), ((0, 8),)))
        holdings = [Holding(rank, spec, half) for rank in (0, 1)]
        with pytest.raises(ManifestMismatchError, match=r"experts\[2:4, 0:8\] .* ranks 0, 1"):
            made(holdings, [Want(0, spec, Slice.whole_of((4, 8)))])

    def test_all_names_at_once(self) -> None:
        holdings = [holding(0, (0, 4), name=f"w{i}") for i in range(12)]
        with pytest.raises(ManifestMismatchError, match=r"^12 tensors have .* and 2 more;"):
            made(holdings, [want(0, name=f"w{i}") for i in range(12)])

    def test_ranks_with_several_shapes(self) -> None:
        holdings = [holding(0, (0, 8)), holding(1, (0, 8)), holding(2, (0, 9), of=9)]
        with pytest.raises(ManifestMismatchError) as raised:
            made(holdings, [want(0)])
        told = "w: float32[8, 4] (ranks 0, 1) and float32[9, 4] (rank 2)"
        assert raised.value.mismatched == (told,)

    def test_receivers_with_several_dtypes(self) -> None:
        wants = [want(0), want(1)._replace(spec=TensorSpec("w", "bfloat16", (8, 4)))]
        with pytest.raises(ManifestMismatchError, match=r"bfloat16\[8, 4\] \(receiver 1\)"):
            made([holding(0, (0, 8))], wants)

    @pytest.mark.parametrize(
        "spec", [TensorSpec("w", "float16", (8, 4)), TensorSpec("w", "float32", (4, 8))]
    )
    def test_other_dtypes_and_shapes(self, spec: TensorSpec) -> None:
        with pytest.raises(ManifestMismatchError) as raised:
            made([holding(0, (0, 8))], [Want(0, spec, Slice.whole_of(spec.shape))])
        assert raised.value.mismatched == (f"w: offered float32[8, 4], wanted {spec}",)

    def test_names_that_one_side_lacks(self) -> None:
        with pytest.raises(ManifestMismatchError, match="removeprefix") as raised:
            made([holding(0, (0, 8), name="model.w")], [want(0)])
        assert (raised.value.missing, raised.value.unexpected) == (("w",), ("model.w",))

    @pytest.mark.parametrize(
        ("spans", "strides"),
        [
            ((((0, 9),), ((0, 4),)), None),
            ((((4, 3),), ((0, 4),)), None),
            ((((0, 4), (3, 8)), ((0, 4),)), None),
            ((((-1, 4),), ((0, 4),)), None),
            ((((0, 8),),), None),
            ((((0, 8),), ((0, 4),)), (4,)),
            ((((0, 8),), ((0, 4),)), (0, 1)),
            ((((0, 8),), ((0, 4),)), (3, 1)),
            ((((0, 8),), ((0, 4),)), (-4, 1)),
        ],
    )
    def test_boxes_that_are_none(self, spans: Any, strides: tuple[int, ...] | None) -> None:
        wrong = holding(6, (0, 8))._replace(box=Slice((8, 4), spans), strides=strides)
        with pytest.raises(ConfigError, match=r"^w: .*\b6\b"):
            made([wrong], [want(0)])

    def test_partial_sums(self) -> None:
        with pytest.raises(ConfigError, match=r"w: Partial\(sum\) is partial sums"):
            Slicer().slice_at("w", (8, 4), (2,), [Partial()], (1,))

    @pytest.mark.parametrize("coordinate", [(2,), (-1,), (0, 0), ()])
    def test_members_that_a_mesh_lacks(self, coordinate: tuple[int, ...]) -> None:
        with pytest.raises(ConfigError, match=r"^w: a mesh of \[2\] has no member at"):
            Slicer().slice_at("w", (8, 4), (2,), [Shard(0)], coordinate)

    def test_dimensions_that_a_tensor_lacks(self) -> None:
        with pytest.raises(ConfigError, match=r"^w: Shard\(dim=2\) splits a dimension"):
            Slicer().slice_at("w", (8, 4), (2,), [Shard(2)], (0,))


def test_a_rank_that_holds_nothing_is_read_by_nobody() -> None:
    spec = TensorSpec("w", "float32", (3,))
    boxes = [Slicer().slice_at("w", (3,), (5,), [Shard(0)], (rank,)) for rank in range(5)]
    plan = made(
        [Holding(r, spec, box) for r, box in enumerate(boxes)],
        [Want(0, spec, Slice.whole_of((3,)))],
    )
    assert [read.rank for read in plan.reads(0)] == [0, 1, 2]


def test_names_of_experts_are_parts_of_the_stack() -> None:
    """A trainer of three ranks holds a stack; receivers hold its experts one by one."""
    shape, columns = (4, 6, 5), 5
    spec = TensorSpec("experts.gate_up_proj", "float32", shape)
    full = random_tensor(spec, 3)
    stacks = [
        LocalBox(Slicer().slice_at("e", shape, (3,), [Shard(0)], (rank,))) for rank in range(3)
    ]
    experts = {
        (expert, row): LocalBox(inside(Slice.whole_of((3, columns)), shape, (expert, row, 0)))
        for expert in range(4)
        for row in (0, 3)
    }
    held = [Placed(spec, Boxes(shape, enumerate(stacks)))]
    wanted = [Placed(spec, Boxes(shape, ((k[0] // 2, part) for k, part in experts.items())))]
    targets = {part: torch.zeros(3, columns) for part in experts.values()}
    plan = plan_reshard(held, wanted)
    for receiver in range(2):
        for read in plan.reads(receiver):
            copy_regions(read.regions, cut(full, stacks[read.rank]), targets[read.target])
    for (expert, row), part in experts.items():
        assert torch.equal(targets[part], full[expert, row : row + 3])


def test_tensors_that_are_placed_alike_share_a_pattern() -> None:
    names = [f"layers.{i}.w" for i in range(500)]
    holdings = [holding(r, (4 * r, 4 * r + 4), name=name) for r in range(2) for name in names]
    plan = made(holdings, [want(0, name=name) for name in names])
    assert (len(plan.patterns), len(plan.routes), len(plan.entries)) == (1, 1, 500)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_slices_of_meshes_without_a_group_are_those_of_torch(case: Case) -> None:
    for rank, coordinate in enumerate(case.held.members):
        with member(rank, case.held.mesh) as mesh:
            for spec in case.specs:
                placements = case.held.placements[spec.name]
                full = torch.arange(math.prod(spec.shape)).view(spec.shape)
                local = local_of(shard(full, mesh, *placements))
                box = Slicer().slice_at("t", spec.shape, case.held.mesh, placements, coordinate)
                assert torch.equal(cut(full, LocalBox(box)), local)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((256,), (Shard(0),)),
        ((32, 8), (_StridedShard(0, split_factor=8), Shard(0))),
        ((32, 8), (Shard(0), Shard(1))),
        ((2, 128), (Replicate(), Shard(0))),
    ],
)
def test_256_ranks_in_one_process(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    """Uneven: 1,187 rows, as of a vocabulary, and 13 columns."""
    spec = TensorSpec("w", "int32", (1187, 13))
    full = random_tensor(spec, 1)
    slicer = Slicer()
    at = list(product(*map(range, mesh_shape)))
    parts = [LocalBox(slicer.slice_at("w", spec.shape, mesh_shape, placements, c)) for c in at]
    for rank in (0, 1, 7, 100, 255):
        with member(rank, mesh_shape) as mesh:
            local = cut(full, parts[rank])
            tensor = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
            )
            assert Slicer().slice_of("w", tensor) == parts[rank].box
            assert torch.equal(local_of(shard(full, mesh, *placements)), local)
    wanted = [LocalBox(slicer.slice_at("w", spec.shape, (8,), [Shard(0)], (r,))) for r in range(8)]
    plan = plan_reshard(
        [Placed(spec, Boxes(spec.shape, enumerate(parts)))],
        [Placed(spec, Boxes(spec.shape, enumerate(wanted)))],
    )
    for receiver, part in enumerate(wanted):
        target = torch.zeros(part.box.local_shape, dtype=full.dtype)
        for read in plan.reads(receiver):
            copy_regions(read.regions, cut(full, parts[read.rank]), target)
        assert torch.equal(target, cut(full, part))


GLOO: dict[str, tuple[tuple[int, ...], tuple[Placement, ...], tuple[Placement, ...]]] = {
    "rows": ((11, 6), (Shard(0),), (Shard(0), Replicate())),
    "uneven": ((5, 7), (Shard(1),), (_StridedShard(0, split_factor=2), Shard(0))),
    "columns": ((6, 9), (_StridedShard(1, split_factor=3),), (Shard(0), Shard(1))),
    "norm": ((7,), (Replicate(),), (Replicate(), Replicate())),
    "few": ((1, 3), (Shard(0),), (Shard(0), Shard(0))),
    "stack": ((4, 5, 6), (Shard(0),), (_StridedShard(1, split_factor=2), Shard(2))),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shards_of_real_groups_become_those_of_another_mesh(ranks: int) -> None:
    """Three receivers get shards of other dimensions, as cut from `full_tensor()`."""
    with crew(ranks) as made_ranks:
        saved = made_ranks.run(_shards, ranks)
    slicer = Slicer()
    mesh = mesh_of(ranks)
    at = list(product(*map(range, mesh)))
    holdings, wants = [], []
    for name, (shape, *placements) in GLOO.items():
        spec = TensorSpec(name, "int64", shape)
        for rank in range(ranks):
            box = slicer.slice_at(name, shape, mesh, placements[len(mesh) - 1], at[rank])
            holdings.append(Holding(rank, spec, box))
        for receiver in range(3):
            box = slicer.slice_at(name, shape, (3,), [Shard(len(shape) - 1)], (receiver,))
            wants.append(Want(receiver, spec, box))
    plan = made(holdings, wants)
    for one in wants:
        target = torch.zeros(one.box.local_shape, dtype=torch.int64)
        for read in plan.reads(one.receiver):
            if read.name == one.spec.name:
                local, _ = saved[read.rank][read.name]
                copy_regions(read.regions, torch.from_numpy(local), target)
        _, full = saved[0][one.spec.name]
        assert torch.equal(target, cut(torch.from_numpy(full), LocalBox(one.box)))


def mesh_of(ranks: int) -> tuple[int, ...]:
    return (2, 2) if ranks == 4 else (ranks,)


def _shards(_: int, ranks: int) -> dict[str, tuple[Any, Any]]:
    """Return the local tensors of this rank, and the full ones."""
    mesh = init_device_mesh("cpu", mesh_of(ranks))
    found = {}
    for name, (shape, *placements) in GLOO.items():
        tensor = shard(torch.arange(math.prod(shape)).view(shape), mesh, *placements[mesh.ndim - 1])
        local = local_of(tensor).contiguous()
        found[name] = (local.numpy(), tensor.full_tensor().numpy())
    return found
