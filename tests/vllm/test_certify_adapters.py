"""Adapters that were sent, compared with the same ones as vLLM itself loads them from files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import weightsync as ws
from tests.vllm.adapted import LINEAR, train
from tests.vllm.architectures import ARCHITECTURES
from tests.vllm.served import vllm_server
from tests.vllm.tiny import change, save
from tests.vllm.versions import CONVOLUTION
from weightsync.integrations.certificate import PROMPTS, Snapshot, differences

pytestmark = pytest.mark.timeout(400)

CELLS: dict[str, tuple[str, list[str], int]] = {
    "Qwen3, tied": ("Qwen3, tied", LINEAR, 1),
    "Qwen2 with biases": ("Qwen2 with biases, untied", LINEAR, 1),
    "Llama": ("Llama, untied", LINEAR, 1),
    "Llama, two workers": ("Llama, untied", LINEAR, 2),
    "Llama, embeddings": ("Llama, untied", ["embed_tokens", "q_proj"], 1),
    "Gemma 2, tied": ("Gemma 2, tied", LINEAR, 1),
    "LFM2, with state": ("LFM2, with state", ["q_proj", "v_proj", "w2"], 1),
}


def look(served: Any, model: str, version: int) -> Snapshot:
    """Return what a model of the server generates; adapters have no fingerprints of their own."""
    answers = [served.complete(16, model=model, prompt=prompt) for prompt in PROMPTS]
    tokens = [[str(token) for token in tokens] for tokens, _ in answers]
    return Snapshot(version, {}, tokens, [logprobs for _, logprobs in answers])


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=CONVOLUTION if "LFM2" in cell else ()) for cell in CELLS]
)
def test_an_adapter_is_equal_to_one_from_a_file_after_each_update(
    cell: str, tmp_path: Path
) -> None:
    name, targets, workers = CELLS[cell]
    torch.manual_seed(0)
    base = ARCHITECTURES[name]().float().eval()
    change(base, 1)
    folder = tmp_path / "base"
    save(base, folder)
    warnings.simplefilter("ignore")
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets)
    model = peft.get_peft_model(base, config)
    files = {}
    for seed, letter in ((2, "A"), (3, "B")):
        train(model, seed)
        files[letter] = tmp_path / letter
        model.save_pretrained(str(files[letter]), save_embedding_layers=False)
    options = {
        "--enable-lora": "",
        "--max-loras": "4",
        "--max-lora-rank": "8",
        "--lora-modules": "",
    }
    options |= {f"{letter}={path}": "" for letter, path in files.items()}
    with vllm_server(folder, tmp_path / "server.log", workers=workers, options=options) as served:
        began = look(served, "tiny", 0)
        cold = {letter: look(served, letter, 0) for letter in files}
        assert differences(cold["A"], cold["B"])
        assert differences(cold["A"], began)
        with ws.connect(ws.AdapterSource(model, name="policy"), to=served.url) as sender:
            for letter in ("B", "A", "B", "A"):
                train(model, 2 if letter == "A" else 3)
                version = sender.send_weights().version
                held = look(served, "policy", version)
                assert differences(held, cold[letter]) == []
                assert held.logprobs == cold[letter].logprobs, "equal to the last bit"
        assert look(served, "tiny", 0) == began
        assert look(served, "B", 0) == cold["B"]
