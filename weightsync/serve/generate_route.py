"""`POST /generate`: completes prompts, and returns the weight version of each token."""

from __future__ import annotations

import uuid

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec.structs import replace

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
from weightsync.serve.openai_routes import add_openai_routes, served_model
from weightsync.serve.requests import (
    GenerateRequest,
    GenerateResponse,
    RequestError,
    decode_request,
)
from weightsync.serve.text import TokenizerService
from weightsync.server.dispatcher import error_response, read_body
from weightsync.server.router import schema_of
from weightsync.wire.problem import MEDIA_TYPE, Problem, encode_problem, to_problem

DEFAULT_MAX_BODY_NBYTES = 32 << 20
RETRY_AFTER_S = 1


def generation_router(
    engine: EngineClient, texts: TokenizerService, *, max_body_nbytes: int = DEFAULT_MAX_BODY_NBYTES
) -> APIRouter:
    """Return the routes `/generate` and `/v1/...` (OpenAI-compatible) of an engine.

    Authentication is left to the app. A client that disconnects cancels its requests.
    """
    router = APIRouter(tags=["generation"])
    content = {"application/json": {"schema": schema_of(GenerateRequest)}}
    answer = {"application/json": {"schema": schema_of(GenerateResponse)}}
    problem = {MEDIA_TYPE: {"schema": schema_of(Problem)}}

    @router.post(
        "/generate",
        summary="Complete prompts; the answer says which weights made which tokens.",
        response_class=Response,
        responses={
            200: {"description": "The completions", "content": answer},
            "default": {"description": "A problem document (RFC 9457)", "content": problem},
        },
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
    async def generate(request: Request) -> Response:
        try:
            body = await read_body(request, max_body_nbytes)
            found = await while_connected(request, _generate(engine, texts, body))
        except ClientGoneError:
            return Response(status_code=GONE_STATUS)
        except Exception as exc:  # noqa: BLE001 - the edge: each error becomes a problem document
            if isinstance(exc, RequestError):
                document = replace(to_problem(exc), status=exc.status)
                return Response(encode_problem(document), exc.status, media_type=MEDIA_TYPE)
            response = error_response(exc)
            if isinstance(exc, NotReadyError):
                response.headers["retry-after"] = str(RETRY_AFTER_S)
            return response
        return Response(msgspec.json.encode(found), media_type="application/json")

    add_openai_routes(router, engine, texts, max_body_nbytes=max_body_nbytes)
    return router


async def _generate(engine: EngineClient, texts: TokenizerService, body: bytes) -> GenerateResponse:
    request = await texts.run(lambda: decode_request(body), len(body))
    prompts = await read_prompts(
        texts,
        engine.card,
        request.prompts,
        n=request.n,
        max_new_tokens=request.max_new_tokens,
    )
    work = GenerationRequest(
        request_id=f"gen-{uuid.uuid4().hex}",
        prompts=prompts,
        max_new_tokens=request.max_new_tokens,
        n=request.n,
        sampling_params=SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            logprobs=0 if request.logprobs else NO_LOGPROBS,
        ),
        stops=request.stop,
        model=served_model(request.model, engine.card),
    )
    whole = await complete(engine, texts, work)
    completions = [part.completion(logprobs=request.logprobs) for part in whole]
    return GenerateResponse(completions=completions)
