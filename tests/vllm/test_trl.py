"""TRL's GRPO with completions from a real vLLM server that gets our updates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import weightsync as ws
from tests.vllm.served import Served, vllm_server
from tests.vllm.tiny import make_model
from weightsync.integrations.trl_rollouts import ServedRollouts

ROOT = Path(__file__).parents[2]
PROMPTS = ["1 2 3", "7 7 7"]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_model(made, tied=True)
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with vllm_server(folder, tmp_path_factory.mktemp("log") / "server.log") as made:
        yield made


@pytest.fixture
def trainer(folder: Path) -> Any:
    """What a GRPOTrainer has that a rollout function asks for."""
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


@pytest.fixture
def connected(
    served: Served, tmp_path: Path
) -> Iterator[tuple[Any, ws.WeightSender, ServedRollouts]]:
    """A model of the trainer, its sender, and rollouts of the server that it updates."""
    model = make_model(tmp_path, tied=True)
    with (
        ws.connect(model, to=f"vllm+{served.url}") as sender,
        ServedRollouts(f"vllm+{served.url}") as rollouts,
    ):
        yield model, sender, rollouts


def test_logprobs_are_those_of_the_weights_that_were_sent(connected: Any, trainer: Any) -> None:
    model, sender, rollouts = connected
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    version = sender.send_weights().version
    found = rollouts([PROMPTS[0]] * 3 + [PROMPTS[1]] * 3, trainer)
    trainer.temperature = 0.5
    assert rollouts([PROMPTS[0]], trainer)["logprobs"] is None
    assert found["weight_versions"] == [[version]] * 6
    assert found["prompt_version"] == [version] * 6
    assert set(rollouts.made_by) == {version}
    assert len({tuple(ids) for ids in found["completion_ids"]}) > 1
    for prompt, made, scored in zip(
        found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True
    ):
        logits = model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits, dim=-1)[range(len(made)), made]
        assert own.tolist() == pytest.approx(scored, abs=1e-4)


def test_an_update_meanwhile_leaves_both_versions(connected: Any, trainer: Any) -> None:
    _, sender, rollouts = connected
    version = sender.send_weights().version
    client: Any = rollouts._client
    ask = client._ask

    def ask_and_update(path: str, *args: Any) -> Any:
        answer = ask(path, *args)
        if path == "v1/completions":
            sender.send_weights()
        return answer

    client._ask = ask_and_update
    found = rollouts(PROMPTS * 8, trainer)
    assert found["weight_versions"] == [[version, version + 1]] * 16
    assert rollouts.made_by[None] == sum(map(len, found["completion_ids"]))


def test_the_wrong_kind_of_url_is_named(served: Served, trainer: Any) -> None:
    named = pytest.raises(ws.ConfigError, match=r"or vllm\+http://\S+ where it is a vLLM server")
    with ServedRollouts(served.url) as rollouts, named:
        rollouts(PROMPTS, trainer)


def test_the_example(served: Served, folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "examples/trl_grpo_vllm.py", folder, served.url],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    first, second, third = re.findall(r"then version (\d+)", ended.stdout)
    before = int(first) - 1  # of the start
    assert (int(second), int(third)) == (before + 2, before + 3)
    made = re.findall(r"version (\d+): (\d+) tokens", ended.stdout.splitlines()[-1])
    assert [int(version) for version, _ in made] == [before, before + 1, before + 2]
    assert all(int(tokens) > 0 for _, tokens in made)
