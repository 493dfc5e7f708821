"""`POST /generate`: completes prompts, and returns the weight version of each token."""

from __future__ import annotations

import uuid

import msgspec
from fastapi import APIRouter, Request, Response

from weightsync.errors import NotReadyError
from weightsync.serve.completions import (
    GONE_STATUS,
    ClientGoneError,
    GenerationRequest,
    complete,
    read_prompts,
    while_connected,
)
from weightsync.serve.engine_client import EngineClient
from weightsync.serve.messages import NO_LOGPROBS, SamplingParams
from weightsync.serve.openai_routes import add_openai_routes
from weightsync.serve.requests import (
    GenerateRequest,
    GenerateResponse,
    decode_request,
)
from weightsync.serve.text import TokenizerService
from weightsync.server.dispatcher import error_response, read_body
from weightsync.server.router import schema_of
from weightsync.wire.problem import MEDIA_TYPE, Problem

DEFAULT_MAX_BODY_NBYTES = 32 << 20
RETRY_AFTER_S = 1


def generation_router(
    engine: EngineClient, texts: TokenizerService, *, max_body_nbytes: int = DEFAULT_MAX_BODY_NBYTES
) -> APIRouter:
    """Return the routes `/generate` and `/v1/...` (OpenAI-compatible) of an engine.

    Authentication is left to the app. A client that disconnects cancels its jobs.
    """
    router = APIRouter(tags=["generation"])
    route = _GenerateRoute(engine, texts, max_body_nbytes)
    content = {"application/json": {"schema": schema_of(GenerateRequest)}}
    answer = {"application/json": {"schema": schema_of(GenerateResponse)}}
    problem = {MEDIA_TYPE: {"schema": schema_of(Problem)}}
    router.add_api_route(
        "/generate",
        route.handle,
        methods=["POST"],
        name="generate",
        summary="Complete prompts; the answer says which weights made which tokens.",
        response_class=Response,
        responses={
            200: {"description": "The completions", "content": answer},
            "default": {"description": "A problem document (RFC 9457)", "content": problem},
        },
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
    add_openai_routes(router, engine, texts, max_body_nbytes=max_body_nbytes)
    return router


class _GenerateRoute:
    def __init__(self, engine: EngineClient, texts: TokenizerService, max_body_nbytes: int) -> None:
        self._engine = engine
        self._texts = texts
        self._max_body_nbytes = max_body_nbytes

    async def handle(self, request: Request) -> Response:
        """Reply to one request."""
        try:
            body = await read_body(request, self._max_body_nbytes)
            answer = await while_connected(request, self._answer(body))
        except ClientGoneError:
            return Response(status_code=GONE_STATUS)
        except Exception as exc:  # noqa: BLE001 - the edge: each error becomes a problem document
            response = error_response(exc)
            if isinstance(exc, NotReadyError):
                response.headers["retry-after"] = str(RETRY_AFTER_S)
            return response
        return Response(answer, media_type="application/json")

    async def _answer(self, body: bytes) -> bytes:
        request = await self._texts.run(lambda: decode_request(body), len(body))
        work = await self._work(request)
        whole = await complete(self._engine, self._texts, work)
        completions = [part.completion(logprobs=request.logprobs) for part in whole]
        return msgspec.json.encode(GenerateResponse(completions=completions))

    async def _work(self, request: GenerateRequest) -> GenerationRequest:
        prompts = await read_prompts(
            self._texts,
            self._engine.card,
            request.prompts,
            n=request.n,
            max_new_tokens=request.max_new_tokens,
        )
        return GenerationRequest(
            request_id=f"gen-{uuid.uuid4().hex}",
            prompts=prompts,
            max_new_tokens=request.max_new_tokens,
            n=request.n,
            choosing=SamplingParams(
                temperature=request.temperature,
                top_p=request.top_p,
                seed=request.seed,
                logprobs=0 if request.logprobs else NO_LOGPROBS,
            ),
            stops=request.stop,
        )
