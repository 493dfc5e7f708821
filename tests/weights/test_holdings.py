"""What each rank holds of the tensors of a source: boxes that together are each tensor, once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import weightsync as ws
from tests.crew import Crew
from tests.soak.sizes import sizes
from tests.weights.meshes import member, shard
from tests.weights.trainer_models import MODELS, fsdp, plain, replicated
from weightsync.errors import ManifestMismatchError
from weightsync.specs import Manifest
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.copying.reshard import copy_regions, place_whole, plan_reshard
from weightsync.weights.copying.shards import Slice, local_of
from weightsync.weights.sources.base import (
    ModuleSource,
    SourceExtras,
    SplitSource,
    WeightSource,
    as_source,
)
from weightsync.weights.sources.exchange import (
    decode_holdings,
    encode_holdings,
    gathered_from,
    placed_from,
)
from weightsync.weights.sources.holdings import Holdings

Array = npt.NDArray[Any]
Local = list[tuple[str, Slice, Array]]
Told = tuple[bytes, Local]


def held_by(source: Any) -> Holdings:
    held = SourceExtras(as_source(source)).holdings()
    assert held is not None
    return held


def tell(source: Any, held: Holdings | None = None) -> Told:
    """Return what a rank tells the others, and what it holds, cast to what is sent."""
    held = held or held_by(source)
    index = source.manifest.index
    found: Local = []
    for box, (name, tensor) in zip(held.boxes, held.pairs(), strict=True):
        dtype = TORCH_DTYPES[source.manifest.specs[index[name]].dtype]
        local = tensor.detach().to(dtype).contiguous()
        assert type(local) is torch.Tensor
        found.append((name, box, local.view(-1).view(torch.uint8).numpy().copy()))
    return encode_holdings(held, source.manifest), found


def assemble(manifest: Manifest, told: Sequence[Told]) -> dict[str, torch.Tensor]:
    """Return the full tensors that one receiver reads from the ranks, by a plan."""
    passed = [decode_holdings(data) for data, _ in told]
    placed = placed_from(manifest, passed)
    wanted = place_whole([one.spec for one in placed])
    full = {
        one.spec.name: torch.zeros(one.spec.shape, dtype=TORCH_DTYPES[one.spec.dtype])
        for one in placed
    }
    memory = [{(name, box): local for name, box, local in local} for _, local in told]
    for read in plan_reshard(placed, wanted).reads(0):
        local = torch.from_numpy(memory[read.rank][read.name, read.source.box])
        copy_regions(read.regions, local, full[read.name])
    return full


def differing(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [
        name
        for name, tensor in found.items()
        if tensor.dtype is not wanted[name].dtype or not torch.equal(tensor, wanted[name])
    ]


def sent(source: WeightSource) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Return the manifest and the tensors of a source of which nothing is sharded."""
    specs = source.manifest.specs
    tensors = {
        n: t.to(TORCH_DTYPES[s.dtype], copy=True)
        for s, (n, t) in zip(specs, source.tensors(), strict=True)
    }
    return source.manifest, tensors


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "cast": {"dtype": torch.bfloat16},
    "renamed": {"rename": {"norm.weight": "final_norm.weight"}, "dtype": torch.float16},
}
KINDS: dict[str, Callable[[], nn.Module]] = {**MODELS, "plain": plain, "replicated": replicated}


def model_of(kind: str) -> nn.Module:
    made = KINDS[kind]()
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("gate" not in name)  # frozen ones
    return made


def of_module(_: int, kind: str, options: dict[str, Any]) -> tuple[Told, list[str], int]:
    source = ModuleSource(model_of(kind), **options)
    held = held_by(source)
    own = sum(tensor.numel() for tensor in held.tensors())
    return tell(source, held), list(held.gathered), own


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_shards_of_all_ranks_are_the_model(
    ranks: Crew, kind: str, options: dict[str, Any]
) -> None:
    """Uneven and empty shards, tied, frozen and plain parameters, and buffers."""
    manifest, wanted = sent(ModuleSource(plain(), **options))
    found = ranks.run(of_module, kind, options)
    assert differing(assemble(manifest, [told for told, _, _ in found]), wanted) == []
    assert [gathered for _, gathered, _ in found] == [[]] * 4
    if kind == "one_dimension":  # no rank holds more than its part, and the buffers
        assert max(own for _, _, own in found) < sum(t.numel() for t in wanted.values()) / 2


