"""The control routes of a receiver, for any FastAPI app, and their OpenAPI descriptions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, get_args

import msgspec
from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from weightsync.errors import ConfigError, NotReadyError, ProtocolError
from weightsync.runtime.provided import provided
from weightsync.server.auth import check_authorization
from weightsync.server.dispatcher import (
    DEFAULT_MAX_BODY_NBYTES,
    AsyncDispatcher,
    Receiver,
    error_response,
    read_body,
)
from weightsync.server.metrics import CONTENT_TYPE, MoreMetrics, render
from weightsync.transports.tokens import check_token_text
from weightsync.wire.codec import from_plain
from weightsync.wire.messages import (
    ALL_CALLS,
    ANNOUNCED_CALLS,
    REPLIES,
    ForeignUpdate,
    Request,
    SleepRequest,
    Status,
    StatusRequest,
    UpdateInfo,
    UpdateRequest,
    WakeRequest,
)
from weightsync.wire.problem import MEDIA_TYPE, Problem

Schema = dict[str, Any]  # JSON Schema, which has no narrower type


def describe_body(call: str) -> Schema:
    """Return the `openapi_extra` of the route of `call`: the schema of its body."""
    kind = ALL_CALLS[call]
    schema = _update_schema() if kind is UpdateRequest else schema_of(kind)
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": kind is UpdateRequest, "content": content}}


def describe_answers(call: str) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of the route of `call`: the reply, and problem documents."""
    return {
        200: _content("The reply", "application/json", schema_of(REPLIES[call])),
        "default": _content("A problem document (RFC 9457)", MEDIA_TYPE, schema_of(Problem)),
    }


def schema_of(kind: Any) -> Schema:
    """Return the JSON Schema of a type, with each reference replaced by its definition."""
    schema = msgspec.json.schema(kind)
    definitions: Schema = schema.pop("$defs", {})
    inlined: Schema = _inline(schema, definitions)
    return inlined


def _update_schema() -> Schema:
    # msgspec has no schema for a union of untagged structs; the codec decides by their fields.
    kinds = (provided("update") if kind is ForeignUpdate else kind for kind in get_args(UpdateInfo))
    infos = {"anyOf": [schema_of(kind) for kind in kinds]}
    fields = msgspec.structs.fields(UpdateRequest)
    properties = {
        field.encode_name: infos if field.name == "update_info" else schema_of(field.type)
        for field in fields
    }
    return {
        "title": UpdateRequest.__name__,
        "type": "object",
        "properties": properties,
        "required": [field.encode_name for field in fields if field.required],
        "additionalProperties": False,
    }


def _inline(node: Any, definitions: Schema) -> Any:
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    # A discriminator maps to references, which are gone; each tag is an enum of one value.
    return {k: _inline(v, definitions) for k, v in node.items() if k != "discriminator"}


def _content(description: str, media_type: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}


Handler = Callable[[HttpRequest], Awaitable[Response]]
_OF_RECEIVER = ("dispatch", "handle_json", "report", "status")


def weight_router(
    receiver: Receiver,
    *,
    token: str | None,
    max_body_nbytes: int = DEFAULT_MAX_BODY_NBYTES,
    more_metrics: MoreMetrics | None = None,
) -> APIRouter:
    """Return the control routes of `receiver`.

    Every POST needs `token` as a bearer token, which is checked before the body is read: the
    handlers take the raw request, because a router has no middleware, and FastAPI reads a typed
    body first. `token=None` accepts every client that reaches the app; `TokenAuth` protects a whole
    app instead. `/metrics` shows `more_metrics` as well. Raises ConfigError for a token that a
    header cannot carry, and for what is no receiver.
    """
    if lacking := [name for name in _OF_RECEIVER if not callable(getattr(receiver, name, None))]:
        raise ConfigError(
            f"a {type(receiver).__name__} is no receiver, without {', '.join(lacking)}; give "
            "weight_router(WeightReceiver(sink)), or what inherits from server.dispatcher.Receiver"
        )
    if token is not None:
        check_token_text(token)
    dispatcher = AsyncDispatcher(receiver)
    router = APIRouter(tags=["weights"])
    for call, kind in ALL_CALLS.items():
        if kind is not StatusRequest:
            handler = _call_handler(dispatcher, call, token, max_body_nbytes)
            summary = (kind.__doc__ or "").partition("\n")[0]
            _add(router, "POST", call, handler, summary, openapi_extra=describe_body(call))
    readings = _Readings(dispatcher, more_metrics)
    for reading in (
        readings.weight_info,
        readings.health,
        readings.get_world_size,
        readings.is_paused,
        readings.is_sleeping,
        readings.metrics,
    ):
        _add(router, "GET", reading.__name__, reading, reading.__doc__)
    return router


