"""GRPO with OpenRLHF, whose engines get the weights by weightsync: the two marked lines are new.

python examples/openrlhf_grpo.py --actor.model_name_or_path Qwen/Qwen3-0.6B --vllm.num_engines 1

It takes all options of openrlhf.cli.train_ppo_ray, and needs OpenRLHF 0.11 and its GPUs.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path

import torch

from weightsync.integrations.openrlhf import install  # new

PROMPTS = ("Count from 1 to 20.", "What is 17 times 23?", "Name some primes.", "7, 14, 21,")
OPTIONS = {
    "algo.advantage.estimator": "group_norm",
    "algo.kl.init_coef": 0,
    "actor.num_gpus_per_node": 1,
    "data.max_len": 256,
    "rollout.batch_size": 4,
    "rollout.n_samples_per_prompt": 2,
    "train.batch_size": 8,
    "reward.remote_url": __file__,
}


def reward_func(queries: list[str], prompts: list[str], _: list[str]) -> dict[str, object]:
    """Return the reward of each answer: the share of its characters that are digits."""
    answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    shares = [sum(c.isdigit() for c in text) / max(len(text), 1) for text in answers]
    rewards = torch.tensor(shares)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("\n".join(json.dumps({"input": text}) for text in PROMPTS * 4))
        options = OPTIONS | {"data.prompt_dataset": prompts}
        texts = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        sys.argv[1:1] = texts
        install()  # new
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
