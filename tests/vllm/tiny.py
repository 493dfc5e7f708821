"""Models of a few thousand parameters, and transformers' results with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

PROMPT = [5, 77, 130, 42, 9]
TOKENS = 12
LARGEST_DIFFERENCE = 1e-5
"""Of log-probabilities in float32: transformers' own are up to 3.2e-6 off those in float64 (of 200
weights), and weights of another version differ by more than 0.1."""


_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}


def make_model(folder: Path, *, tied: bool, **sizes: int) -> Qwen3ForCausalLM:
    """Save a model with a byte-level tokenizer, and return it; `sizes` are other ones."""
    torch.manual_seed(0)
    config = Qwen3Config(**{**_SIZES, "intermediate_size": 128, **sizes}, tie_word_embeddings=tied)
    model: Qwen3ForCausalLM = cast(Any, Qwen3ForCausalLM(config)).float().eval()
    save(model, folder)
    return model


def make_mixture(folder: Path, kind: str) -> Any:
    """Save a mixture of four experts, `mixtral` or `qwen3_moe`, and return it.

    vLLM's kernel on CPU wants experts of a multiple of 32, and pads those of the second.
    """
    torch.manual_seed(0)
    common = {**_SIZES, "tie_word_embeddings": False, "num_experts_per_tok": 2}
    model: Any
    if kind == "mixtral":
        model = MixtralForCausalLM(
            MixtralConfig(**common, intermediate_size=64, num_local_experts=4)
        )
    else:
        config = Qwen3MoeConfig(
            **common,
            intermediate_size=128,
            moe_intermediate_size=48,
            num_experts=4,
            norm_topk_prob=True,
        )
        model = Qwen3MoeForCausalLM(config)
    save(model.float().eval(), folder)
    return model


def gpt_oss() -> Any:
    """Return a GPT-OSS of four experts, with sinks and a window in its first layer."""
    torch.manual_seed(0)
    config = GptOssConfig(
        **_SIZES,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=False,
    )
    model: Any = GptOssForCausalLM(config)
    return model.float().eval()


def make_gpt_oss(folder: Path) -> Any:
    """Save a GPT-OSS, and return it."""
    model = gpt_oss()
    save(model, folder)
    return model


def save(model: Any, folder: Path) -> None:
    """Save a model, and a byte-level tokenizer."""
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers has no type for it
        tokenizer_object=tokenizer
    ).save_pretrained(folder)


def change(model: torch.nn.Module, seed: int, names: str = "") -> None:
    """Change the parameters as a training step would; `names` are parts of their names."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            if names in name:  # of one size, however often it changes
                parameter.copy_(noise + 1 if parameter.dim() == 1 else noise)


def expected(
    model: torch.nn.Module, prompt: Sequence[int] = PROMPT, count: int = TOKENS
) -> tuple[list[int], list[float]]:
    """Return the greedy continuation of a prompt, and each token's log-probability."""
    tokens = list(prompt)
    found: list[float] = []
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            best = int(logits.argmax())
            found.append(float(logits[best]))
            tokens.append(best)
    return tokens[len(prompt) :], found


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return how far two lists of log-probabilities are apart."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def held(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a Qwen3 by vLLM's names: it fuses q, k, v, and gate and up."""
    state = dict(model.named_parameters())
    fused = {name: p for name, p in state.items() if "_proj" not in name}
    for layer in range(model.config.num_hidden_layers):
        path = f"model.layers.{layer}"
        for fusion, parts in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
            ("self_attn.o_proj", ("self_attn.o_proj",)),
            ("mlp.down_proj", ("mlp.down_proj",)),
        ):
            whole = torch.cat([state[f"{path}.{part}.weight"] for part in parts])
            fused[f"{path}.{fusion}.weight"] = whole
    fused["lm_head.weight"] = model.lm_head.weight
    return fused
