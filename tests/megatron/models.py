"""Tiny models of each family: the class of transformers, and the GPTModel of megatron-core.

The weights of a step are made from its number, so that every process makes the same. What a rank of
Megatron holds of them is cut out here by Megatron's own rules (`partition_dim`, groups of queries,
halves of the gate), not by the tables of weightsync.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # torch's
from torch import nn

from tests.megatron.on_cpu import pretend

VOCAB, PADDED = 101, 128
HIDDEN, LAYERS, HEADS, GROUPS, FFN = 32, 4, 4, 2, 48
WIDTH = 32
"""vLLM's attention on a CPU wants heads of 32."""
EXPERTS, EXPERT_FFN = 4, 16
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "v_head_dim": 8}
NOPE, ROPE = 8, 4
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")
MIXTURES = ("qwen3_moe", "mixtral", "deepseek_v3")
Tensors = dict[str, torch.Tensor]


def checkpoint_config(family: str, *, tied: bool = False) -> Any:
    """Return the configuration of transformers."""
    import transformers

    names = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "qwen3_moe": transformers.Qwen3MoeConfig,
        "mixtral": transformers.MixtralConfig,
        "deepseek_v3": transformers.DeepseekV3Config,
    }
    given: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": WIDTH,
        "intermediate_size": FFN,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "use_sliding_window": False,
        "sliding_window": None,
    }
    if family == "qwen3_moe":
        given |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": EXPERT_FFN,
            "norm_topk_prob": True,
        }
    if family == "mixtral":
        given |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
        given |= {"intermediate_size": EXPERT_FFN}
    if family == "deepseek_v3":
        given |= LATENT | {
            "num_key_value_heads": HEADS,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE,
            "head_dim": ROPE,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": EXPERT_FFN,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        }
    return names[family](**given)


def checkpoint_model(family: str, step: int, *, tied: bool = False) -> nn.Module:
    """Return the model of transformers with the weights of a step."""
    import transformers

    config = checkpoint_config(family, tied=tied)
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.eval()
    generator = torch.Generator().manual_seed(7 + step)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tied and name == "lm_head.weight":
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + noise / 8 if "norm" in name else noise / 4)
    return model


def state_of(model: nn.Module, family: str) -> Tensors:
    """Return the tensors of a model of transformers under the names of checkpoints."""
    found: Tensors = {}
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in model.state_dict().items():
        prefix = name.replace(".mlp.", f".{block}.")
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for key, part in zip(names[:2], both.chunk(2), strict=True):
                    found[prefix.replace("gate_up_proj", f"{expert}.{key}.weight")] = part
        elif name.endswith("experts.down_proj"):
            for expert, part in enumerate(tensor):
                found[prefix.replace("down_proj", f"{expert}.{names[2]}.weight")] = part
        else:
            found[prefix] = tensor
    return found


GROUPS_OF: list[tuple[int, int, int, int | None]] = []


def start(tp: int = 1, pp: int = 1, ep: int = 1, vp: int | None = None) -> None:
    """Make the groups of ranks, unless they are those that there are."""
    if GROUPS_OF[-1:] == [(tp, pp, ep, vp)]:
        return
    GROUPS_OF[:] = [(tp, pp, ep, vp)]
    pretend()
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    # The package forgets them, and each has threads of Gloo that would go on.
    world = dist.distributed_c10d._world
    for group in list(world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    del group
    gc.collect()  # models of earlier tests, which refer to them
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        virtual_pipeline_model_parallel_size=vp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1 if ep > 1 else tp,
    )


def trainer_config(family: str, *, vp: int | None = None, **others: Any) -> Any:
    """Return the configuration of megatron-core, for the groups of `start`."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    pp = parallel_state.get_pipeline_model_parallel_world_size()
    given: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "kv_channels": WIDTH,
        "ffn_hidden_size": FFN,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": family == "qwen2",
        "qk_layernorm": family.startswith(("qwen3", "deepseek")),
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vp,
        "pipeline_dtype": torch.float32,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }
    if family in MIXTURES:
        given |= {
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": EXPERT_FFN,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_router_dtype": "fp32",
        }
    if family == "mixtral":
        given |= {"ffn_hidden_size": EXPERT_FFN}
    if family != "deepseek_v3":
        return TransformerConfig(**given | others)
    given |= LATENT | {
        "num_query_groups": HEADS,
        "qk_head_dim": NOPE,
        "qk_pos_emb_head_dim": ROPE,
        "rope_type": "rope",
        "rotary_base": 10000,
        "moe_layer_freq": [0] + [1] * (LAYERS - 1),
        "moe_shared_expert_intermediate_size": EXPERT_FFN,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "multi_latent_attention": True,
    }
    return MLATransformerConfig(**given | others)


def trainer_model(
    family: str, *, tied: bool = False, vp: int | None = None, vocab: int = PADDED, **others: Any
) -> list[nn.Module]:
    """Return the chunks of this rank, without weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = trainer_config(family, vp=vp, **others)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    last = parallel_state.get_pipeline_model_parallel_world_size() - 1
    chunks: list[nn.Module] = []
    for chunk in range(vp or 1):
        how = {} if vp is None else {"vp_stage": chunk}
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", **how
        )
        for layer in spec.layer_specs:  # the package's own wants CUDA's random numbers
            layer.submodules.self_attention.submodules.core_attention = Attention
        made = GPTModel(
            config,
            spec,
            vocab_size=vocab,
            max_sequence_length=64,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == last and chunk == (vp or 1) - 1,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            rotary_base=10000,
            **how,
        )
        chunks.append(made.eval())
    return chunks


