"""The streams of several ranks: their boxes arrive where they belong, and are proved to be all."""

from __future__ import annotations

import math
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.soak.sizes import sizes
from tests.weights.test_reshard import Case, cases, cut, random_tensor
from weightsync.backends.ipc.memory import held_tensors, register
from weightsync.backends.rank_streams import parts_in
from weightsync.errors import ConfigError, ManifestMismatchError, ProtocolError, TransferError
from weightsync.ranks.replicas import ReplicaCheck
from weightsync.ranks.streams import StreamSource, encode_held, plan_streams
from weightsync.ranks.update_source import ModelComparison
from weightsync.shm.shared_stream import SharedStream
from weightsync.specs import Manifest, TensorSpec
from weightsync.tensors import as_bytes
from weightsync.weights.copying.checksums import SumsCompared, compare_sums, join_parts
from weightsync.weights.copying.copy_plan import Memory, Share, UnitCompiler
from weightsync.weights.copying.fingerprint import parts_of, xxh3
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.copying.rank_streams import (
    RankStream,
    StreamPlaces,
    check_coverage,
    cut_box,
    describe_stream,
    describe_wants,
    stream_of,
    wants_of,
)
from weightsync.weights.copying.reshard import LocalBox
from weightsync.weights.copying.shards import Slice, Span
from weightsync.weights.sources.holdings import Holdings
from weightsync.wire.messages import TensorPart
from weightsync.wire.offers import BoxInfo, WantsInfo


def contiguous(case: Case) -> Case:
    """The same case with contiguous local tensors: sources and sinks have no others."""
    return Case(case.specs, case.held, case.wanted, frozenset())


def streams_of(
    case: Case, *, cut_for: bool = False
) -> tuple[list[RankStream], list[dict[str, torch.Tensor]]]:
    """The stream of each rank, and its boxes, as their source reads them."""
    model = Manifest(case.specs)
    full = {spec.name: random_tensor(spec, seed) for seed, spec in enumerate(case.specs)}
    held = []
    for rank in range(len(case.held.members)):
        parts = [case.local("held", spec, rank) for spec in case.specs]
        tensors = [cut(full[spec.name], part) for spec, part in zip(case.specs, parts, strict=True)]
        names = [spec.name for spec in case.specs]
        held.append(Holdings(names, [part.box for part in parts], partial(list, tensors)))
    plan = plan_streams(model, [encode_held(one, model, "HOST-1") for one in held])
    assert plan.why_not == ""
    if cut_for:
        plan = plan.cut([wants_of_receiver(case, r) for r in range(len(case.wanted.members))])
    read = [
        dict(StreamSource(mock.Mock(), plan, rank, one).tensors()) for rank, one in enumerate(held)
    ]
    return list(plan.streams), read


def wants_of_receiver(case: Case, receiver: int) -> WantsInfo:
    boxes = [case.local("wanted", spec, receiver).box for spec in case.specs]
    return describe_wants(list(enumerate(boxes)))


def copy(
    stream: RankStream, places: StreamPlaces, boxes: dict[str, torch.Tensor], unit_nbytes: int
) -> int:
    """Copy a stream to its places, unit by unit, and verify each as a receiver does."""
    layout = StreamLayout(stream.manifest, unit_nbytes=unit_nbytes)
    flats = [as_bytes(boxes[spec.name].contiguous()) for spec in stream.manifest.specs]
    source = Memory(flats)
    there = UnitCompiler(layout, places.memory, source)
    here = UnitCompiler(layout, source, source)
    read = 0
    for unit in layout.units:
        if not there.takes(unit):
            continue
        compiled = there.compile(unit)
        compiled.copy()
        assert compiled.fingerprint() == here.compile(unit).fingerprint()
        read += sum(part.nbytes for part in layout.slices(unit.start, unit.stop))
    return read


def placed_nbytes(memory: Memory) -> int:
    """Bytes of a stream that are copied to its places."""
    if memory.shares is None:
        return sum(flat.numel() for flat in memory.tensors)
    return sum(b.width * b.height for share in memory.shares for b in share.blocks)


