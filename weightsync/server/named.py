"""Receivers below a URL by name, which come and go while the server runs: those of adapters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import anyio
from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weightsync.server.auth import check_authorization
from weightsync.server.dispatcher import DEFAULT_MAX_BODY_NBYTES, error_response
from weightsync.server.threads import run_limited
from weightsync.server.workers import Workers, workers_router
from weightsync.wire.messages import UNLOAD_CALL

_MAX_NAMES = 64
"""Names whose routes are kept; those of another name are made again when it is requested."""


class NamedReceivers:
    """An ASGI app with the control routes of a receiver per name, to be mounted at `PATH/{name}`.

    `make(name)` returns the receivers of that name in all workers, and raises ConfigError for a
    name that can be none; it makes no receiver yet. `unload(name)` has all workers forget it; it
    blocks. Every POST needs `token`, if it is not None, and so does the first request of a name: it
    makes routes here, and receivers in the workers.
    """

    def __init__(
        self,
        make: Callable[[str], Workers],
        unload: Callable[[str], None],
        *,
        token: str | None,
        max_body_nbytes: int = DEFAULT_MAX_BODY_NBYTES,
    ) -> None:
        self._make = make
        self._unload = unload
        self._token = token
        self._max_body_nbytes = max_body_nbytes
        self._apps: OrderedDict[str, tuple[Workers, ASGIApp]] = OrderedDict()
        self._unloads = anyio.CapacityLimiter(8)
        self._making = anyio.CapacityLimiter(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the routes of its name. Called by the ASGI server."""
        try:
            app = await self._app(scope)
        except Exception as exc:  # noqa: BLE001 - the edge: each error becomes a problem document
            await error_response(exc)(scope, receive, send)
        else:
            await app(scope, receive, send)

    async def _app(self, scope: Scope) -> ASGIApp:
        """Return the routes of a request's name. Those of a new one are made in a thread.

        That takes tenths of a second, in which the server goes on.
        """
        name: str = scope["path_params"]["name"]
        if name not in self._apps:
            if self._token is not None:
                check_authorization(scope, self._token)
            made = await run_limited(self._making, self._routes, name)
            if self._apps.setdefault(name, made) is not made:
                made[0].close()
            if len(self._apps) > _MAX_NAMES:
                self._apps.popitem(last=False)[1][0].close()
        self._apps.move_to_end(name)
        return self._apps[name][1]

    def _routes(self, name: str) -> tuple[Workers, ASGIApp]:
        workers = self._make(name)
        router = workers_router(workers, token=self._token, max_body_nbytes=self._max_body_nbytes)
        self._add_unload(router, name)
        return workers, router

    def _add_unload(self, router: APIRouter, name: str) -> None:
        async def unload(request: Request) -> Response:
            try:
                if self._token is not None:
                    check_authorization(request.scope, self._token)
                await run_limited(self._unloads, self._unload, name)
            except Exception as exc:  # noqa: BLE001 - as above
                return error_response(exc)
            return Response(b"{}", media_type="application/json")

        router.add_api_route(f"/{UNLOAD_CALL}", unload, methods=["POST"])
