"""The OpenAI-compatible routes: chat and text completions, whole or streamed."""

from __future__ import annotations

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from jinja2 import TemplateError
from msgspec.structs import asdict
from starlette.convertors import PathConvertor, register_url_convertor

from weightsync.serve.completions import (
    GONE_STATUS,
    LEAST_LOGPROB,
    ClientGoneError,
    EventStream,
    GenerationRequest,
    Prompt,
    StreamDelta,
    begun,
    closing,
    complete,
    event,
    read_prompts,
    stream_deltas,
    while_connected,
)
from weightsync.serve.engine_client import EngineClient
from weightsync.serve.messages import NO_LOGPROBS, ModelCard, SamplingParams
from weightsync.serve.openai_protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ErrorResponse,
    ImagePart,
    ModelEntry,
    ModelList,
    OpenAIRequest,
    R,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TextPart,
    TokenLogprob,
    TopLogprob,
    Usage,
    decode_openai,
    openai_error,
)
from weightsync.serve.requests import ModelName, RequestError
from weightsync.serve.text import TokenizerService
from weightsync.serve.vision import ImagePreparer, read_images
from weightsync.server.dispatcher import BodyError, read_body
from weightsync.server.router import schema_of


class Responses(ABC):
    """Builds the responses to one request, which are streamed or not."""

    response: Callable[..., msgspec.Struct]
    chunk_response: Callable[..., msgspec.Struct]

    def __init__(
        self, texts: TokenizerService, work: GenerationRequest, parsed: OpenAIRequest, model: str
    ) -> None:
        self.texts = texts
        self._work = work
        self._created = int(time.time())
        self._model = model
        self._wants_ids = parsed.return_token_ids

    def whole(self, completions: Sequence[StreamDelta]) -> msgspec.Struct:
        """Return the response that is not streamed."""
        num_tokens = sum(len(completion.tokens) for completion in completions)
        return self._response(self.response, [self.choice(c) for c in completions], num_tokens)

    def chunk(self, delta: StreamDelta) -> msgspec.Struct:
        """Return one chunk of a stream."""
        return self._response(self.chunk_response, [self.chunk_choice(delta)])

    def last_chunk(self, num_completion_tokens: int) -> msgspec.Struct:
        """Return the chunk of the usage."""
        return self._response(self.chunk_response, [], num_completion_tokens)

    @abstractmethod
    def choice(self, delta: StreamDelta) -> msgspec.Struct:
        """Return a whole completion."""

    @abstractmethod
    def chunk_choice(self, delta: StreamDelta) -> msgspec.Struct:
        """Return the next part of a completion."""

    @abstractmethod
    def logprobs(self, delta: StreamDelta, num_top: int) -> msgspec.Struct:
        """Return the log-probabilities of tokens, and of `num_top` others at each position."""

    def make_choice(
        self, kind: Callable[..., msgspec.Struct], delta: StreamDelta, /, **own: object
    ) -> msgspec.Struct:
        """Return a choice with the fields that all kinds have, and `own`."""
        num_top = self._work.sampling_params.logprobs
        return kind(
            index=delta.prompt_index * self._work.n + delta.index,
            finish_reason=delta.finish_reason,
            weight_versions=delta.weight_versions,
            prompt_version=delta.prompt_version,
            token_ids=delta.token_ids if self._wants_ids else msgspec.UNSET,
            logprobs=None if num_top == NO_LOGPROBS else self.logprobs(delta, num_top),
            **own,
        )

    def _response(
        self,
        kind: Callable[..., msgspec.Struct],
        choices: list[msgspec.Struct],
        num_completion_tokens: int | None = None,
    ) -> msgspec.Struct:
        usage = None
        if num_completion_tokens is not None:
            num_prompt_tokens = self._work.num_prompt_tokens
            usage = Usage(
                prompt_tokens=num_prompt_tokens,
                completion_tokens=num_completion_tokens,
                total_tokens=num_prompt_tokens + num_completion_tokens,
            )
        return kind(
            id=self._work.request_id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
        )


class CompletionResponses(Responses):
    """The responses of `/v1/completions`."""

    response = chunk_response = TextCompletion

    def choice(self, delta: StreamDelta) -> msgspec.Struct:
        return self.make_choice(TextChoice, delta, text=delta.text)

    chunk_choice = choice

    def logprobs(self, delta: StreamDelta, num_top: int) -> TextLogprobs:
        names, tops = [], []
        for place, made in enumerate(delta.tokens, delta.start):
            name = partial(self.texts.token_name, first=place == 0)
            names.append(name(made.token))
            top = {name(token): _least(logprob) for token, logprob in made.top}
            top.setdefault(names[-1], made.logprob or 0.0)  # the chosen token in any case
            tops.append(top)
        return TextLogprobs(
            tokens=names,
            token_logprobs=[made.logprob for made in delta.tokens],
            top_logprobs=tops if num_top else None,
            text_offset=[made.offset for made in delta.tokens],
        )


