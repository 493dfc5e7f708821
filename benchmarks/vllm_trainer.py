"""An update through vLLM's trainer API beside one of `weightsync.connect`, to a real vLLM.

`python -m benchmarks.vllm_trainer`, where vLLM is installed (`make test-vllm` makes such an
environment in .venv-vllm-0.32.0). The sources and the receiver are the same, and the updates take
turns. Prints milliseconds (medians) and their ratio.
"""

from __future__ import annotations

import os

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    TORCH_COMPILE_DISABLE="1",
    VLLM_HOST_IP="127.0.0.1",
    GLOO_SOCKET_IFNAME="lo",
)

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

import weightsync as ws
from weightsync.integrations.vllm.actors import vllm_targets
from weightsync.integrations.vllm.trainer import WeightsyncTrainerInitInfo

TURNS = 15


def main() -> None:
    """Print one line for each kind of source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    config = Qwen3Config(
        hidden_size=given.hidden,
        intermediate_size=2 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=512,
        tie_word_embeddings=False,
    )
    made: Any = Qwen3ForCausalLM(config)
    model = made.float().eval()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    print(f"torch {torch.__version__}, {nbytes / 1e6:.0f} MB in {len(model.state_dict())} tensors")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=256,
            weight_transfer_config={"backend": "weightsync"},
        )
        for name, source in (("the module", model), ("vLLM's ModuleSource", ModuleSource(model))):
            compare(name, source, llm)


def compare(name: str, source: Any, llm: Any) -> None:
    """Measure both in turns, each with a connection of its own and its second update."""
    seconds: dict[str, list[float]] = {"connect": [], "trainer API": []}
    for _ in range(TURNS):
        with ws.connect(source, to=vllm_targets(llm), delta="off") as sender:
            sender.send_weights()
            seconds["connect"].append(timed(sender.send_weights))
        engine: Any = WeightTransferTrainerFactory.trainer_init(
            WeightsyncTrainerInitInfo(rank=0, to=vllm_targets(llm), options={"delta": "off"}),
            client=None,
            source=source,
        )
        engine.send_weights()
        seconds["trainer API"].append(timed(engine.send_weights))
        engine.shutdown()
    ours, theirs = (statistics.median(measured) * 1e3 for measured in seconds.values())
    print(f"{name}: connect {ours:.1f} ms, trainer API {theirs:.1f} ms, {theirs / ours:.2f} x")


def timed(send: Any) -> float:
    """Return the seconds of one call."""
    started = time.perf_counter()
    send()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
