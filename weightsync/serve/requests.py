"""Request and response bodies of `/generate`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from weightsync.errors import ConfigError, ProtocolError

MAX_PROMPTS = 256
MAX_PROMPT_CHARACTERS = 1 << 20

PromptText = Annotated[str, msgspec.Meta(max_length=MAX_PROMPT_CHARACTERS)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
PromptTokens = Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=1 << 17)]
StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /generate`: asks for `n` completions of every prompt, text or token ids.

    `model` is the served model (None, too), an adapter's name, or `name@version`.
    """

    prompts: Annotated[
        list[PromptText | PromptTokens], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)
    ]
    model: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 16
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 1.0
    """0 chooses the likeliest token."""
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    logprobs: bool = False
    stop: Annotated[tuple[StopText, ...], msgspec.Meta(max_length=16)] = ()


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens from `start` up to `stop` of a completion, made by weights of `version`.

    With an adapter that is its version, and `base_version` the one of the model below it.
    """

    version: int
    start: int
    stop: int
    base_version: int | None = None


def spans(
    versions: Sequence[int], start: int = 0, *, bases: Sequence[int | None] = ()
) -> list[VersionSpan]:
    """Return spans of equal versions. The first version is the one of token `start`.

    `bases` has the base version of each token, where an adapter made them.
    """
    made = list(zip(versions, bases or [None] * len(versions), strict=True))
    found: list[VersionSpan] = []
    begin = 0
    for at in range(1, len(made) + 1):
        if at == len(made) or made[at] != made[begin]:
            version, base = made[begin]
            found.append(
                VersionSpan(
                    version=version, start=start + begin, stop=start + at, base_version=base
                )
            )
            begin = at
    return found


@dataclass(frozen=True, slots=True)
class ModelName:
    """The `model` of a request, parsed: the base model (None) or an adapter, perhaps a version."""

    adapter: str | None = None
    version: int | None = None

    @classmethod
    def parse(cls, model: str | None, base: Collection[str]) -> ModelName:
        """Return what a name names: one of `base`, `adapter` or `adapter@7`; None is the base."""
        if model is None or model in base:
            return cls()
        name, at, version = model.rpartition("@")
        if name and at and version.isdecimal() and version.isascii() and len(version) < 20:
            return cls(name, int(version))
        return cls(model)


class RequestError(ConfigError):
    """A request that is refused, with HTTP status, the field at fault and OpenAI's error code."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        self.status = status
        self.param = param
        self.code = code
        super().__init__(message)


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of prompt `prompt_index`.

    `token_ids` contain the end token if there is one; `text` contains neither it nor a stop text.
    `logprobs` are those of the model, before temperature and top_p; None if not requested.
    `prompt_version` is the version of the weights that read the prompt; 0 if it was not read.
    """

    prompt_index: int
    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    weight_versions: list[VersionSpan]
    prompt_version: int
    finish_reason: Literal["stop", "length", "abort"]


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/generate`: `n` completions of each prompt, in order."""

    completions: list[Completion]


# Made here and not at first use, which msgspec 0.22 does not survive in two threads at once.
_REQUESTS = msgspec.json.Decoder(GenerateRequest)
_RESPONSES = msgspec.json.Decoder(GenerateResponse)


def decode_request(body: bytes) -> GenerateRequest:
    """Decode the body of a request. Raises ProtocolError, which names the field at fault."""
    try:
        return _REQUESTS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"the body of /generate is not a request: {exc}") from exc


def decode_response(body: bytes) -> GenerateResponse:
    """Decode a response. Called by trainers that sample from the server.

    Raises ProtocolError for any other body.
    """
    try:
        return _RESPONSES.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"this is not a response of /generate: {exc}") from exc
