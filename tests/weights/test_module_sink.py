"""Where tensors go in a module: swapped by pointer, by copy, or written in place."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.weights.streams import random_tensors
from weightsync.errors import ConfigError, ManifestMismatchError, TransferError
from weightsync.specs import Manifest, TensorSpec
from weightsync.tensors import TORCH_DTYPES, as_bytes, spec_of
from weightsync.update.incoming import LoadTargets
from weightsync.weights.copying import arena
from weightsync.weights.copying.fingerprint import mix64, to_hex
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.sinks.base import LoadTarget
from weightsync.weights.sinks.module_sink import ModuleSink, ModuleTensors

Way = Literal["pointer", "copy", "in_place"]
every_way = pytest.mark.parametrize("way", ["pointer", "copy", "in_place"])


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def sink_of(module: nn.Module, way: Way, *, cast: bool = False) -> ModuleSink:
    return ModuleSink(module, cast=cast, swap="copy" if way == "copy" else "pointer")


def open_target(sink: ModuleSink, manifest: Manifest, way: Way) -> LoadTarget:
    return sink.open_target(StreamLayout(manifest), "in_place" if way == "in_place" else "staged")


def deliver(load_target: LoadTarget, tensors: list[torch.Tensor], *, commit: bool = True) -> None:
    load_target.begin()
    assert load_target.memory is not None
    for place, tensor in zip(load_target.memory.tensors, tensors, strict=True):
        place.copy_(as_bytes(tensor.contiguous()))
    load_target.validate()
    if commit:
        load_target.commit()
    else:
        load_target.discard()


def manifest_of(sink: ModuleSink) -> Manifest:
    assert sink.manifest is not None
    return sink.manifest


def equal_bits(have: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(as_bytes(have.contiguous()), as_bytes(want.contiguous()))


@every_way
@pytest.mark.parametrize("tied", [True, False])
def test_update_after_update(way: Way, tied: bool) -> None:
    module = Model(tied=tied)
    sink = sink_of(module, way)
    parameters = dict(module.named_parameters())
    load_target = open_target(sink, manifest_of(sink), way)
    for seed in range(4):
        tensors = random_tensors(manifest_of(sink), seed)
        deliver(load_target, tensors)
        state = module.state_dict()
        for spec, tensor in zip(manifest_of(sink).specs, tensors, strict=True):
            assert equal_bits(state[spec.name], tensor)
        assert (module.head.weight is module.embed.weight) is tied
    assert all(parameters[name] is p for name, p in module.named_parameters())


@every_way
def test_conjugate_and_negative_views(way: Way) -> None:
    module = nn.Module()
    flat = torch.zeros(4, dtype=torch.complex64)
    module.plain = nn.Parameter(torch.zeros(3))
    module.conjugate = nn.Parameter(flat.conj())
    module.negative = nn.Parameter(torch.zeros(4, dtype=torch.complex64).conj().imag)
    sink = sink_of(module, way)
    load_target = open_target(sink, manifest_of(sink), way)
    sent = [torch.arange(3.0), torch.tensor([1 + 2j, 3 - 4j, 5j, 6]), torch.arange(4.0)]
    deliver(load_target, sent)
    assert module.conjugate.is_conj()
    assert module.negative.is_neg()
    for held, want in zip(module.parameters(), sent, strict=True):
        assert torch.equal(held, want)


@pytest.mark.parametrize("way", ["pointer", "copy"])
def test_staged_weights_are_unseen_until_commit_and_after_discard(way: Way) -> None:
    module = Model()
    sink = sink_of(module, way)
    load_target = open_target(sink, manifest_of(sink), way)
    first, second = (random_tensors(manifest_of(sink), seed) for seed in (1, 2))
    deliver(load_target, first)
    held = sink.checksums()
    deliver(load_target, second, commit=False)
    assert sink.checksums() == held
    deliver(load_target, second)
    assert sink.checksums() != held


def test_making_room_changes_no_value() -> None:
    module = Model()
    sink = sink_of(module, "pointer")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    open_target(sink, manifest_of(sink), "pointer")
    assert all(equal_bits(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_staging_takes_one_slab_beside_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the module held is let go of before there is a second slab."""
    module = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    module.add_module("kept", nn.Linear(64, 64, bias=False))
    shown = module.get_parameter("kept.weight")[1:]  # a view: its parameter cannot move
    sink = sink_of(module, "pointer")
    plan = StreamLayout(manifest_of(sink))
    weak: Any = StorageWeakRef
    held = [(t.untyped_storage().nbytes(), weak(t.untyped_storage())) for t in module.parameters()]
    made: list[torch.Tensor] = []
    beside: list[int] = []
    allocate = arena.allocate

    def counted(nbytes: int, device: torch.device) -> torch.Tensor:
        made.append(allocate(nbytes, device))
        old = sum(size for size, storage in held if not storage.expired())
        beside.append(old + sum(map(torch.Tensor.numel, made)) - sink_nbytes)
        return made[-1]

    sink_nbytes = sum(size for size, _ in held)
    monkeypatch.setattr(arena, "allocate", counted)
    load_target = sink.open_target(plan, "staged")
    one = 64 * 64 * 4
    assert beside == [plan.nbytes, plan.nbytes + one]
    assert sink.staged_nbytes(plan) == max(beside)
    deliver(load_target, random_tensors(manifest_of(sink), 1))
    assert equal_bits(shown, module.get_parameter("kept.weight")[1:])


