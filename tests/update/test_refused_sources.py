"""Sources that no longer fit: refused as long as that is so, and then sent as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune

import weightsync as ws
from weightsync.integrations.huggingface import MergedSource
from weightsync.specs import Manifest
from weightsync.tensors import spec_of
from weightsync.weights.sources.base import ModuleSource, StateDictSource

SETTINGS: list[dict[str, Any]] = [
    {},
    {"packed": True},
    {"adopt": False},
    {"delta": "always"},
    {"delta": "always", "packed": True},
    {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "delta": "always"},
]
Change = Callable[[nn.Module], object]


class Layers(nn.Module):
    """Three parameters of one shape, a norm, and two tied tensors."""

    a: nn.Parameter
    c: nn.Parameter

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        for i, name in enumerate("abc"):
            self.register_parameter(name, weight(value + i))
        self.norm = nn.LayerNorm(64)
        self.embed = nn.Embedding(8, 64)
        self.head = nn.Linear(64, 8, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            self.embed.weight.fill_(value)


def weight(value: float) -> nn.Parameter:
    return nn.Parameter(torch.full((64,), float(value)), requires_grad=False)


def train(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.view(-1)[:: i + 2] += step + 1


def put_last(table: dict[str, Any], key: str) -> None:
    table[key] = table.pop(key)


def same(sent: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(t.to(held[name].dtype), held[name]) for name, t in sent.items())


def rename_one(model: Any) -> None:
    model.d, model.c = model.c, None
    del model.c


def name_back(model: Any) -> None:
    model.c = model.d
    del model.d


def replace_one(model: Any) -> None:
    del model.c
    model.d = weight(9)


def put_back(model: Any) -> None:
    del model.d
    model.c = weight(11)


def prune_norm(model: Any) -> None:
    prune.identity(model.norm, "weight")  # type: ignore[no-untyped-call]  # torch's


def remove_pruning(model: Any) -> None:
    prune.remove(model.norm, "weight")  # type: ignore[no-untyped-call]  # torch's


def untie(model: Any) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach() + 1)


def untie_by_assigning(model: nn.Module) -> None:
    state = {name: t.clone() + i for i, (name, t) in enumerate(model.state_dict().items())}
    model.load_state_dict(state, assign=True)


def tie(model: Any) -> None:
    model.head.weight = model.embed.weight


def tie_the_other_way(model: Any) -> None:
    model.embed.weight = model.head.weight


def tie_more(model: Any) -> None:
    model.b = model.a


def untie_those(model: Any) -> None:
    model.b = weight(5)


def add(model: nn.Module) -> None:
    model.extra = weight(1)


def take_out(model: nn.Module) -> None:
    del model.extra


CHANGES: list[tuple[Change, Change]] = [
    (rename_one, name_back),
    (replace_one, put_back),
    (prune_norm, remove_pruning),
    (untie, tie),
    (untie, tie_the_other_way),
    (untie_by_assigning, tie),
    (tie_more, untie_those),
    (add, take_out),
]


@pytest.mark.parametrize("released", [False, True], ids=["connected", "released"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("away", "back"), CHANGES, ids=lambda change: change.__name__)
def test_refused_until_it_fits_again(
    away: Change, back: Change, settings: dict[str, Any], released: bool
) -> None:
    trainer, server = Layers(), Layers(20)
    server.to(settings.get("dtype", torch.float32))
    with ws.connect(trainer, to=ws.WeightReceiver(server), **settings) as sender:
        sender.send_weights()
        train(trainer, 1)
        sender.send_weights()
        before = {name: tensor.clone() for name, tensor in server.state_dict().items()}
        away(trainer)
        if released:
            sender.release()
        for _ in range(3):
            with pytest.raises(ws.ManifestMismatchError, match=r"no longer those of connect\(\)"):
                sender.send_weights()
            assert same(before, server.state_dict())
            assert sender.version == 2
        back(trainer)
        for step in range(4):
            assert sender.send_weights().verified == "held"
            assert same(trainer.state_dict(), server.state_dict()), step
            train(trainer, step)


def test_another_order_is_sent_under_the_right_names() -> None:
    trainer, server = Layers(), Layers(20)
    with ws.connect(trainer, to=ws.WeightReceiver(server)) as sender:
        put_last(trainer._parameters, "a")
        trainer.a.data += 7
        trainer.embed.weight = nn.Parameter(trainer.embed.weight.detach() + 1)
        tie(trainer)
        put_last(trainer._modules, "head")
        put_last(trainer._modules, "embed")
        assert [name for name, _ in trainer.named_parameters()][2:] == [
            "a",
            "norm.weight",
            "norm.bias",
            "head.weight",
        ]
        sender.send_weights()
        assert same(trainer.state_dict(), server.state_dict())


def test_a_walk_that_fails_takes_nothing_over() -> None:
    trainer = Layers()
    fails = False

    def rename(name: str) -> str:
        if fails and name.startswith("norm"):
            raise RuntimeError("not now")
        return name

    source = ModuleSource(trainer, rename=rename)
    trainer.a = weight(3)
    fails = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not now"):
            source.stable_tensors()
    fails = False
    assert same(dict(source.tensors()), trainer.state_dict())


class OwnSource:
    """A user's source of stable tensors, which come without names."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.held = tensors

    @property
    def manifest(self) -> Manifest:
        return Manifest(tuple(spec_of(name, tensor) for name, tensor in self.held.items()))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.held.items())

    def stable_tensors(self) -> list[torch.Tensor]:
        return list(self.held.values())


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("packed", [None, True])
def test_a_source_of_ones_own_may_not_rename(packed: bool | None, released: bool) -> None:
    source = OwnSource({"a": torch.ones(64), "b": torch.zeros(64)})
    server = nn.ParameterDict({"a": weight(5), "b": weight(6)})
    with ws.connect(source, to=ws.WeightReceiver(server), packed=packed) as sender:
        sender.send_weights()
        a, b = source.held.values()
        for wrong in ({"b": a, "a": b}, {"a": a, "c": b}, {"a": a}):
            source.held = wrong
            if released:
                sender.release()
            for _ in range(2):
                with pytest.raises(ws.ManifestMismatchError):
                    sender.send_weights()
        source.held = {"a": b, "b": a}
        sender.send_weights()
        assert same(source.held, server.state_dict())


