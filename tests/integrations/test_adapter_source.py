"""What an AdapterSource sends is what PEFT saves of the adapter, and nothing else."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from fastapi import FastAPI
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import weightsync as ws
from tests.crew import Crew, crew
from tests.integrations.test_huggingface import KINDS as MERGED_KINDS
from tests.integrations.test_huggingface import PROJECTIONS, Tensors, llama, quiet_peft, train
from tests.server.live import serving
from weightsync.integrations.adapter_paths import adapter_of, adapter_path
from weightsync.integrations.adapters import CONFIG_NAME, config_spec, decode_config
from weightsync.server import weight_router

pytestmark = quiet_peft

KINDS: dict[str, dict[str, Any]] = {
    **MERGED_KINDS,
    "patterns": {
        "target_modules": PROJECTIONS,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"v_proj": 5},
    },
}


def adapted(kind: str = "lora", **model: Any) -> Any:
    found = peft.get_peft_model(llama(**model), peft.LoraConfig(r=4, **KINDS[kind]))
    train(found, 1)
    return found


class Held:
    """A hook that keeps what it was given last."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}

    def __call__(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in pairs}

    @property
    def config(self) -> dict[str, Any]:
        return decode_config(bytes(self.tensors[CONFIG_NAME].tolist()))


def saved(model: Any, folder: Path, adapter: str = "default") -> tuple[Tensors, dict[str, Any]]:
    """What PEFT saves of an adapter: its tensors, and its config."""
    model.save_pretrained(folder, selected_adapters=[adapter], save_embedding_layers=False)
    inside = folder if adapter == "default" else folder / adapter
    config = json.loads((inside / "adapter_config.json").read_text())
    return load_file(inside / "adapter_model.safetensors"), config


def same(found: Tensors, wanted: Tensors) -> None:
    assert set(found) == set(wanted) | {CONFIG_NAME}
    for name, tensor in wanted.items():
        assert found[name].dtype is tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def as_lora(config: dict[str, Any]) -> dict[str, Any]:
    """What PEFT reads of a config. It writes the class of a model without a task into the file."""
    return vars(peft.LoraConfig(**{**config, "inference_mode": True, "auto_mapping": None}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("shm_clean")
def test_what_is_sent_is_what_peft_saves(kind: str, tmp_path: Path) -> None:
    model, held = adapted(kind), Held()
    with ws.connect(ws.AdapterSource(model, name="policy"), to=ws.WeightReceiver(held)) as sender:
        for seed in (2, 3):
            train(model, seed)
            report = sender.send_weights()
            wanted, config = saved(model, tmp_path / str(seed))
            same(held.tensors, wanted)
            assert as_lora(held.config) == as_lora(config)
            in_tensors = sum(tensor.nbytes for tensor in wanted.values())
            assert report.nbytes == in_tensors + held.tensors[CONFIG_NAME].nbytes


def test_stable_tensors_are_read_where_they_are() -> None:
    model = adapted()
    source = ws.AdapterSource(model, name="policy")
    stable = source.stable_tensors()
    assert stable is not None
    own = {id(p) for name, p in model.named_parameters() if "lora_" in name}
    assert {id(tensor) for tensor in stable[:-1]} == own


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16], ids=str)
def test_a_cast_rounds_the_adapter_once(base: torch.dtype, tmp_path: Path) -> None:
    model, held = adapted(dtype=base), Held()
    source = ws.AdapterSource(model, name="policy", dtype="bfloat16")
    with ws.connect(source, to=ws.WeightReceiver(held)) as sender:
        sender.send_weights()
    wanted, _ = saved(model, tmp_path)
    same(held.tensors, {name: tensor.bfloat16() for name, tensor in wanted.items()})


def test_each_of_several_adapters_of_one_model(tmp_path: Path) -> None:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"], lora_alpha=3))
    first, second = Held(), Held()
    one = ws.AdapterSource(model, name="policy")
    two = ws.AdapterSource(model, name="other")
    assert (one.adapter, two.adapter) == ("default", "other")
    with (
        ws.connect(one, to=ws.WeightReceiver(first)) as sender,
        ws.connect(two, to=ws.WeightReceiver(second)) as also,
    ):
        train(model, 2)
        sender.send_weights()
        also.send_weights()
    same(first.tensors, saved(model, tmp_path)[0])
    same(second.tensors, saved(model, tmp_path, "other")[0])
    assert (second.config["r"], second.config["lora_alpha"]) == (2, 3)
    assert ws.AdapterSource(model, name="served", adapter="other").adapter == "other"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(2) as made:
        yield made


def sharded_model() -> Any:
    """One rank's part of a PEFT model whose layers are sharded."""
    warnings.simplefilter("ignore")
    model = adapted()
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(p, DTensor) for n, p in model.named_parameters() if "lora_" in n)
    return model


def sends_sharded(rank: int, cast: str | None) -> tuple[Tensors, ws.SyncReport]:
    """One rank's part: send the adapter of a sharded model twice."""
    model = sharded_model()
    held = Held()
    to: Any = ws.WeightReceiver(held) if rank == 0 else ()
    source = ws.AdapterSource(model, name="policy", dtype=cast)
    with ws.connect(source, to=to) as sender:
        sender.send_weights()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1.5)
        report = sender.send_weights()
    return held.tensors, report


@pytest.mark.parametrize("cast", [None, "bfloat16"])
def test_ranks_send_the_shards_of_an_adapter(ranks: Crew, cast: str | None, tmp_path: Path) -> None:
    (found, report), (none, _) = ranks.run(sends_sharded, cast)
    assert none == {}
    assert report.gathered == {}
    (receiver,) = report.receivers
    assert len(receiver.sources) == 2
    assert min(receiver.sources.values()) > report.nbytes / 4
    model = adapted()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.5)
    wanted, _ = saved(model, tmp_path)
    same(found, {n: t.to(getattr(torch, cast)) if cast else t for n, t in wanted.items()})


