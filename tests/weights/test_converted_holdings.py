"""Holdings of sources around others, and copies of holdings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import weightsync as ws
from tests.soak.sizes import sizes
from tests.weights.meshes import member, shard
from tests.weights.test_holdings import Told, assemble, differing, held_by, sent, tell
from tests.weights.test_wrapping import Scaled
from weightsync.weights.copying.shards import Slice
from weightsync.weights.sources.base import SourceExtras, as_source
from weightsync.weights.sources.experts import FusedExpertsSource, PerExpertSource
from weightsync.weights.sources.holdings import Holdings

Tensors = dict[str, torch.Tensor]
EXPERTS, SIZE, HIDDEN = 5, 3, 4
MESHES = ((1,), (2,), (3,), (7,), (2, 2), (2, 3), (3, 2))


def stacked() -> Tensors:
    generator = torch.Generator().manual_seed(2)
    shapes = {
        "layers.0.mlp.gate.weight": (EXPERTS, HIDDEN),
        "layers.0.mlp.experts.gate_up_proj": (EXPERTS, 2 * SIZE, HIDDEN),
        "layers.0.mlp.experts.down_proj": (EXPERTS, HIDDEN, SIZE),
        "norm.weight": (HIDDEN,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def one_by_one() -> Tensors:
    return {n: t.clone() for n, t in PerExpertSource(stacked()).tensors()}


@st.composite
def placed(draw: st.DrawFn, full: Tensors) -> tuple[tuple[int, ...], list[tuple[Placement, ...]]]:
    mesh = draw(st.sampled_from(MESHES))
    found = []
    for tensor in full.values():
        dims = st.integers(0, tensor.dim() - 1)
        cut = st.one_of(
            st.just(Replicate()),
            st.builds(Shard, dims),
            st.builds(_StridedShard, dims, split_factor=st.integers(1, 3)),
        )
        found.append(draw(st.tuples(*[cut] * len(mesh))))
    return mesh, found


def on_every_rank(
    full: Tensors, mesh_shape: Sequence[int], placements: Sequence[Sequence[Placement]], **how: Any
) -> tuple[ws.Manifest, list[Told]]:
    """Return what ranks tell of a source in the class `wrap`, given as `form`."""
    wrap, form = how["wrap"], how["form"]
    told = []
    for rank in range(math.prod(mesh_shape)):
        with member(rank, mesh_shape) as mesh:
            pairs = zip(full.items(), placements, strict=True)
            local = {name: shard(tensor, mesh, *cut) for (name, tensor), cut in pairs}
            source = wrap(local if form == "state dict" else partial(iter, local.items()))
            told.append(tell(source))
            manifest = source.manifest
    return manifest, told


FORMS = ("state dict", "callable")


@sizes(quick=60, whole=1000)
def test_experts_of_any_shards_of_a_stack(size: int) -> None:
    @settings(max_examples=size, deadline=None)
    @given(placed(stacked()), st.sampled_from(FORMS))
    def check(case: tuple[tuple[int, ...], list[tuple[Placement, ...]]], form: str) -> None:
        manifest, told = on_every_rank(stacked(), *case, wrap=PerExpertSource, form=form)
        assert differing(assemble(manifest, told), one_by_one()) == []

    check()


@sizes(quick=20, whole=300)
def test_a_stack_of_any_shards_of_experts(size: int) -> None:
    @settings(max_examples=size, deadline=None)
    @given(placed(one_by_one()), st.sampled_from(FORMS))
    def check(case: tuple[tuple[int, ...], list[tuple[Placement, ...]]], form: str) -> None:
        manifest, told = on_every_rank(one_by_one(), *case, wrap=FusedExpertsSource, form=form)
        assert differing(assemble(manifest, told), stacked()) == []

    check()


class Interleaved:
    """A source of its own, whose two ranks hold rows of gate and up in turns."""

    ROWS = ([(0, 1), (3, 4), (1, 2)], [(5, 6), (2, 3), (4, 5)])

    def __init__(self, rank: int) -> None:
        self._full = stacked()
        self._rank = rank
        self.manifest = as_source(self._full).manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._full.items())

    def stable_tensors(self) -> None:
        return None

    def holdings(self) -> Holdings:
        boxes, tensors = [], []
        for name, tensor in self._full.items():
            box, local = Slice.whole_of(tuple(tensor.shape)), tensor
            if name.endswith("gate_up_proj"):
                rows = self.ROWS[self._rank]
                box = Slice(box.shape, (box.spans[0], tuple(rows), box.spans[2]))
                local = torch.cat([tensor[:, begin:end] for begin, end in rows], dim=1)
            boxes.append(box)
            tensors.append(local)
        return Holdings(list(self._full), boxes, lambda: tensors, stays=False)


def test_rows_of_a_stack_in_any_order() -> None:
    sources = [PerExpertSource(Interleaved(rank)) for rank in range(2)]
    found = assemble(sources[0].manifest, [tell(source) for source in sources])
    assert differing(found, one_by_one()) == []


def test_there_and_back_in_other_dtypes_and_names() -> None:
    """Wrappers around wrappers keep the boxes; casts are the manifest's."""

    def wrap(source: object) -> FusedExpertsSource:
        inner = PerExpertSource(source, dtype=torch.bfloat16, layout="mixtral")
        return FusedExpertsSource(inner, layout="mixtral", rename={"norm.weight": "n.weight"})

    full = stacked()
    cuts = [(Shard(0),), (_StridedShard(1, split_factor=2),), (Shard(2),), (Replicate(),)]
    manifest, told = on_every_rank(full, (3,), cuts, wrap=wrap, form="callable")
    wanted = {n.replace("norm", "n"): t.bfloat16() for n, t in full.items()}
    assert differing(assemble(manifest, told), wanted) == []