def test_a_state_dict_that_lacks_a_tensor() -> None:
    state: dict[str, Any] = {"a": torch.ones(64), "b": torch.zeros(64)}
    source = StateDictSource(state)
    state["b"] = None
    for _ in range(2):
        with pytest.raises(ws.ConfigError, match="'b' of the source is no tensor"):
            list(source.tensors())
    state["b"] = torch.ones(64)
    assert same(dict(source.tensors()), state)


def test_files_of_another_model_are_refused_each_time(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.ones(64), "b": torch.zeros(64)}
    save_file(tensors, path)
    source = ws.SafetensorsSource(path)
    save_file({"a": torch.ones(64), "c": torch.zeros(64)}, path)
    for _ in range(3):
        with pytest.raises(ws.ManifestMismatchError, match="no longer describe"):
            list(source.tensors())
        assert [spec.name for spec in source.manifest.specs] == ["a", "b"]
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, path)
    assert dict(source.tensors())["b"].sum() == 64


def test_adapters_that_cannot_be_merged_are_refused_each_time() -> None:
    config = peft.LoraConfig(target_modules=["0", "2"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), config)
    source = MergedSource(model)
    before = {name: tensor.clone() for name, tensor in source.tensors()}
    base = model.get_base_model()

    class Unknown(AuxiliaryTrainingWrapper):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    base.extra = Unknown()
    for _ in range(3):
        with pytest.raises(ws.ConfigError, match="is a Unknown"):
            list(source.tensors())
    del base.extra
    assert same(before, dict(source.tensors()))
