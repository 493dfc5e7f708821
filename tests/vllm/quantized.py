"""Tiny models quantized by compressed-tensors, as checkpoints that vLLM can serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams

from tests.vllm.tiny import change, make_model, save

Kind = Literal["fp8", "int8"]


def make_quantized(folder: Path, kind: Kind, *, seed: int, plain: Path | None = None) -> None:
    """Save an untied Qwen3 with a scale for each output channel; its head stays float32.

    In `plain` the same model as it was before.
    """
    model: Any = make_model(folder, tied=False)
    change(model, seed)
    if plain is not None:
        save(model, plain)
    apply_quantization_config(model, _config(kind))
    for layer in model.modules():
        scheme = getattr(layer, "quantization_scheme", None)
        if scheme is not None:
            weight = layer.weight.detach()
            lowest, highest = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
            layer.weight_scale.data.copy_(calculate_qparams(lowest, highest, scheme.weights)[0])
            layer.quantization_status = QuantizationStatus.FROZEN
    compressor = cast(Any, ModelCompressor).from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    assert {p.dtype for p in model.parameters()} > {torch.float32}


def _config(kind: Kind) -> QuantizationConfig:
    bits = {"num_bits": 8, "type": "float" if kind == "fp8" else "int", "symmetric": True}
    return QuantizationConfig.model_validate(
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized" if kind == "fp8" else "int-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**bits, "strategy": "channel", "dynamic": False},
                    "input_activations": {**bits, "strategy": "token", "dynamic": True},
                }
            },
        }
    )
