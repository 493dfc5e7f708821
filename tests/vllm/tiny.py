"""A Qwen3 of a few thousand parameters, made on the spot, and what transformers says of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PROMPT = [5, 77, 130, 42, 9]
TOKENS = 12
LARGEST_DIFFERENCE = 2e-6
"""Of log-probabilities in float32; weights of another version differ by more than 0.1."""


def make_model(folder: Path, *, tied: bool) -> Qwen3ForCausalLM:
    """Save a model with a byte-level tokenizer, and return it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        vocab_size=320,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Qwen3ForCausalLM = cast(Any, Qwen3ForCausalLM(config)).float().eval()
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers has no type for it
        tokenizer_object=tokenizer
    ).save_pretrained(folder)
    return model


def change(model: torch.nn.Module, seed: int, names: str = "") -> None:
    """Train a step, in a way of speaking; `names` are parts of the parameters' names."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            if names in name:  # of one size, however often it changes
                parameter.copy_(noise + 1 if parameter.dim() == 1 else noise)


def expected(model: torch.nn.Module) -> tuple[list[int], list[float]]:
    """Return the greedy continuation of PROMPT, and each token's log-probability."""
    tokens = list(PROMPT)
    found: list[float] = []
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            best = int(logits.argmax())
            found.append(float(logits[best]))
            tokens.append(best)
    return tokens[len(PROMPT) :], found


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return how far two lists of log-probabilities are apart."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
