"""What ranks tell each other of their holdings is what they hold, in kilobytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from tests.soak.sizes import sizes
from weightsync.cli.models import CONFIGS, published
from weightsync.errors import ConfigError, ManifestMismatchError, ProtocolError
from weightsync.specs import Manifest, TensorSpec
from weightsync.weights.copying.reshard import Boxes, Holding, place
from weightsync.weights.copying.shards import Slice, Slicer
from weightsync.weights.sources.exchange import (
    RankHoldings,
    decode_holdings,
    encode_holdings,
    gathered_from,
    placed_from,
)
from weightsync.weights.sources.holdings import Holdings

Held = list[tuple[str, Slice]]


def manifest_of(*shapes: tuple[int, ...]) -> Manifest:
    return Manifest(tuple(TensorSpec(f"t{i}", "float32", s) for i, s in enumerate(shapes)))


def holdings(held: Held, gathered: dict[str, str] | None = None) -> Holdings:
    return Holdings([n for n, _ in held], [b for _, b in held], list, gathered=gathered)


def told(manifest: Manifest, ranks: Sequence[Held]) -> dict[str, Boxes]:
    passed = [decode_holdings(encode_holdings(holdings(held), manifest)) for held in ranks]
    return {one.spec.name: one.boxes for one in placed_from(manifest, passed)}


def rows(shape: tuple[int, ...], begin: int, end: int) -> Slice:
    return Slice(shape, (((begin, end),), *(((0, size),) for size in shape[1:])))


@st.composite
def models(draw: st.DrawFn) -> tuple[Manifest, list[Held]]:
    """Up to five ranks that hold none, one or more boxes of each tensor, in any order."""
    shapes = draw(st.lists(st.sampled_from([(4,), (4, 2), (6, 2), ()]), min_size=1, max_size=12))
    manifest = manifest_of(*shapes)
    count = draw(st.integers(1, 5))
    ranks = []
    for rank in range(count):
        held = []
        for spec in manifest.specs:
            whole = Slice.whole_of(spec.shape)
            choices = [whole]
            if spec.shape:
                choices = [whole, rows(spec.shape, 0, 2), rows(spec.shape, 2, 4)]
                choices.append(rows(spec.shape, rank % 2, rank % 2))
            boxes = draw(st.lists(st.sampled_from(choices), max_size=3, unique=True))
            held += [(spec.name, box) for box in boxes]
        ranks.append(draw(st.permutations(held)))
    return manifest, ranks


@sizes(quick=150, whole=3000)
def test_boxes_are_those_of_all_ranks(size: int) -> None:
    @settings(max_examples=size, deadline=None)
    @given(models())
    def check(model: tuple[Manifest, list[Held]]) -> None:
        manifest, ranks = model
        specs = {spec.name: spec for spec in manifest.specs}
        listed = [
            Holding(rank, specs[name], box) for rank, held in enumerate(ranks) for name, box in held
        ]
        expected = {name: Boxes(spec.shape, ()) for name, spec in specs.items()}
        expected |= {one.spec.name: one.boxes for one in place(listed)}
        assert told(manifest, ranks) == expected

    check()


def test_tensors_that_are_placed_alike_share_one_object() -> None:
    manifest = manifest_of(*[(4, 2), (6,), (4, 2)] * 5)
    halves = [
        [(spec.name, rows(spec.shape, at, at + 2)) for spec in manifest.specs] for at in (0, 2)
    ]
    found = told(manifest, halves)
    assert len({id(boxes) for boxes in found.values()}) == 2
    assert found["t0"] is found["t2"] is found["t14"]


@pytest.mark.parametrize(
    ("mesh", "placements"), [((256,), (Shard(0),)), ((2, 128), (Replicate(), Shard(0)))]
)
def test_256_ranks_of_a_large_model_tell_kilobytes(
    mesh: tuple[int, ...], placements: Sequence[Shard | Replicate]
) -> None:
    """36,945 tensors: one megabyte for all ranks together."""
    manifest = Manifest(tuple(published(CONFIGS["qwen3-235b"])))
    names = [spec.name for spec in manifest.specs]
    shapes = list(dict.fromkeys(spec.shape for spec in manifest.specs))
    slicer = Slicer()
    passed: list[RankHoldings] = []
    some: dict[int, list[Slice]] = {}
    for rank, at in enumerate(product(*map(range, mesh))):
        boxes = [slicer.slice_at("t", shape, mesh, placements, at) for shape in shapes]
        if rank in (0, 100, 255):
            by_shape = dict(zip(shapes, boxes, strict=True))
            some[rank] = [by_shape[spec.shape] for spec in manifest.specs]
            held = list(zip(names, some[rank], strict=True))
            data = encode_holdings(holdings(held), manifest)
            assert len(data) < 4096
            passed.append(decode_holdings(data))
        else:  # encoding takes a while, and ranks differ in these alone
            passed.append(msgspec.structs.replace(passed[0], boxes=boxes))
    assert len({one.table for one in passed}) == 1
    placed = placed_from(manifest, passed)
    assert [one.spec for one in placed] == list(manifest.specs)
    assert len({id(one.boxes) for one in placed}) == len({s.shape for s in manifest.specs})
    for i in random.Random(1).sample(range(len(placed)), 50):
        found = {
            rank: part.box
            for part, members in zip(placed[i].boxes.parts, placed[i].boxes.members, strict=True)
            for rank in members
        }
        for rank, boxes in some.items():
            assert found.get(rank, boxes[i]) == boxes[i]
            assert (rank in found) == (0 not in boxes[i].local_shape)


def test_experts_that_only_some_ranks_hold() -> None:
    manifest = manifest_of(*[(4, 2)] * 8)
    whole = Slice.whole_of((4, 2))
    ranks = [[("t0", whole), (f"t{1 + rank % 7}", whole)] for rank in range(14)]
    found = told(manifest, ranks)
    assert found["t0"].members == (tuple(range(14)),)
    assert [found[f"t{i}"].members for i in range(1, 8)] == [((i - 1, i + 6),) for i in range(1, 8)]


def test_a_tensor_that_one_rank_cannot_tell_is_gathered_by_all() -> None:
    manifest = manifest_of((4,), (4,), (4,))
    whole = Slice.whole_of((4,))
    ranks = [
        holdings([(f"t{i}", whole) for i in range(3)]),
        holdings([("t0", whole)], {"t2": "partial sums", "t1": "unknown"}),
    ]
    passed = [decode_holdings(encode_holdings(one, manifest)) for one in ranks]
    assert list(gathered_from(manifest, passed).items()) == [
        ("t1", "unknown"),
        ("t2", "partial sums"),
    ]
    assert [one.spec.name for one in placed_from(manifest, passed)] == ["t0"]


class TestRefused:
    def test_names_that_the_source_lacks(self) -> None:
        whole = Slice.whole_of((4,))
        with pytest.raises(ConfigError, match=r"holds 2 tensors .*: w, v;"):
            encode_holdings(holdings([("t0", whole), ("w", whole)], {"v": ""}), manifest_of((4,)))

    def test_ranks_with_another_manifest(self) -> None:
        one, other = manifest_of((4,)), manifest_of((4,), (2,))
        passed = [
            decode_holdings(encode_holdings(holdings([]), manifest))
            for manifest in (one, other, one, other)
        ]
        with pytest.raises(ManifestMismatchError, match="ranks 1, 3 hold tensors of another"):
            placed_from(one, passed)

    def test_a_box_of_another_shape(self) -> None:
        ranks = [[("t1", Slice.whole_of((4,)))], [("t1", Slice.whole_of((5,)))]]
        with pytest.raises(ConfigError, match=r"^t1: \[0:5\] \(of 1\) is no box of .* \[4\]"):
            told(manifest_of((5,), (4,)), ranks)

    @pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x81\xa1\xff\x00"])
    def test_other_bytes(self, data: bytes) -> None:
        with pytest.raises(ProtocolError, match="something else than its holdings"):
            decode_holdings(data)

    def test_tables_that_are_none(self) -> None:
        manifest = manifest_of((4,), (4,))
        whole = Slice.whole_of((4,))
        told = decode_holdings(encode_holdings(holdings([("t1", whole)]), manifest))
        changes: list[dict[str, Any]] = [{"table": b"-"}, {"boxes": []}]
        for change in changes:
            with pytest.raises(ProtocolError):
                placed_from(manifest, [msgspec.structs.replace(told, **change)])
