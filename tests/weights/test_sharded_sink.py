"""Full tensors into a module of shards: each rank gets its slice, and what it holds is proved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.weights.meshes import member, shard
from tests.weights.streams import random_tensors, stream_bytes
from weightsync.errors import (
    ConfigError,
    ManifestMismatchError,
    TransferError,
    VerificationError,
)
from weightsync.integrations.vllm.handles import HandlesUpdate
from weightsync.receiver import WeightReceiver, as_sink
from weightsync.shm.host_keys import host_key
from weightsync.shm.segment import Segment
from weightsync.specs import Manifest, TensorSpec
from weightsync.tensors import TORCH_DTYPES, as_bytes
from weightsync.weights.copying.copy_plan import (
    CopyPlan,
    DeviceCopyUnit,
    HostCopyUnit,
    Memory,
    UnitCompiler,
)
from weightsync.weights.copying.fingerprint import mix64, to_hex, xxh3
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.copying.shards import local_of
from weightsync.weights.sinks.base import Apply, LoadTarget
from weightsync.weights.sinks.module_sink import ModuleSink, ShardedModuleSink
from weightsync.wire.messages import StepReply, UpdateRequest
from weightsync.wire.offers import SegmentHandle

Way = Literal["pointer", "copy", "in_place"]
PathName = Literal["buckets", "memory", "devices"]
every_way = pytest.mark.parametrize("way", ["pointer", "copy", "in_place"])
every_path = pytest.mark.parametrize("path", ["buckets", "memory", "devices"])

TENSORS: dict[str, tuple[tuple[int, ...], list[Placement], list[Placement]]] = {
    "rows": ((10, 37), [Shard(0)], [Replicate(), Shard(0)]),
    "uneven": ((7, 5), [Shard(0)], [Shard(0), Shard(0)]),
    "columns": ((40, 22), [Shard(1)], [Shard(1), Replicate()]),
    "fused": ((16, 9), [_StridedShard(0, split_factor=2)], [_StridedShard(0, split_factor=2)] * 2),
    "experts": ((6, 8, 6), [_StridedShard(1, split_factor=2)], [Shard(2), Shard(1)]),
    "striped": ((9, 12), [_StridedShard(1, split_factor=2)], [Replicate(), Shard(1)]),
    "inner": ((3, 40, 6), [Shard(2)], [Shard(0), Shard(2)]),
    "few": ((1, 3), [Shard(0)], [Shard(0), Shard(1)]),
    "everywhere": ((5,), [Replicate()], [Replicate(), Replicate()]),
    "scalar": ((), [Replicate()], [Replicate(), Replicate()]),
}
"""Full shape, and placements on a mesh of one and of two dimensions."""
MESHES = [(0, (2,)), (1, (2,)), (2, (3,)), (0, (2, 2)), (3, (2, 2))]
every_member = pytest.mark.parametrize(("rank", "shape"), MESHES)


def sharded(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A module of every kind of shard, plain tensors between them and one that is tied."""
    module = nn.Module()
    module.before = nn.Linear(5, 3)
    for name, (size, on_line, on_grid) in TENSORS.items():
        placements = on_line if mesh.ndim == 1 else on_grid
        full = torch.zeros(size, dtype=dtype)
        setattr(module, name, nn.Parameter(shard(full, mesh, *placements)))
    module.register_buffer("after", torch.zeros(3, 3))
    module.tied = module.columns
    return module