class Attention(nn.Module):
    """Causal attention `[tokens, sequences, heads, width]`, without parameters."""

    def __init__(self, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Return `[tokens, sequences, heads * width]`."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        made = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
        )
        return made.permute(2, 0, 1, 3).flatten(2)


def load(chunks: list[nn.Module], state: Tensors, family: str) -> None:
    """Write what this rank holds of the tensors of a checkpoint, in place."""
    with torch.no_grad():
        for chunk in chunks:
            buffers = ((n, b) for n, b in chunk.named_buffers() if n.endswith("expert_bias"))
            for name, tensor in [*chunk.named_parameters(), *buffers]:
                tensor.copy_(_part_of(name, chunk, state, family))


class Ranks:
    """This process's part of a group of tensor parallelism."""

    def __init__(self, *, experts: bool = False) -> None:
        from megatron.core import parallel_state as groups

        if experts:
            self.size: int = groups.get_expert_tensor_parallel_world_size()
            self.rank: int = groups.get_expert_tensor_parallel_rank()
        else:
            self.size = groups.get_tensor_model_parallel_world_size()
            self.rank = groups.get_tensor_model_parallel_rank()

    def split(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return the part of this rank."""
        return tensor.chunk(self.size, dim)[self.rank]

    def halves(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return the parts of gate and up, one above the other."""
        return torch.cat([self.split(gate), self.split(up)])


WHOLE = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "mlp.router": "mlp.gate",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}
ROWS = {
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "linear_kv_up_proj": "kv_b_proj",
}
MLPS = {"mlp": "mlp", "mlp.shared_experts": "mlp.shared_experts"}


def _part_of(name: str, chunk: Any, state: Tensors, family: str) -> torch.Tensor:
    """Return what this rank has of a parameter, made of the tensors of a checkpoint."""
    if not name.startswith("decoder.layers."):
        return _outside(name, chunk, state)
    number, _, path = name.removeprefix("decoder.layers.").partition(".")
    prefix = f"model.layers.{chunk.decoder.layers[int(number)].layer_number - 1}."
    own = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
    key = path.removesuffix(".weight")
    if key in WHOLE:
        renamed = WHOLE[key]
        if family == "deepseek_v3":
            renamed = renamed.replace("q_norm", "q_a_layernorm")
        if family == "mixtral":
            renamed = renamed.replace("mlp.", "block_sparse_moe.")
        return own[renamed + path.removeprefix(key)]
    if ".local_experts." in key:
        return _of_expert(key, own, family)
    part, _, linear = key.rpartition(".")
    if part == "self_attention":
        return _of_attention(linear, own)
    if part == "self_attention.linear_qkv":
        return _of_attention("linear_qkv", own, leaf=linear)
    block = MLPS[part]
    gate, up, down = (own[f"{block}.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return Ranks().halves(gate, up) if linear == "linear_fc1" else Ranks().split(down, 1)


def _outside(name: str, chunk: Any, state: Tensors) -> torch.Tensor:
    if name == "decoder.final_layernorm.weight":
        return state["model.norm.weight"]
    embeds = "embedding" in name or chunk.share_embeddings_and_output_weights
    tensor = state["model.embed_tokens.weight" if embeds else "lm_head.weight"]
    return Ranks().split(F.pad(tensor, (0, 0, 0, PADDED - VOCAB), value=9.0))


def _of_attention(linear: str, own: Tensors, leaf: str = "weight") -> torch.Tensor:
    if linear == "linear_proj":
        return Ranks().split(own["self_attn.o_proj.weight"], 1)
    if linear in ROWS:
        return Ranks().split(own[f"self_attn.{ROWS[linear]}.weight"])
    each = [own[f"self_attn.{n}_proj.{leaf}"] for n in "qkv"]
    rest = each[0].shape[1:]
    groups = torch.cat([tensor.view(GROUPS, -1, *rest) for tensor in each], 1)
    return Ranks().split(groups.reshape(-1, *rest))


def _of_expert(key: str, own: Tensors, family: str) -> torch.Tensor:
    from megatron.core import parallel_state as groups

    mine = EXPERTS // groups.get_expert_model_parallel_world_size()
    number = groups.get_expert_model_parallel_rank() * mine + int(key.split(".")[3])
    names, block = ("gate_proj", "up_proj", "down_proj"), "mlp"
    if family == "mixtral":
        names, block = ("w1", "w3", "w2"), "block_sparse_moe"
    gate, up, down = (own[f"{block}.experts.{number}.{n}.weight"] for n in names)
    ranks = Ranks(experts=True)
    return ranks.halves(gate, up) if key.endswith("linear_fc1") else ranks.split(down, 1)


def logits(chunk: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits `[sequences, tokens, VOCAB]` of a model that is one chunk."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    count = tokens.shape[1]
    mask = torch.triu(torch.ones(count, count, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        made = chunk(tokens, torch.arange(count)[None].expand_as(tokens), mask)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            made = gather_from_tensor_model_parallel_region(made)
    found: torch.Tensor = made[..., :VOCAB]
    return found
