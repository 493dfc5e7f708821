"""`GET /server_info`: what is served, and how. For whoever asks; weightsync reports to nobody."""

from __future__ import annotations

import platform
from importlib import metadata

import msgspec
from fastapi import APIRouter, Response

from weightsync.serve.steps import ModelCard

FEATURES = (
    "staged updates",
    "in-place updates",
    "version spans",
    "kept prompts",
    "pause modes",
    "openai",
)


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model, the parallel layout, and the parts in use."""

    model: ModelCard
    api_servers: int
    data_parallel: int
    tensor_parallel: int
    apply: str
    tensor_ipc: str
    features: tuple[str, ...] = FEATURES
    torch: str = metadata.version("torch")
    python: str = platform.python_version()


def server_info_router(info: ServerInfo) -> APIRouter:
    """Return the route; it changes nothing and wants no token."""
    router = APIRouter(tags=["status"])
    body = msgspec.json.encode(info)

    @router.get("/server_info", response_class=Response)
    async def server_info() -> Response:
        """Model, layout and features."""
        return Response(body, media_type="application/json")

    return router