def test_experts_are_views_of_the_stack() -> None:
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = nn.ParameterDict(
        {
            "gate_up_proj": torch.randn(6, 2 * SIZE, HIDDEN),
            "down_proj": torch.randn(6, HIDDEN, SIZE),
        }
    )
    with member(1, (3,)) as mesh:
        fully_shard(model, mesh=mesh)
        source = PerExpertSource(model)
        held = held_by(source)
        assert {name.split(".")[2] for name in held.names} == {"2", "3"}  # this rank's two
        memory = {t.untyped_storage().data_ptr() for t in held_by(source.source).tensors()}
        assert {t.untyped_storage().data_ptr() for _, t in held.pairs()} == memory
        assert held.stays
        assert held.bases is not None
        stack_of = {id(tensor) for tensor in held_by(source.source).tensors()}
        assert {id(base) for base in held.bases()} <= stack_of
        stack: Any = model.mlp.experts["down_proj"]
        stack._local_tensor.fill_(7)
        assert dict(held.pairs())["mlp.experts.3.down_proj.weight"].eq(7).all()


class Prefixed(ws.WrappingSource):
    """Gives the tensors of another source other names."""

    only_moves = True

    @property
    def manifest(self) -> ws.Manifest:
        specs = self.source.manifest.specs
        return ws.Manifest(tuple(ws.TensorSpec(f"model.{s.name}", s.dtype, s.shape) for s in specs))

    def convert(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs:
            yield f"model.{name}", tensor

    def hold(self, held: Holdings) -> Holdings:
        return held.renamed("model.{}".format)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7))


def on_ranks(make: Any, ranks: int = 3) -> tuple[ws.Manifest, list[Told]]:
    told = []
    for rank in range(ranks):
        with member(rank, (ranks,)) as mesh:
            sharded = model()
            for part, tensor in list(sharded.named_parameters()):
                owner, _, name = part.rpartition(".")
                parameter = nn.Parameter(shard(tensor.detach(), mesh, Shard(0)))
                setattr(sharded.get_submodule(owner), name, parameter)
            source = make(sharded)
            told.append(tell(source))
            manifest = source.manifest
    return manifest, told


def test_a_wrapper_that_renames_and_casts_keeps_them() -> None:
    manifest, told = on_ranks(lambda module: Prefixed(module, dtype=torch.bfloat16))
    _, wanted = sent(Prefixed(model(), dtype=torch.bfloat16))
    assert next(iter(wanted)).startswith("model.0.")
    assert differing(assemble(manifest, told), wanted) == []


def test_a_wrapper_that_computes_has_none() -> None:
    assert SourceExtras(Scaled(model())).holdings() is None
    assert SourceExtras(Prefixed(Scaled(model()))).holdings() is None
    assert SourceExtras(Scaled(Prefixed(model()))).holdings() is None
