"""Names, shapes and dtypes of published models, from the numbers of their `config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from weightsync.specs import TensorSpec

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The fields of a `config.json` that decide shapes, by the names that they have there.

    Without experts all layers are dense; `first_k_dense_replace` layers are with them. With
    `kv_lora_rank`, attention is the one of DeepSeek.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_norm: bool = False
    experts: int = 0
    moe_intermediate_size: int = 0
    first_k_dense_replace: int = 0
    n_shared_experts: int = 0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0


CONFIGS: Mapping[str, Config] = {
    "llama3-70b": Config(
        vocab_size=128_256,
        hidden_size=8192,
        num_hidden_layers=80,
        intermediate_size=28_672,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "qwen3-235b": Config(
        vocab_size=151_936,
        hidden_size=4096,
        num_hidden_layers=94,
        intermediate_size=12_288,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        qk_norm=True,
        experts=128,
        moe_intermediate_size=1536,
    ),
    "deepseek-v3": Config(
        vocab_size=129_280,
        hidden_size=7168,
        num_hidden_layers=61,
        intermediate_size=18_432,
        num_attention_heads=128,
        num_key_value_heads=128,
        head_dim=0,
        experts=256,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        n_shared_experts=1,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    "kimi-k2": Config(
        vocab_size=163_840,
        hidden_size=7168,
        num_hidden_layers=61,
        intermediate_size=18_432,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=0,
        experts=384,
        moe_intermediate_size=2048,
        first_k_dense_replace=1,
        n_shared_experts=1,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
}
"""Meta-Llama-3-70B (723 tensors), Qwen3-235B-A22B (36,945), DeepSeek-V3 (45,395) and Kimi-K2
(69,975), in bf16, without layers that predict several tokens, and without scales of fp8."""


def published(config: Config) -> list[TensorSpec]:
    """Return the tensors of a model, by the names of its checkpoint."""
    return [
        TensorSpec(name, "float32" if name.endswith("_correction_bias") else "bfloat16", shape)
        for name, shape in _model(config)
    ]


def _model(config: Config) -> Iterator[tuple[str, Shape]]:
    hidden = config.hidden_size
    attention = _latent_attention if config.kv_lora_rank else _attention
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield from attention(config, f"{prefix}self_attn.")
        if config.experts and layer >= config.first_k_dense_replace:
            yield from _experts(config, f"{prefix}mlp.")
        else:
            yield from _ffn(f"{prefix}mlp.", hidden, config.intermediate_size)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config.vocab_size, hidden)


def _attention(config: Config, prefix: str) -> Iterator[tuple[str, Shape]]:
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    yield f"{prefix}q_proj.weight", (queries, hidden)
    yield f"{prefix}k_proj.weight", (keys, hidden)
    yield f"{prefix}v_proj.weight", (keys, hidden)
    yield f"{prefix}o_proj.weight", (hidden, queries)
    if config.qk_norm:
        yield f"{prefix}q_norm.weight", (head,)
        yield f"{prefix}k_norm.weight", (head,)


def _latent_attention(config: Config, prefix: str) -> Iterator[tuple[str, Shape]]:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    query = config.qk_nope_head_dim + config.qk_rope_head_dim
    yield f"{prefix}q_a_proj.weight", (config.q_lora_rank, hidden)
    yield f"{prefix}q_a_layernorm.weight", (config.q_lora_rank,)
    yield f"{prefix}q_b_proj.weight", (heads * query, config.q_lora_rank)
    yield f"{prefix}kv_a_proj_with_mqa.weight", (latent + config.qk_rope_head_dim, hidden)
    yield f"{prefix}kv_a_layernorm.weight", (latent,)
    yield (
        f"{prefix}kv_b_proj.weight",
        (
            heads * (config.qk_nope_head_dim + config.v_head_dim),
            latent,
        ),
    )
    yield f"{prefix}o_proj.weight", (hidden, heads * config.v_head_dim)


def _experts(config: Config, prefix: str) -> Iterator[tuple[str, Shape]]:
    hidden, size = config.hidden_size, config.moe_intermediate_size
    yield f"{prefix}gate.weight", (config.experts, hidden)
    if config.kv_lora_rank:
        yield f"{prefix}gate.e_score_correction_bias", (config.experts,)
    for expert in range(config.experts):
        yield from _ffn(f"{prefix}experts.{expert}.", hidden, size)
    if config.n_shared_experts:
        yield from _ffn(f"{prefix}shared_experts.", hidden, size * config.n_shared_experts)


def _ffn(prefix: str, hidden: int, size: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}gate_proj.weight", (size, hidden)
    yield f"{prefix}up_proj.weight", (size, hidden)
    yield f"{prefix}down_proj.weight", (hidden, size)