@pytest.mark.parametrize("room_for", [0, 1])
def test_without_room_for_what_is_staged_auto_writes_in_place(
    room_for: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the second slab finds none."""
    module = Model()
    sink = sink_of(module, "pointer")
    before = sink.checksums()
    allocate = arena.allocate
    made: list[int] = []

    def full(nbytes: int, device: torch.device) -> torch.Tensor:
        if len(made) == room_for:
            raise TransferError("no room")
        made.append(nbytes)
        return allocate(nbytes, device)

    monkeypatch.setattr(arena, "allocate", full)
    with pytest.raises(TransferError, match="no room"):
        LoadTargets(sink_of(Model(), "pointer"), "staged").get(
            StreamLayout(manifest_of(sink)), whole=True
        )
    made.clear()
    load_targets = LoadTargets(sink, "auto")
    load_target = load_targets.get(StreamLayout(manifest_of(sink)), whole=True)
    assert (load_targets.apply, load_target.in_place) == ("in_place", True)
    assert sink.checksums() == before
    tensors = random_tensors(manifest_of(sink), 1)
    deliver(load_target, tensors)
    state = module.state_dict()
    for spec, tensor in zip(manifest_of(sink).specs, tensors, strict=True):
        assert equal_bits(state[spec.name], tensor)


def test_a_swap_by_copy_leaves_every_address() -> None:
    module = Model()
    sink = sink_of(module, "copy")
    addresses = [t.data_ptr() for t in module.state_dict().values()]
    deliver(open_target(sink, manifest_of(sink), "copy"), random_tensors(manifest_of(sink), 1))
    assert [t.data_ptr() for t in module.state_dict().values()] == addresses


def test_compiled_modules_are_swapped_by_copy() -> None:
    assert ModuleSink(Model()).swap == "pointer"
    part = nn.Linear(2, 2)
    part.compile(backend="eager")
    assert ModuleSink(nn.Sequential(part)).swap == "copy"


class TestTied:
    """The two sides need not tie alike: every place gets its tensor."""

    tensors = random_tensors(
        Manifest((TensorSpec("e", "float32", (5, 4)), TensorSpec("h", "float32", (5, 4)))), 1
    )

    @every_way
    def test_tied_there_and_not_here(self, way: Way) -> None:
        module = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
        sink = sink_of(module, way)
        offered = Manifest(
            (spec_of("embed.weight", self.tensors[0]),), {"head.weight": "embed.weight"}
        )
        for seed in (1, 2):
            tensor = random_tensors(offered, seed)[0]
            deliver(open_target(sink, offered, way), [tensor])
            assert equal_bits(module.get_parameter("embed.weight"), tensor)
            assert equal_bits(module.get_parameter("head.weight"), tensor)

    @every_way
    @pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
    def test_tied_here_and_sent_once_under_either_name(self, way: Way, name: str) -> None:
        module = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
        module["head"].weight = module["embed"].weight
        sink = sink_of(module, way)
        offered = Manifest((spec_of(name, self.tensors[0]),))
        deliver(open_target(sink, offered, way), [self.tensors[0]])
        assert equal_bits(module.get_parameter("head.weight"), self.tensors[0])
        assert module["head"].weight is module["embed"].weight

    def test_two_tensors_for_one_tied_place_are_refused(self) -> None:
        module = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
        module["head"].weight = module["embed"].weight
        specs = tuple(
            spec_of(name, tensor)
            for name, tensor in zip(("embed.weight", "head.weight"), self.tensors, strict=True)
        )
        with pytest.raises(ManifestMismatchError, match="wanted as one tied tensor"):
            open_target(ModuleSink(module), Manifest(specs), "pointer")

    @every_way
    def test_tied_by_memory_alone(self, way: Way) -> None:
        module = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
        module["head"].weight.data = module["embed"].weight.data
        sink = sink_of(module, way)
        load_target = open_target(sink, manifest_of(sink), way)
        for seed in (1, 2):
            tensors = random_tensors(manifest_of(sink), seed)
            deliver(load_target, tensors)
            assert equal_bits(module.get_parameter("embed.weight"), tensors[0])
            assert equal_bits(module.get_parameter("head.weight"), tensors[0])


class TestUnusual:
    @every_way
    def test_a_cast(self, way: Way) -> None:
        module = nn.Linear(4, 3).bfloat16()
        sink = sink_of(module, way, cast=True)
        offered = Manifest(
            (TensorSpec("weight", "float32", (3, 4)), TensorSpec("bias", "bfloat16", (3,)))
        )
        for value in (1.0, 2.5):
            weight = torch.full((3, 4), value)
            deliver(open_target(sink, offered, way), [weight, torch.full((3,), value).bfloat16()])
            assert equal_bits(module.weight, weight.bfloat16())
            assert module.weight.dtype is torch.bfloat16
            assert module.bias.tolist() == [value] * 3

    def test_no_cast_unless_it_is_asked_for(self) -> None:
        offered = Manifest((TensorSpec("weight", "bfloat16", (3, 4)),))
        with pytest.raises(
            ManifestMismatchError, match=r"offered bfloat16\[3, 4\], wanted float32"
        ):
            open_target(ModuleSink(nn.Linear(4, 3)), offered, "pointer")

    @every_way
    def test_other_strides_are_kept(self, way: Way) -> None:
        module = nn.Linear(4, 3, bias=False)
        module.weight.data = torch.zeros(4, 3).t()
        sink = sink_of(module, way)
        load_target = open_target(sink, manifest_of(sink), way)
        for seed in (1, 2):
            tensors = random_tensors(manifest_of(sink), seed)
            deliver(load_target, tensors)
            assert equal_bits(module.weight, tensors[0])
        assert module.weight.stride() == (1, 3)

    @every_way
    @pytest.mark.parametrize("dtype", TORCH_DTYPES)
    def test_every_dtype(self, way: Way, dtype: str) -> None:
        module = nn.Module()
        module.register_buffer("t", torch.zeros(3, 5, dtype=TORCH_DTYPES[dtype]))
        sink = sink_of(module, way)
        tensors = random_tensors(manifest_of(sink), 4)
        deliver(open_target(sink, manifest_of(sink), way), tensors)
        assert equal_bits(module.get_buffer("t"), tensors[0])

    @every_way
    def test_a_part_changes_nothing_else(self, way: Way) -> None:
        module = Model()
        sink = sink_of(module, way)
        whole = open_target(sink, manifest_of(sink), way)
        part = Manifest((TensorSpec("head.weight", "float32", (5, 4)),))
        for seed in (1, 2):
            tensors = random_tensors(manifest_of(sink), seed)
            deliver(whole, tensors)
            before = sink.checksums()
            tensor = random_tensors(part, seed + 10)
            deliver(open_target(sink, part, way), tensor)
            after = sink.checksums()
            assert {name for name in after if after[name] != before[name]} == {"head.weight"}
            assert equal_bits(module.head.weight, tensor[0])


class TestChecksums:
    def test_all_or_some_aliases_included(self) -> None:
        module = Model(tied=True)
        sums = ModuleSink(module).checksums()
        assert set(sums) == set(module.state_dict())
        assert sums["head.weight"] == sums["embed.weight"]
        wanted = to_hex(mix64(as_bytes(module.embed.weight)))
        assert ModuleSink(module).checksums(["head.weight"]) == {"head.weight": wanted}

    def test_unknown_names(self) -> None:
        with pytest.raises(ConfigError, match="no such tensors here: x, y"):
            ModuleSink(Model()).checksums(["x", "scale", "y"])

    def test_a_module_with_other_parameters_now(self) -> None:
        module = Model()
        sink = ModuleSink(module)
        module.scale = nn.Parameter(torch.zeros(1))
        for _ in range(2):  # it is not forgotten once it was said
            with pytest.raises(ManifestMismatchError, match="make a new WeightReceiver"):
                sink.checksums()


@pytest.mark.parametrize("at", [0, 126, 127, 128, 255, 299])
def test_a_change_is_seen_wherever_it_is_in_a_large_module(at: int) -> None:
    """Modules are asked in blocks."""
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(300)))
    found = ModuleTensors(module)
    assert not found.refresh()
    layer: Any = module[at]
    layer.weight = nn.Parameter(torch.ones(2, 2))
    assert found.refresh()
    assert found.tensors[2 * at] is layer.weight
    layer.compile(backend="eager")
    assert not found.refresh()
    assert not found.compiled
    assert not found.refresh(notes_compiled=True)
    assert found.compiled