def cut(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What torch itself gives this rank of `full`."""
    if not isinstance(like, DTensor):
        return full
    return local_of(shard(full, like.device_mesh, *like.placements))


def equal_bits(have: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(as_bytes(have.contiguous()), as_bytes(want.contiguous()))


@dataclass
class Sender:
    """Replays units as a receiving engine does: from buckets of a ring, or from whole tensors."""

    path: PathName
    bucket_nbytes: int = 1024
    unit_nbytes: int = 192
    kept: list[torch.Tensor] = field(default_factory=list)
    """Programs know addresses alone: the first tensor or bucket of the source, then the rest."""

    def plan(self, manifest: Manifest) -> StreamLayout:
        bucket = self.bucket_nbytes if self.path == "buckets" else None
        return StreamLayout(manifest, bucket_nbytes=bucket, unit_nbytes=self.unit_nbytes)

    def deliver(
        self, plan: StreamLayout, load_target: LoadTarget, tensors: list[torch.Tensor]
    ) -> None:
        """Bring the tensors; every unit must prove itself."""
        load_target.begin()
        stream = stream_bytes(plan, tensors)
        for unit, program in self.programs(plan, load_target, tensors):
            program.copy()
            assert program.fingerprint() == xxh3(memoryview(stream[unit.start : unit.stop]))
        load_target.validate()
        load_target.commit()

    def programs(
        self, plan: StreamLayout, load_target: LoadTarget, tensors: list[torch.Tensor]
    ) -> list[Any]:
        memory = load_target.memory
        assert memory is not None
        source = Memory([as_bytes(t.contiguous()) for t in tensors])
        compiler = UnitCompiler(plan, memory, None if self.path == "buckets" else source)
        compile_unit: Any = (
            compiler.compile_on_devices if self.path == "devices" else compiler.compile
        )
        made: list[Any] = []
        content = torch.frombuffer(bytearray(stream_bytes(plan, tensors)), dtype=torch.uint8)
        self.kept = [source.tensors[0]]
        for chunk in plan.chunks:
            bucket = content[chunk.start : chunk.stop].clone() if self.path == "buckets" else None
            units = plan.units[chunk.first_unit : chunk.last_unit]
            made += [(unit, compile_unit(unit, bucket, chunk.start)) for unit in units]
            self.kept.append(source.tensors[0] if bucket is None else bucket)
        self.kept += source.tensors
        return made


def open_target(
    module: nn.Module, way: Way, sender: Sender
) -> tuple[ShardedModuleSink, StreamLayout, LoadTarget]:
    sink = ShardedModuleSink(module, swap="copy" if way == "copy" else "pointer")
    assert sink.manifest is not None
    plan = sender.plan(sink.manifest)
    return sink, plan, sink.open_target(plan, "in_place" if way == "in_place" else "staged")


@every_way
@every_path
@every_member
def test_every_shard_is_what_torch_cuts(
    way: Way, path: PathName, rank: int, shape: tuple[int, ...]
) -> None:
    with member(rank, shape) as mesh:
        module = sharded(mesh)
        sender = Sender(path)
        _, plan, load_target = open_target(module, way, sender)
        held = {name: local_of(p) for name, p in module.named_parameters()}
        for seed in range(3):
            tensors = random_tensors(plan.manifest, seed)
            sender.deliver(plan, load_target, tensors)
            for spec, tensor in zip(plan.manifest.specs, tensors, strict=True):
                here = module.state_dict()[spec.name]
                assert equal_bits(local_of(here), cut(tensor, here)), spec.name
        assert all(local_of(p) is held[name] for name, p in module.named_parameters())
        assert module.tied is module.columns


@every_path
@pytest.mark.parametrize("unit_nbytes", [64, 128, 1 << 20])
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64"])
def test_runs_cut_rows_anywhere(path: PathName, unit_nbytes: int, dtype: str) -> None:
    with member(1, (2,)) as mesh:
        module = nn.Module()
        for name, (size, placements, _) in TENSORS.items():
            full = torch.zeros(size, dtype=TORCH_DTYPES[dtype])
            module.register_buffer(name, shard(full, mesh, *placements))
        sender = Sender(path, unit_nbytes=unit_nbytes, bucket_nbytes=max(unit_nbytes, 256))
        _, plan, load_target = open_target(module, "in_place", sender)
        tensors = random_tensors(plan.manifest, 5)
        sender.deliver(plan, load_target, tensors)
        for spec, tensor in zip(plan.manifest.specs, tensors, strict=True):
            here = module.state_dict()[spec.name]
            assert equal_bits(local_of(here), cut(tensor, here)), spec.name


@every_path
@pytest.mark.parametrize("verify", [True, False])
def test_a_copy_plan_fills_every_shard(path: PathName, verify: bool) -> None:
    with member(1, (2,)) as mesh:
        module = sharded(mesh)
        sender = Sender(path)
        _, plan, load_target = open_target(module, "in_place", sender)
        tensors = random_tensors(plan.manifest, 5)
        stream = stream_bytes(plan, tensors)
        wanted = [xxh3(memoryview(stream[unit.start : unit.stop])) for unit in plan.units]
        programs = [program for _, program in sender.programs(plan, load_target, tensors)]
        assert CopyPlan.of(0, programs, verify=verify).run() == (wanted if verify else [])
        for spec, tensor in zip(plan.manifest.specs, tensors, strict=True):
            here = module.state_dict()[spec.name]
            assert equal_bits(local_of(here), cut(tensor, here)), spec.name


def test_manifests_are_those_of_the_full_model() -> None:
    with member(0, (2,)) as mesh:
        sink = as_sink(sharded(mesh))
    assert isinstance(sink, ShardedModuleSink)
    assert sink.manifest is not None
    shapes = {spec.name: spec.shape for spec in sink.manifest.specs}
    assert shapes == {
        "before.weight": (3, 5),
        "before.bias": (3,),
        **{name: size for name, (size, *_) in TENSORS.items()},
        "after": (3, 3),
    }
    assert sink.manifest.aliases == {"tied": "columns"}
    assert type(as_sink(nn.Linear(2, 2))) is ModuleSink


def test_only_the_shard_is_staged() -> None:
    with member(0, (4,)) as mesh:
        module = nn.Module()
        module.w = nn.Parameter(shard(torch.zeros(64, 256), mesh, Shard(1)))
        sink, plan, load_target = open_target(module, "pointer", Sender("memory"))
    assert sink.staged_nbytes(plan) == 64 * 64 * 4
    assert load_target.peak_extra_nbytes == 64 * 64 * 4
    assert load_target.memory is not None
    assert sum(t.numel() for t in load_target.memory.tensors) == 64 * 64 * 4


@every_way
def test_a_swap_points_at_new_shards_where_nothing_else_sees_them(way: Way) -> None:
    with member(0, (2,)) as mesh:
        module = nn.Module()
        own = shard(torch.zeros(8, 4), mesh, Shard(0))
        module.w = nn.Parameter(own)
        module.view = nn.Parameter(shard(torch.zeros(8, 4), mesh, Shard(0)))
        del own
        seen = local_of(module.view)[1:]
        sender = Sender("memory")
        _, plan, load_target = open_target(module, way, sender)
        before = local_of(module.w).data_ptr()
        tensors = random_tensors(plan.manifest, 1)
        sender.deliver(plan, load_target, tensors)
        assert (local_of(module.w).data_ptr() != before) is (way == "pointer")
        assert equal_bits(seen, tensors[1][1:4])


class TestProof:
    """A byte that is wrong is seen, in what arrived and in what is held."""

    @staticmethod
    def _prepare(
        path: PathName, unit_nbytes: int = 192
    ) -> tuple[Sender, StreamLayout, LoadTarget, list[Any], bytes]:
        with member(1, (2,)) as mesh:
            sender = Sender(path, unit_nbytes=unit_nbytes, bucket_nbytes=max(unit_nbytes, 1024))
            _, plan, load_target = open_target(sharded(mesh), "pointer", sender)
            tensors = random_tensors(plan.manifest, 2)
            made = sender.programs(plan, load_target, tensors)
            for _, program in made:
                program.copy()
            return sender, plan, load_target, made, stream_bytes(plan, tensors)

    @every_path
    @pytest.mark.parametrize("unit_nbytes", [192, 1 << 20])
    def test_every_byte_that_is_held(self, path: PathName, unit_nbytes: int) -> None:
        sender, _, load_target, made, stream = self._prepare(path, unit_nbytes)
        assert load_target.memory is not None
        assert load_target.memory.shares is not None
        for tensor in load_target.memory.tensors:
            for at in {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else ():
                tensor[at] ^= 1
                assert sum(not program.holds() for _, program in made) == 1
                if path != "devices":  # whose source is on the host here: arrived alone
                    wrong = [
                        unit
                        for unit, program in made
                        if program.fingerprint() != xxh3(memoryview(stream[unit.start : unit.stop]))
                    ]
                    assert len(wrong) == 1
                tensor[at] ^= 1
        assert all(program.holds() for _, program in made)
        assert sender.path == path

    @every_path
    def test_bytes_of_other_ranks_are_part_of_what_arrived(self, path: PathName) -> None:
        with member(1, (2,)) as mesh:
            module = nn.Module()
            module.w = nn.Parameter(shard(torch.zeros(8, 4), mesh, Shard(0)))
            sender = Sender(path)
            _, plan, load_target = open_target(module, "in_place", sender)
            ((_, program),) = sender.programs(plan, load_target, [torch.zeros(8, 4)])
            program.copy()
            before = program.fingerprint()
            sender.kept[1][0] = 1  # a row of rank 0
            assert program.fingerprint() != before

    def test_runs_by_kind(self) -> None:
        for path, kind in (("buckets", HostCopyUnit), ("devices", DeviceCopyUnit)):
            assert all(isinstance(p, kind) for _, p in self._prepare(path)[3])  # type: ignore[arg-type]  # paths


class TestUpdatesWithHandlesOfTheirOwn:
    """What a message carries itself is fingerprinted tensor by tensor, not unit by unit."""

    def _update(
        self, stack: ExitStack, pairs: list[tuple[str, torch.Tensor]], spoilt: str = ""
    ) -> UpdateRequest:
        handles: list[dict[str, Any]] = []
        for _, tensor in pairs:
            segment = stack.enter_context(Segment.create(as_bytes(tensor).numel()))
            segment.tensor().copy_(as_bytes(tensor))
            handles.append({host_key(): SegmentHandle(name=segment.name, nbytes=segment.nbytes)})
        prints = [mix64(as_bytes(t)) ^ (name == spoilt) for name, t in pairs]
        info = HandlesUpdate(
            names=[name for name, _ in pairs],
            dtype_names=["float32"] * len(pairs),
            shapes=[list(tensor.shape) for _, tensor in pairs],
            ipc_handles=handles,
            fingerprints=[to_hex(value) for value in prints],
        )
        return UpdateRequest(update_info=info)

    @pytest.mark.parametrize("apply", ["staged", "in_place"])
    def test_slices_of_them_arrive(self, apply: Apply) -> None:
        with member(1, (2,)) as mesh, ExitStack() as stack:
            module = sharded(mesh)
            receiver = WeightReceiver(module, apply=apply)
            stack.callback(receiver.close)
            manifest = receiver.sink.manifest
            assert manifest is not None
            names = [spec.name for spec in manifest.specs]
            tensors = random_tensors(manifest, 3)
            reply = receiver.dispatch(self._update(stack, list(zip(names, tensors, strict=True))))
            assert isinstance(reply, StepReply)
            assert (receiver.version, reply.verified) == (1, "held")
            for name, tensor in zip(names, tensors, strict=True):
                here = module.state_dict()[name]
                assert equal_bits(local_of(here), cut(tensor, here)), name

    @pytest.mark.parametrize("offered", ["embed.w", "both"])
    def test_a_tied_tensor_that_is_cut_twice_may_be_offered_once(self, offered: str) -> None:
        with member(1, (2,)) as mesh, ExitStack() as stack:
            module = nn.Module()
            module.embed, module.head = nn.Module(), nn.Module()
            module.embed.w = nn.Parameter(shard(torch.zeros(8, 4), mesh, Shard(0)))
            module.head.w = nn.Parameter(shard(torch.zeros(8, 4), mesh, Shard(1)))
            sent = torch.randn(8, 4)
            pairs = [("embed.w", sent)] + [("head.w", sent)] * (offered == "both")
            receiver = WeightReceiver(module)
            stack.callback(receiver.close)
            if offered != "both":
                with pytest.raises(ManifestMismatchError, match=r"1 missing: head\.w"):
                    receiver.dispatch(self._update(stack, pairs))
            # What transformers says of a model whose config ties them.
            declared: Any = {"head.w": "embed.w", "gone.w": "embed.w"}
            module.all_tied_weights_keys = declared
            receiver.dispatch(self._update(stack, pairs))
            assert receiver.version == 1
            for held in (module.embed.w, module.head.w):
                assert equal_bits(local_of(held), cut(sent, held))

    def test_what_did_not_arrive_or_is_not_held_is_named(self) -> None:
        with member(1, (2,)) as mesh, ExitStack() as stack:
            module = nn.Module()
            module.a = nn.Parameter(shard(torch.zeros(8, 4), mesh, Shard(0)))
            local = local_of(module.a)
            given = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            module.b = nn.Parameter(given)  # over the same memory, unknown to anybody
            local_of(module.b).data = local.data
            receiver = WeightReceiver(module, apply="in_place")
            stack.callback(receiver.close)
            pairs = [("a", torch.randn(8, 4)), ("b", torch.randn(8, 4))]
            with pytest.raises(VerificationError) as arrived:
                receiver.dispatch(self._update(stack, pairs, spoilt="b"))
            assert arrived.value.names == ("b",)
            with pytest.raises(VerificationError) as held:
                receiver.dispatch(self._update(stack, pairs))
            assert "a" in held.value.names


class TestTied:
    @every_way
    def test_one_offered_tensor_goes_to_slices_of_several_kinds(self, way: Way) -> None:
        """The sender ties what the receiver cuts in two ways, or not at all."""
        with member(1, (2,)) as mesh:
            module = nn.Module()
            for name, placement in (("a", Shard(0)), ("b", Shard(1)), ("c", Replicate())):
                setattr(module, name, nn.Parameter(shard(torch.zeros(6, 8), mesh, placement)))
            module.plain = nn.Parameter(torch.zeros(6, 8))
            sink = ShardedModuleSink(module, swap="copy" if way == "copy" else "pointer")
            offered = Manifest(
                (TensorSpec("a", "float32", (6, 8)),), dict.fromkeys(["b", "c", "plain"], "a")
            )
            sender = Sender("buckets")
            plan = sender.plan(offered)
            load_target = sink.open_target(plan, "in_place" if way == "in_place" else "staged")
            for seed in (1, 2):
                (full,) = random_tensors(offered, seed)
                sender.deliver(plan, load_target, [full])
                for _, parameter in module.named_parameters():
                    assert equal_bits(local_of(parameter), cut(full, parameter))

    def test_a_bucket_that_ends_between_two_rows(self) -> None:
        """A copy of one shard's row does not overwrite a row of another, copied before."""
        with member(2, (4, 4)) as mesh:
            module = nn.Module()
            for name, placements in (
                ("a", [Shard(1), Replicate()]),
                ("b", [Replicate(), Shard(1)]),
            ):
                setattr(module, name, nn.Parameter(shard(torch.zeros(2, 32), mesh, *placements)))
            sink = ShardedModuleSink(module, swap="copy")
            offered = Manifest((TensorSpec("a", "float32", (2, 32)),), {"b": "a"})
            sender = Sender("buckets", bucket_nbytes=128)
            plan = sender.plan(offered)
            load_target = sink.open_target(plan, "staged")
            (full,) = random_tensors(offered, 1)
            sender.deliver(plan, load_target, [full])
            for _, parameter in module.named_parameters():
                assert equal_bits(local_of(parameter), cut(full, parameter))


class TestUnusual:
    @every_way
    def test_a_cast(self, way: Way) -> None:
        with member(1, (2,)) as mesh:
            module = sharded(mesh, torch.bfloat16)
            sink = ShardedModuleSink(module, cast=True, swap="copy" if way == "copy" else "pointer")
            assert sink.manifest is not None
            specs = (TensorSpec(s.name, "float32", s.shape) for s in sink.manifest.specs)
            offered = Manifest(tuple(specs), sink.manifest.aliases)
            sender = Sender("buckets")
            plan = sender.plan(offered)
            load_target = sink.open_target(plan, "in_place" if way == "in_place" else "staged")
            tensors = [torch.randn(s.shape) for s in offered.specs]
            sender.deliver(plan, load_target, tensors)
            for spec, tensor in zip(offered.specs, tensors, strict=True):
                here = module.state_dict()[spec.name]
                assert equal_bits(local_of(here), cut(tensor.to(here.dtype), here)), spec.name

    @every_way
    def test_shards_that_are_not_contiguous_keep_their_strides(self, way: Way) -> None:
        with member(0, (2,)) as mesh:
            module = nn.Module()
            local = torch.zeros(5, 4).t()
            given = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            module.w = nn.Parameter(given)
            sender = Sender("memory")
            _, plan, load_target = open_target(module, way, sender)
            for seed in (1, 2):
                (full,) = random_tensors(plan.manifest, seed)
                sender.deliver(plan, load_target, [full])
                assert equal_bits(local_of(module.w), full[:4])
            assert local_of(module.w).stride() == (1, 4)

    def test_a_part_changes_nothing_else(self) -> None:
        with member(0, (2,)) as mesh:
            module = sharded(mesh)
            sink = ShardedModuleSink(module)
            offered = Manifest((TensorSpec("columns", "float32", (40, 22)),))
            sender = Sender("buckets")
            plan = sender.plan(offered)
            before = {name: local_of(t).clone() for name, t in module.state_dict().items()}
            (full,) = random_tensors(offered, 1)
            sender.deliver(plan, sink.open_target(plan, "staged"), [full])
            for name, tensor in module.state_dict().items():
                want = cut(full, tensor) if name in ("columns", "tied") else before[name]
                assert equal_bits(local_of(tensor), want), name


class TestReplaced:
    def test_a_new_parameter_with_another_placement(self) -> None:
        with member(1, (2,)) as mesh:
            module = sharded(mesh)
            sender = Sender("buckets")
            sink, plan, load_target = open_target(module, "pointer", sender)
            full = torch.zeros(10, 37)
            module.rows = nn.Parameter(shard(full, mesh, Shard(1)))
            with pytest.raises(TransferError, match="moved or replaced during the update"):
                load_target.validate()
            tensors = random_tensors(plan.manifest, 1)
            sender.deliver(plan, sink.open_target(plan, "staged"), tensors)
            full = tensors[plan.manifest.index["rows"]]
            assert equal_bits(local_of(module.rows), cut(full, module.rows))

    def test_a_local_tensor_that_moved(self) -> None:
        with member(1, (2,)) as mesh:
            module: Any = sharded(mesh)
            sink, _, _ = open_target(module, "copy", Sender("buckets"))
            before = sink.refresh()
            assert sink.refresh() == before
            local_of(module.rows).data = local_of(module.rows).clone()
            assert sink.refresh() == before + 1
            module.rows._local_tensor = local_of(module.rows).detach()
            assert sink.refresh() == before + 2

    def test_what_a_forward_pass_puts_in_its_place_for_as_long_as_it_lasts(self) -> None:
        with member(1, (2,)) as mesh:
            module: Any = sharded(mesh)
            sink, _, _ = open_target(module, "pointer", Sender("buckets"))
            before, manifest = sink.refresh(), sink.manifest
            places = dict(module._parameters)
            # As transformers does while a tensor-parallel module computes, a bias added later.
            with torch.no_grad():
                module._parameters["rows"] = module.rows.to_local()
                module._parameters["uneven"] = None
            assert sink.refresh() == before
            module._parameters.update(places)
            assert sink.refresh() == before
            assert sink.manifest is manifest

    def test_a_module_that_was_sharded_behind_a_plain_sink(self) -> None:
        module = nn.Linear(4, 4)
        sink = ModuleSink(module)
        with member(0, (2,)) as mesh:
            module.weight = nn.Parameter(shard(module.weight.detach(), mesh, Shard(0)))
            for _ in range(2):  # it is not forgotten once it was said
                with pytest.raises(ConfigError, match="1 tensors of the module are sharded"):
                    sink.refresh()


def test_full_shapes_are_wanted() -> None:
    with member(0, (2,)) as mesh:
        sink = ShardedModuleSink(sharded(mesh))
        offered = Manifest((TensorSpec("rows", "float32", (5, 37)),))
        with pytest.raises(ManifestMismatchError, match=r"wanted float32\[10, 37\]"):
            sink.open_target(StreamLayout(offered), "staged")


def test_partial_sums_are_refused_by_name() -> None:
    with member(0, (2,)) as mesh:
        module = nn.Module()
        given = DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False)
        module.register_buffer("sums", given)
        with pytest.raises(ConfigError, match=r"sums: Partial\(sum\)"):
            as_sink(module)


