"""MegatronSource on stand-ins that have the names and shapes of layers that need CUDA.

Transformer Engine fuses norms into linear layers, and has experts as parameters of one module;
GroupedMLP has them in one parameter. `make test-megatron` runs the real package.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.docs.pages import blocks
from weightsync.errors import ConfigError, ManifestMismatchError
from weightsync.integrations.megatron import MegatronSource
from weightsync.weights.sources.base import as_source

HIDDEN, FFN, HEADS, GROUPS, WIDTH, VOCAB, EXPERTS = 8, 6, 4, 2, 2, 11, 4
CONFIG = {"model_type": "qwen3_moe", "vocab_size": VOCAB, "tie_word_embeddings": False}
Tensors = dict[str, torch.Tensor]


class Group:
    """What a process group tells of a rank."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def checkpoint() -> Tensors:
    generator = torch.Generator().manual_seed(1)
    layer = "model.layers.3."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}self_attn.q_proj.weight": (HEADS * WIDTH, HIDDEN),
        f"{layer}self_attn.k_proj.weight": (GROUPS * WIDTH, HIDDEN),
        f"{layer}self_attn.v_proj.weight": (GROUPS * WIDTH, HIDDEN),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
        f"{layer}mlp.gate.weight": (EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        prefix = f"{layer}mlp.experts.{expert}."
        shapes |= {f"{prefix}{name}_proj.weight": (FFN, HIDDEN) for name in ("gate", "up")}
        shapes[f"{prefix}down_proj.weight"] = (HIDDEN, FFN)
    return {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}


def put(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]  # just added
    root.register_parameter(leaf, nn.Parameter(tensor.clone()))


def experts_of(form: str, fc1: torch.Tensor, fc2: torch.Tensor) -> Tensors:
    """Return the parameters of the experts of a rank; `fc1` and `fc2` are stacks."""
    count = len(fc1)
    if form == "modules":
        named = {f"local_experts.{i}.linear_fc1.weight": fc1[i] for i in range(count)}
        return named | {f"local_experts.{i}.linear_fc2.weight": fc2[i] for i in range(count)}
    if form == "grouped":
        named = {f"linear_fc1.weight{i}": fc1[i] for i in range(count)}
        return named | {f"linear_fc2.weight{i}": fc2[i] for i in range(count)}
    if form == "stacked":
        return {"linear_fc1.weight": fc1, "linear_fc2.weight": fc2}
    return {
        "weight1": fc1.mT.contiguous().view(HIDDEN, -1),
        "weight2": fc2.mT.contiguous().view(-1, HIDDEN),
    }


def trainer(state: Tensors, form: str, rank: int = 0, ranks: int = 2, **config: Any) -> Any:
    """Return what a rank of `ranks` of tensor and of expert parallelism holds."""
    root: Any = nn.Module()
    layer = "model.layers.3."
    own = {n.removeprefix(layer): t for n, t in state.items()}

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(ranks)[rank]

    padding = torch.full((16 - VOCAB, HIDDEN), 9.0)
    put(
        root,
        "embedding.word_embeddings.weight",
        rows(torch.cat([own["model.embed_tokens.weight"], padding])),
    )
    put(root, "output_layer.weight", rows(torch.cat([own["lm_head.weight"], padding])))
    put(root, "decoder.final_layernorm.weight", own["model.norm.weight"])
    place = "decoder.layers.0."
    each = [own[f"self_attn.{n}_proj.weight"].view(GROUPS, -1, HIDDEN) for n in "qkv"]
    put(root, f"{place}self_attention.linear_qkv.weight", rows(torch.cat(each, 1).view(-1, HIDDEN)))
    put(root, f"{place}self_attention.linear_qkv.layer_norm_weight", own["input_layernorm.weight"])
    put(
        root,
        f"{place}self_attention.linear_proj.weight",
        own["self_attn.o_proj.weight"].chunk(ranks, 1)[rank],
    )
    put(root, f"{place}pre_mlp_layernorm.weight", own["post_attention_layernorm.weight"])
    put(root, f"{place}mlp.router.weight", own["mlp.gate.weight"])
    mine = torch.arange(EXPERTS).chunk(ranks)[rank].tolist()
    fc1 = torch.stack(
        [torch.cat([own[f"mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up")]) for e in mine]
    )
    fc2 = torch.stack([own[f"mlp.experts.{e}.down_proj.weight"] for e in mine])
    for name, tensor in experts_of(form, fc1, fc2).items():
        put(root, f"{place}mlp.experts.{name}", tensor)
    root.decoder.layers._modules["0"].layer_number = 4
    root.decoder.layers = nn.ModuleList([root.decoder.layers._modules["0"]])
    root.decoder.layers[0].mlp.local_expert_indices = mine
    given = {
        "gated_linear_unit": True,
        "virtual_pipeline_model_parallel_size": None,
        "num_query_groups": GROUPS,
        "num_attention_heads": HEADS,
        "kv_channels": WIDTH,
        "num_moe_experts": EXPERTS,
    }
    root.config = SimpleNamespace(**given | config)
    root.share_embeddings_and_output_weights = False
    root.pg_collection = SimpleNamespace(tp=Group(rank, ranks), expt_tp=Group(0, 1))
    return root


def assembled(sources: list[MegatronSource]) -> Tensors:
    """Return the tensors that the ranks hold together; NaN where none does."""
    found: Tensors = {}
    for source in sources:
        held = source.holdings()
        for name, box, tensor in zip(held.names, held.boxes, held.tensors(), strict=True):
            full = found.setdefault(name, torch.full(box.shape, float("nan")))
            for inside, part in box.parts():
                full[inside] = tensor[part]
    return found


@pytest.mark.parametrize("form", ["modules", "grouped", "stacked", "legacy"])
def test_every_form_of_experts_and_norms_inside_of_linear_layers(form: str) -> None:
    state = checkpoint()
    ranks = [trainer(state, form, rank) for rank in range(2)]
    found = assembled([MegatronSource(rank, CONFIG) for rank in ranks])
    assert set(found) == set(state)
    assert [n for n, tensor in found.items() if not torch.equal(tensor, state[n])] == []
    fused = assembled([MegatronSource(rank, CONFIG, fused_experts=True) for rank in ranks])
    prefix = "model.layers.3.mlp.experts."
    down = torch.stack([state[f"{prefix}{e}.down_proj.weight"] for e in range(EXPERTS)])
    both = [
        torch.cat([state[f"{prefix}{e}.{n}_proj.weight"] for n in ("gate", "up")])
        for e in range(EXPERTS)
    ]
    assert torch.equal(fused[f"{prefix}gate_up_proj"], torch.stack(both))
    assert torch.equal(fused[f"{prefix}down_proj"], down)


def test_parts_are_views_and_follow_a_parameter_that_moves() -> None:
    model = trainer(checkpoint(), "grouped")
    held = MegatronSource(model, CONFIG).holdings()
    assert held.bases is not None
    pairs = list(zip(held.tensors(), held.bases(), strict=True))
    assert all(t.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for t, b in pairs)
    parameter = model.decoder.layers[0].self_attention.linear_qkv.weight
    parameter.data = torch.full_like(parameter, 3.0)
    at = held.names.index("model.layers.3.self_attn.v_proj.weight")
    assert held.tensors()[at].eq(3).all()


class Quantized(torch.Tensor):
    """As Transformer Engine's: values in another tensor, of which most operations make plain ones.

    So a view of it is a copy, which does not follow the parameter.
    """

    elsewhere: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)
        made.elsewhere = values
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # without types, as torch calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].elsewhere)
        plain = torch.utils._pytree.tree_map(lambda a: getattr(a, "elsewhere", a), args)
        return func(*plain, **(kwargs or {}))


