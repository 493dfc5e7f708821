"""Request and response bodies of the OpenAI-compatible routes."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from weightsync.errors import (
    AuthError,
    ConfigError,
    NotReadyError,
    ProtocolError,
    TransferError,
    TransportError,
)
from weightsync.serve.requests import PromptText, RequestError, StopText, TokenId, VersionSpan
from weightsync.server.dispatcher import BodyError

MAX_LOGPROBS = 20
MAX_STOPS = 16

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
LogprobCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Stops = Annotated[list[StopText], msgspec.Meta(max_length=MAX_STOPS)]
Prompts = Annotated[
    list[PromptText | TokenId | list[TokenId]], msgspec.Meta(min_length=1, max_length=1 << 17)
]

REFUSED: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (None, True),
    "audio": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "modalities": (None, [], ["text"]),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "stop_token_ids": (None, []),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_k": (None, 0, -1),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}
"""Fields that are not supported, each with its values that have no effect."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a stream. `include_usage` adds a last chunk that has the usage and no choices."""

    include_usage: bool | None = None


class OpenAIRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both kinds of request. None stands for the default."""

    model: str | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=256)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    seed: Seed | None = None
    stop: StopText | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/completions`.

    `prompt` is a text, or a list of texts, of token ids, or of lists of token ids. `logprobs` is
    the number of likeliest tokens to return for each position.
    """

    prompt: PromptText | Prompts
    logprobs: LogprobCount | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list. Raises RequestError for a mixture of texts and ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        if len(ids) == len(self.prompt):
            return [ids]
        kinds = {type(item) for item in self.prompt}
        if len(kinds) != 1:
            raise RequestError(
                "prompt has both texts and token ids; send texts, or lists of token ids, or the "
                "token ids of one prompt",
                param="prompt",
            )
        return [item for item in self.prompt if not isinstance(item, int)]


class TextPart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text of a message."""

    text: PromptText


class ImageUrl(msgspec.Struct, frozen=True, kw_only=True):
    """An image as a `data:` URL. No other URL is fetched."""

    url: str


class ImagePart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="image_url"):
    """An image of a message."""

    image_url: ImageUrl


Parts = Annotated[list[TextPart | ImagePart], msgspec.Meta(max_length=1024)]


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation. `tool_calls` exists to be refused with a reason."""

    role: Literal["system", "developer", "user", "assistant"]
    content: PromptText | Parts | None = None
    name: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def parts(self) -> list[TextPart | ImagePart]:
        """The content as a list of parts."""
        if isinstance(self.content, str):
            return [TextPart(text=self.content)]
        return list(self.content or ())


class ChatRequest(OpenAIRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None


R = TypeVar("R", CompletionRequest, ChatRequest)

_PLACE = re.compile(r" - at `\$\.?([^`]*)`")


def decode_openai(body: bytes, kind: type[R]) -> R:
    """Decode a body. Raises RequestError if it is malformed, contradictory or not supported."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        _refuse_unsupported(fields)
        request = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        place = _PLACE.search(str(exc))
        raise RequestError(
            f"the body is not a request of this route: {exc}",
            param=(place[1] or None) if place else None,
        ) from exc
    _check(request)
    return request


def _refuse_unsupported(fields: dict[str, msgspec.Raw]) -> None:
    for name in sorted(REFUSED.keys() & fields.keys()):
        value: Any = msgspec.json.decode(fields[name])
        if value not in REFUSED[name]:
            raise RequestError(
                f"{name} is not supported; leave it out", param=name, code="unsupported_parameter"
            )


def _check(request: CompletionRequest | ChatRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream=true", param="stream_options")
    if isinstance(request, CompletionRequest):
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise RequestError(
                f"best_of={request.best_of} is not supported, every completion is returned; "
                "leave it out",
                param="best_of",
                code="unsupported_parameter",
            )
        return
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    for place, message in enumerate(request.messages):
        if message.tool_calls:
            raise RequestError(
                "tool calls are not supported; send their text as content",
                param=f"messages[{place}].tool_calls",
                code="unsupported_parameter",
            )


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The number of tokens of all prompts, each counted once, and of all completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of `/v1/completions`; each list has one item per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One of the likeliest tokens of a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    """A chosen token, and the likeliest tokens of its position."""

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
    """One completion of `/v1/completions`, or the next part of it."""

    text: str
    logprobs: TextLogprobs | None = None


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message that the model generated."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The next part of a generated message. Only the first part of a choice has a role."""

    content: str
    role: Literal["assistant"] | None = None


class ChatChoice(_Choice, frozen=True, kw_only=True):
    """One completion of `/v1/chat/completions`."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class ChatChunkChoice(_Choice, frozen=True, kw_only=True):
    """The next part of one completion of `/v1/chat/completions`."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class _Response(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    usage: Usage | None = None


class TextCompletion(_Response, frozen=True, kw_only=True):
    """The response of `/v1/completions`, or a chunk of it."""

    choices: list[TextChoice]
    object: Literal["text_completion"] = "text_completion"


class ChatCompletion(_Response, frozen=True, kw_only=True):
    """The response of `/v1/chat/completions`."""

    choices: list[ChatChoice]
    object: Literal["chat.completion"] = "chat.completion"


class ChatChunk(_Response, frozen=True, kw_only=True):
    """A chunk of a streamed response of `/v1/chat/completions`."""

    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A served model. `max_model_len` is the most tokens of a prompt and its completion.

    `parent` is the base model of an adapter.
    """

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "weightsync"
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/v1/models`."""

    data: list[ModelEntry]
    object: Literal["list"] = "list"


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The description of an error. `param` is the field at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An error in OpenAI's format."""

    error: ErrorDetail


def openai_error(exc: Exception) -> tuple[int, ErrorResponse]:
    """Return the HTTP status and the body of an error."""
    status = _status_of(exc)
    param = exc.param if isinstance(exc, RequestError) else None
    code = exc.code if isinstance(exc, RequestError) else _CODES.get(status)
    message = str(exc) if status != 500 else f"{type(exc).__name__}: {exc}"
    kind = _TYPES.get(status, "invalid_request_error")
    return status, ErrorResponse(
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