@sizes(quick=250, whole=3000)
def test_every_byte_arrives_in_modules_and_shards(size: int) -> None:
    @settings(max_examples=size, deadline=None)
    @given(cases(), st.sampled_from([64, 128, 1 << 19]), st.booleans())
    def check(case: Case, unit_nbytes: int, cut_for: bool) -> None:
        case = contiguous(case)
        streams, boxes = streams_of(case, cut_for=cut_for)
        model = Manifest(case.specs)
        check_coverage(model, streams)
        assert sum(stream.nbytes for stream in streams) == model.nbytes
        full = {spec.name: random_tensor(spec, seed) for seed, spec in enumerate(case.specs)}
        # Whole tensors, as a module or the arena of a hook has them.
        whole = [torch.zeros(spec.nbytes, dtype=torch.uint8) for spec in case.specs]
        for stream, own in zip(streams, boxes, strict=True):
            copy(stream, StreamPlaces(stream, Memory(whole)), own, unit_nbytes)
        for spec, flat in zip(case.specs, whole, strict=True):
            assert torch.equal(flat, as_bytes(full[spec.name]))
        sent = list(map(sums_of_rank, streams, boxes))
        every = {spec.name for spec in case.specs}
        held = parts_in(model, Memory(whole))
        assert compare_sums(sent, {"whole": held}) == SumsCompared({}, every, set())
        workers = []
        # Shards of another mesh.
        for receiver in range(len(case.wanted.members)):
            parts = [case.local("wanted", spec, receiver).box for spec in case.specs]
            flats = [
                torch.zeros(math.prod(part.local_shape) * full[s.name].itemsize, dtype=torch.uint8)
                for part, s in zip(parts, case.specs, strict=True)
            ]
            shares = [
                Share(i, part.blocks(full[spec.name].itemsize), part)
                for i, (part, spec) in enumerate(zip(parts, case.specs, strict=True))
            ]
            copied = read = 0
            for stream, own in zip(streams, boxes, strict=True):
                places = StreamPlaces(stream, Memory(flats, shares=shares))
                read += copy(stream, places, own, unit_nbytes)
                copied += placed_nbytes(places.memory)
            assert copied == sum(flat.numel() for flat in flats)
            if cut_for and unit_nbytes == 64 and not too_many_cuts(case):
                assert read == copied  # a box begins a unit of its own
            for spec, part, flat in zip(case.specs, parts, flats, strict=True):
                wanted = cut(full[spec.name], LocalBox(part))
                assert torch.equal(flat, as_bytes(wanted))
            workers.append(parts_in(model, Memory(flats, shares=shares)))
        found = compare_sums(sent, {"shards": join_parts(workers), "whole": held})
        assert found == SumsCompared({}, every, set())

    check()


def test_the_sums_of_a_memory_end_with_its_update() -> None:
    model = Manifest(tuple(TensorSpec(name, "uint8", (8,)) for name in "abc"))
    memory = Memory([torch.zeros(8, dtype=torch.uint8) for _ in model.specs])
    calls = iter([None, TransferError("aborted")])

    def check() -> None:
        if (error := next(calls)) is not None:
            raise error

    with pytest.raises(TransferError, match="aborted"):
        parts_in(model, memory, check)
    assert not list(calls)


def sums_of_rank(stream: RankStream, boxes: dict[str, torch.Tensor]) -> dict[str, list[TensorPart]]:
    """What a rank adds up of the boxes that it sends."""
    placed = zip(stream.manifest.specs, stream.indices, stream.boxes, strict=True)
    return parts_of(
        (
            stream.model.specs[index].name,
            as_bytes(boxes[spec.name].contiguous()),
            box,
            boxes[spec.name].element_size(),
        )
        for spec, index, box in placed
    )


def too_many_cuts(case: Case) -> bool:
    """Whether a box has more parts than a box is cut into."""
    for spec in case.specs:
        wants = [case.local("wanted", spec, r).box for r in range(len(case.wanted.members))]
        for rank in range(len(case.held.members)):
            box = case.local("held", spec, rank).box
            parts = cut_box(box, wants)
            if len(parts) == 1 and parts[0][0] == box and len(set(wants)) > 1:
                return True
    return False


def two_halves(*spans: Span, shape: tuple[int, ...] = (4, 2)) -> tuple[Manifest, list[RankStream]]:
    model = Manifest((TensorSpec("w", "float32", shape),))
    boxes = [Slice(shape, ((span,), ((0, 2),))) for span in spans]
    return model, [RankStream(rank, model, [0], [box]) for rank, box in enumerate(boxes)]


def test_a_hole_is_refused() -> None:
    model, streams = two_halves((0, 2), (3, 4))
    with pytest.raises(ManifestMismatchError, match=r"w\[2:3, 0:2\].*held by none of ranks 0, 1"):
        check_coverage(model, streams)


def test_an_overlap_is_refused() -> None:
    model, streams = two_halves((0, 3), (2, 4))
    with pytest.raises(ConfigError, match=r"w\[2:3, 0:2\] is held by rank 0.*and rank 1"):
        check_coverage(model, streams)


