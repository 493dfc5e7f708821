"""The demo's task: rewards, advantages, and a gradient that makes the reward climb."""

from __future__ import annotations

import statistics

import pytest
import torch

from examples.demo.trainer import TASKS, Learner, advantages, completion_logprobs
from tests.serve.stepping import completions as completed
from weightsync.serve.messages import SamplingParams
from weightsync.serve.model import make_tiny_model
from weightsync.serve.requests import Completion


@pytest.mark.parametrize(
    ("task", "text", "reward"),
    [
        ("smollm2", "", 0.0),
        ("smollm2", "1234", 1.0),
        ("smollm2", "1, 2", 0.5),
        ("smollm2", "²٣", 0.0),
        ("tiny", "abcD", 0.75),
        ("tiny", "éß", 0.0),
    ],
)
def test_the_reward_is_the_share_of_rewarded_characters(
    task: str, text: str, reward: float
) -> None:
    assert TASKS[task].reward(text) == reward


def test_advantages_compare_inside_a_group_only() -> None:
    rewards = torch.tensor([[0.0, 1.0, 0.0, 1.0], [10.0, 11.0, 10.0, 11.0], [3.0, 3.0, 3.0, 3.0]])
    found = advantages(rewards)
    torch.testing.assert_close(found[0], found[1])
    assert found[0].tolist() == pytest.approx([-0.866, 0.866, -0.866, 0.866], abs=1e-3)
    assert found[2].tolist() == [0.0] * 4


def rollouts(seed: int, n: int) -> tuple[list[list[int]], list[Completion]]:
    loaded = make_tiny_model()
    prompts = TASKS["tiny"].encode(loaded.tokenizer)
    choosing = SamplingParams(seed=seed, logprobs=0)
    return prompts, completed(loaded, prompts, choosing, n, steps=6)


def test_logprobs_are_those_of_each_sequence_alone_and_carry_gradients() -> None:
    model = make_tiny_model().model
    prompts, completions = rollouts(seed=1, n=2)
    logprobs, rows = completion_logprobs(model, prompts, completions)
    assert rows.tolist() == [r for r, c in enumerate(completions) for _ in c.token_ids]
    for row, completion in enumerate(completions):
        prompt = prompts[completion.prompt_index]
        logits = model(torch.tensor([prompt + completion.token_ids])).logits[0]
        wanted = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        wanted = wanted.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(logprobs[rows == row], wanted, rtol=0, atol=1e-4)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_gap_tells_whether_the_rollouts_are_of_the_trainers_weights() -> None:
    loaded = make_tiny_model()
    prompts, completions = rollouts(seed=2, n=TASKS["tiny"].group)
    learner = Learner(loaded.model, TASKS["tiny"], prompts)
    _, fresh = learner.step(completions)
    _, stale = learner.step(completions)
    assert fresh < 1e-3 < stale


@pytest.mark.parametrize("seed", [0, 1000])
def test_the_tiny_models_reward_climbs_within_ten_steps(seed: int) -> None:
    loaded, task = make_tiny_model(), TASKS["tiny"]
    prompts = task.encode(loaded.tokenizer)
    learner = Learner(loaded.model, task, prompts)
    rewards = []
    for step in range(10):
        choosing = SamplingParams(seed=seed + step, logprobs=0)
        rollout = completed(loaded, prompts, choosing, task.group, task.max_new_tokens)
        rewards.append(learner.step(rollout)[0])
    assert statistics.mean(rewards[-3:]) > 2 * statistics.mean(rewards[:3])