def test_checksums_of_what_is_whole_here() -> None:
    with member(0, (2,)) as mesh:
        module: Any = sharded(mesh)
        sink = ShardedModuleSink(module)
        whole = ["before.bias", "everywhere"]
        want: Callable[[torch.Tensor], str] = lambda t: to_hex(mix64(as_bytes(t)))  # noqa: E731
        assert sink.checksums(whole) == {
            "before.bias": want(module.before.bias),
            "everywhere": want(local_of(module.everywhere)),
        }
        with pytest.raises(
            ConfigError, match=r"2 tensors are sharded, .* slice of each: rows, tied"
        ):
            sink.checksums([*whole, "rows", "tied"])
        with pytest.raises(ConfigError, match="8 tensors are sharded"):
            sink.checksums()
        with pytest.raises(ConfigError, match="no such tensors here: x"):
            sink.checksums(["x"])


@pytest.mark.parametrize("flat", [True, False])
def test_neighbours_that_are_whole_are_copied_together(flat: bool) -> None:
    """37,000 small replicated tensors must not cost 37,000 copies."""
    with member(0, (2,)) as mesh:
        module = nn.Module()
        for i in range(20):
            module.register_buffer(f"b{i}", torch.zeros(5))
        module.w = nn.Parameter(shard(torch.zeros(8, 4), mesh, Shard(0)))
        _, plan, load_target = open_target(
            module, "pointer" if flat else "in_place", Sender("buckets")
        )
        sender = Sender("buckets", bucket_nbytes=1 << 20, unit_nbytes=1 << 20)
        plan = sender.plan(plan.manifest)
        ((_, program),) = sender.programs(plan, load_target, random_tensors(plan.manifest))
        assert len(program.copies) == (2 if flat else 21)


