"""Batched generation, one decode step at a time, so that weights can change between the steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from weightsync.errors import ConfigError
from weightsync.rollout.requests import (
    Completion,
    GenerateRequest,
    GenerateResponse,
    Sampling,
    VersionSpan,
    decode_request,
    encode_response,
)

_COLDEST = 1e-4
"""Below it a softmax overflows; the likeliest token is what it would choose."""
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
        self._model = model
        self._tokenizer = tokenizer
        self._reading = reading
        self._batches = threading.Lock()
        self._end_ids = _end_token_ids(model, tokenizer)
        self._pad_id = _first(tokenizer.pad_token_id, tokenizer.eos_token_id, 0)

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
        batch = _Batch.of(len(tokens), sampling)
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
        config = self._model.config
        if not tokens or len(tokens) * sampling.n > MAX_ROWS:
            raise ConfigError(
                f"{len(tokens)} prompts, {sampling.n} completions each, are asked for; "
                f"send 1 to {MAX_ROWS} completions at a time"
            )
        longest = max(map(len, tokens)) + sampling.max_new_tokens
        if longest > config.max_position_embeddings:
            raise ConfigError(
                f"prompt and completion take {longest} tokens, the model has room for "
                f"{config.max_position_embeddings}; shorten the prompt or max_new_tokens"
            )
        for index, ids in enumerate(tokens):
            if not ids or not 0 <= min(ids) <= max(ids) < config.vocab_size:
                raise ConfigError(
                    f"prompt {index} is empty or has token ids outside 0 to "
                    f"{config.vocab_size - 1}; encode it with the model's own tokenizer"
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

    @torch.inference_mode()
    def _decode(self, batch: _Batch, tokens: list[list[int]], should_stop: ShouldStop) -> None:
        step = _first_step(tokens, self._pad_id, self._model.device)
        choose = _Chooser(batch.sampling, self._model.device)
        for _ in range(batch.sampling.max_new_tokens):
            if batch.done or should_stop():
                return
            with self._reading() as version:
                logits = self._forward(step)
                if step.is_prompt:
                    logits = step.repeat(batch.sampling.n, logits)
                chosen, logprobs = choose(logits)
            batch.append(version, chosen.tolist(), logprobs)
            self._close_rows(batch)
            step.follow(chosen)

    def _forward(self, step: _Step) -> torch.Tensor:
        output = self._model(
            input_ids=step.input_ids,
            attention_mask=step.attention_mask,
            position_ids=step.position_ids,
            past_key_values=step.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        step.cache = output.past_key_values
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float()

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
        cuts = [at for stop in batch.sampling.stop if (at := text.find(stop)) >= 0]
        return Completion(
            prompt_index=row.prompt_index,
            text=text[: min(cuts)] if cuts else text,
            token_ids=row.token_ids,
            logprobs=row.logprobs if batch.sampling.logprobs else None,
            weight_versions=_spans(row.versions),
            finish_reason=row.finish_reason or "abort",
        )


@dataclass
class _Row:
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
    def of(cls, num_prompts: int, sampling: Sampling) -> _Batch:
        rows = [_Row(prompt_index=i) for i in range(num_prompts) for _ in range(sampling.n)]
        return cls(sampling=sampling, rows=rows)

    @property
    def open_rows(self) -> list[_Row]:
        return [row for row in self.rows if row.finish_reason is None]

    @property
    def done(self) -> bool:
        return not self.open_rows

    def append(self, version: int, chosen: list[int], logprobs: list[float]) -> None:
        for row, token, logprob in zip(self.rows, chosen, logprobs, strict=True):
            if row.finish_reason is None:
                row.token_ids.append(token)
                row.logprobs.append(logprob)
                row.versions.append(version)


@dataclass
class _Step:
    """The input of one forward pass: prompts padded on the left, later one token a row."""

    input_ids: torch.Tensor  # int64[rows, tokens]
    attention_mask: torch.Tensor  # int64[rows, tokens so far]
    position_ids: torch.Tensor  # int64[rows, tokens]
    cache: Any = None
    is_prompt: bool = True

    def repeat(self, n: int, logits: torch.Tensor) -> torch.Tensor:
        """Go on with `n` rows for each prompt, whose cache is computed once."""
        self.is_prompt = False
        if n == 1:
            return logits
        self.cache.batch_repeat_interleave(n)
        self.attention_mask = self.attention_mask.repeat_interleave(n, dim=0)
        self.position_ids = self.position_ids.repeat_interleave(n, dim=0)
        return logits.repeat_interleave(n, dim=0)

    def follow(self, chosen: torch.Tensor) -> None:
        """Make the tokens just chosen, int64[rows], the next input."""
        self.input_ids = chosen[:, None]
        new_column = torch.ones_like(self.attention_mask[:, :1])
        self.attention_mask = torch.cat((self.attention_mask, new_column), dim=1)
        self.position_ids = self.position_ids[:, -1:] + 1


def _first_step(tokens: list[list[int]], pad_id: int, device: torch.device) -> _Step:
    width = max(map(len, tokens))
    ids = [[pad_id] * (width - len(row)) + row for row in tokens]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in tokens]
    attention_mask = torch.tensor(mask, device=device)
    return _Step(
        input_ids=torch.tensor(ids, device=device),
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(dim=1) - 1).clamp(min=0),
    )


class _Chooser:
    """Chooses a token for each row of logits, float32[rows, vocabulary]."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._random = torch.Generator(device=device)
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        chosen = self._choose(logits)
        if not self._sampling.logprobs:
            return chosen, [0.0] * len(chosen)
        logprobs = torch.log_softmax(logits, dim=-1)
        return chosen, logprobs.gather(1, chosen[:, None])[:, 0].tolist()

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        if self._sampling.temperature < _COLDEST:
            return logits.argmax(dim=-1)
        probabilities = torch.softmax(logits / self._sampling.temperature, dim=-1)
        if self._sampling.top_p < 1:
            probabilities = _nucleus(probabilities, self._sampling.top_p)
        return torch.multinomial(probabilities, 1, generator=self._random)[:, 0]


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    # The fewest likeliest tokens that together reach top_p; the likeliest one is always kept.
    ordered, places = probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = ordered.masked_fill(before >= top_p, 0.0)
    return torch.zeros_like(kept).scatter(1, places, kept)


def _spans(versions: list[int]) -> list[VersionSpan]:
    spans: list[VersionSpan] = []
    start = 0
    for at in range(1, len(versions) + 1):
        if at == len(versions) or versions[at] != versions[start]:
            spans.append(VersionSpan(version=versions[start], start=start, stop=at))
            start = at
    return spans


def _end_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for ids in (model.config.eos_token_id, tokenizer.eos_token_id):
        if ids is not None:
            found.update(ids if isinstance(ids, list | tuple) else (ids,))
    return frozenset(found)


def _first(*candidates: int | None) -> int:
    return next(candidate for candidate in candidates if candidate is not None)
