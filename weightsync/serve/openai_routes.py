"""`/v1/models`, `/v1/completions` and `/v1/chat/completions`, as OpenAI's clients want them."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.convertors import PathConvertor, register_url_convertor

from weightsync.serve.chat import chat_prompt
from weightsync.serve.completions import (
    GenerationRequest,
    Prompt,
    closing,
    complete,
    read_prompts,
    stream_deltas,
)
from weightsync.serve.engine_client import EngineClient
from weightsync.serve.event_stream import (
    GONE_STATUS,
    ClientGoneError,
    EventStream,
    begun,
    event,
    while_connected,
)
from weightsync.serve.openai_answers import (
    ChatChunk,
    ChatCompletion,
    ErrorAnswer,
    ModelEntry,
    ModelList,
    TextCompletion,
    error_answer,
    model_entry,
)
from weightsync.serve.openai_choices import Answers, ChatAnswers, TextAnswers
from weightsync.serve.openai_messages import (
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    RequestError,
    decode_openai,
)
from weightsync.serve.steps import NO_LOGPROBS, SamplingParams
from weightsync.serve.text import TokenizerService
from weightsync.server.dispatcher import BodyError, read_body
from weightsync.server.router import schema_of

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 16
RETRY_AFTER_S = 1
_SEED_MASK = 2**63 - 1
_DONE = event(b"[DONE]")

_METHODS = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"]

Handler = Callable[[Request], Awaitable[Response]]


class _Anything(PathConvertor):
    """The rest of a path, a line feed in it, too: the usual pattern ends there."""

    regex = r"[\s\S]*"


register_url_convertor("anything", _Anything())


def add_openai_routes(
    router: APIRouter, engine: EngineClient, texts: TokenizerService, *, max_body_nbytes: int
) -> None:
    """Add the OpenAI-compatible routes over an engine to a router."""
    routes = _OpenAIRoutes(engine, texts, max_body_nbytes)
    _add_get(router, "/v1/models", routes.models, ModelList)
    _add_get(router, "/v1/models/{model:anything}", routes.model, ModelEntry)
    _add_post(
        router, "/v1/completions", routes.completions, CompletionRequest, (TextCompletion,) * 2
    )
    _add_post(router, "/v1/chat/completions", routes.chat, ChatRequest, (ChatCompletion, ChatChunk))
    # Without it, what is not here would be answered in another shape than OpenAI's.
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
        """The one model that is served."""
        return _json(ModelList(data=[model_entry(self._engine.card, self._started)]))

    async def model(self, request: Request) -> Response:
        """The served model, by its name."""
        self._check_model(request.path_params["model"])
        return _json(model_entry(self._engine.card, self._started))

    async def completions(self, request: Request) -> Response:
        """Complete prompts; every choice says which weights made which tokens."""
        body = await read_body(request, self._max_body_nbytes)
        asked = await self._texts.run(lambda: decode_openai(body, CompletionRequest), len(body))
        return await while_connected(request, self._complete(asked))

    async def chat(self, request: Request) -> Response:
        """Go on with a conversation; every choice says which weights made which tokens."""
        body = await read_body(request, self._max_body_nbytes)
        asked = await self._texts.run(lambda: decode_openai(body, ChatRequest), len(body))
        return await while_connected(request, self._chat(asked))

    async def _complete(self, asked: CompletionRequest) -> Response:
        self._check_model(asked.model)
        max_tokens = asked.max_tokens or DEFAULT_MAX_TOKENS
        prompts = await read_prompts(
            self._texts,
            self._engine.card,
            asked.prompts,
            n=asked.n or 1,
            max_new_tokens=max_tokens,
        )
        work = _work(asked, "cmpl", prompts, max_tokens, asked.logprobs)
        return await self._answer(
            asked, work, TextAnswers(self._texts, work, asked, self._engine.card.name)
        )

    async def _chat(self, asked: ChatRequest) -> Response:
        self._check_model(asked.model)
        prompt = await chat_prompt(self._texts, asked.messages)
        room = max(1, self._engine.card.max_length - len(prompt.token_ids))
        max_tokens = asked.max_completion_tokens or asked.max_tokens or room
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        work = _work(asked, "chatcmpl", [prompt], max_tokens, logprobs)
        return await self._answer(
            asked, work, ChatAnswers(self._texts, work, asked, self._engine.card.name)
        )

    async def _answer(
        self, asked: OpenAIRequest, work: GenerationRequest, answers: Answers
    ) -> Response:
        if asked.stream:
            return EventStream(await begun(self._events(asked, work, answers)))
        return _json(answers.whole(await complete(self._engine, self._texts, work)))

    async def _events(
        self, asked: OpenAIRequest, work: GenerationRequest, answers: Answers
    ) -> AsyncGenerator[bytes, None]:
        begun_already = False
        num_tokens = 0
        try:
            async with closing(stream_deltas(self._engine, self._texts, work)) as source:
                async for increment in source:
                    yield event(msgspec.json.encode(answers.chunk(increment)))
                    begun_already = True
                    num_tokens += len(increment.tokens)
            if asked.include_usage:
                yield event(msgspec.json.encode(answers.last_chunk(num_tokens)))
        except Exception as exc:
            if not begun_already:
                raise
            yield event(msgspec.json.encode(_logged_error(exc)[1]))
        yield _DONE

    def _check_model(self, name: str | None) -> None:
        served = self._engine.card.name
        # What `serve --model` was given is right, too: that is the name that users know.
        if name is not None and name not in (served, self._engine.card.directory):
            raise RequestError(
                f"model {name!r} is not served here, {served!r} is; name that one",
                status=404,
                param="model",
                code="model_not_found",
            )


async def _no_route(request: Request) -> Response:
    path = request.url.path
    if path in ("/v1/completions", "/v1/chat/completions"):
        right = "POST"
    elif path == "/v1/models" or path.startswith("/v1/models/"):
        right = "GET"
    else:
        raise RequestError(f"there is no {path} here; see /openapi.json", status=404)
    exc = RequestError(f"{request.method} {path} is not a call of it; use {right}", status=405)
    response = _error_response(exc)
    response.headers["allow"] = right
    return response


def _work(
    asked: OpenAIRequest,
    prefix: str,
    prompts: list[Prompt],
    max_tokens: int,
    logprobs: int | None,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{prefix}-{uuid.uuid4().hex}",
        prompts=prompts,
        max_new_tokens=max_tokens,
        n=asked.n or 1,
        choosing=SamplingParams(
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            seed=None if asked.seed is None else asked.seed & _SEED_MASK,
            logprobs=NO_LOGPROBS if logprobs is None else logprobs,
        ),
        stops=asked.stops,
        stop_at_end=not asked.ignore_eos,
    )


def _add_get(router: APIRouter, path: str, handler: Handler, answer: type[msgspec.Struct]) -> None:
    extra: dict[str, Any] = {}
    if "{" in path:
        name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        extra = {"parameters": [name]}
    router.add_api_route(
        path,
        _guarded(handler),
        methods=["GET"],
        name=f"openai_{handler.__name__}",
        summary=handler.__doc__,
        response_class=Response,
        responses=_responses(answer),
        openapi_extra=extra,
    )


def _add_post(
    router: APIRouter,
    path: str,
    handler: Handler,
    body: type[msgspec.Struct],
    answers: tuple[type[msgspec.Struct], type[msgspec.Struct]],
) -> None:
    whole, chunk = answers
    responses = _responses(whole)
    responses[200]["content"]["text/event-stream"] = {"schema": _event_schema(chunk)}
    content = {"application/json": {"schema": schema_of(body)}}
    router.add_api_route(
        path,
        _guarded(handler),
        methods=["POST"],
        name=f"openai_{handler.__name__}",
        summary=handler.__doc__,
        response_class=Response,
        responses=responses,
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )


def _responses(answer: type[msgspec.Struct]) -> dict[int | str, dict[str, Any]]:
    def described(description: str, kind: type[msgspec.Struct]) -> dict[str, Any]:
        return {
            "description": description,
            "content": {"application/json": {"schema": schema_of(kind)}},
        }

    return {
        200: described("The answer", answer),
        "default": described("An error as OpenAI writes it", ErrorAnswer),
    }


def _guarded(handler: Handler) -> Handler:
    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientGoneError:
            return Response(status_code=GONE_STATUS)
        except Exception as exc:  # noqa: BLE001 - the edge: each error becomes an answer
            return _error_response(exc)

    return guarded


def _error_response(exc: Exception) -> Response:
    status, answer = _logged_error(exc)
    headers = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else {}
    if isinstance(exc, BodyError):
        headers["connection"] = "close"
    return _json(answer, status, headers)


def _logged_error(exc: Exception) -> tuple[int, ErrorAnswer]:
    status, answer = error_answer(exc)
    if status == 500:
        logger.error("a request failed", exc_info=exc)
    return status, answer


def _json(
    answer: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(answer), status, headers, "application/json")


def _event_schema(chunk: type[msgspec.Struct]) -> dict[str, object]:
    """Describe one server-sent event.

    No contentSchema: OpenAI ends a stream with `[DONE]`, which is no JSON.
    """
    data = {
        "type": "string",
        "description": "the JSON of a chunk (x-data-schema) or of an error, or [DONE]",
        "x-data-schema": schema_of(chunk),
    }
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}
