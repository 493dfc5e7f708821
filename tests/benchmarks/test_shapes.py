"""Lists of tensors are those of the real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from benchmarks.plan import WORKLOADS
from benchmarks.shapes import equal, mixed, qwen3_8b, qwen3_30b_a3b, smollm2

COMMON: dict[str, Any] = {
    "num_attention_heads": 32,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}


def parameters(config: Any) -> dict[str, tuple[int, ...]]:
    model: Any = AutoModelForCausalLM
    with torch.device("meta"):
        made = model.from_config(config)
    return {name: tuple(p.shape) for name, p in made.named_parameters()}


def test_qwen3_8b() -> None:
    config = Qwen3Config(
        hidden_size=4096,
        num_hidden_layers=36,
        num_key_value_heads=8,
        intermediate_size=12_288,
        **COMMON,
    )
    tensors = qwen3_8b()
    assert len(tensors) == 399
    assert {tensor.name: tensor.shape for tensor in tensors} == parameters(config)


def test_qwen3_30b_a3b() -> None:
    config = Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        num_key_value_heads=4,
        moe_intermediate_size=768,
        num_experts=128,
        **COMMON,
    )
    real = parameters(config)
    tensors = qwen3_30b_a3b()
    assert len(tensors) == 18_867
    experts = {t.name: t.shape for t in tensors if ".experts." in t.name}
    assert len(experts) == 48 * 128 * 3
    # Published one by one; the class has fused them.
    others = {name: shape for name, shape in real.items() if ".experts." not in name}
    assert {t.name: t.shape for t in tensors if t.name not in experts} == others
    fused = sum(torch.Size(real[name]).numel() for name in real if name not in others)
    assert sum(torch.Size(shape).numel() for shape in experts.values()) == fused


@pytest.mark.parametrize("width", [4, 8, 16])
def test_a_narrow_model_has_all_tensors(width: int) -> None:
    for make in (qwen3_8b, qwen3_30b_a3b):
        narrow, real = make(width), make()
        assert [tensor.name for tensor in narrow] == [tensor.name for tensor in real]
        assert all(min(tensor.shape) > 0 for tensor in narrow)
        least = 1 / width**2
        assert least < sum(t.nbytes for t in narrow) / sum(t.nbytes for t in real) < 2.5 / width


def test_smollm2() -> None:
    assert len(smollm2()) == 272
    assert sum(tensor.nbytes for tensor in smollm2()) == 269_030_016


def test_synthetic_lists_have_the_bytes_asked_for() -> None:
    for tensors in (equal(1 << 20, 30, "float32"), mixed(1 << 20, 30)):
        assert len(tensors) == 30
        assert sum(tensor.nbytes for tensor in tensors) == pytest.approx(1 << 20, rel=0.01)
    assert WORKLOADS["toy-mixed"]().dtype == "mixed"
    assert WORKLOADS["4K-37000"]().nbytes == 37_000 * 4096
