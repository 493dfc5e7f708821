"""Which rows a placement holds, against torch's own split of the tensor."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor.placement_types import _StridedShard

from tests.weights.meshes import member, shard
from weightsync.errors import ConfigError
from weightsync.weights.copying.shards import (
    Block,
    Slice,
    Slicer,
    holds_shards,
    is_sharded,
    local_of,
)

MESHES = [(2,), (3,), (2, 2), (2, 3)]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.int32).view(shape)


def raw(tensor: torch.Tensor) -> bytearray:
    return bytearray(tensor.contiguous().numpy().tobytes())


def copied(blocks: tuple[Block, ...], full: bytearray, nbytes: int, cuts: list[int]) -> bytearray:
    """Copy the shard piece by piece, as runs cut the tensor; no byte may be written twice."""
    local, written = bytearray(nbytes), bytearray(nbytes)
    for begin, end in pairwise([0, *sorted(cuts), len(full)]):
        for block in blocks:
            for part in block.within(begin, end):
                for i in range(part.height):
                    source = part.source + i * part.source_stride
                    target = part.target + i * part.target_stride
                    assert begin <= source
                    assert source + part.width <= end
                    assert not any(written[target : target + part.width])
                    written[target : target + part.width] = b"\1" * part.width
                    local[target : target + part.width] = full[source : source + part.width]
    assert all(written)
    return local


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    mesh = draw(st.sampled_from(MESHES))
    dims = st.integers(0, len(shape) - 1)
    one: st.SearchStrategy[Placement] = st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dims),
        st.builds(_StridedShard, dims, split_factor=st.integers(1, 4)),
    )
    return shape, mesh, draw(st.lists(one, min_size=len(mesh), max_size=len(mesh)))


@settings(deadline=None)
@given(cases(), st.lists(st.floats(0, 1), max_size=4))
def test_any_placement(
    case: tuple[tuple[int, ...], tuple[int, ...], list[Placement]], cuts: list[float]
) -> None:
    shape, mesh_shape, placements = case
    full = numbered(shape)
    nbytes = full.numel() * 4
    for rank in range(math.prod(mesh_shape)):
        with member(rank, mesh_shape) as mesh:
            tensor = shard(full, mesh, *placements)
            held = Slicer().slice_of("t", tensor)
        local = local_of(tensor)
        assert held.local_shape == tuple(local.shape)
        at = [int(cut * nbytes) for cut in cuts]
        assert copied(held.blocks(4), raw(full), local.numel() * 4, at) == raw(local)


@pytest.mark.parametrize(
    ("placements", "blocks"),
    [
        ([Shard(0)], 1),
        ([Shard(1)], 1),
        ([_StridedShard(0, split_factor=2)], 2),
        ([_StridedShard(1, split_factor=2)], 2),
        ([Replicate()], 1),
    ],
)
def test_few_blocks_however_many_rows(placements: list[Placement], blocks: int) -> None:
    with member(1, (4,)) as mesh:
        held = Slicer().slice_of("t", shard(torch.zeros(64, 64), mesh, *placements))
    assert len(held.blocks(4)) == blocks


def test_a_scalar_is_whole() -> None:
    with member(1, (2,)) as mesh:
        held = Slicer().slice_of("t", shard(torch.tensor(1.0), mesh, Replicate()))
    assert held.is_whole
    assert held.blocks(4) == (Block(0, 0, 4, 1, 4, 4),)


def test_a_shard_of_nothing() -> None:
    with member(3, (4,)) as mesh:
        held = Slicer().slice_of("t", shard(torch.zeros(3, 5), mesh, Shard(0)))
    assert held.local_shape == (0, 5)
    assert held.blocks(4) == ()
    assert not held.is_whole


def test_negative_dimensions_count_from_the_end() -> None:
    with member(1, (2,)) as mesh:
        tensor = DTensor.from_local(torch.zeros(4, 3), mesh, [Shard(-1)], run_check=False)
        held = Slicer().slice_of("t", tensor)
    assert held.spans == (((0, 4),), ((3, 6),))


def test_the_order_of_cuts_is_followed() -> None:
    """Newer torch can say that a later dimension of the mesh cut first."""
    full = numbered((8, 3))
    with member(1, (2, 2)) as mesh:
        # For even sizes torch's strided split is that very order, told in another way.
        strided = shard(full, mesh, _StridedShard(0, split_factor=2), Shard(0))
        plain = shard(full, mesh, Shard(0), Shard(0))
        spec = DTensorSpec(
            mesh,
            (Shard(0), Shard(0)),
            tensor_meta=plain._spec.tensor_meta,
            shard_order=(ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),),
        )
        turned = DTensor(local_of(strided), spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        held = Slicer().slice_of("t", turned)
        assert held == Slicer().slice_of("t", strided)
        assert held != Slicer().slice_of("t", plain)
    assert torch.equal(full[held.spans[0][0][0] : held.spans[0][0][1]], local_of(turned))


def test_equal_splits_are_derived_once() -> None:
    slicer = Slicer()
    with member(0, (2,)) as mesh:
        for name in "abc":
            slicer.slice_of(name, shard(torch.zeros(6, 4), mesh, Shard(0)))
    assert len(slicer._known) == 1


def test_which_tensors_are_sharded() -> None:
    module = torch.nn.Linear(2, 2)
    assert not holds_shards(module)
    with member(0, (2,)) as mesh:
        module.weight = torch.nn.Parameter(shard(module.weight.detach(), mesh, Replicate()))
    assert holds_shards(module)
    assert is_sharded(module.weight)
    assert not is_sharded(module.bias)
    assert local_of(module.bias) is module.bias


class Unheard(Placement):
    """A placement that nobody knows."""

    def __repr__(self) -> str:
        return "Unheard()"

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return False


class Tensor:
    """The few attributes that a DTensor is known by."""

    def __init__(self, like: DTensor, placement: Placement) -> None:
        self.placements = (placement,)
        self.device_mesh = like.device_mesh
        self.shape, self.ndim = like.shape, like.ndim
        self._local_tensor = like._local_tensor


class TestRefused:
    def test_partial_sums(self) -> None:
        with member(0, (2,)) as mesh:
            tensor = DTensor.from_local(torch.zeros(4, 3), mesh, [Partial()], run_check=False)
            with pytest.raises(ConfigError, match=r"layer\.weight: Partial\(sum\) is partial sums"):
                Slicer().slice_of("layer.weight", tensor)

    def test_unknown_placements(self) -> None:
        with member(0, (2,)) as mesh:
            tensor: Any = Tensor(shard(torch.zeros(4, 3), mesh, Shard(0)), Unheard())
            with pytest.raises(ConfigError, match=r"w: Unheard\(\) is an unknown placement"):
                Slicer().slice_of("w", tensor)

    def test_local_tensors_of_another_shape(self) -> None:
        with member(0, (2,)) as mesh:
            tensor = DTensor.from_local(
                torch.zeros(3, 4),
                mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size((9, 4)),
                stride=(4, 1),
            )
            with pytest.raises(ConfigError, match=r"w: .* hold \[5, 4\] here, but its local"):
                Slicer().slice_of("w", tensor)


def test_a_process_outside_of_the_mesh_is_refused() -> None:
    with member(0, (4,)):
        mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [2, 3])
        tensor = shard(torch.zeros(4, 3), mesh, Shard(0))
        with pytest.raises(ConfigError, match="not a member of the tensor's mesh"):
            Slicer().slice_of("w", tensor)


def test_slices_are_values() -> None:
    assert Slice.whole_of((3, 2)) == Slice((3, 2), (((0, 3),), ((0, 2),)))
    assert len({Slice.whole_of((3,)), Slice.whole_of((3,))}) == 1