def _add(
    router: APIRouter,
    method: str,
    name: str,
    handler: Handler,
    summary: str | None,
    *,
    openapi_extra: Schema | None = None,
) -> None:
    async def guarded(request: HttpRequest) -> Response:
        try:
            return await handler(request)
        except Exception as exc:  # noqa: BLE001 - the edge: each error becomes a problem document
            return error_response(exc)

    router.add_api_route(
        f"/{name}",
        guarded,
        methods=[method],
        name=name,
        summary=summary,
        response_class=Response,
        responses=describe_answers(name) if name in ALL_CALLS else None,
        openapi_extra=openapi_extra,
    )


def _call_handler(
    dispatcher: AsyncDispatcher, call: str, token: str | None, max_body_nbytes: int
) -> Handler:
    async def handler(request: HttpRequest) -> Response:
        if token is not None:
            check_authorization(request.scope, token)
        body = await read_body(request, max_body_nbytes)
        is_short = call in ANNOUNCED_CALLS and not body  # our senders always have a body
        if is_short or (call in _BY_URL and request.query_params):
            wanted = _by_url(call, request, body)
            answer = await dispatcher.step(call, msgspec.json.encode(wanted))
            return answer if call == "pause" else _short_answer(wanted, answer)
        return await dispatcher.step(call, body)

    return handler


_BY_URL = ("pause", *ANNOUNCED_CALLS)
"""Calls whose fields may stand in the URL instead, as clients of engines have them."""


def _by_url(call: str, request: HttpRequest, body: bytes) -> Request:
    """Return the request of a call whose fields stand in the URL. Raises ProtocolError."""
    given = request.query_params
    if body.strip() not in (b"", b"{}"):
        raise ProtocolError(f"{call} has fields in its URL and a body as well; give them once")
    fields: dict[str, object] = dict(given)
    if "tags" in given:
        fields["tags"] = given.getlist("tags")
    if (level := given.get("level", "")).isdecimal():
        fields["level"] = int(level[:9])
    return from_plain({"call": call, "body": fields})


def _short_answer(wanted: Request, answer: Response) -> Response:
    """Return what engines answer to `/sleep` and `/wake_up`, from the status in our reply."""
    if isinstance(wanted, SleepRequest):
        return _json({"status": "sleeping", "level": wanted.level})
    status = msgspec.json.decode(answer.body, type=Status)
    awake = not (status.asleep or status.paused)
    tags = wanted.tags if isinstance(wanted, WakeRequest) else None
    return _json({"status": "awake" if awake else "sleeping", "tags": tags})


class _Readings:
    """The GET routes. They need no token, and change no weights.

    A status frees the memory that dead senders left, and touches no living sender.
    """

    def __init__(self, dispatcher: AsyncDispatcher, more_metrics: MoreMetrics | None) -> None:
        self._dispatcher = dispatcher
        self._more_metrics = more_metrics

    async def weight_info(self, request: HttpRequest) -> Response:
        """State, version, label, digest and shared memory."""
        return await self._dispatcher.step("weight_info", b"")

    async def health(self, request: HttpRequest) -> Response:
        """200 where the server may generate, else 503."""
        status = await self._status()
        if not status.may_generate:
            raise NotReadyError(
                f"{status.state} at version {status.version}, update {status.update_id}: "
                f"{status.detail or 'the weights are not whole; wait, or send a full update'}",
                state=status.state,
                update_id=status.update_id or "",
            )
        return _json({"status": "ok", "state": status.state, "version": status.version})

    async def get_world_size(self, request: HttpRequest) -> Response:
        """The number of workers."""
        return _json({"world_size": max(len((await self._status()).workers), 1)})

    async def is_paused(self, request: HttpRequest) -> Response:
        """Whether generation is paused."""
        return _json({"is_paused": (await self._status()).paused})

    async def is_sleeping(self, request: HttpRequest) -> Response:
        """Whether weights or KV cache sleep, or generation is paused."""
        status = await self._status()
        return _json({"is_sleeping": bool(status.asleep) or status.paused})

    async def metrics(self, request: HttpRequest) -> Response:
        """Prometheus metrics."""
        more = await self._more_metrics() if self._more_metrics else ()
        text = await self._dispatcher.read(lambda: render(self._dispatcher.receiver.report(), more))
        return Response(text, media_type=CONTENT_TYPE)

    async def _status(self) -> Status:
        return await self._dispatcher.read(self._dispatcher.receiver.status)


def _json(data: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")