def test_what_lies_between_neighbours_of_a_module_is_kept() -> None:
    """Parameters may be spaced in foreign memory as they are in the stream."""
    with member(0, (2,)) as mesh:
        pool = torch.full((21,), 7.0)
        module = nn.Module()
        module.a, module.b = nn.Parameter(pool[:5]), nn.Parameter(pool[16:])
        module.w = nn.Parameter(shard(torch.zeros(8, 4), mesh, Shard(0)))
        sender = Sender("buckets")
        _, plan, load_target = open_target(module, "in_place", sender)
        tensors = random_tensors(plan.manifest)
        sender.deliver(plan, load_target, tensors)
        assert pool[5:16].tolist() == [7.0] * 11
        assert equal_bits(pool[16:], tensors[1])


def test_a_run_without_a_source_is_a_mistake() -> None:
    with member(0, (2,)) as mesh:
        _, plan, load_target = open_target(sharded(mesh), "pointer", Sender("buckets"))
    assert load_target.memory is not None
    compiler = UnitCompiler(plan, load_target.memory)
    with pytest.raises(ValueError, match="needs a bucket"):
        compiler.compile_on_devices(plan.units[0])


def test_bytes_of_other_rows_are_not_assigned_to_a_shard() -> None:
    """A shard of the same shape may hold other rows."""
    with member(0, (2,)) as mesh:
        module = nn.Module()
        full = torch.arange(16.0).reshape(4, 4)
        module.weight = nn.Parameter(shard(full, mesh, Shard(0)))
        sink = ShardedModuleSink(module)
        assert sink.manifest is not None
        target = sink.open_target(StreamLayout(sink.manifest), "staged")
        target.begin()
        module.weight = nn.Parameter(shard(full, mesh, Shard(0)))
        target.validate()
        module.weight = nn.Parameter(shard(full, mesh, _StridedShard(0, split_factor=2)))
        with pytest.raises(TransferError, match="moved or replaced"):
            target.validate()
