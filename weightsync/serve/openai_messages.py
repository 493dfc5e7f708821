"""What the OpenAI-compatible routes take.

Both take: model, n, temperature, top_p, seed, stop, stream, stream_options.include_usage.
`/v1/completions`: prompt (a text, texts, token ids, lists of token ids), max_tokens, logprobs.
`/v1/chat/completions`: messages (role, name, content: a text, or text and image_url parts),
max_completion_tokens (or max_tokens), logprobs, top_logprobs. Beyond OpenAI, both: ignore_eos (go
on after the end token), return_token_ids. Fields that would change the answer and are not supported
are refused unless they say what happens anyway (REFUSED); any other is ignored.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from weightsync.errors import ConfigError
from weightsync.serve.requests import PromptText, StopText, TokenId

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
"""Fields that are not supported, and the values that ask for nothing."""


class RequestError(ConfigError):
    """A request that cannot be answered: `status`, the field at fault and OpenAI's code for it."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        self.status = status
        self.param = param
        self.code = code
        super().__init__(message)


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """With `include_usage`, a last chunk without choices says how many tokens there were."""

    include_usage: bool | None = None


class OpenAIRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What both calls take; None stands for the default everywhere."""

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
        """Whether the stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/completions`. `prompt` holds texts, ids, or lists of ids; no mixture.

    `logprobs` is how many of the likeliest tokens are told beside each chosen one.
    """

    prompt: PromptText | Prompts
    logprobs: LogprobCount | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one. Raises RequestError for a mixture."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        if len(ids) == len(self.prompt):
            return [ids]
        kinds = {type(item) for item in self.prompt}
        if len(kinds) != 1:
            raise RequestError(
                "prompt mixes texts and token ids; send texts, or lists of token ids, or the "
                "token ids of one prompt",
                param="prompt",
            )
        return [item for item in self.prompt if not isinstance(item, int)]


class TextPart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text of a message."""

    text: PromptText


class ImageUrl(msgspec.Struct, frozen=True, kw_only=True):
    """An image as a `data:` URL: nothing is fetched."""

    url: str


class ImagePart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="image_url"):
    """An image of a message."""

    image_url: ImageUrl


Parts = Annotated[list[TextPart | ImagePart], msgspec.Meta(max_length=1024)]


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation. `tool_calls` is there to be refused."""

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
    """Read a body. Raises RequestError for what is malformed, contradictory or not supported."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        _refuse_unsupported(fields)
        request = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        place = _PLACE.search(str(exc))
        raise RequestError(
            f"the body is no request of this call: {exc}",
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
        raise RequestError("stream_options is for stream=true alone", param="stream_options")
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
        raise RequestError("top_logprobs wants logprobs=true", param="top_logprobs")
    for place, message in enumerate(request.messages):
        if message.tool_calls:
            raise RequestError(
                "tool calls are not supported; send their text as content",
                param=f"messages[{place}].tool_calls",
                code="unsupported_parameter",
            )
