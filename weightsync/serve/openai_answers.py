"""What the OpenAI-compatible routes answer: whole, in chunks, and errors.

Beyond OpenAI, every choice has `weight_versions` (which weights made which of its tokens, counted
from the first of the completion; in a chunk, of the chunk's tokens), `prompt_version` and, where
asked for, `token_ids`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from weightsync.errors import (
    AuthError,
    ConfigError,
    NotReadyError,
    ProtocolError,
    TransferError,
    TransportError,
)
from weightsync.serve.openai_messages import RequestError
from weightsync.serve.requests import VersionSpan
from weightsync.serve.steps import ModelCard
from weightsync.server.dispatcher import BodyError


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all prompts, each counted once, and of all completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of `/v1/completions`, token by token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    """A chosen token, and the likeliest ones of its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of `/v1/chat/completions`."""

    content: list[TokenLogprob]
    refusal: None = None


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    finish_reason: Literal["stop", "length", "abort"] | None
    weight_versions: list[VersionSpan]
    prompt_version: int
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TextChoice(_Choice, frozen=True, kw_only=True):
    """One completion of `/v1/completions`, or more of it."""

    text: str
    logprobs: TextLogprobs | None = None


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the model says."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """More of what the model says; the first of a choice has a role."""

    content: str
    role: Literal["assistant"] | None = None


class ChatChoice(_Choice, frozen=True, kw_only=True):
    """One completion of `/v1/chat/completions`."""

    message: ChatAnswer
    logprobs: ChatLogprobs | None = None


class ChatChunkChoice(_Choice, frozen=True, kw_only=True):
    """More of one completion of `/v1/chat/completions`."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    usage: Usage | None = None


class TextCompletion(_Answer, frozen=True, kw_only=True):
    """The answer of `/v1/completions`, and a chunk of it."""

    choices: list[TextChoice]
    object: Literal["text_completion"] = "text_completion"


class ChatCompletion(_Answer, frozen=True, kw_only=True):
    """The answer of `/v1/chat/completions`."""

    choices: list[ChatChoice]
    object: Literal["chat.completion"] = "chat.completion"


class ChatChunk(_Answer, frozen=True, kw_only=True):
    """A chunk of a streamed answer of `/v1/chat/completions`."""

    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served; `max_model_len` is the room for a prompt and its completion."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "weightsync"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/models`."""

    data: list[ModelEntry]
    object: Literal["list"] = "list"


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong; `param` is the field at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An error as OpenAI writes it."""

    error: ErrorDetail


def usage_of(num_prompt_tokens: int, num_completion_tokens: int) -> Usage:
    """Return the usage of an answer."""
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
    )


def model_entry(card: ModelCard, created: int) -> ModelEntry:
    """Describe the served model."""
    return ModelEntry(id=card.name, created=created, max_model_len=card.max_length)


def error_answer(exc: Exception) -> tuple[int, ErrorAnswer]:
    """Return the status and the body for an error."""
    status = _status_of(exc)
    param = exc.param if isinstance(exc, RequestError) else None
    code = exc.code if isinstance(exc, RequestError) else _CODES.get(status)
    message = str(exc) if status != 500 else f"{type(exc).__name__}: {exc}"
    kind = _TYPES.get(status, "invalid_request_error")
    return status, ErrorAnswer(
        error=ErrorDetail(message=message, type=kind, param=param, code=code)
    )


_TYPES = {401: "authentication_error", 403: "permission_error", 500: "server_error"} | {
    503: "service_unavailable"
}
_CODES = {413: "request_too_large", 500: "internal_error", 503: "not_ready"}


def _status_of(exc: Exception) -> int:
    if isinstance(exc, RequestError | BodyError | AuthError):
        return exc.status
    if isinstance(exc, NotReadyError | TransferError | TransportError):
        return 503
    return 400 if isinstance(exc, ConfigError | ProtocolError) else 500