def changes_on_one(rank: int) -> str:
    """One rank's part: its adapter gets another scale after `connect`."""
    model, held = sharded_model(), Held()
    to: Any = ws.WeightReceiver(held) if rank == 0 else ()
    with ws.connect(ws.AdapterSource(model, name="policy"), to=to) as sender:
        sender.send_weights()
        if rank:
            layer = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj")
            layer.set_scale("default", 3)
        try:
            sender.send_weights()
        except ws.ConfigError as exc:
            return str(exc)
    return ""


def test_a_scale_that_changes_on_one_rank_is_refused_on_all(ranks: Crew) -> None:
    for told in ranks.run(changes_on_one):
        assert "has another scale than its config" in told


def test_the_receiver_is_below_the_servers_url() -> None:
    base, held = llama(), Held()
    app = FastAPI()
    app.include_router(weight_router(ws.WeightReceiver(base), token="t"))
    receiver = ws.WeightReceiver(held)
    app.include_router(weight_router(receiver, token="t"), prefix="/adapters/policy")
    model = adapted()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    with (
        serving(app) as url,
        ws.connect(ws.AdapterSource(model, name="policy"), to=url, token="t") as sender,
    ):
        assert sender.targets == [f"{url}/adapters/policy"]
        report = sender.send_weights()
        assert report.control_messages == 2
    assert len(held.tensors) == 13
    assert all(torch.equal(before[name], t) for name, t in base.state_dict().items())
    assert receiver.version == 1


def test_a_server_without_adapters_says_so() -> None:
    app = FastAPI()
    app.include_router(weight_router(ws.WeightReceiver(llama()), token="t"))
    with (
        serving(app) as url,
        pytest.raises(ws.WeightSyncError, match=r"adapters/policy.*404"),
    ):
        ws.connect(ws.AdapterSource(adapted(), name="policy"), to=url, token="t")


def test_a_plain_model_refuses_an_adapter_and_keeps_its_weights() -> None:
    server = llama()
    with pytest.raises(ws.ManifestMismatchError, match="unexpected"):
        ws.connect(ws.AdapterSource(adapted(), name="policy"), to=ws.WeightReceiver(server))
    assert torch.equal(server.lm_head.weight, llama().lm_head.weight)


def arrow() -> Any:
    """Return a config as of a router over one adapter."""
    made = peft.ArrowConfig(top_k=1)
    made.task_adapter_names, made.gks_adapter_names = ["task_0"], []
    return made


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights='lora_ga'"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"kasa_config": peft.KasaConfig()}, "kasa_config"),
        ({"arrow_config": arrow()}, "arrow_config"),
    ],
)
def test_an_adapter_over_a_changed_base_is_refused(config: dict[str, Any], named: str) -> None:
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], **config))
    with pytest.raises(ws.ConfigError, match=rf"{named}.*MergedSource"):
        ws.AdapterSource(model, name="policy")


def test_another_kind_of_adapter_is_refused() -> None:
    config = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    with pytest.raises(ws.ConfigError, match="peft_type='IA3'"):
        ws.AdapterSource(peft.get_peft_model(llama(), config), name="policy")


def test_a_change_of_scale_or_config_is_refused_until_it_is_undone() -> None:
    model, held = adapted(), Held()
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    with ws.connect(ws.AdapterSource(model, name="policy"), to=ws.WeightReceiver(held)) as sender:
        sender.send_weights()
        layer.set_scale("default", 3)
        with pytest.raises(ws.ConfigError, match=r"q_proj \(6, not 2\)"):
            sender.send_weights()
        with pytest.raises(ws.ConfigError, match="q_proj"):
            ws.AdapterSource(model, name="policy")
        layer.set_scale("default", 1)
        model.peft_config["default"].lora_alpha = 2
        with pytest.raises(ws.ConfigError, match="connect again"):
            sender.send_weights()
        model.peft_config["default"].lora_alpha = 8
        train(model, 5)
        sender.send_weights()
    sent = held.tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert torch.equal(sent, layer.lora_A["default"].weight)


@pytest.mark.parametrize("name", ["", "a/b", "policy@3", "../base", ".", "x" * 129, None])
def test_a_name_is_part_of_a_path(name: Any) -> None:
    with pytest.raises(ws.ConfigError, match="an adapter's name is"):
        ws.AdapterSource(adapted(), name=name)


def test_an_adapter_that_the_model_lacks() -> None:
    with pytest.raises(ws.ConfigError, match="no adapter 'third'; it has default"):
        ws.AdapterSource(adapted(), name="policy", adapter="third")


def test_what_is_no_peft_model_is_refused() -> None:
    with pytest.raises(ws.ConfigError, match="LlamaForCausalLM is no PeftModel"):
        ws.AdapterSource(llama(), name="policy")


def test_paths_and_names() -> None:
    assert adapter_of(adapter_path("policy")) == "policy"
    for path in ("policy", "adapters/", "adapters/a/b"):
        with pytest.raises(ws.ConfigError):
            adapter_of(path)


@pytest.mark.parametrize(
    "spec",
    [None, ws.TensorSpec(CONFIG_NAME, "int8", (4,)), ws.TensorSpec(CONFIG_NAME, "uint8", ())],
)
def test_a_manifest_without_a_config_is_refused(spec: ws.TensorSpec | None) -> None:
    with pytest.raises(ws.ManifestMismatchError, match="AdapterSource"):
        config_spec(ws.Manifest(() if spec is None else (spec,)))
