"""A receiver's control routes for FastAPI: `weight_router`, `TokenAuth`, `resolve_token`.

Needs the extra `server`; the modules import fastapi and prometheus_client at their top.
"""

from __future__ import annotations

from weightsync.server.auth import Token, TokenAuth, resolve_token
from weightsync.server.router import weight_router

__all__ = ["Token", "TokenAuth", "resolve_token", "weight_router"]
