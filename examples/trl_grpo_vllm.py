"""GRPO with TRL: a vLLM server generates, and has the newest weights after each step.

VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "weightsync"}'
python examples/trl_grpo_vllm.py MODEL http://127.0.0.1:8000

With --adapter a LoRA adapter is trained, by PEFT, and it alone is sent, to a server that was
started with --enable-lora --max-loras 2 as well:

python examples/trl_grpo_vllm.py MODEL http://127.0.0.1:8000 --adapter policy

It needs pip install '.[trl,peft,vllm]' in a clone of weightsync. MODEL is a directory; its
prompts need no chat template.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from weightsync.integrations.trl import ServedRollouts, WeightSyncCallback

PROMPTS = ["1 2 3", "7 7 7", "12 13"]
LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")


def variety(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Return the reward of each completion: the share of its tokens that differ."""
    return [len(set(ids)) / max(len(ids), 1) for ids in completion_ids]


def main() -> None:
    """Train, and print which version of the weights made the samples, and what was sent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("url")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--adapter", help="train a LoRA adapter, of this name on the server")
    given = parser.parse_args()
    torch.manual_seed(0)
    url = f"vllm+{given.url}"
    sync = WeightSyncCallback(url, adapter=given.adapter, dtype="float32")
    rollouts = ServedRollouts(url, adapter=given.adapter)
    with tempfile.TemporaryDirectory() as directory, sync, rollouts:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(given.model),
            peft_config=LORA if given.adapter else None,
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
    print(f"each update sent {sync.last_report.nbytes} bytes; ", end="")
    print(f"the model has {sum(p.nbytes for p in trainer.model.parameters())}")


if __name__ == "__main__":
    main()
