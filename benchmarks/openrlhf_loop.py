"""A step of OpenRLHF's loop by weightsync beside `weightsync.connect`, with vLLM in Ray's actors.

`python -m benchmarks.openrlhf_loop [--megabytes 128]`, where OpenRLHF is installed (`make
test-openrlhf` makes such an environment). The loop's step is what OpenRLHF's controller waits for:
a call of `broadcast_to_vllm` to the actor of the trainer. The other one is `send_weights` of the
same model in the same process, to a second engine; they take turns. Prints medians of `--turns`
turns, and their ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import torch.distributed as dist

import weightsync as ws
from tests.openrlhf.on_cpu import pretend
from tests.vllm.tiny import make_model
from tests.vllm.variables import ON_A_CPU
from weightsync.integrations.vllm.actors import vllm_targets

WIDTH = 512
MIB_OF_A_LAYER = 7
"""In bf16, with the widths below."""
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_attention_heads": 8,
    "head_dim": 64,
}


class Engine(torch.nn.Module):
    """Has a model where DeepSpeed's engine has it."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


class Trainer:
    """The trainer's half of OpenRLHF on one rank, and a connection to another engine beside it."""

    def __init__(self, folder: str, engine: Any, other: Any) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415  # after the stand-ins

        from weightsync.integrations.openrlhf import trainer  # noqa: PLC0415  # as above

        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        kind = trainer.with_options({"delta": "off"})
        self.model, mine = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for _ in range(2)
        )
        self.trainer = kind.__new__(kind)
        self.trainer.args = SimpleNamespace(
            ds=SimpleNamespace(zero_stage=0, tensor_parallel_size=1, load_in_4bit=False)
        )
        self.trainer.actor = SimpleNamespace(model=Engine(mine))
        self.trainer.vllm_engines = [engine]
        self.sender = ws.connect(self.model, to=vllm_targets(other), dtype="receiver", delta="off")

    def broadcast_to_vllm(self) -> None:
        """Send through OpenRLHF's method, as its PolicyModelActor does."""
        self.trainer.broadcast_to_vllm()

    def send(self) -> float:
        """Send by `connect`; return the seconds."""
        started = time.perf_counter()
        self.sender.send_weights()
        return time.perf_counter() - started

    def change(self) -> str:
        """Change all weights, as a step does; return what the last updates were."""
        for model in (self.model, self.trainer.actor.model.module):
            for parameter in model.parameters():
                parameter.data.mul_(1.0625)
        return f"{self.trainer.report}"

    def close(self) -> None:
        """End both connections."""
        self.sender.close()
        self.trainer._sender.close()


def main() -> None:
    """Measure, and print a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    os.environ.update(ON_A_CPU, RAY_worker_niceness="0")
    pretend()
    from weightsync.integrations.openrlhf.engine import (  # noqa: PLC0415  # as above
        WeightsyncRolloutActor,
    )

    ray.init(
        num_cpus=4,
        object_store_memory=80 << 20,
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": "tests.openrlhf.on_cpu.pretend"},
    )
    layers = max(1, given.megabytes // MIB_OF_A_LAYER)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), tied=False, num_hidden_layers=layers, **SIZES)
        remote: Any = ray.remote(num_cpus=1)
        engine, other = (
            remote(WeightsyncRolloutActor).remote(
                model=folder,
                enforce_eager=True,
                dtype="bfloat16",
                max_model_len=64,
                distributed_executor_backend="uni",
                gpu_memory_utilization=0.1,
                num_gpus=1,
            )
            for _ in range(2)
        )
        trainer = remote(Trainer).remote(folder, engine, other)
        loop, alone = [], []
        for turn in range(given.turns + 2):
            ray.get(trainer.change.remote())
            started = time.perf_counter()
            ray.get(trainer.broadcast_to_vllm.remote())
            took_s, send_s = time.perf_counter() - started, ray.get(trainer.send.remote())
            if turn >= 2:  # the first ones connect, and write memory for the first time
                loop.append(took_s * 1e3)
                alone.append(send_s * 1e3)
        print(ray.get(trainer.change.remote()))
        ray.get(trainer.close.remote())
    theirs, ours = statistics.median(loop), statistics.median(alone)
    print(f"connect {ours:.1f} ms, OpenRLHF's loop {theirs:.1f} ms: {theirs / ours:.2f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
