"""Drives a model runner as an engine core does: rows start, continue and end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weightsync.serve.kv_cache import BatchedKVCache, CachedPrefix, cached_layers
from weightsync.serve.messages import NewRows, RowId, SampledToken, SamplingParams, Step, StepResult
from weightsync.serve.model import LoadedModel, end_token_ids
from weightsync.serve.model_runner import ModelRunner
from weightsync.serve.requests import Completion, spans

GREEDY = SamplingParams(temperature=0)

Execute = Callable[[Step, int], StepResult]


class Stepping:
    """One core's view of a runner. `said` are the tokens of every row so far."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._rows = itertools.count()
        self._numbers = itertools.count()
        self._gone: list[RowId] = []
        self.living: list[RowId] = []
        self.said: dict[RowId, list[int]] = {}
        self.sampled: dict[RowId, list[SampledToken]] = {}

    def new(
        self, prompt: list[int], sampling_params: SamplingParams = GREEDY, n: int = 1, **o: Any
    ) -> NewRows:
        rows = list(itertools.islice(self._rows, n))
        return NewRows(rows=rows, prompt=prompt, sampling_params=sampling_params, **o)

    def start(self, *new: NewRows) -> StepResult:
        result = self._make(new=list(new))
        self.living += [row for one in new if one.rows[0] not in result.refused for row in one.rows]
        return result

    def go_on(self, steps: int = 1) -> StepResult:
        for _ in range(steps):
            tokens = [self.said[row][-1] for row in self.living]
            result = self._make(rows=list(self.living), tokens=tokens)
        return result

    def leave(self, *rows: RowId) -> None:
        self._gone += rows
        self.living = [row for row in self.living if row not in rows]

    def evict(self, *kept: int) -> None:
        self._make(evict=list(kept))

    def _make(self, **what: Any) -> StepResult:
        gone, self._gone = self._gone, []
        result = self._execute(Step(number=next(self._numbers), drop=gone, **what), 1)
        for choice in result.sampled:
            self.said.setdefault(choice.row, []).append(choice.token)
            self.sampled.setdefault(choice.row, []).append(choice)
        return result


def completions(
    loaded: LoadedModel,
    prompts: Sequence[list[int]],
    sampling_params: SamplingParams,
    n: int,
    steps: int,
) -> list[Completion]:
    """Complete each prompt `n` times, each up to its end token or `steps` tokens."""
    end_ids = end_token_ids(loaded.model, loaded.tokenizer)
    core = Stepping(ModelRunner(loaded.model).execute)
    new = [core.new(prompt, sampling_params, n) for prompt in prompts]
    core.start(*new)
    for _ in range(steps - 1):
        core.leave(*(row for row in core.living if core.said[row][-1] in end_ids))
        if core.living:
            core.go_on()
    return [
        Completion(
            prompt_index=index,
            text=loaded.tokenizer.decode(core.said[row], skip_special_tokens=True),
            token_ids=core.said[row],
            logprobs=[choice.logprob or 0.0 for choice in core.sampled[row]],
            weight_versions=spans([1] * len(core.said[row])),
            prompt_version=1,
            finish_reason="length",
        )
        for index, one in enumerate(new)
        for row in one.rows
    ]


def alone(
    model: Any, prompt: list[int], steps: int, inputs: Mapping[str, torch.Tensor] | None = None
) -> list[int]:
    """The likeliest tokens by transformers' own generation, one prompt at a time."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **(inputs or {}),
    )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def living_nbytes(living: BatchedKVCache) -> int:
    """The bytes of keys and values of live rows, without spare room."""
    layers = cached_layers(living.cache) if living.rows else []
    return sum(tensor.nbytes for layer in layers for tensor in layer.held())


def kept_nbytes(kept: CachedPrefix) -> int:
    """The bytes of the keys and values of a kept prompt."""
    return sum(tensor.nbytes for layer in kept._layers for tensor in layer)


def cache_nbytes(runner: ModelRunner) -> int:
    """The bytes of the keys and values of live rows and kept prompts."""
    return sum(map(living_nbytes, runner._batches.values())) + sum(
        map(kept_nbytes, runner._kept.values())
    )
