"""GRPO with TRL: a vLLM server generates, and has the newest weights after each step.

VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "weightsync"}'
python examples/trl_grpo_vllm.py MODEL http://127.0.0.1:8000

It needs pip install '.[trl,vllm]' in a clone of weightsync. MODEL is a directory; its
prompts need no chat template.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from weightsync.integrations.trl import ServedRollouts, WeightSyncCallback

PROMPTS = ["1 2 3", "7 7 7", "12 13"]


def variety(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Return the reward of each completion: the share of its tokens that differ."""
    return [len(set(ids)) / max(len(ids), 1) for ids in completion_ids]


def main() -> None:
    """Train, and print which version of the weights made the samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("url")
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    torch.manual_seed(0)
    sync = WeightSyncCallback(f"vllm+{given.url}", dtype="float32")
    rollouts = ServedRollouts(f"vllm+{given.url}")
    with tempfile.TemporaryDirectory() as directory, sync, rollouts:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(given.model),
            reward_funcs=variety,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            args=GRPOConfig(
                output_dir=directory,
                max_steps=given.steps,
                per_device_train_batch_size=4 * len(PROMPTS),
                num_generations=4,
                max_completion_length=8,
                learning_rate=1e-2,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
                gradient_checkpointing=False,
            ),
            callbacks=[sync],
            rollout_func=rollouts,
        )
        trainer.remove_callback(PrinterCallback)  # a kilobyte of figures for each step
        trainer.train()
    for entry in trainer.state.log_history:
        if "reward" in entry:
            print(f"step {entry['step']}: reward {entry['reward']:.3f}, ", end="")
            print(f"then version {entry['sync/version']}")
    made = ", ".join(f"version {v}: {n} tokens" for v, n in sorted(rollouts.made_by.items()))
    print(f"samples made by {made}")


if __name__ == "__main__":
    main()