def test_parameters_whose_values_are_elsewhere_are_refused_at_once() -> None:
    model = trainer(checkpoint(), "modules")
    proj = model.decoder.layers[0].self_attention.linear_proj
    proj.weight = nn.Parameter(Quantized(proj.weight.detach()), requires_grad=False)
    assert "linear_proj.weight is a Quantized" in refusal(model)


def test_parameters_that_other_ranks_have_not_sent_yet_are_refused() -> None:
    """With `overlap_param_gather` the optimizer leaves them to the next forward pass."""

    class DistributedDataParallel:
        def _make_forward_pre_hook(self) -> Callable[..., None]:
            def hook(module: nn.Module, *unused: object) -> None:
                """Gather."""

            return hook

    hook = DistributedDataParallel()._make_forward_pre_hook()
    hook.__qualname__ = hook.__qualname__.rpartition("<locals>.DistributedData")[2]
    hook.__qualname__ = f"DistributedData{hook.__qualname__}"  # of a module, as Megatron's is
    model = trainer(checkpoint(), "grouped", ranks=1)
    held = MegatronSource(model, CONFIG).holdings()
    registered = model.register_forward_pre_hook(hook)
    with pytest.raises(ConfigError, match=r"call disable_forward_pre_hook\(\) of Megatron's"):
        held.tensors()
    registered.remove()
    model.register_forward_pre_hook(lambda *_: None)  # of another kind
    assert held.tensors()


def test_another_parameter_than_at_connect_is_refused() -> None:
    model = trainer(checkpoint(), "grouped")
    held = MegatronSource(model, CONFIG).holdings()
    put(model, "decoder.layers.0.mlp.linear_fc1.bias", torch.ones(2))
    with pytest.raises(ManifestMismatchError, match=r"linear_fc1\.bias; connect again"):
        held.tensors()


