"""Experts of real (tiny) transformers models, fused and one by one, bit for bit both ways."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

import weightsync as ws
from weightsync.cli.checkpoint import explain
from weightsync.errors import ConfigError, ManifestMismatchError
from weightsync.weights.sources.experts import ExpertLayout

Tensors = dict[str, torch.Tensor]
COMMON: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
}


class Kind(NamedTuple):
    """A transformers model; its checkpoint names one expert's tensors by `layout`."""

    model: str
    layout: ExpertLayout
    config: dict[str, Any]


KINDS = {
    "mixtral": Kind("Mixtral", "mixtral", {"intermediate_size": 12, "num_local_experts": 4}),
    # 2 * intermediate == hidden: gate_up_proj is square, and its shape alone says nothing.
    "qwen3_moe": Kind(
        "Qwen3Moe",
        "qwen3_moe",
        {"moe_intermediate_size": 8, "intermediate_size": 24, "num_experts": 4},
    ),
    # Shared experts beside the others, and intermediate == hidden.
    "qwen2_moe": Kind(
        "Qwen2Moe",
        "qwen3_moe",
        {
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 20,
            "intermediate_size": 24,
            "num_experts": 4,
            "decoder_sparse_step": 2,  # one layer has no experts
        },
    ),
    "olmoe": Kind("Olmoe", "qwen3_moe", {"intermediate_size": 12, "num_experts": 4}),
}


def make_model(kind: Kind, *, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind.model}Config")(**COMMON, **kind.config)
    model = getattr(transformers, f"{kind.model}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, so that no two are alike
            parameter.normal_()
    return model


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def found_in(source: Any) -> Tensors:
    """What a source yields, which is what its manifest says."""
    pairs = [(name, tensor.clone()) for name, tensor in source.tensors()]
    assert [(n, tuple(t.shape)) for n, t in pairs] == [
        (spec.name, spec.shape) for spec in source.manifest.specs
    ]
    return dict(pairs)


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype is tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_what_transformers_saves_and_loads_is_what_the_sources_make(
    kind: Kind, tmp_path: Path
) -> None:
    """`save_pretrained` takes experts apart; `from_pretrained` fuses them."""
    model = make_model(kind)
    model.save_pretrained(tmp_path)
    saved = ws.SafetensorsSource(tmp_path)
    per_expert = ws.PerExpertSource(model, layout=kind.layout)
    assert_same(found_in(per_expert), found_in(saved))
    assert_same(
        found_in(ws.FusedExpertsSource(saved, layout=kind.layout)), dict(model.named_parameters())
    )
    assert_same(
        found_in(ws.FusedExpertsSource(per_expert, layout=kind.layout)),
        dict(model.named_parameters()),
    )


def test_parts_are_views_and_see_the_next_step() -> None:
    model = make_model(KINDS["mixtral"])
    source = ws.PerExpertSource(model, layout="mixtral")
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert {t.untyped_storage().data_ptr() for _, t in source.tensors()} == storages
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[3, 12:] = 7
    tensors = dict(source.tensors())
    assert (tensors["model.layers.1.block_sparse_moe.experts.3.w3.weight"] == 7).all()
    assert not (tensors["model.layers.1.block_sparse_moe.experts.3.w1.weight"] == 7).any()


def test_views_are_registered_where_they_stay_outside_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensors without memory stand for those on a GPU, which has not been tried."""
    monkeypatch.setattr(ws.ModuleSource, "_look_again", lambda _: None)  # refuses them
    with torch.device("meta"):
        model = make_model(KINDS["qwen3_moe"])
    source = ws.PerExpertSource(model)
    stable = source.stable_tensors()
    assert stable is not None
    assert [tuple(t.shape) for t in stable] == [spec.shape for spec in source.manifest.specs]
    parts = [t for t in stable if t._is_view()]
    assert len(parts) == 2 * 4 * 3
    assert all(part.is_contiguous() for part in parts)
    assert ws.PerExpertSource(make_model(KINDS["qwen3_moe"])).stable_tensors() is None


@pytest.mark.usefixtures("shm_clean")
def test_a_model_with_fused_experts_takes_a_checkpoint_without(kind: Kind, tmp_path: Path) -> None:
    """The error of connect names the source, and with that source the update goes through."""
    make_model(kind, seed=1).save_pretrained(tmp_path)
    files, server = ws.SafetensorsSource(tmp_path), make_model(kind)
    receiver = ws.WeightReceiver(server)
    with pytest.raises(ManifestMismatchError) as caught:
        ws.connect(files, to=receiver.handle)
    named = advised(caught.value, files)
    assert isinstance(named, ws.FusedExpertsSource)
    with ws.connect(named, to=receiver.handle) as sender:
        sender.send_weights()
    assert_same(dict(server.named_parameters()), dict(make_model(kind, seed=1).named_parameters()))


@pytest.mark.usefixtures("shm_clean")
@pytest.mark.parametrize("packed", [None, False, True])
def test_a_receiver_without_fused_experts_takes_them_from_a_model(
    kind: Kind, tmp_path: Path, *, packed: bool | None
) -> None:
    model = make_model(kind)
    model.save_pretrained(tmp_path)
    held = Named(found_in(ws.SafetensorsSource(tmp_path)))
    receiver = ws.WeightReceiver(held)
    with pytest.raises(ManifestMismatchError) as caught:
        ws.connect(model, to=receiver.handle)
    named = advised(caught.value, model)
    assert isinstance(named, ws.PerExpertSource)
    with ws.connect(named, to=receiver.handle, packed=packed, bucket_nbytes=1 << 12) as sender:
        sender.send_weights()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        sender.send_weights()
    assert_same(held.tensors(), found_in(ws.PerExpertSource(model, layout=kind.layout)))


class Named(nn.Module):
    """A module that holds tensors by any names."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.names = dict(enumerate(tensors))
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(torch.zeros_like(tensor)))

    def tensors(self) -> Tensors:
        return dict(self.named_parameters())


