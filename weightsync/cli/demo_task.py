"""What the demo teaches: prompts, a reward that anyone can recompute, and the policy gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.serve.requests import Completion

MAX_GRAD_NORM = 1.0
_SPREAD_FLOOR = 1e-4  # a group whose rewards are all equal teaches nothing


@dataclass(frozen=True, kw_only=True)
class Task:
    """`prompts` are asked `group` times each; `share` of the characters is what is rewarded."""

    goal: str
    prompts: tuple[str, ...]
    rewarded: Callable[[str], bool]
    group: int
    max_new_tokens: int
    learning_rate: float
    chat: bool

    def reward(self, text: str) -> float:
        """Return the share of the characters of `text` that are rewarded, 0 to 1."""
        return sum(map(self.rewarded, text)) / len(text) if text else 0.0

    def encode(self, tokenizer: Any) -> list[list[int]]:
        """Return the token ids of each prompt, as a chat where the model knows chats."""
        texts = [self._chat(tokenizer, p) if self.chat else p for p in self.prompts]
        return [list(tokenizer(text)["input_ids"]) for text in texts]

    def _chat(self, tokenizer: Any, prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return str(text)


def is_digit(character: str) -> bool:
    """Tell whether a character is one of 0 to 9."""
    return character in "0123456789"


def is_lower(character: str) -> bool:
    """Tell whether a character is one of a to z."""
    return "a" <= character <= "z"


TASKS = {
    "smollm2": Task(
        goal="answer in digits: the reward is the share of characters that are digits",
        prompts=(
            "Count from 1 to 20.",
            "What is 17 times 23?",
            "List the years of the world cups.",
            "Tell me some prime numbers.",
        ),
        rewarded=is_digit,
        group=6,
        max_new_tokens=16,
        learning_rate=7e-5,
        chat=True,
    ),
    "tiny": Task(
        goal="write lower case: the reward is the share of characters from a to z",
        prompts=("The sea", "A cat", "Why?", "Say it."),
        rewarded=is_lower,
        group=16,
        max_new_tokens=16,
        learning_rate=1e-2,
        chat=False,
    ),
}


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Return how far each reward lies from its group's mean, in the group's spread.

    `rewards` and the result are float32[prompts, group]. This is the group-relative advantage of
    DeepSeekMath (Shao et al. 2024), which needs no value model.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + _SPREAD_FLOOR)


def completion_logprobs(
    model: Any, prompts: Sequence[list[int]], completions: Sequence[Completion]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of every generated token, and the completion it belongs to.

    Both are of shape [generated tokens]; gradients flow through the first.
    """
    starts = [len(prompts[c.prompt_index]) for c in completions]
    sequences = [prompts[c.prompt_index] + c.token_ids for c in completions]
    ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    rows = torch.tensor([r for r, c in enumerate(completions) for _ in c.token_ids])
    places = [range(a, len(s)) for a, s in zip(starts, sequences, strict=True)]
    columns = torch.tensor([at for place in places for at in place])
    hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    # Only generated tokens need logits: over the whole vocabulary these outweigh the rest.
    logits = model.get_output_embeddings()(hidden[rows, columns - 1]).float()
    wanted = ids[rows, columns][:, None]
    return torch.log_softmax(logits, dim=-1).gather(1, wanted)[:, 0], rows


class Learner:
    """One policy-gradient step per batch of rollouts that the current weights made."""

    def __init__(self, model: Any, task: Task, prompts: list[list[int]]) -> None:
        self._model = model
        self._task = task
        self._prompts = prompts
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=task.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, completions: Sequence[Completion]) -> tuple[float, float]:
        """Move the weights once; return the mean reward and the logprob gap.

        The gap is the largest difference between the server's log-probability of a token it made
        and the trainer's own: with equal weights on both sides it is rounding error.
        """
        rewards = torch.tensor([self._task.reward(c.text) for c in completions])
        weights = advantages(rewards.view(len(self._prompts), self._task.group))
        num_tokens = sum(len(c.token_ids) for c in completions)
        gap = 0.0
        for prompt, weight in enumerate(weights):
            group = [c for c in completions if c.prompt_index == prompt]
            logprobs, rows = completion_logprobs(self._model, self._prompts, group)
            # Group by group: the activations of all at once would outweigh the model.
            loss = -(logprobs * weight[rows]).sum() / num_tokens
            loss.backward()
            server = torch.tensor([p for c in group for p in c.logprobs or ()])
            gap = max(gap, float((logprobs.detach() - server).abs().max()))
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(rewards.mean()), gap
