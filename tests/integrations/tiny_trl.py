"""Tiny trainers of TRL, and their data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import trl as typed_trl
from datasets import Dataset

from weightsync.integrations.trl import ServedRollouts
from weightsync.serve.model import make_tiny_model

trl: Any = typed_trl  # its names are made when they are asked for, which its types do not say

PROMPTS = ("The sea", "A cat", "Why?", "Say it.")
LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
COMMON = {
    "use_cpu": True,
    "bf16": False,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
GROUPS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 6,
}


def lower(completions: list[str], **_: object) -> list[float]:
    return [sum(map(str.islower, text)) / max(len(text), 1) for text in completions]


def prompts() -> Any:
    return Dataset.from_dict({"prompt": list(PROMPTS)})


def texts() -> Any:
    return Dataset.from_dict({"text": [f"{prompt} says {i}" for i, prompt in enumerate(PROMPTS)]})


def grpo(directory: Path, *, steps: int = 2, **settings: Any) -> Any:
    return trl.GRPOConfig(str(directory), max_steps=steps, **{**COMMON, **GROUPS, **settings})


def sft(directory: Path, *, steps: int = 3, **settings: Any) -> Any:
    return trl.SFTConfig(
        str(directory), max_steps=steps, per_device_train_batch_size=2, **{**COMMON, **settings}
    )


def sft_trainer(directory: Path, model: Any = None, *, steps: int = 3, **given: Any) -> Any:
    tiny = make_tiny_model()
    return trl.SFTTrainer(
        model or tiny.model,
        sft(directory, steps=steps),
        train_dataset=texts(),
        processing_class=tiny.tokenizer,
        **given,
    )


def grpo_trainer(directory: Path, rollouts: ServedRollouts, **given: Any) -> Any:
    tiny = make_tiny_model()
    callbacks, reward = given.pop("callbacks", []), given.pop("reward", lower)
    peft_config = given.pop("peft_config", None)
    return trl.GRPOTrainer(
        tiny.model,
        reward,
        grpo(directory, **given),
        train_dataset=prompts(),
        processing_class=tiny.tokenizer,
        callbacks=callbacks,
        rollout_func=rollouts,
        peft_config=peft_config,
    )
