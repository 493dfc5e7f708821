"""Every example of docs/sources.md, run as it stands."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import peft
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import weightsync as ws
from tests.crew import crew
from weightsync.weights.sources.base import as_source

Tensors = dict[str, torch.Tensor]
ADAPTERS = "A model with adapters"
EXPERTS = "A mixture of experts"
DERIVED = "What is not sent"
KEPT = "A cast to what receivers keep"
FLAT = "FSDP1 and ZeRO-3"
PAGE = Path(__file__).parents[2] / "docs" / "sources.md"
FOUND = re.findall(
    r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL
)
EXAMPLES: dict[str, str] = dict(FOUND)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(5, 3))
        self.gate_up_proj = nn.Linear(5, 6, bias=False)
        self.norm = nn.LayerNorm(5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])


def make_model() -> Model:
    torch.manual_seed(3)
    return Model()


def casted(state: Tensors) -> Tensors:
    return {n: t.to(torch.bfloat16) for n, t in state.items()}


def renamed(state: Tensors) -> Tensors:
    return {f"model.{n}": t for n, t in state.items()}


def fused(state: Tensors) -> Tensors:
    wanted = {n: t for n, t in state.items() if not re.search("[qkv]_proj", n)}
    for i in range(2):
        for kind in ("weight", "bias"):
            prefix = f"layers.{i}."
            parts = [state[f"{prefix}{part}_proj.{kind}"] for part in "qkv"]
            wanted[f"{prefix}qkv_proj.{kind}"] = torch.cat(parts)
    return wanted


def split(state: Tensors) -> Tensors:
    wanted = {n: t for n, t in state.items() if "gate_up" not in n}
    for i in range(2):
        whole = state[f"layers.{i}.gate_up_proj.weight"]
        wanted[f"layers.{i}.gate_proj.weight"] = whole[:3]
        wanted[f"layers.{i}.up_proj.weight"] = whole[3:]
    return wanted


def partly_cast(state: Tensors) -> Tensors:
    return {n: t if "norm" in n else t.to(torch.bfloat16) for n, t in state.items()}


def less_one(state: Tensors) -> Tensors:
    return {n: t - 1 if n.endswith("norm.weight") else t for n, t in casted(state).items()}


def same(state: Tensors) -> Tensors:
    return state


WANTED: dict[str, Callable[[Tensors], Tensors]] = {
    "What happens by itself": casted,
    "Other names": renamed,
    "One tensor made from several": fused,
    "Several tensors made from one": split,
    "A cast for some of them": partly_cast,
    "Parts that ranks declare": same,
    "A source of your own": same,
    "A source around another": less_one,
}


def check(found: Tensors, wanted: Tensors) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_every_example_is_run() -> None:
    assert set(EXAMPLES) == {*WANTED, ADAPTERS, EXPERTS, DERIVED, KEPT, FLAT}
    assert PAGE.read_text().count("```python") == len(EXAMPLES)


def test_each_tensor_is_cast_to_what_the_server_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    model, server = make_model(), make_model().bfloat16()
    server.layers[0].norm.float()
    run(KEPT, model, ws=ws, url=ws.WeightReceiver(server).handle)
    sent = model.state_dict()
    check(
        dict(server.state_dict()), {n: sent[n].to(t.dtype) for n, t in server.state_dict().items()}
    )
    casts = len(sent) - 2
    assert capsys.readouterr().out == f"{{'float32 to bfloat16': {casts}}}\n"


class Scaled(nn.Linear):
    scale_of_weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("scale_of_weight", torch.zeros(()), persistent=False)


@pytest.mark.usefixtures("shm_clean")
def test_what_is_not_sent_is_derived() -> None:
    server, model = nn.Module(), nn.Module()
    server.layers, model.layers = nn.ModuleList([Scaled()]), nn.ModuleList([Scaled()])
    receiver = run(DERIVED, model, ws=ws, server_model=server)["receiver"]
    with torch.no_grad():
        next(model.parameters()).fill_(-4.0)
    with ws.connect(model, to=receiver.handle) as sender:
        sender.send_weights()
    assert server.layers[0].scale_of_weight == 4
    receiver.close()


@pytest.mark.usefixtures("shm_clean")
def test_experts_arrive_one_by_one() -> None:
    mixture, received = nn.Module(), {}
    mixture.mlp = nn.Module()
    mixture.mlp.experts = nn.ParameterDict(
        {"gate_up_proj": torch.randn(2, 6, 4), "down_proj": torch.randn(2, 4, 3)}
    )

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        received.update({name: tensor.clone() for name, tensor in weights})

    run(EXPERTS, mixture, ws=ws, url=ws.WeightReceiver(load).handle)
    fused = mixture.mlp.experts
    wanted = {f"mlp.experts.{i}.gate_proj.weight": fused["gate_up_proj"][i, :3] for i in (0, 1)}
    wanted |= {f"mlp.experts.{i}.up_proj.weight": fused["gate_up_proj"][i, 3:] for i in (0, 1)}
    wanted |= {f"mlp.experts.{i}.down_proj.weight": fused["down_proj"][i] for i in (0, 1)}
    check(received, wanted)


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.usefixtures("shm_clean")
def test_adapters_are_merged() -> None:
    model: Any = peft.get_peft_model(make_model(), peft.LoraConfig(target_modules=["q_proj"]))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    server = make_model()
    run(ADAPTERS, model, ws=ws, url=ws.WeightReceiver(server).handle)
    check(dict(server.state_dict()), copy.deepcopy(model).merge_and_unload().state_dict())


@pytest.mark.parametrize("title", WANTED)
@pytest.mark.usefixtures("shm_clean")
def test_example(title: str) -> None:
    model, received = make_model(), {}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        received.update({name: tensor.clone() for name, tensor in weights})

    wanted = WANTED[title]({n: t.clone() for n, t in model.state_dict().items()})
    run(title, model, ws=ws, url=ws.WeightReceiver(load).handle)
    check(received, wanted)


def run(title: str, model: nn.Module, **names: Any) -> dict[str, Any]:
    namespace = {"torch": torch, "model": model, **names}
    exec(compile(EXAMPLES[title], f"{PAGE.name}: {title}", "exec"), namespace)  # our own page
    return namespace


class OnlySource:
    """In the place of weightsync, where the ranks of a trainer are to make tensors alone."""

    def __init__(self) -> None:
        self.found: Tensors = {}

    def connect(self, source: object, **_: object) -> OnlySource:
        self.found = {n: t.clone() for n, t in as_source(source).tensors()}
        return self

    def send_weights(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


SHARDED = (
    "One tensor made from several",
    "Several tensors made from one",
    "A cast for some of them",
)


def on_a_rank(_: int) -> None:
    for title in SHARDED:
        model, only = make_model(), OnlySource()
        wanted = WANTED[title]({n: t.clone() for n, t in model.state_dict().items()})
        for layer in model.layers:
            fully_shard(layer)
        run(title, model, ws=only, url="")
        check(only.found, wanted)


@pytest.fixture
def two_ranks() -> Iterator[Any]:
    with crew(2) as made:
        yield made


def test_callables_work_on_sharded_models_as_they_stand(two_ranks: Any) -> None:
    two_ranks.run(on_a_rank)
