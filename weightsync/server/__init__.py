"""A receiver's control routes for FastAPI: `weight_router`, `TokenAuth`, `resolve_token`.

`Workers` makes several receivers act as one; `workers_router` has the routes of all of them.

Needs the extra `server`: the modules import fastapi and prometheus_client.
"""

from __future__ import annotations

from weightsync.errors import MissingExtraError, install_hint

try:
    from weightsync.server.auth import Token, TokenAuth, resolve_token
    from weightsync.server.router import weight_router
    from weightsync.server.workers import Workers, worker_path, workers_router
except ImportError as exc:
    raise MissingExtraError(
        f"weightsync.server needs more packages ({exc}); {install_hint('server')}"
    ) from exc

__all__ = [
    "Token",
    "TokenAuth",
    "Workers",
    "resolve_token",
    "weight_router",
    "worker_path",
    "workers_router",
]