def sharded_only(_: int, bf16: bool, reshard: bool) -> list[bool]:
    """Train two steps; at each moment the holdings are the parameters that the optimizer has."""
    model = fsdp(bf16=bf16, reshard_after_forward=reshard)
    held = held_by(ModuleSource(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    known = {id(p._local_tensor) for group in optimizer.param_groups for p in group["params"]}
    buffers = {id(tensor) for tensor in model.buffers()}
    right = []
    for step in range(2):
        loss = model(torch.arange(6).view(2, 3) + step).float().square().mean()
        right.append({id(tensor) for tensor in held.tensors()} == known | buffers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        right.append({id(tensor) for tensor in held.tensors()} == known | buffers)
    return right


@pytest.mark.parametrize(("bf16", "reshard"), [(False, True), (True, False)])
def test_at_every_moment_of_training(two_ranks: Crew, bf16: bool, reshard: bool) -> None:
    assert two_ranks.run(sharded_only, bf16, reshard) == [[True] * 4] * 2


class Made(nn.Module):
    """Parameters by name; a name may be frozen, or a buffer."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for i, (name, tensor) in enumerate(tensors.items()):
            if i % 3 == 2:
                self.register_buffer(name, tensor)
            else:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=i % 3 == 0))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], Any]]]:
    """A mesh, and shapes with the placements of each; None for a plain tensor."""
    mesh = draw(
        st.sampled_from([(1,), (2,), (3,), (5,), (8,), (2, 2), (2, 3), (3, 2), (2, 4), (2, 2, 2)])
    )
    tensors = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        one: st.SearchStrategy[Placement] = st.just(Replicate())
        if shape:
            dims = st.integers(0, len(shape) - 1)
            strided = st.builds(_StridedShard, dims, split_factor=st.integers(1, 4))
            one = st.one_of(one, st.builds(Shard, dims), strided)
        placements = st.tuples(*[one] * len(mesh))
        tensors.append((shape, draw(st.one_of(placements, st.none()))))
    return mesh, tensors


def full_tensors(shapes: Sequence[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return {f"t{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}


@sizes(quick=100, whole=1500)
def test_boxes_of_any_placements_are_the_full_tensors(size: int) -> None:
    @settings(max_examples=size, deadline=None)
    @given(layouts(), st.sampled_from([None, torch.bfloat16]))
    def check(
        layout: tuple[tuple[int, ...], list[tuple[tuple[int, ...], Any]]],
        dtype: torch.dtype | None,
    ) -> None:
        mesh_shape, tensors = layout
        full = full_tensors([shape for shape, _ in tensors])
        told: list[Told] = []
        for rank in range(math.prod(mesh_shape)):
            with member(rank, mesh_shape) as mesh:
                placed = {
                    name: tensor.clone() if placements is None else shard(tensor, mesh, *placements)
                    for (name, tensor), (_, placements) in zip(full.items(), tensors, strict=True)
                }
                source = ModuleSource(Made(placed), dtype=dtype)
                told.append(tell(source))
                manifest = source.manifest
        wanted = {name: tensor.to(dtype or torch.float32) for name, tensor in full.items()}
        assert differing(assemble(manifest, told), wanted) == []

    check()


class TestOfOneRank:
    """Rank 1 of 4; the group never communicates."""

    @pytest.fixture
    def mesh(self) -> Iterator[DeviceMesh]:
        with member(1, (4,)) as mesh:
            yield mesh

    def made(self, mesh: DeviceMesh) -> Made:
        rows = torch.arange(24.0).view(8, 3)
        return Made({"a": shard(rows, mesh, Shard(0)), "b": shard(rows.clone(), mesh, Shard(0))})

    def test_what_has_another_placement_is_refused_until_it_is_back(self, mesh: DeviceMesh) -> None:
        model = self.made(mesh)
        held = held_by(ModuleSource(model))
        first, rows = model.b, torch.arange(24.0).view(8, 3)
        for other, now in (
            (shard(rows, mesh, Shard(1)), "[0:8, 1:2]"),
            (shard(rows, mesh, Replicate()), "[0:8, 0:3]"),
            (rows, "[0:8, 0:3]"),
        ):
            model.b = nn.Parameter(other, requires_grad=False)
            with pytest.raises(ManifestMismatchError, match="1 tensors are placed oth") as raised:
                held.tensors()
            assert raised.value.mismatched == (f"b: {now} here, [2:4, 0:3] at connect()",)
            with pytest.raises(ManifestMismatchError):
                held.tensors()
            model.b = first
            assert [tensor.shape for tensor in held.tensors()] == [(2, 3)] * 2

    def test_one_that_becomes_a_partial_sum_is_refused(self, mesh: DeviceMesh) -> None:
        model = self.made(mesh)
        held = held_by(ModuleSource(model))
        model.b = nn.Parameter(DTensor.from_local(torch.ones(8, 3), mesh, [Partial()]), False)
        with pytest.raises(ManifestMismatchError, match=r"b: Partial\(sum\) is partial sums"):
            held.tensors()

    def test_equal_parameters_may_take_the_place_of_others(self, mesh: DeviceMesh) -> None:
        model = self.made(mesh)
        held = held_by(ModuleSource(model))
        model.b = nn.Parameter(shard(torch.ones(8, 3), mesh, Shard(0)), requires_grad=False)
        del model.a
        model.a = nn.Parameter(shard(torch.zeros(8, 3), mesh, Shard(0)))
        assert [t.sum().item() for t in held.tensors()] == [0, 6]
        assert held.tensors()[1] is local_of(model.b)

    def test_a_module_that_was_cast_is_held_as_it_is(self, mesh: DeviceMesh) -> None:
        """As of full tensors: the stream has the dtypes of connect()."""
        model = self.made(mesh)
        held = held_by(ModuleSource(model, dtype=torch.float32))
        model.bfloat16()
        assert {tensor.dtype for tensor in held.tensors()} == {torch.bfloat16}

    def test_an_offloaded_module_is_refused_until_it_is_back(self, mesh: DeviceMesh) -> None:
        model = self.made(mesh)
        held = held_by(ModuleSource(model))
        first = model.b
        model.b = nn.Parameter(torch.empty(8, 3, device="meta"), requires_grad=False)
        with pytest.raises(ManifestMismatchError, match=r"meta device \(offloaded\): b;"):
            held.tensors()
        model.b = first
        assert len(held.tensors()) == 2

    def test_a_local_tensor_of_another_shape_is_refused(self, mesh: DeviceMesh) -> None:
        model = self.made(mesh)
        held = held_by(ModuleSource(model))
        changed: Any = model.b
        changed._local_tensor = torch.ones(1, 3)
        with pytest.raises(ManifestMismatchError, match=r"b: \[1, 3\], its box was \[2, 3\]"):
            held.tensors()

    def test_partial_sums_are_gathered(self, mesh: DeviceMesh) -> None:
        model = self.made(mesh)
        model.b = nn.Parameter(DTensor.from_local(torch.ones(8, 3), mesh, [Partial()]), False)
        source = ModuleSource(model)
        held = held_by(source)
        assert (held.names, list(held.gathered)) == (["a"], ["b"])
        assert "b: Partial(sum) is partial sums" in held.gathered["b"]
        assert [name for name, _ in held.pairs()] == ["a"]
        passed = [decode_holdings(encode_holdings(held, source.manifest))]
        assert list(gathered_from(source.manifest, passed)) == ["b"]

    def test_a_shard_of_rows_that_its_placement_does_not_say_is_gathered(
        self, mesh: DeviceMesh
    ) -> None:
        model = self.made(mesh)
        uneven = DTensor.from_local(
            torch.ones(5, 3), mesh, [Shard(0)], shape=torch.Size((8, 3)), stride=(3, 1)
        )
        model.b = nn.Parameter(uneven, requires_grad=False)
        held = held_by(ModuleSource(model))
        assert "its local tensor is [5, 3]" in held.gathered["b"]

    def test_a_mesh_without_this_rank_is_held_by_others(self, mesh: DeviceMesh) -> None:
        others = DeviceMesh("cpu", [0, 2])
        model = self.made(mesh)
        model.b = nn.Parameter(shard(torch.ones(8, 3), others, Shard(0)), requires_grad=False)
        held = held_by(ModuleSource(model))
        assert (held.names, held.gathered) == (["a"], {})
        assert len(held.tensors()) == 1

    def test_the_buffers_of_fsdp_follow(self, mesh: DeviceMesh) -> None:
        model = nn.Linear(3, 10)
        fully_shard(model, mesh=mesh)
        held = held_by(ModuleSource(model))
        memory = {buffer.untyped_storage().data_ptr() for buffer in held.buffers()}
        assert {t.untyped_storage().data_ptr() for t in held.tensors()} == memory


def given_as(form: str, model: nn.Module) -> Any:
    """Return what is given to connect(): the state dict, or a callable that uses memory again."""
    if form == "state dict":
        return dict(model.state_dict())

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        memory: dict[Any, torch.Tensor] = {}
        for name, tensor in model.state_dict().items():
            if local_of(tensor) is not tensor:
                yield name, tensor * 1
                continue
            again = memory.setdefault((tensor.shape, tensor.dtype), torch.empty_like(tensor))
            yield name, again.copy_(tensor)

    return tensors


def of_source(_: int, kind: str, form: str, options: dict[str, Any]) -> tuple[Told, bool]:
    source = as_source(given_as(form, model_of(kind)), **options)
    held = held_by(source)
    return tell(source, held), held.stays


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("form", ["state dict", "callable"])
@pytest.mark.parametrize("kind", ["hybrid", "tensor_parallel", "plain"])
def test_what_a_source_yields_of_shards_is_the_model(
    ranks: Crew, kind: str, form: str, options: dict[str, Any]
) -> None:
    manifest, wanted = sent(as_source(given_as(form, plain()), **options))
    found = ranks.run(of_source, kind, form, options)
    assert differing(assemble(manifest, [told for told, _ in found]), wanted) == []
    assert [stays for _, stays in found] == [False] * 4


class TestOfACallable:
    def given(self) -> tuple[dict[str, torch.Tensor], ws.WeightSource]:
        tensors = {f"t{i}": torch.full((4, 2), float(i)) for i in range(4)}
        return tensors, as_source(lambda: iter(tensors.items()))

    def test_a_steady_update_runs_it_once(self) -> None:
        runs = []

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            runs.append(0)
            yield "w", torch.full((2,), float(len(runs)))

        held = held_by(as_source(tensors))
        assert len(runs) == 1  # by connect
        for run in (2, 3):
            assert [tensor.tolist() for _, tensor in held.pairs()] == [[run, run]]
            assert len(runs) == run

    def test_tensors_are_not_listed(self) -> None:
        _, source = self.given()
        with pytest.raises(AssertionError, match=r"read by pairs\(\)"):
            held_by(source).tensors()

    @pytest.mark.parametrize("when", ["t2", "end"])
    def test_a_change_is_detected(self, when: str) -> None:
        """Of a tensor that was read before, while a later one is; or after the last."""
        tensors, source = self.given()
        pairs = held_by(source).pairs()
        for name, _ in pairs:
            if name == when or (when == "end" and name == "t3"):
                tensors["t1"].add_(1)
        assert SourceExtras(source).changed == ["t1"]
        assert list(held_by(source).pairs())
        assert SourceExtras(source).changed == ["t1"]  # until the reader clears it

    def test_other_names_are_refused(self) -> None:
        tensors, source = self.given()
        held = held_by(source)
        tensors["t4"] = tensors.pop("t3")
        with pytest.raises(ManifestMismatchError, match=r"position 3: it yields 't4'"):
            list(held.pairs())
        tensors["t3"] = tensors.pop("t4")
        assert [name for name, _ in held.pairs()] == ["t0", "t1", "t2", "t3"]
        del tensors["t3"]
        with pytest.raises(ManifestMismatchError, match="ended before 't3'"):
            list(held.pairs())

    def test_another_placement_is_refused_until_it_is_back(self) -> None:
        with member(1, (2,)) as mesh:
            placement: Placement = Shard(0)
            source = as_source(
                lambda: [("w", shard(torch.arange(8.0).view(4, 2), mesh, placement))]
            )
            held = held_by(source)
            placement = Shard(1)
            with pytest.raises(ManifestMismatchError) as raised:
                list(held.pairs())
            assert raised.value.mismatched == ("w: [0:4, 1:2] here, [2:4, 0:2] at connect()",)
            placement = Shard(0)
            assert [tensor.tolist() for _, tensor in held.pairs()] == [[[4, 5], [6, 7]]]

    def test_one_that_yields_partial_sums_tells_none(self) -> None:
        with member(1, (2,)) as mesh:
            tensor = DTensor.from_local(torch.ones(3), mesh, [Partial()])
            assert SourceExtras(as_source(lambda: [("w", tensor)])).holdings() is None

    def test_other_tied_tensors_are_refused(self) -> None:
        tensors: dict[str, torch.Tensor] = {"a": torch.ones(2), "b": torch.zeros(2)}
        held = held_by(as_source(tensors))
        tensors["b"] = tensors["a"]
        with pytest.raises(ManifestMismatchError, match="other tensors are tied"):
            list(held.pairs())


class TestSplit:
    """Ranks that hold other names."""

    WHOLE = tuple((f"e{i}", torch.full((3, 2), float(i))) for i in range(5))

    def source(self, held: Sequence[int] | None, **options: Any) -> SplitSource:
        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for i, (name, tensor) in enumerate(self.WHOLE):
                has = held is None or i in held
                yield name, tensor if has else torch.empty_like(tensor, device="meta")

        return SplitSource(tensors, self.WHOLE, held, **options)

    @pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16, "rename": {"e1": "x"}}])
    def test_ranks_together_hold_all(self, options: dict[str, Any]) -> None:
        sources = [self.source(held, **options) for held in ([0, 1], [1, 3, 4], [2], [])]
        assert [len(held_by(source).names) for source in sources] == [2, 3, 1, 0]
        manifest, wanted = sent(self.source(None, **options))
        found = assemble(manifest, [tell(source) for source in sources])
        assert differing(found, wanted) == []

    def test_what_nobody_holds_is_named(self) -> None:
        told = [tell(self.source(held)) for held in ([0, 1], [1, 3])]
        with pytest.raises(ManifestMismatchError) as raised:
            assemble(self.source(None).manifest, told)
        assert [entry.partition("[")[0] for entry in raised.value.mismatched] == ["e2", "e4"]

    def test_shards_of_some_ranks(self) -> None:
        """A rank holds e0 and its part of e1; the mesh has no other rank here."""
        told = []
        for rank in range(2):
            with member(rank, (2,)) as mesh:
                rows = shard(self.WHOLE[1][1], mesh, Shard(0))
                absent = torch.empty(3, 2, device="meta")
                pairs = [("e0", self.WHOLE[0][1] if rank == 0 else absent), ("e1", rows)]
                held = [0, 1] if rank == 0 else [1]
                source = SplitSource(lambda pairs=pairs: pairs, self.WHOLE[:2], held)  # type: ignore[misc]  # of this round
                told.append(tell(source))
        found = assemble(source.manifest, told)
        assert differing(found, dict(self.WHOLE[:2])) == []

    def test_a_tensor_that_is_gone_is_refused_until_it_is_back(self) -> None:
        held_now = [0, 2]
        source = self.source(held_now)
        held = held_by(source)
        held_now.remove(2)
        with pytest.raises(ManifestMismatchError, match="held 'e2' at connect"):
            list(held.pairs())
        held_now += [2, 3]
        assert [name for name, _ in held.pairs()] == ["e0", "e2"]


class Doubled(ModuleSource):
    """A subclass that sends other tensors than those of its module."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().tensors():
            yield name, tensor * 2


def test_a_subclass_that_makes_others_tells_none() -> None:
    assert SourceExtras(Doubled(plain())).holdings() is None
    assert SourceExtras(ModuleSource(plain())).holdings() is not None


def test_a_source_without_holdings_tells_none(tmp_path: Any) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert SourceExtras(ws.SafetensorsSource(tmp_path)).holdings() is None


def test_ties_are_held_once() -> None:
    model = plain()
    held = held_by(ModuleSource(model))
    assert "head.weight" not in held.names
    assert held.tensors()[held.names.index("embed.weight")] is model.embed.weight
