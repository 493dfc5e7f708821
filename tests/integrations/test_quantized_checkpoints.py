"""Models that transformers loads from checkpoints of compressed-tensors, updated by their config.

vLLM on a CPU without AMX serves fp8 by channel alone (tests/vllm). What other engines would hold
is compared here: every parameter of a model that was loaded, and what it computes.
"""

from __future__ import annotations

import json
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import weightsync as ws
from tests.vllm.tiny import change, make_model
from tests.weights.test_quantized import library_scales
from weightsync.weights.sinks.module_sink import ModuleSink

with warnings.catch_warnings():
    # torch's own, where it compiles: the library does so when it is imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )

pytestmark = pytest.mark.usefixtures("shm_clean")

PRESETS = {"fp8 by channel": "FP8_DYNAMIC", "fp8 by block": "FP8_BLOCK", "int8": "W8A8"}
PRESETS["mxfp8"] = "MXFP8"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}


def checkpoint(folder: Path, preset: str, seed: int) -> Any:
    """Save a model that the library has quantized, and return what it was before."""
    model: Any = make_model(folder, tied=False, **SIZES)
    change(model, seed)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    groups = {"group_0": preset_name_to_scheme(preset, ["Linear"])}
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for layer in model.modules():
        found = getattr(layer, "quantization_scheme", None)
        if found is not None:
            layer.weight_scale.data.copy_(library_scales(layer.weight.detach(), found.weights))
            layer.quantization_status = QuantizationStatus.FROZEN
    compressor: Any = ModelCompressor
    compressor = compressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return state


def loaded(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return model.eval()


def bits(model: Any) -> dict[str, torch.Tensor]:
    return {n: t.detach().contiguous().view(torch.uint8) for n, t in model.state_dict().items()}


@pytest.fixture(params=PRESETS)
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = [tmp_path / "1", tmp_path / "2"]
    return made, [checkpoint(f, PRESETS[request.param], i) for i, f in enumerate(made, 1)]


def test_a_trainer_updates_a_quantized_model(folders: Any, tmp_path: Path) -> None:
    """Four updates and back: the parameters of the library's checkpoint, to the bit."""
    paths, states = folders
    served, cold = loaded(paths[0]), [loaded(path) for path in paths]
    wanted = [bits(model) for model in cold]
    assert any(tensor.dtype is not torch.float32 for tensor in served.state_dict().values())
    trainer = make_model(tmp_path, tied=False, **SIZES)
    sink = ModuleSink(served)
    sink.quantization = json.loads((paths[0] / "config.json").read_text())["quantization_config"]
    receiver = ws.WeightReceiver(sink)
    with (
        closing(receiver),
        ws.connect(trainer, to=receiver.handle, quantize="receiver") as sender,
    ):
        for step in (1, 0, 1, 0, 1):
            trainer.load_state_dict(states[step])
            assert sender.send_weights().verified == "held"
            held = bits(served)
            assert held.keys() == wanted[step].keys()
            differing = [n for n, t in held.items() if not torch.equal(t, wanted[step][n])]
            assert differing == []
            assert any(not torch.equal(t, wanted[1 - step][n]) for n, t in held.items())
