"""The status page of a server: `/`, the parts of it that change, and the same as JSON."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse

from weightsync.serve.engine_client import EngineClient
from weightsync.serve.status_page_data import Watch
from weightsync.serve.status_page_view import render_fragment, render_page
from weightsync.server.dispatcher import Receiver

_HEADERS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def status_router(engine: EngineClient, receivers: Sequence[Receiver]) -> APIRouter:
    """Return the routes of the status page; they change nothing and want no token.

    `receivers` are the workers', replica by replica. What an update cost is known of a
    WeightReceiver, and of what has a `report()` as RemoteReceiver does. Every route answers,
    whoever else does not.
    """
    watch = Watch(engine, receivers)
    router = APIRouter(tags=["status"])

    @router.get("/", include_in_schema=False, response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        allowed = f"style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'"
        policy = f"{_NOTHING}; {allowed}; connect-src 'self'; img-src data:"
        return _html(render_page(await watch.snapshot(), nonce), policy)

    @router.get("/status/fragment", include_in_schema=False, response_class=HTMLResponse)
    async def fragment() -> HTMLResponse:
        return _html(render_fragment(await watch.snapshot()), _NOTHING)

    @router.get("/status.json", response_class=Response, summary="All that the status page shows.")
    async def status_json() -> Response:
        body = msgspec.json.encode(await watch.snapshot())
        return Response(body, headers=_HEADERS, media_type="application/json")

    return router


def _html(text: str, policy: str) -> HTMLResponse:
    return HTMLResponse(str(text), headers=_HEADERS | {"content-security-policy": policy})
