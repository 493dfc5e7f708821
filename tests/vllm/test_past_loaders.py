"""Every `load_weights` of the installed vLLM that writes past its loaders: right, or refused.

The models are made without an engine, in a process of their own for each: an update, staged and in
place, leaves what the same model has that was loaded cold from those weights.
"""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers as hf
import vllm
from safetensors import safe_open
from safetensors.torch import save_file

import weightsync as ws
from tests.vllm.past_loaders import found
from tests.vllm.tiny import gpt_oss
from weightsync.integrations.vllm.checksums import held_checksums

Shapes = Mapping[str, tuple[int, ...]]
Config = dict[str, Any]

V, H, HEADS, KV, D, I, E = 320, 64, 4, 2, 32, 128, 4  # noqa: E741  # as in the papers
_COMMON: Config = {
    "hidden_size": H,
    "intermediate_size": I,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "vocab_size": V,
    "head_dim": D,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _mlp(prefix: str, width: int, *experts: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an MLP, or of stacked experts."""
    return {
        f"{prefix}.gate_proj.weight": (*experts, width, H),
        f"{prefix}.up_proj.weight": (*experts, width, H),
        f"{prefix}.down_proj.weight": (*experts, H, width),
    }


def _decoder(layers: Shapes) -> Shapes:
    """Return the shapes of a decoder: both norms of each layer, embedding, head, last norm."""
    norms = {
        f"layers.{i}.{name}.weight": (H,)
        for i in range(2)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    inside = {**norms, **layers, "embed_tokens.weight": (V, H), "norm.weight": (H,)}
    return {**{f"model.{name}": shape for name, shape in inside.items()}, "lm_head.weight": (V, H)}


def step3_text() -> tuple[Config, Shapes]:
    config = {
        **_COMMON,
        "model_type": "step3_text",
        "architectures": ["Step3TextForCausalLM"],
        "num_attention_groups": 1,
        "max_position_embedding": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "share_q_dim": H,
        "share_expert_dim": I,
        "moe_intermediate_size": H,
        "moe_num_experts": E,
        "moe_top_k": 2,
        "moe_layers_enum": "1",
    }
    layers: dict[str, tuple[int, ...]] = {}
    for i in range(2):
        attention = {"q_proj": (H, H), "k_proj": (D, H), "v_proj": (D, H), "wq": (HEADS * D, H)}
        attention |= {"o_proj": (H, HEADS * D), "inter_norm": (H,)}  # type: ignore[dict-item]
        layers |= {f"layers.{i}.self_attn.{n}.weight": shape for n, shape in attention.items()}
    layers |= _mlp("layers.0.mlp", I)
    layers |= {"layers.1.moe.gate.weight": (E, H), **_mlp("layers.1.moe", H, E)}
    layers |= _mlp("layers.1.share_expert", I)
    return config, _decoder(layers)


def step3p5() -> tuple[Config, Shapes]:
    config = {
        **_COMMON,
        "model_type": "step3p5",
        "architectures": ["Step3p5ForCausalLM"],
        "num_attention_groups": KV,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "share_expert_dim": I,
        "moe_intermediate_size": H,
        "moe_num_experts": E,
        "moe_top_k": 2,
        "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": 1.0,
        "moe_layers_enum": "1",
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["full_attention", "full_attention"],
        "use_moe": True,
        "use_moe_router_bias": True,
        "need_fp32_gate": True,
        "norm_expert_weight": True,
    }
    layers: dict[str, tuple[int, ...]] = {}
    for i in range(2):
        layers |= _attention(f"layers.{i}.self_attn")
        layers |= {f"layers.{i}.self_attn.{n}_norm.weight": (D,) for n in "qk"}
    layers |= _mlp("layers.0.mlp", I)
    layers |= {"layers.1.moe.gate.weight": (E, H), "layers.1.moe.router_bias": (E,)}
    layers |= {**_mlp("layers.1.moe", H, E), **_mlp("layers.1.share_expert", I)}
    return config, _decoder(layers)


def _attention(prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.q_proj.weight": (HEADS * D, H),
        f"{prefix}.k_proj.weight": (KV * D, H),
        f"{prefix}.v_proj.weight": (KV * D, H),
        f"{prefix}.o_proj.weight": (H, HEADS * D),
    }


def mimo_v2() -> tuple[Config, Shapes]:
    """One layer with a window and sinks, the other with experts."""
    heads: Config = {"num_attention_heads": HEADS, "num_key_value_heads": KV}
    heads |= {"head_dim": D, "v_head_dim": D}
    config = {
        **_COMMON,
        **heads,
        **{f"swa_{name}": value for name, value in heads.items()},
        "model_type": "mimo_v2_flash",
        "architectures": ["MiMoV2FlashForCausalLM"],
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "swa_rope_theta": 10000.0,
        "layernorm_epsilon": 1e-5,
        "attention_bias": False,
        "hidden_act": "silu",
        "sliding_window": 32,
        "sliding_window_size": 32,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "hybrid_layer_pattern": [1, 0],
        "moe_layer_freq": [0, 1],
        "moe_intermediate_size": H,
        "n_routed_experts": E,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
    }
    layers = {**_attention("layers.0.self_attn"), **_attention("layers.1.self_attn")}
    layers |= {"layers.0.self_attn.attention_sink_bias": (HEADS,), **_mlp("layers.0.mlp", I)}
    layers |= {"layers.1.mlp.gate.weight": (E, H)}
    layers |= {"layers.1.mlp.gate.e_score_correction_bias": (E,)}
    for expert in range(E):
        layers |= _mlp(f"layers.1.mlp.experts.{expert}", H)
    return config, _decoder(layers)


_BERT: Config = {
    "hidden_size": H,
    "intermediate_size": I,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": V,
    "max_position_embeddings": 256,
}


def of_transformers(model: Any) -> tuple[Config, Shapes]:
    """Return the configuration and the shapes that transformers saves of a model."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder, "model.safetensors"), "pt") as saved:
            shapes = {name: tuple(saved.get_slice(name).get_shape()) for name in list(saved.keys())}
        return json.loads(Path(folder, "config.json").read_text()), shapes


def longcat_flash() -> tuple[Config, Shapes]:
    """Without the weights that transformers gives to its experts that compute nothing."""
    config = hf.LongcatFlashConfig(
        hidden_size=H,
        ffn_hidden_size=I,
        num_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=V,
        head_dim=D,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=D,
        qk_rope_head_dim=D,
        v_head_dim=D,
        n_routed_experts=E,
        zero_expert_num=1,
        moe_topk=2,
        expert_ffn_hidden_size=H,
        max_position_embeddings=256,
        hidden_act="silu",
    )
    made, shapes = of_transformers(hf.LongcatFlashForCausalLM(config))
    derived = isinstance(getattr(type(config), "num_hidden_layers", None), property)
    made["num_hidden_layers"] = 4 if derived else 2  # of newer transformers: twice `num_layers`
    made |= {"zero_expert_type": "identity", "mla_scale_q_lora": True, "mla_scale_kv_lora": True}
    return made, {name: shape for name, shape in shapes.items() if f".experts.{E}." not in name}


def bert_masked() -> tuple[Config, Shapes]:
    return of_transformers(hf.BertForMaskedLM(hf.BertConfig(**_BERT)))


def colbert() -> tuple[Config, Shapes]:
    config, shapes = of_transformers(hf.BertModel(hf.BertConfig(**_BERT)))
    kept = {f"bert.{name}": shape for name, shape in shapes.items() if "pooler" not in name}
    return {**config, "architectures": ["HF_ColBERT"]}, {**kept, "linear.weight": (32, H)}


BUILT: Mapping[str, Callable[[], tuple[Config, Shapes]]] = {
    "longcat_flash.FlashModel.load_weights": longcat_flash,
    "gpt_oss.GptOssModel._load_weights_other": lambda: of_transformers(gpt_oss()),
    "step3_text.Step3TextModel.load_weights": step3_text,
    "step3p5.Step3p5Model.load_weights": step3p5,
    "mimo_v2.MiMoV2Model.load_weights": mimo_v2,
    "bert.BertForMaskedLM.load_weights": bert_masked,
    "colbert.ColBERTMixin._load_colbert_weights": colbert,
}


def make_checkpoint(config: Config, shapes: Shapes, folder: Path, seed: int) -> None:
    """Save a checkpoint of random weights."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.1 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))


def engine_config(folder: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        skip_tokenizer_init=True,
    ).create_engine_config()


def begin(store: Path) -> None:
    """Make a process one worker of a vLLM on a CPU."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    # As vLLM's worker for CPUs does.
    torch.accelerator.empty_cache = torch.accelerator.synchronize = lambda *_: None
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)


def loaded(folder: Path) -> tuple[Any, Any]:
    """Return a model that vLLM loads from a checkpoint, and its configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = engine_config(folder)
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def outcomes(name: str, folder: Path) -> dict[str, Any]:
    """Update a model by each way; return what differs from a cold one, or the error."""
    from weightsync.integrations.vllm.sink import VllmSink

    config, shapes = BUILT[name]()
    for seed, part in enumerate("AB", 1):
        make_checkpoint(config, shapes, folder / part, seed)
    before, wanted = (held_checksums(loaded(folder / part)[0]) for part in "AB")
    told: dict[str, Any] = {"moved": sum(wanted[key] != before[key] for key in wanted)}
    for apply in WAYS:
        model, made = loaded(folder / "A")
        receiver = ws.WeightReceiver(VllmSink(model, made, torch.device("cpu")), apply=apply)
        with closing(receiver):
            try:
                with ws.connect(ws.SafetensorsSource(folder / "B"), to=receiver.handle) as sender:
                    report = sender.send_weights()
                assert (report.apply, report.verified) == (apply, "arrived")
                held = held_checksums(model)
                told[apply] = sorted(key for key in wanted if held[key] != wanted[key])
            except ws.WeightSyncError as exc:
                told[apply] = f"{type(exc).__name__}: {exc}"
                told[f"{apply}, kept"] = held_checksums(model) == before
    return told


_DRAFT = "a draft model: our engine refuses vLLM's updates of drafts (supports_draft_weight_update)"
_SECOND_RUNNER = "of the second model runner, which needs Triton"
NOT_BUILT: Mapping[str, str] = {
    "cohere_asr.CohereASRModel.load_weights": "an audio model; writes the dtype of a buffer",
    "diffusion_gemma.DiffusionGemmaForConditionalGeneration.load_weights": _SECOND_RUNNER,
    "gpt_oss.GptOssModel._load_weights_mxfp4": "mxfp4 is not computed in float32",
    "gpt_oss.GptOssModel._load_weights_quark": "a checkpoint that Quark has quantized",
    "llama_eagle3.Eagle3LlamaForCausalLM.load_weights": _DRAFT,
    "longcat_flash_mtp.LongCatFlashMTP.load_weights": _DRAFT,
    "longcat_flash_ngram.NgramEmbedding.load_weight": _SECOND_RUNNER,
    "mllama4.Llama4ForConditionalGeneration.load_weights": "writes scales of ModelOpt's experts",
    "qwen3_eagle3.Eagle3Qwen3ForCausalLM.load_weights": _DRAFT,
    "qwen3_xpress.XPressRefinerHead.fold_from_raw_": _DRAFT,
}
"""Models that are not made here, and why."""

REFUSED: Mapping[str, str] = {
    "colbert.ColBERTMixin._load_colbert_weights": r"projector.weight: ColBERTModel made them while",
    "longcat_flash.FlashModel.load_weights": r"self_attn.1: .* at its first load alone",
}
"""The message of each model that takes no update; the others are updated."""

FOUND = found()
WAYS: tuple[Any, ...] = ("staged", "in_place")


def test_each_of_the_installed_vllm_is_known() -> None:
    assert set(FOUND) - BUILT.keys() - NOT_BUILT.keys() == set(), "build it, or say why not"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process for the models: they change torch, and a process group is theirs."""
    store = tmp_path_factory.mktemp("group") / "store"
    with multiprocessing.get_context("spawn").Pool(1, begin, (store,)) as pool:
        yield pool


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FOUND)
def test_an_update_is_right_or_refused(worker: Any, name: str, tmp_path: Path) -> None:
    if name in NOT_BUILT:
        pytest.skip(f"vLLM {vllm.__version__}: {name}: {NOT_BUILT[name]}")
    told = worker.apply(outcomes, (name, tmp_path))
    assert told.pop("moved") > 10
    if name not in REFUSED:
        assert told == {way: [] for way in WAYS}
        return
    for way in WAYS:
        assert re.search(f"^ConfigError: .*{REFUSED[name]}", told[way]), told
        assert told[f"{way}, kept"]