def advised(error: ManifestMismatchError, source: object) -> Any:
    """Make the source that an error names, as a reader would."""
    found = re.search(r"give connect\(\) (weightsync\.\w+\(.*?\)) in place", str(error))
    assert found is not None, str(error)
    return eval(found[1], {"weightsync": ws, "source": source})  # our own message


def test_the_error_names_another_layout() -> None:
    source = ws.PerExpertSource(make_model(KINDS["mixtral"]))
    wanted = Named(found_in(ws.PerExpertSource(make_model(KINDS["mixtral"]), layout="mixtral")))
    with pytest.raises(ManifestMismatchError, match=r'PerExpertSource\(source, layout="mixtral"\)'):
        ws.connect(source, to=ws.WeightReceiver(wanted).handle)


def test_no_source_is_named_where_experts_are_not_the_difference() -> None:
    model = make_model(KINDS["qwen3_moe"])
    tensors = {name: p.detach() for name, p in model.named_parameters() if "norm" not in name}
    with (
        ws.connect(tensors, to=ws.WeightReceiver(model).handle) as sender,
        pytest.raises(ManifestMismatchError, match="rename=") as caught,
    ):
        sender.send_weights()
    assert "Source" not in str(caught.value)


def test_dtype_and_rename() -> None:
    model = make_model(KINDS["qwen3_moe"])
    source = ws.PerExpertSource(
        model, dtype=torch.bfloat16, rename=lambda name: name.replace(".mlp.", ".moe.")
    )
    specs = source.manifest.specs
    assert {spec.dtype for spec in specs} == {"bfloat16"}
    assert "model.layers.1.moe.experts.3.up_proj.weight" in source.manifest.index
    received: Tensors = {}

    def load(pairs: Any) -> None:
        received.update({name: tensor.clone() for name, tensor in pairs})

    with ws.connect(source, to=ws.WeightReceiver(load).handle) as sender:
        sender.send_weights()
    back = ws.FusedExpertsSource(received, rename=lambda name: name.replace(".moe.", ".mlp."))
    wanted = {n: p.to(torch.bfloat16) for n, p in model.named_parameters()}
    assert_same(found_in(back), wanted)


def transposed(name: str) -> Any:
    """Models that hold `[experts, hidden, 2 * intermediate]`."""
    if name == "gpt_oss":
        return transformers.GptOssForCausalLM(
            transformers.GptOssConfig(**COMMON, intermediate_size=12, num_local_experts=4)
        )
    config = transformers.Llama4TextConfig(
        **COMMON, intermediate_size=12, intermediate_size_mlp=12, num_local_experts=4
    )
    return transformers.Llama4ForCausalLM(config)