GIVEN_CONFIG: list[tuple[Any, str]] = [
    (
        CONFIG | {"model_type": "gpt2"},
        r"model_type .* is 'gpt2', and MegatronSource knows llama, qwen2, .*AutoBridge",
    ),
    (
        CONFIG | {"vocab_size": 17},
        r"'embedding.word_embeddings.weight' has 16 rows .*vocab_size .* is 17",
    ),
    (CONFIG | {"vocab_size": None}, "vocab_size of the checkpoint's configuration is None"),
    (
        CONFIG | {"tie_word_embeddings": True},
        "tie_word_embeddings .* is True, and share_embeddings_and_output_weights .*False",
    ),
    ("/nowhere", "cannot read the checkpoint's configuration: .*config.json"),
]
SETTINGS: list[tuple[dict[str, Any], str]] = [
    (
        {"virtual_pipeline_model_parallel_size": 2},
        "2 virtual stages on each rank, and 1 of their chunks are given",
    ),
    ({"num_query_groups": 4}, r"linear_qkv\.weight' has 8 rows on each of 2 ranks, and 4 groups"),
    ({"layernorm_zero_centered_gamma": True}, "has layernorm_zero_centered_gamma set"),
    ({"moe_shared_expert_glu_interleave_size": 32}, "has moe_shared_expert_glu_interleave_size s"),
    ({"use_grouped_gemm_for_dense_mlp": True}, "has use_grouped_gemm_for_dense_mlp set"),
    ({"expert_gtp_weight_remat_size": 2}, "has expert_gtp_weight_remat_size set"),
    ({"gated_linear_unit": False}, "no gated_linear_unit"),
]


def refusal(model: Any, config: Any = CONFIG, **how: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        MegatronSource(model, config, **how)
    said = str(caught.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize(("config", "said"), GIVEN_CONFIG)
def test_configurations_of_other_checkpoints_are_refused(config: Any, said: str) -> None:
    assert re.search(said, refusal(trainer(checkpoint(), "modules"), config))


@pytest.mark.parametrize(("settings", "said"), SETTINGS)
def test_models_of_other_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    assert re.search(said, refusal(trainer(checkpoint(), "modules", **settings)))


def test_a_chunk_that_is_given_twice_is_refused() -> None:
    model = trainer(checkpoint(), "modules", virtual_pipeline_model_parallel_size=2)
    said = "2 virtual stages on each rank, and 1 of their chunks are given, some twice; give the"
    assert said in refusal([model, model])
    other = trainer(checkpoint(), "modules", virtual_pipeline_model_parallel_size=2)
    assert "and 2 of their chunks are given, some twice" in refusal([model, other, model])


def test_a_model_of_a_megatron_without_its_groups_is_refused() -> None:
    model = trainer(checkpoint(), "modules")
    del model.pg_collection
    assert re.search(r"say its groups of ranks \(pg_collection\), as GPTModel of", refusal(model))


def test_other_models_are_refused() -> None:
    assert "not a Linear" in refusal(nn.Linear(2, 2))
    model = trainer(checkpoint(), "modules")
    dense = CONFIG | {"model_type": "qwen3"}
    assert "qwen3 has no experts" in refusal(model, dense, fused_experts=True)
    assert "no tensor for the parameter 'decoder.layers.0.mlp.router.weight'" in refusal(
        model, dense
    )
    put(model, "embedding.position_embeddings.weight", torch.ones(2, 2))
    assert "no tensor for the parameter 'embedding.position_embeddings.weight'" in refusal(model)


def test_a_version_that_was_not_tried_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for version, warnings in (("0.19.2", 0), ("0.99.1", 1), ("0.190.0", 1)):
        caplog.clear()
        monkeypatch.setattr("importlib.metadata.version", lambda _, version=version: version)
        with caplog.at_level(logging.WARNING):
            MegatronSource(trainer(checkpoint(), "modules"), CONFIG)
        found = [line for line in caplog.messages if "was not tried" in line]
        assert len(found) == warnings
        assert all(version in line for line in found)


def test_the_example_of_the_page(tmp_path: Path) -> None:
    """One rank stands for all; the second block is an export of another package, and compiles."""
    state, received = checkpoint(), dict[str, torch.Tensor]()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    first, second = (
        block.text for block in blocks("docs/megatron.md") if block.language == "python"
    )
    model = trainer(state, "stacked", ranks=1)

    def train(trained: nn.Module) -> None:
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(2)

    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        received.update((name, tensor.clone()) for name, tensor in pairs)

    with closing(ws.WeightReceiver(load)) as receiver:
        given = {"model": model, "train": train, "steps": 2, "url": receiver.handle}
        exec(first.replace("path/of/the/checkpoint", str(tmp_path)), given)
    assert set(received) == set(state)
    assert [n for n, tensor in received.items() if not torch.equal(tensor, 4 * state[n])] == []
    compile(second, "docs/megatron.md", "exec")


def test_a_model_that_is_given_itself_has_megatrons_names(caplog: pytest.LogCaptureFixture) -> None:
    theirs = type("GPTModel", (nn.Linear,), {"__module__": "megatron.core.models.gpt.gpt_model"})
    as_source(nn.Linear(2, 2))
    assert not caplog.records
    as_source(nn.Sequential(theirs(2, 2)))
    (record,) = caplog.records
    assert "give weightsync.MegatronSource(model, checkpoint)" in record.getMessage()