def _least(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


class ChatResponses(Responses):
    """The responses of `/v1/chat/completions`."""

    response = ChatCompletion
    chunk_response = ChatChunk

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._begun: set[int] = set()

    def choice(self, delta: StreamDelta) -> msgspec.Struct:
        return self.make_choice(ChatChoice, delta, message=AssistantMessage(content=delta.text))

    def chunk_choice(self, delta: StreamDelta) -> msgspec.Struct:
        # Only the first chunk of each choice has a role.
        role: Literal["assistant"] | None = None if delta.index in self._begun else "assistant"
        self._begun.add(delta.index)
        return self.make_choice(
            ChatChunkChoice, delta, delta=ChatDelta(content=delta.text, role=role)
        )

    def logprobs(self, delta: StreamDelta, num_top: int) -> ChatLogprobs:
        content = []
        for place, made in enumerate(delta.tokens, delta.start):
            chosen, *top = [
                self._top(token, logprob, first=place == 0)
                for token, logprob in [(made.token, made.logprob or 0.0), *made.top]
            ]
            content.append(TokenLogprob(**asdict(chosen), top_logprobs=top))
        return ChatLogprobs(content=content)

    def _top(self, token: int, logprob: float, *, first: bool) -> TopLogprob:
        return TopLogprob(
            token=self.texts.token_name(token, first=first),
            logprob=_least(logprob),
            bytes=list(self.texts.token_bytes(token, first=first)),
        )


PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The chat template for a tokenizer that has none."""


_MESSAGE_SIZE = 32
_UNKNOWN_SIZE = 1 << 20


async def chat_prompt(texts: TokenizerService, messages: Sequence[ChatMessage]) -> Prompt:
    """Return the prompt for the assistant's next message of a conversation.

    Raises RequestError if the model, or its chat template, cannot take the messages.
    """
    return await texts.run(lambda: _prompt(texts, messages), sum(map(_size, messages)))


def _size(message: ChatMessage) -> int:
    content = message.content or ""
    return _MESSAGE_SIZE + len(content) if isinstance(content, str) else _UNKNOWN_SIZE


def _prompt(texts: TokenizerService, messages: Sequence[ChatMessage]) -> Prompt:
    parts = [part for message in messages for part in message.parts]
    urls = [part.image_url.url for part in parts if isinstance(part, ImagePart)]
    preparer = texts.images
    if urls and preparer is None:
        raise RequestError("the served model takes no images; send text alone", param="messages")
    rendered = render(texts, [_as_wanted(texts, message) for message in messages])
    if preparer is not None and urls:
        return _with_images(preparer, rendered, urls)
    return Prompt(token_ids=texts.encode(rendered, add_special_tokens=False))


def render(texts: TokenizerService, messages: list[dict[str, Any]]) -> str:
    """Return the text of a conversation. Raises RequestError if the template refuses it."""
    # Given none, a tokenizer with several templates chooses one of them.
    own = texts.tokenizer.chat_template
    template = None if own else texts.chat_template or PLAIN_TEMPLATE
    try:
        return str(
            texts.tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        )
    except (TemplateError, TypeError, ValueError, ArithmeticError) as exc:
        raise RequestError(
            f"the chat template of the model does not take these messages: {exc}", param="messages"
        ) from exc


def _with_images(preparer: ImagePreparer, rendered: str, urls: list[str]) -> Prompt:
    ids, inputs = preparer.prepare(rendered, read_images(urls), add_special_tokens=False)
    return Prompt(token_ids=ids, inputs=inputs)


def _as_wanted(texts: TokenizerService, message: ChatMessage) -> dict[str, Any]:
    """Return a message in the form that the model's chat template expects."""
    content: str | list[dict[str, str]]
    if texts.images is not None and texts.chat_template:
        # Templates of vision-language models iterate over parts, and ignore a plain string.
        content = [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in message.parts
        ] or [{"type": "text", "text": ""}]
    else:
        image = texts.images.image_token if texts.images else ""
        parts = [part.text if isinstance(part, TextPart) else image for part in message.parts]
        content = "\n".join(parts)
    role = "system" if message.role == "developer" else message.role
    named = {"name": message.name} if message.name is not None else {}
    return {"role": role, "content": content} | named


logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 16
RETRY_AFTER_S = 1
_SEED_MASK = 2**63 - 1
_DONE = event(b"[DONE]")

_METHODS = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"]

Handler = Callable[[Request], Awaitable[Response]]


class _Anything(PathConvertor):
    """Matches the rest of a path, line feeds included, unlike the converter `path`."""

    regex = r"[\s\S]*"


register_url_convertor("anything", _Anything())


def add_openai_routes(
    router: APIRouter, engine: EngineClient, texts: TokenizerService, *, max_body_nbytes: int
) -> None:
    """Add the OpenAI-compatible routes over an engine to a router."""
    routes = _OpenAIRoutes(engine, texts, max_body_nbytes)
    _add(router, "GET", "/v1/models", routes.models, ModelList)
    _add(router, "GET", "/v1/models/{model:anything}", routes.model, ModelEntry)
    _add(
        router,
        "POST",
        "/v1/completions",
        routes.completions,
        TextCompletion,
        chunk=TextCompletion,
        body=CompletionRequest,
    )
    _add(
        router,
        "POST",
        "/v1/chat/completions",
        routes.chat,
        ChatCompletion,
        chunk=ChatChunk,
        body=ChatRequest,
    )
    # Without this route, unknown paths would not get an error in OpenAI's format.
    router.add_api_route(
        "/v1/{path:anything}", _guarded(_no_route), methods=_METHODS, include_in_schema=False
    )


class _OpenAIRoutes:
    def __init__(self, engine: EngineClient, texts: TokenizerService, max_body_nbytes: int) -> None:
        self._engine = engine
        self._texts = texts
        self._max_body_nbytes = max_body_nbytes
        self._started = int(time.time())

    async def models(self, request: Request) -> Response:
        """List the served model, and its adapters with the versions that requests may name."""
        return _json(ModelList(data=await self._entries()))

    async def model(self, request: Request) -> Response:
        """Describe the served model, or an adapter, by its name."""
        name, card = request.path_params["model"], self._engine.card
        wanted = card.name if name == card.directory else name
        for entry in await self._entries():
            if entry.id == wanted:
                return _json(entry)
        raise RequestError(
            f"model {name!r} is not served here; use {card.name!r}",
            status=404,
            param="model",
            code="model_not_found",
        )

    async def completions(self, request: Request) -> Response:
        """Complete prompts. Each choice has the weight versions of its tokens."""
        parsed = await self._read(request, CompletionRequest)
        return await while_connected(request, self._complete(parsed))

    async def chat(self, request: Request) -> Response:
        """Continue a conversation. Each choice has the weight versions of its tokens."""
        parsed = await self._read(request, ChatRequest)
        return await while_connected(request, self._chat(parsed))

    async def _read(self, request: Request, kind: type[R]) -> R:
        body = await read_body(request, self._max_body_nbytes)
        return await self._texts.run(lambda: decode_openai(body, kind), len(body))

    async def _entries(self) -> list[ModelEntry]:
        """The base model, and what every replica holds of adapters."""
        card = self._engine.card
        replicas = [
            [name for held in stats.adapters for name in (held.name, f"{held.name}@{held.version}")]
            for stats in await self._engine.stats()
        ]
        first = replicas[0] if replicas else []
        names = [name for name in first if all(name in other for other in replicas)]
        return [
            ModelEntry(
                id=name,
                created=self._started,
                max_model_len=card.max_length,
                parent=None if name == card.name else card.name,
            )
            for name in dict.fromkeys([card.name, *names])
        ]

    async def _complete(self, parsed: CompletionRequest) -> Response:
        max_tokens = parsed.max_tokens or DEFAULT_MAX_TOKENS
        prompts = await read_prompts(
            self._texts,
            self._engine.card,
            parsed.prompts,
            n=parsed.n or 1,
            max_new_tokens=max_tokens,
        )
        work = self._work(parsed, "cmpl", prompts, max_tokens, parsed.logprobs)
        return await self._answer(parsed, work, CompletionResponses)

    async def _chat(self, parsed: ChatRequest) -> Response:
        prompt = await chat_prompt(self._texts, parsed.messages)
        room = max(1, self._engine.card.max_length - len(prompt.token_ids))
        max_tokens = parsed.max_completion_tokens or parsed.max_tokens or room
        logprobs = (parsed.top_logprobs or 0) if parsed.logprobs else None
        work = self._work(parsed, "chatcmpl", [prompt], max_tokens, logprobs)
        return await self._answer(parsed, work, ChatResponses)

    async def _answer(
        self, parsed: OpenAIRequest, work: GenerationRequest, kind: type[Responses]
    ) -> Response:
        name = (parsed.model or "") if work.model.adapter is not None else self._engine.card.name
        responses = kind(self._texts, work, parsed, name)
        if parsed.stream:
            return EventStream(await begun(self._events(parsed, work, responses)))
        return _json(responses.whole(await complete(self._engine, self._texts, work)))

    async def _events(
        self, parsed: OpenAIRequest, work: GenerationRequest, responses: Responses
    ) -> AsyncGenerator[bytes, None]:
        begun_already = False
        num_tokens = 0
        try:
            async with closing(stream_deltas(self._engine, self._texts, work)) as source:
                async for increment in source:
                    yield event(msgspec.json.encode(responses.chunk(increment)))
                    begun_already = True
                    num_tokens += len(increment.tokens)
            if parsed.include_usage:
                yield event(msgspec.json.encode(responses.last_chunk(num_tokens)))
        except Exception as exc:
            if not begun_already:
                raise
            yield event(msgspec.json.encode(_logged_error(exc)[1]))
        yield _DONE

    def _work(
        self,
        parsed: CompletionRequest | ChatRequest,
        prefix: str,
        prompts: list[Prompt],
        max_tokens: int,
        logprobs: int | None,
    ) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"{prefix}-{uuid.uuid4().hex}",
            prompts=prompts,
            max_new_tokens=max_tokens,
            n=parsed.n or 1,
            sampling_params=SamplingParams(
                temperature=1.0 if parsed.temperature is None else parsed.temperature,
                top_p=1.0 if parsed.top_p is None else parsed.top_p,
                seed=None if parsed.seed is None else parsed.seed & _SEED_MASK,
                logprobs=NO_LOGPROBS if logprobs is None else logprobs,
            ),
            stops=parsed.stops,
            stop_at_end=not parsed.ignore_eos,
            model=served_model(parsed.model, self._engine.card),
        )


