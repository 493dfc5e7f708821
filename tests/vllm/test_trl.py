"""TRL's GRPO with completions from a real vLLM server that gets our updates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync as ws
from tests.vllm.grpo import PROMPTS, assert_rolls_out, make_folder, run_example, trainer_of
from tests.vllm.served import Served, vllm_server
from tests.vllm.tiny import make_model
from weightsync.integrations.trl_rollouts import ServedRollouts

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with vllm_server(folder, tmp_path_factory.mktemp("log") / "server.log") as made:
        yield made


@pytest.fixture
def trainer(folder: Path) -> Any:
    return trainer_of(folder)


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
    assert_rolls_out(rollouts, trainer, model, version)
    assert set(rollouts.made_by) == {version}
    trainer.temperature = 0.5
    assert rollouts([PROMPTS[0]], trainer)["logprobs"] is None


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
    after, made_by, _ = run_example(folder, served.url)
    start = after[0] - 1
    assert after == [start + 1, start + 2, start + 3]
    assert made_by == [start, start + 1, start + 2]
