"""What the tests of TRL's GRPO with a vLLM server share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.vllm.tiny import make_model

ROOT = Path(__file__).parents[2]
PROMPTS = ["1 2 3", "7 7 7"]


def make_folder(folder: Path, *, tied: bool) -> Path:
    """Save a model whose tokenizer pads, as GRPO wants it."""
    make_model(folder, tied=tied)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.save_pretrained(folder)
    return folder


def trainer_of(folder: Path) -> Any:
    """Return what a GRPOTrainer has that a rollout function asks for."""
    return SimpleNamespace(
        use_vllm=False,
        top_k=None,
        min_p=None,
        repetition_penalty=1.0,
        tools=None,
        temperature=1.0,
        top_p=1.0,
        max_completion_length=6,
        processing_class=AutoTokenizer.from_pretrained(folder),
        args=SimpleNamespace(seed=0, generation_kwargs=None),
        accelerator=SimpleNamespace(process_index=0),
        state=SimpleNamespace(global_step=0),
    )


def assert_rolls_out(rollouts: Any, trainer: Any, model: Any, version: int) -> None:
    """Assert that samples are made by a version, and scored as the model does."""
    found = rollouts([PROMPTS[0]] * 3 + [PROMPTS[1]] * 3, trainer)
    assert found["weight_versions"] == [[version]] * 6
    assert found["prompt_version"] == [version] * 6
    assert len({tuple(ids) for ids in found["completion_ids"]}) > 1
    for prompt, made, scored in zip(
        found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True
    ):
        logits = model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits, dim=-1)[range(len(made)), made]
        assert own.tolist() == pytest.approx(scored, abs=1e-4)


def run_example(folder: Path, url: str, *options: str) -> tuple[list[int], list[int], int]:
    """Run examples/trl_grpo_vllm.py.

    Return the versions after each step, those that made samples, and the bytes of an update.
    """
    ended = subprocess.run(
        [sys.executable, ROOT / "examples/trl_grpo_vllm.py", folder, url, *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    *_, made, sent = ended.stdout.splitlines()
    counts = re.findall(r"version (\d+): (\d+) tokens", made)
    assert all(int(tokens) > 0 for _, tokens in counts)
    (nbytes,) = re.findall(r"each update sent (\d+) bytes", sent)
    after = [int(version) for version in re.findall(r"then version (\d+)", ended.stdout)]
    return after, [int(version) for version, _ in counts], int(nbytes)