def test_a_box_that_two_ranks_send_is_refused() -> None:
    model, streams = two_halves((0, 2), (2, 4), (2, 4))
    with pytest.raises(ConfigError, match="w: ranks 1 and 2 send the same box"):
        check_coverage(model, streams)


def test_a_rank_with_two_streams_is_refused() -> None:
    model = Manifest((TensorSpec("w", "float32", (2,)),))
    streams = [RankStream(1, model, [0], [Slice.whole_of((2,))]) for _ in range(2)]
    with pytest.raises(ConfigError, match="rank 1 sends 2 streams"):
        check_coverage(model, streams)


@pytest.mark.parametrize("shape", [(8,), (9, 9)])
def test_wants_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    model = Manifest((TensorSpec("w", "float32", (4, 2)),))
    wants = describe_wants([(0, Slice.whole_of(shape))])
    with pytest.raises(ProtocolError, match=r"a receiver: w: a box of .* is none of float32"):
        wants_of(wants, model, "a receiver")


def test_a_plan_says_why_there_is_none() -> None:
    model = Manifest((TensorSpec("w", "float32", (4, 2)),))
    held = Holdings(["w"], [Slice((4, 2), (((0, 2),), ((0, 2),)))], lambda: [torch.zeros(2, 2)])
    silent = encode_held(None, model, "HOST-1")
    known = encode_held(held, model, "HOST-1")
    rest = Holdings(["w"], [Slice((4, 2), (((2, 4),), ((0, 2),)))], lambda: [torch.zeros(2, 2)])
    elsewhere = encode_held(rest, model, "HOST-2")
    assert plan_streams(model, [known, silent]).why_not == (
        "rank 1: its source only makes full tensors"
    )
    plan = plan_streams(model, [known, elsewhere])
    assert (plan.why_not, plan.hosts, plan.has_replicas) == ("", [0, 1], False)
    assert plan_streams(model, [known, elsewhere, known]).has_replicas
    assert "elements that no rank holds" in plan_streams(model, [known, known]).why_not


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("replicas", [False, True])
def test_boxes_that_one_rank_holds_are_not_read_for_a_comparison(
    streams: bool, replicas: bool
) -> None:
    two: Any = SimpleNamespace(size=2)
    nothing: Any = None
    comparison = ModelComparison(ReplicaCheck(two, "always"), nothing, None, ["w"])
    comparison.sends_streams, comparison.has_replicas = streams, replicas
    assert comparison.is_next is (replicas or not streams)


def test_what_several_ranks_make_in_their_iterations_is_gathered() -> None:
    """They may wait for each other; tensors of one rank alone, and kept ones, are sent as held."""
    shape = (4, 2)
    model = Manifest(tuple(TensorSpec(name, "float32", shape) for name in ("a", "b")))

    def told(*names: str, may_wait: bool = True) -> bytes:
        boxes = [Slice.whole_of(shape)] * len(names)
        held = Holdings(names, boxes, list, stays=not may_wait, may_wait=may_wait)
        return encode_held(held, model, "HOST-1")

    why = "b: several ranks make it in an iteration, and may wait for each other"
    assert plan_streams(model, [told("a", "b"), told("b")]).why_not == why
    assert plan_streams(model, [told("a"), told("b")]).why_not == ""
    kept = [told("a", "b", may_wait=False), told("a", "b", may_wait=False)]
    assert plan_streams(model, kept).why_not == ""


def damaged(model: Manifest, **fields: object) -> object:
    _, streams = two_halves((0, 2), (2, 4))
    info = describe_stream(streams[0], "shared_memory", None)
    return stream_of(structs.replace(info, **fields), model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"box": []}, "rank 0 lists 1 boxes and places 0"),
        ({"tensors": [1]}, "rank 0 lists a box of no tensor"),
        ({"box": [1]}, "rank 0 lists a box of no tensor"),
        ({"boxes": [{"shape": [4, 2], "spans": [[(0, 5)], [(0, 2)]]}]}, "of a tensor of"),
        ({"boxes": [{"shape": [4, 2], "spans": [[(2, 1)], [(0, 2)]]}]}, "of a tensor of"),
        ({"boxes": [{"shape": [4, 2], "spans": [[(0, 2)]]}]}, "of a tensor of"),
        ({"boxes": [{"shape": [2, 4], "spans": [[(0, 2)], [(0, 4)]]}]}, "is none of float32"),
    ],
)
def test_a_damaged_stream_is_refused(fields: dict[str, object], message: str) -> None:
    model, _ = two_halves((0, 2), (2, 4))
    if "boxes" in fields:
        fields = {"boxes": msgspec.convert(fields["boxes"], list[BoxInfo])}
    with pytest.raises(ProtocolError, match=message):
        damaged(model, **fields)


