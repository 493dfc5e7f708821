"""Adapters of the head of an `LLM` in this process, and numbers in the tables of vLLM's workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import weightsync as ws
from tests.vllm.adapted import adapt, assert_told, train
from tests.vllm.offline import generated, offline_llm
from tests.vllm.tiny import expected, make_model
from weightsync.integrations.vllm.actors import vllm_targets
from weightsync.integrations.vllm.adapter_names import (
    FIRST_ID,
    LAST_ID,
    AdapterPath,
    adapter_request,
    request_of,
)
from weightsync.integrations.vllm.adapter_sink import _Check, _sizes

HEAD = ["q_proj", "lm_head"]


@pytest.fixture(scope="module")
def llm_and_base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    folder = tmp_path_factory.mktemp("head")
    base = make_model(folder, tied=False)
    with offline_llm(folder, enable_lora=True, max_loras=1, max_lora_rank=8) as llm:
        yield llm, base


def test_an_adapter_of_the_head_is_computed_as_by_peft(llm_and_base: tuple[Any, Any]) -> None:
    """Not the base beside it: on a CPU vLLM gives those requests the head of an adapter, too."""
    llm, base = llm_and_base
    model = adapt(base, target_modules=HEAD)
    with ws.connect(ws.AdapterSource(model, name="policy"), to=vllm_targets(llm)) as sender:
        for seed in (1, 2):
            train(model, seed)
            sender.send_weights()
            assert_told(generated(llm, adapter_request("policy")), expected(model))


@pytest.mark.parametrize(
    "sizes", [{"vocab_size": 400}, {"vocab_size": 310}, {"hidden_size": 96}], ids=str
)
def test_an_adapter_of_another_head_is_refused(
    llm_and_base: tuple[Any, Any], sizes: dict[str, int], tmp_path: Path
) -> None:
    """vLLM would copy what fits, or end in the step of the first request."""
    llm, _ = llm_and_base
    model = adapt(make_model(tmp_path, tied=False, **sizes), target_modules=["lm_head"])
    before = generated(llm)
    with pytest.raises(ws.WeightSyncError, match=r"another base model.*here 64 to 320.*lm_head"):
        ws.connect(ws.AdapterSource(model, name="other"), to=vllm_targets(llm))
    with pytest.raises(ws.ConfigError, match="'other' was never sent"):
        generated(llm, adapter_request("other"))
    assert generated(llm) == before


def test_sizes_of_experts() -> None:
    """Of a layer as vLLM's two workers have it: no CPU computes a LoRA of experts."""

    def layer(slices: int, *, gated: bool) -> Any:
        config = SimpleNamespace(
            is_act_and_mul=gated,
            hidden_dim_unpadded=64,
            intermediate_size_per_partition_unpadded=48,
        )
        base = SimpleNamespace(moe_config=config)
        return SimpleNamespace(base_layer=base, _w13_slices=slices, tp_size=2)

    gated = [_sizes(layer(2, gated=True), part) for part in range(6)]
    assert gated == [(64, 96), (96, 64), (64, 96)] * 2
    assert [_sizes(layer(1, gated=False), part) for part in range(4)] == [(64, 96), (96, 64)] * 2
    assert _sizes(layer(1, gated=True), 0) is None  # gate and up in one tensor
    assert _sizes(layer(2, gated=True), None) is None  # all of them


def fused(outputs: list[int]) -> Any:
    return SimpleNamespace(base_layer=SimpleNamespace(input_size=64, output_sizes=outputs))


def test_sizes_of_parts_that_are_several_of_vllm() -> None:
    """The qkv and z of Qwen3.5's linear attention are four parts there: k, k, v and v."""
    layer = fused([32, 32, 48, 48])
    assert [_sizes(layer, part, 2) for part in range(2)] == [(64, 112), (64, 48)]
    assert [_sizes(fused([96, 80]), part, 2) for part in range(2)] == [(64, 96), (64, 80)]


def test_a_part_that_vllm_computes_with_another_alone_is_refused() -> None:
    path = "model.layers.0.linear_attn.in_proj_"
    parts = [f"{path}qkv", f"{path}z"]
    manager = SimpleNamespace(
        lora_config=SimpleNamespace(max_lora_rank=8),
        _adapter_manager=SimpleNamespace(
            model=SimpleNamespace(),
            modules={f"{path}qkvz": fused([32, 32, 48, 48])},
            packed_modules={f"{path}qkvz": parts},
        ),
    )

    def offer(**outputs: int) -> ws.Manifest:
        specs = []
        for part, size in outputs.items():
            name = f"base_model.model.{path}{part}.lora_"
            specs.append(ws.TensorSpec(f"{name}A.weight", "float32", (8, 64)))
            specs.append(ws.TensorSpec(f"{name}B.weight", "float32", (size, 8)))
        return ws.Manifest(tuple(specs))

    for taken in ({"qkv": 112, "z": 48}, {"qkv": 112}):
        _Check(manager).check(offer(**taken))
    with pytest.raises(ws.ManifestMismatchError, match=r"takes with in_proj_qkv alone.*in_proj_z"):
        _Check(manager).check(offer(z=48))
    with pytest.raises(ws.ManifestMismatchError, match="another base model"):
        _Check(manager).check(offer(qkv=64, z=48))


def test_the_tables_of_gpu_workers_take_every_number() -> None:
    """Those of vLLM's V2 model runner, which no CPU runs: it is the default where Triton works."""
    from vllm.v1.worker.gpu.lora_utils import LoraState

    state = LoraState(2)
    path = AdapterPath("policy", 7, "0123456789abcdef")
    for index, number in enumerate((FIRST_ID, LAST_ID)):
        state.add_request(str(index), index, request_of(path, number))
    given, _, _ = state.make_lora_inputs(["0", "1"], np.array([0, 1]), np.array([1, 1]))
    assert list(map(int, given)) == [FIRST_ID, LAST_ID]
