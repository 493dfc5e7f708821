"""Generation inside one process: calls that return completions, over the runner's steps."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from weightsync.errors import ConfigError
from weightsync.serve.causal_model import end_token_ids
from weightsync.serve.model_runner import ModelRunner
from weightsync.serve.requests import (
    Completion,
    GenerateRequest,
    GenerateResponse,
    Sampling,
    decode_request,
    encode_response,
    spans,
)
from weightsync.serve.steps import NO_LOGPROBS, NewRows, RowId, SampledToken, SamplingParams, Step
from weightsync.serve.text import find_stop

MAX_ROWS = 1024

Reading = Callable[[], AbstractContextManager[int]]
ShouldStop = Callable[[], bool]
FinishReason = Literal["stop", "length", "abort"]

_STOP_POLL_S = 0.05


def _unversioned() -> AbstractContextManager[int]:
    return nullcontext(0)


def _never() -> bool:
    return False


class Generator:
    """Generates with a Hugging Face causal language model while its weights are being replaced.

    `reading()` is entered around every decode step and yields the weight version: the swap of an
    update waits for the step, and the step for the swap. It raises when the weights may not be
    used, and so does the call. Attention caches of tokens made with older weights are kept: a
    completion goes on over an update, and `weight_versions` says which tokens had which weights.
    Threads may call at once; batches run one after the other.
    """

    def __init__(self, model: Any, tokenizer: Any, *, reading: Reading = _unversioned) -> None:
        self._runner = ModelRunner(model)
        self._tokenizer = tokenizer
        self._reading = reading
        self._batches = threading.Lock()
        self._end_ids = end_token_ids(model, tokenizer)
        self._row_ids = itertools.count()
        self._step_numbers = itertools.count()

    def handle_generate(self, body: bytes, *, should_stop: ShouldStop = _never) -> bytes:
        """Answer the body of a `POST /generate`; ProtocolError for one that is no request."""
        request = decode_request(body)
        return encode_response(self.answer(request, should_stop=should_stop))

    def answer(
        self, request: GenerateRequest, *, should_stop: ShouldStop = _never
    ) -> GenerateResponse:
        """Generate what the request asks for."""
        completions = self.generate(request.prompts, request, should_stop=should_stop)
        return GenerateResponse(completions=completions)

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        sampling: Sampling | None = None,
        *,
        should_stop: ShouldStop = _never,
    ) -> list[Completion]:
        """Complete each prompt `sampling.n` times; the completions of a prompt are neighbours.

        `should_stop` is asked before every step; once it says yes, what is there is returned with
        finish_reason "abort". Raises ConfigError for prompts that the model cannot take, and what
        `reading()` raises.
        """
        sampling = sampling or Sampling()
        tokens = [self._tokens(prompt) for prompt in prompts]
        self._check(tokens, sampling)
        batch = _Batch.of(len(tokens), sampling, self._row_ids)
        with self._turn(should_stop) as granted:
            if granted:
                self._decode(batch, tokens, should_stop)
        return [self._completion(batch, row) for row in batch.rows]

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        ids = list(self._tokenizer(prompt)["input_ids"])
        if not ids and self._tokenizer.bos_token_id is not None:
            ids = [self._tokenizer.bos_token_id]
        return ids

    def _check(self, tokens: list[list[int]], sampling: Sampling) -> None:
        room, vocab_size = self._runner.max_length, self._runner.vocab_size
        if not tokens or len(tokens) * sampling.n > MAX_ROWS:
            raise ConfigError(
                f"{len(tokens)} prompts, {sampling.n} completions each, are asked for; "
                f"send 1 to {MAX_ROWS} completions at a time"
            )
        longest = max(map(len, tokens)) + sampling.max_new_tokens
        if longest > room:
            raise ConfigError(
                f"prompt and completion take {longest} tokens, the model has room for {room}; "
                "shorten the prompt or max_new_tokens"
            )
        for index, ids in enumerate(tokens):
            if not ids or not 0 <= min(ids) <= max(ids) < vocab_size:
                raise ConfigError(
                    f"prompt {index} is empty or has token ids outside 0 to "
                    f"{vocab_size - 1}; encode it with the model's own tokenizer"
                )

    @contextmanager
    def _turn(self, should_stop: ShouldStop) -> Iterator[bool]:
        granted = False
        while not granted and not should_stop():
            granted = self._batches.acquire(timeout=_STOP_POLL_S)
        try:
            yield granted
        finally:
            if granted:
                self._batches.release()

    def _decode(self, batch: _Batch, tokens: list[list[int]], should_stop: ShouldStop) -> None:
        step = batch.first_step(tokens, next(self._step_numbers))
        try:
            while not batch.done and not should_stop():
                with self._reading() as version:
                    result = self._runner.execute(step, version)
                for first, why in result.refused.items():
                    raise ConfigError(f"prompt {batch.row(first).prompt_index}: {why}")
                living = batch.append(version, result.chosen)
                self._close_rows(batch)
                step = batch.next_step(living, next(self._step_numbers))
        finally:
            rows = [row.row_id for row in batch.rows]
            self._runner.execute(Step(number=next(self._step_numbers), drop=rows), 0)

    def _close_rows(self, batch: _Batch) -> None:
        for row in batch.open_rows:
            if row.token_ids[-1] in self._end_ids:
                row.finish_reason = "stop"
            elif batch.sampling.stop:
                text = self._text(row)
                if any(stop in text for stop in batch.sampling.stop):
                    row.finish_reason = "stop"
            if row.finish_reason is None and len(row.token_ids) == batch.sampling.max_new_tokens:
                row.finish_reason = "length"

    def _text(self, row: _Row) -> str:
        return str(self._tokenizer.decode(row.token_ids, skip_special_tokens=True))

    def _completion(self, batch: _Batch, row: _Row) -> Completion:
        text = self._text(row)
        return Completion(
            prompt_index=row.prompt_index,
            text=text[: find_stop(text, batch.sampling.stop)],
            token_ids=row.token_ids,
            logprobs=row.logprobs if batch.sampling.logprobs else None,
            weight_versions=spans(row.versions),
            prompt_version=row.versions[0] if row.versions else 0,
            finish_reason=row.finish_reason or "abort",
        )


@dataclass
class _Row:
    row_id: RowId
    prompt_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass
class _Batch:
    sampling: Sampling
    rows: list[_Row]

    @classmethod
    def of(cls, num_prompts: int, sampling: Sampling, row_ids: Iterator[RowId]) -> _Batch:
        owners = [prompt for prompt in range(num_prompts) for _ in range(sampling.n)]
        rows = [_Row(row_id=next(row_ids), prompt_index=prompt) for prompt in owners]
        return cls(sampling=sampling, rows=rows)

    @property
    def open_rows(self) -> list[_Row]:
        return [row for row in self.rows if row.finish_reason is None]

    @property
    def done(self) -> bool:
        return not self.open_rows

    def row(self, row_id: RowId) -> _Row:
        return self.rows[row_id - self.rows[0].row_id]

    def first_step(self, tokens: list[list[int]], number: int) -> Step:
        choosing = SamplingParams(
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            seed=self.sampling.seed,
            logprobs=0 if self.sampling.logprobs else NO_LOGPROBS,
        )
        rows = [row.row_id for row in self.rows]
        n = self.sampling.n
        new = [
            NewRows(rows=rows[i * n : (i + 1) * n], prompt=prompt, choosing=choosing)
            for i, prompt in enumerate(tokens)
        ]
        return Step(number=number, new=new)

    def append(self, version: int, chosen: list[SampledToken]) -> list[_Row]:
        """Give each row its token; return the rows that had not ended before."""
        for choice in chosen:
            row = self.row(choice.row)
            row.token_ids.append(choice.token)
            row.logprobs.append(choice.logprob or 0.0)
            row.versions.append(version)
        return [self.row(choice.row) for choice in chosen]

    def next_step(self, living: list[_Row], number: int) -> Step:
        open_rows = self.open_rows
        return Step(
            number=number,
            drop=[row.row_id for row in living if row.finish_reason is not None],
            rows=[row.row_id for row in open_rows],
            tokens=[row.token_ids[-1] for row in open_rows],
        )