def test_a_stream_survives_the_wire() -> None:
    model, streams = two_halves((0, 2), (2, 4))
    again = stream_of(describe_stream(streams[1], "shared_memory", None), model)
    assert (again.rank, again.manifest, list(again.boxes)) == (
        1,
        streams[1].manifest,
        list(streams[1].boxes),
    )


def test_whole_units_are_read_back_where_they_are_written() -> None:
    """A unit with one contiguous place has the fingerprint of its target, not of what arrived."""
    _, streams = two_halves((0, 2), (2, 4))
    target = torch.zeros(32, dtype=torch.uint8)
    share = Share(0, Slice.whole_of((4, 2)).blocks(4), Slice.whole_of((4, 2)))
    places = StreamPlaces(streams[1], Memory([target], shares=[share]))
    layout = StreamLayout(streams[1].manifest)
    source = Memory([torch.ones(16, dtype=torch.uint8)])
    unit = UnitCompiler(layout, places.memory, source).compile(layout.units[0])
    unit.copy()
    before = unit.fingerprint()
    assert before == xxh3(memoryview(b"\1" * 16 + b"\0" * 48))
    target[20] = 7
    assert unit.fingerprint() != before


class Fused:
    """A source of one rank whose parameters each hold several tensors."""

    def __init__(self) -> None:
        self.rows = torch.nn.Parameter(torch.arange(24.0).view(6, 4))
        self.stack = torch.nn.Parameter(torch.arange(24.0, 36.0).view(2, 2, 3))

    def parts(self) -> list[torch.Tensor]:
        rows, stack = self.rows.detach(), self.stack.detach()
        return [rows[:2], rows[2:5], rows[5:, :2], rows[:2, 1:3], *stack.mT, stack[1]]

    def bases(self) -> list[torch.Tensor]:
        return [*[self.rows] * 4, *[self.stack] * 3]

    def stream(self) -> StreamSource:
        parts = self.parts()
        names = [f"layers.{i}" for i in range(len(parts))]
        specs = [
            TensorSpec(n, "float32", tuple(t.shape)) for n, t in zip(names, parts, strict=True)
        ]
        model = Manifest(tuple(specs))
        boxes = [Slice.whole_of(spec.shape) for spec in specs]
        held = Holdings(names, boxes, self.parts, bases=self.bases)
        plan = plan_streams(model, [encode_held(held, model, "HOST-1")])
        return StreamSource(mock.Mock(), plan, 0, held)


def test_views_are_read_where_the_tensors_that_hold_them_are() -> None:
    """These move into shared memory, though an update uses views of them at that time."""
    fused = Fused()
    source = fused.stream()
    layout = StreamLayout(source.manifest)
    in_use = source.stable_tensors()
    with closing(register(layout, source, in_use, None, adopt=True)) as memory:
        assert isinstance(memory, SharedStream)
        held = held_tensors(memory, source)
        assert held is not None
        memory.adopt(held)
        begin, end = memory.segment.address, memory.segment.address + memory.segment.nbytes
        for step in range(3):
            with torch.no_grad():
                fused.rows.add_(step)
                fused.stack.add_(step)
            held = held_tensors(memory, source)
            assert held is not None
            memory.refresh(held)
            assert all(begin <= p.data_ptr() < end for p in (fused.rows, fused.stack))
            for flat, part in zip(memory.tensors, fused.parts(), strict=True):
                assert torch.equal(flat, as_bytes(part.contiguous()))
        # What is no run of bytes is copied for each update: two columns, and what is transposed.
        assert memory.copied_nbytes == 4 * (2 * 2 + 2 * 6)
        assert in_use is not None
        assert begin <= in_use[0].data_ptr() < end  # those in use went along


def test_a_parameter_with_other_memory_is_moved_again() -> None:
    fused = Fused()
    source = fused.stream()
    layout = StreamLayout(source.manifest)
    with closing(register(layout, source, source.stable_tensors(), None, adopt=True)) as memory:
        assert isinstance(memory, SharedStream)
        for value in (1.0, 2.0):
            fused.rows.data = torch.full((6, 4), value)
            held = held_tensors(memory, source)
            assert held is not None
            assert not memory.occupied(held)
            memory.refresh(held)
            assert memory.tensors[1].view(torch.float32).eq(value).all()
            assert memory.segment.address <= fused.rows.data_ptr()
