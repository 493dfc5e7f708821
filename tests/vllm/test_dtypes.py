"""A real vLLM says in which dtypes it keeps tensors: a router in float32 arrives exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import weightsync as ws
from tests.vllm.architectures import SIZES
from tests.vllm.offline import engine_of, offline_llm
from tests.vllm.test_experts import Computed
from tests.vllm.tiny import change, save
from weightsync.integrations.vllm.actors import vllm_targets

pytestmark = pytest.mark.timeout(400)

MIXTURE: dict[str, Any] = {
    **SIZES,
    "tie_word_embeddings": False,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


def test_an_engine_in_bfloat16_gets_its_router_in_float32(tmp_path: Path) -> None:
    """It computes what a cold engine does that read a checkpoint in float32."""
    torch.manual_seed(0)
    model: Any = hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**MIXTURE))
    model.float().eval()
    folders = tmp_path / "A", tmp_path / "B"
    for seed, folder in enumerate(folders, 1):
        change(model, seed)
        save(model, folder)
    with offline_llm(folders[1], dtype="bfloat16") as llm:
        cold = Computed.by(llm)
    source = ws.PerExpertSource(model)
    with offline_llm(folders[0], dtype="bfloat16") as llm:
        with ws.connect(source, to=vllm_targets(llm), dtype="receiver") as sender:
            report = sender.send_weights()
        Computed.by(llm).assert_same(cold)
        router = "model.layers.1.mlp.gate.weight"
        assert engine_of(llm).receiver.sink.kept()[router] == "float32"
        rounded = ws.PerExpertSource(model, dtype=torch.bfloat16)
        with ws.connect(rounded, to=vllm_targets(llm)) as sender:
            sender.send_weights()
        assert Computed.by(llm).checksums != cold.checksums
    assert set(report.casts) == {"float32 to bfloat16"}