@pytest.mark.parametrize(("name", "why"), [("gpt_oss", "interleaves"), ("llama4", "transposed")])
def test_models_that_hold_experts_otherwise_are_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ws.PerExpertSource(transposed(name))


def fused(experts: int = 2, intermediate: int = 3, hidden: int = 4) -> Tensors:
    return {
        "l.0.mlp.experts.gate_up_proj": torch.randn(experts, 2 * intermediate, hidden),
        "l.0.mlp.experts.down_proj": torch.randn(experts, hidden, intermediate),
        "l.0.mlp.gate.weight": torch.randn(experts, hidden),
    }


def per_expert() -> Tensors:
    return found_in(ws.PerExpertSource(fused()))


UP, DOWN = "l.0.mlp.experts.gate_up_proj", "l.0.mlp.experts.down_proj"
UP_1, DOWN_1 = "l.0.mlp.experts.1.up_proj.weight", "l.0.mlp.experts.1.down_proj.weight"


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("make", "tensors", "why"),
    [
        (ws.PerExpertSource, lambda: {"a.weight": torch.ones(2)}, "no fused experts.*a.weight"),
        (ws.PerExpertSource, lambda: without(fused(), DOWN), "without the other"),
        (
            ws.PerExpertSource,
            lambda: {**fused(), UP: torch.ones(2, 4, 6), DOWN: torch.ones(2, 3, 4)},
            "transposed",
        ),
        (  # intermediate 2, hidden 4: gate_up is square, and down says that it is transposed
            ws.PerExpertSource,
            lambda: {**fused(), UP: torch.ones(2, 4, 4), DOWN: torch.ones(2, 2, 4)},
            "transposed",
        ),
        (ws.PerExpertSource, lambda: {**fused(), DOWN: torch.ones(2, 4, 4)}, "down_proj is"),
        (ws.PerExpertSource, lambda: {**fused(), DOWN: torch.ones(3, 4, 3)}, "down_proj is"),
        (ws.PerExpertSource, lambda: {**fused(), UP: torch.ones(6, 4)}, "gate_up_proj is"),
        (
            ws.PerExpertSource,
            lambda: {**fused(), "l.0.mlp.gate.weight": torch.ones(2, 5)},
            "router",
        ),
        (ws.PerExpertSource, lambda: {**fused(), f"{UP}_bias": torch.ones(2, 6)}, "interleaves"),
        (
            ws.PerExpertSource,
            lambda: dict.fromkeys([UP, "tied"], torch.ones(2, 6, 4)) | without(fused(), UP),
            "share their memory.*gate_up_proj",
        ),
        (ws.FusedExpertsSource, fused, "no names like"),
        (ws.FusedExpertsSource, lambda: without(per_expert(), UP_1), "lacks 1 up"),
        (ws.FusedExpertsSource, lambda: {**per_expert(), UP_1: torch.ones(4, 4)}, "up_proj.*is"),
        (
            ws.FusedExpertsSource,
            lambda: {**per_expert(), DOWN_1: torch.ones(3, 4)},
            "down_proj.*is",
        ),
        (ws.FusedExpertsSource, lambda: {**per_expert(), UP_1: torch.ones(3, 4).half()}, "float16"),
        (
            ws.FusedExpertsSource,
            lambda: {n: t.t() if t.shape != (2, 4) else t for n, t in per_expert().items()},
            "router",
        ),
    ],
)
def test_other_shapes_are_an_error(
    make: Callable[[object], object], tensors: Callable[[], Tensors], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        make(tensors())


def test_an_unknown_layout_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'qwen3_moe', 'mixtral'"):
        ws.PerExpertSource(fused(), layout="qwen")  # type: ignore[arg-type]  # what is tested


def test_a_source_that_changes_its_shapes_is_an_error() -> None:
    held = fused()
    source = ws.PerExpertSource(held.items)
    held[UP] = torch.randn(3, 6, 4)
    with pytest.raises(ManifestMismatchError, match="diverges"):
        list(source.tensors())


def test_push_names_the_source_too() -> None:
    error = ManifestMismatchError(missing=[UP], unexpected=["l.0.mlp.experts.0.gate_proj.weight"])
    said = explain(error, Path("checkpoint"), ["http://server"])
    assert "nothing was changed. " in said
    assert "weightsync.FusedExpertsSource(source)" in said
