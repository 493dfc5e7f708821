"""From increments to the choices of OpenAI's answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from weightsync.serve.completions import LEAST_LOGPROB, GenerationRequest, MadeToken, StreamDelta
from weightsync.serve.openai_answers import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
    usage_of,
)
from weightsync.serve.openai_messages import OpenAIRequest
from weightsync.serve.steps import NO_LOGPROBS
from weightsync.serve.text import TokenizerService


class Answers(Protocol):
    """Writes the answers to one request."""

    def whole(self, completions: Sequence[StreamDelta]) -> msgspec.Struct:
        """Return the answer that is not streamed."""

    def chunk(self, increment: StreamDelta) -> msgspec.Struct:
        """Return one chunk of a stream."""

    def last_chunk(self, num_completion_tokens: int) -> msgspec.Struct:
        """Return the chunk of the usage."""


class _Head:
    """What all answers to one request have in common."""

    def __init__(
        self, texts: TokenizerService, work: GenerationRequest, asked: OpenAIRequest, model: str
    ) -> None:
        self.texts = texts
        self.id = work.request_id
        self.created = int(time.time())
        self.model = model
        self.num_prompt_tokens = work.num_prompt_tokens
        self.n = work.n
        self._wants_ids = asked.return_token_ids
        self.num_top = work.choosing.logprobs

    def ids(self, increment: StreamDelta) -> list[int] | msgspec.UnsetType:
        return increment.token_ids if self._wants_ids else msgspec.UNSET

    def usage(self, num_completion_tokens: int) -> Usage:
        return usage_of(self.num_prompt_tokens, num_completion_tokens)

    def usage_of(self, completions: Sequence[StreamDelta]) -> Usage:
        return self.usage(sum(len(completion.tokens) for completion in completions))


class TextAnswers:
    """The answers of `/v1/completions`."""

    def __init__(
        self, texts: TokenizerService, work: GenerationRequest, asked: OpenAIRequest, model: str
    ) -> None:
        self._head = _Head(texts, work, asked, model)

    def whole(self, completions: Sequence[StreamDelta]) -> TextCompletion:
        """Return the answer that is not streamed."""
        choices = [self._choice(completion) for completion in completions]
        return self._answer(choices, self._head.usage_of(completions))

    def chunk(self, increment: StreamDelta) -> TextCompletion:
        """Return one chunk of a stream."""
        return self._answer([self._choice(increment)])

    def last_chunk(self, num_completion_tokens: int) -> TextCompletion:
        """Return the chunk of the usage."""
        return self._answer([], self._head.usage(num_completion_tokens))

    def _answer(self, choices: list[TextChoice], usage: Usage | None = None) -> TextCompletion:
        head = self._head
        return TextCompletion(
            id=head.id, created=head.created, model=head.model, choices=choices, usage=usage
        )

    def _choice(self, increment: StreamDelta) -> TextChoice:
        return TextChoice(
            index=increment.prompt_index * self._head.n + increment.index,
            text=increment.text,
            finish_reason=increment.finish_reason,
            weight_versions=increment.weight_versions,
            prompt_version=increment.prompt_version,
            token_ids=self._head.ids(increment),
            logprobs=self._logprobs(increment.tokens, increment.start),
        )

    def _logprobs(self, tokens: Sequence[MadeToken], start: int) -> TextLogprobs | None:
        if self._head.num_top == NO_LOGPROBS:
            return None
        name = self._head.texts.token_name
        names = [name(made.token, first=place == 0) for place, made in enumerate(tokens, start)]
        return TextLogprobs(
            tokens=names,
            token_logprobs=[made.logprob for made in tokens],
            top_logprobs=self._tops(tokens, names, start) if self._head.num_top else None,
            text_offset=[made.offset for made in tokens],
        )

    def _tops(
        self, tokens: Sequence[MadeToken], names: list[str], start: int
    ) -> list[dict[str, float]]:
        """Return the likeliest tokens of each place, and the chosen one even where it is none."""
        name = self._head.texts.token_name
        found = []
        for place, (made, chosen) in enumerate(zip(tokens, names, strict=True), start):
            top = {name(one.token, first=place == 0): _least(one.logprob) for one in made.top}
            top.setdefault(chosen, made.logprob or 0.0)
            found.append(top)
        return found


def _least(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


class ChatAnswers:
    """The answers of `/v1/chat/completions`."""

    def __init__(
        self, texts: TokenizerService, work: GenerationRequest, asked: OpenAIRequest, model: str
    ) -> None:
        self._head = _Head(texts, work, asked, model)
        self._begun: set[int] = set()

    def whole(self, completions: Sequence[StreamDelta]) -> ChatCompletion:
        """Return the answer that is not streamed."""
        head = self._head
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[self._choice(completion) for completion in completions],
            usage=head.usage_of(completions),
        )

    def chunk(self, increment: StreamDelta) -> ChatChunk:
        """Return one chunk of a stream; the first of each choice has a role."""
        first = increment.index not in self._begun
        self._begun.add(increment.index)
        choice = ChatChunkChoice(
            index=increment.index,
            delta=ChatDelta(content=increment.text, role="assistant" if first else None),
            finish_reason=increment.finish_reason,
            weight_versions=increment.weight_versions,
            prompt_version=increment.prompt_version,
            token_ids=self._head.ids(increment),
            logprobs=self._logprobs(increment.tokens, increment.start),
        )
        return self._chunk([choice])

    def last_chunk(self, num_completion_tokens: int) -> ChatChunk:
        """Return the chunk of the usage."""
        return self._chunk([], self._head.usage(num_completion_tokens))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        head = self._head
        return ChatChunk(
            id=head.id, created=head.created, model=head.model, choices=choices, usage=usage
        )

    def _choice(self, increment: StreamDelta) -> ChatChoice:
        return ChatChoice(
            index=increment.index,
            message=ChatAnswer(content=increment.text),
            finish_reason=increment.finish_reason,
            weight_versions=increment.weight_versions,
            prompt_version=increment.prompt_version,
            token_ids=self._head.ids(increment),
            logprobs=self._logprobs(increment.tokens, increment.start),
        )

    def _logprobs(self, tokens: Sequence[MadeToken], start: int) -> ChatLogprobs | None:
        if self._head.num_top == NO_LOGPROBS:
            return None
        return ChatLogprobs(
            content=[self._token(made, place == 0) for place, made in enumerate(tokens, start)]
        )

    def _token(self, made: MadeToken, first: bool) -> TokenLogprob:
        chosen = self._top(made.token, made.logprob or 0.0, first)
        return TokenLogprob(
            token=chosen.token,
            logprob=chosen.logprob,
            bytes=chosen.bytes,
            top_logprobs=[self._top(one.token, one.logprob, first) for one in made.top],
        )

    def _top(self, token: int, logprob: float, first: bool) -> TopLogprob:
        texts = self._head.texts
        return TopLogprob(
            token=texts.token_name(token, first=first),
            logprob=_least(logprob),
            bytes=list(texts.token_bytes(token, first=first)),
        )