def served_model(name: str | None, card: ModelCard) -> ModelName:
    """Return what `model` in a request names.

    The argument of `serve --model` is accepted too: users know the model by it.
    """
    return ModelName.parse(name, (card.name, card.directory))


async def _no_route(request: Request) -> Response:
    path = request.url.path
    if path in ("/v1/completions", "/v1/chat/completions"):
        right = "POST"
    elif path == "/v1/models" or path.startswith("/v1/models/"):
        right = "GET"
    else:
        raise RequestError(f"there is no {path} here; see /openapi.json", status=404)
    exc = RequestError(f"{path} does not take {request.method}; use {right}", status=405)
    response = _error_response(exc)
    response.headers["allow"] = right
    return response


def _add(
    router: APIRouter,
    method: str,
    path: str,
    handler: Handler,
    answer: type[msgspec.Struct],
    *,
    chunk: type[msgspec.Struct] | None = None,
    body: type[msgspec.Struct] | None = None,
) -> None:
    """Add a route. Its response is `answer`, or a stream of `chunk` if the request asks for it."""
    content = _json_content(answer)
    if chunk is not None:
        content["text/event-stream"] = {"schema": _event_schema(chunk)}
    extra: dict[str, Any] = {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": _json_content(body)}
    if "{" in path:
        name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        extra["parameters"] = [name]
    error = {"description": "An error in OpenAI's format", "content": _json_content(ErrorResponse)}
    router.add_api_route(
        path,
        _guarded(handler),
        methods=[method],
        name=f"openai_{handler.__name__}",
        summary=handler.__doc__,
        response_class=Response,
        responses={200: {"description": "The response", "content": content}, "default": error},
        openapi_extra=extra,
    )


def _json_content(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": schema_of(kind)}}


def _guarded(handler: Handler) -> Handler:
    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientGoneError:
            return Response(status_code=GONE_STATUS)
        except Exception as exc:  # noqa: BLE001 - the edge: each error becomes a response
            return _error_response(exc)

    return guarded


def _error_response(exc: Exception) -> Response:
    status, answer = _logged_error(exc)
    headers = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else {}
    if isinstance(exc, BodyError):
        headers["connection"] = "close"
    return _json(answer, status, headers)


def _logged_error(exc: Exception) -> tuple[int, ErrorResponse]:
    status, answer = openai_error(exc)
    if status == 500:
        logger.error("a request failed", exc_info=exc)
    return status, answer


def _json(
    answer: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(answer), status, headers, "application/json")


def _event_schema(chunk: type[msgspec.Struct]) -> dict[str, object]:
    """Return the schema of one server-sent event.

    It has no contentSchema, because a stream ends with `[DONE]`, which is not JSON.
    """
    data = {
        "type": "string",
        "description": "the JSON of a chunk (x-data-schema) or of an error, or [DONE]",
        "x-data-schema": schema_of(chunk),
    }
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}
