"""Tiny random models of several architectures, each as a checkpoint that vLLM can serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from tests.vllm.tiny import change, save

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# `block_dim` and `conv_dim` are in real checkpoints, and vLLM reads them.
LFM2 = {
    **SIZES,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "layer_types": ["conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
    "block_dim": 64,
    "conv_dim": 64,
}


def _untied(**more: Any) -> dict[str, Any]:
    return {**SIZES, "tie_word_embeddings": False, **more}


ARCHITECTURES: Mapping[str, Callable[[], Any]] = {
    "Qwen3, tied": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "Qwen2 with biases, untied": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**_untied(num_attention_heads=2, num_key_value_heads=1))
    ),
    "Llama, untied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_untied())),
    "Gemma 2, tied": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES)),
    "Qwen3-MoE": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**_untied(norm_topk_prob=True, **EXPERTS))
    ),
    "Mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**_untied(num_local_experts=4, num_experts_per_tok=2))
    ),
    # The state of a convolution. vLLM on a CPU has no kernel for Mamba's.
    "LFM2, with state": lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**LFM2)),
}


def make_checkpoints(name: str, folder: Path) -> tuple[Path, Path]:
    """Save two checkpoints A and B of an architecture; return their directories."""
    torch.manual_seed(0)
    model = ARCHITECTURES[name]().float().eval()
    made = folder / "A", folder / "B"
    for seed, path in enumerate(made, 1):
        change(model, seed)
        save(model, path)
    return made
