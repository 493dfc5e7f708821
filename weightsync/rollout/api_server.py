"""`weightsync serve` in one process: a model generates while a trainer replaces its weights."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import anyio
import anyio.to_thread
import uvicorn
from fastapi import FastAPI, Request, Response

from weightsync.errors import ConfigError
from weightsync.receiver import WeightReceiver
from weightsync.rollout.generation import Generator
from weightsync.rollout.model import LoadedModel
from weightsync.rollout.pausing import PauseControl
from weightsync.rollout.requests import GenerateRequest, GenerateResponse
from weightsync.server.auth import TokenAuth
from weightsync.server.door import error_response, read_body
from weightsync.server.router import weight_router
from weightsync.server.schemas import schema_of

MAX_GENERATE_NBYTES = 8 << 20
MAX_GENERATE_THREADS = 64
KEEP_ALIVE_S = 600
SHUTDOWN_S = 3

ApplyChoice = Literal["auto", "staged", "in_place"]


class RolloutServer:
    """A loaded model, its receiver, and the app that serves both.

    `token` guards every POST but `/generate`; None guards nothing. `close` ends what runs.
    """

    def __init__(
        self, loaded: LoadedModel, *, token: str | None, apply: ApplyChoice = "auto"
    ) -> None:
        self.pauses = PauseControl()
        self.receiver = WeightReceiver(
            loaded.model, apply=apply, on_pause=self.pauses.pause, on_resume=self.pauses.resume
        )
        self._generator = Generator(loaded.model, loaded.tokenizer, reading=self._step)
        self._threads = anyio.CapacityLimiter(MAX_GENERATE_THREADS)
        self.app = self._make_app(token)

    def run(self, listener: socket.socket) -> None:
        """Serve on `listener` until SIGINT or SIGTERM; then end within seconds.

        Raises what the signal's former handler raises: KeyboardInterrupt, for instance.
        """
        config = uvicorn.Config(
            self.app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            # Longer than a training step: the trainer's connection lives from update to update.
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        try:
            _Server(config, self).run(sockets=[listener])
        finally:
            self.close()

    def stop_requests(self) -> None:
        """End the requests in flight after the step they are in, and take no more."""
        self.pauses.close()

    def close(self) -> None:
        """Stop requests and let every mapping go. The model stays usable."""
        self.stop_requests()
        self.receiver.close()

    @contextmanager
    def _step(self) -> Iterator[int]:
        self.pauses.wait_step()
        with self.receiver.reading() as version:
            yield version

    def _make_app(self, token: str | None) -> FastAPI:
        app = FastAPI(title="weightsync serve", docs_url=None, redoc_url=None)
        app.include_router(weight_router(self.receiver, token=token))
        content = {"application/json": {"schema": schema_of(GenerateRequest)}}
        answer = {"application/json": {"schema": schema_of(GenerateResponse)}}
        app.add_api_route(
            "/generate",
            self._generate,
            methods=["POST"],
            name="generate",
            summary="Complete prompts; the answer says which weights made which tokens.",
            response_class=Response,
            responses={200: {"description": "The completions", "content": answer}},
            openapi_extra={"requestBody": {"required": True, "content": content}},
        )
        if token is not None:
            app.add_middleware(TokenAuth, token=token)
        return app

    async def _generate(self, request: Request) -> Response:
        gone = threading.Event()
        try:
            body = await read_body(request, MAX_GENERATE_NBYTES)
            async with _watching(request, gone):
                answer = await anyio.to_thread.run_sync(
                    self._answer, body, gone, limiter=self._threads, abandon_on_cancel=True
                )
        except Exception as exc:  # noqa: BLE001 - the edge: each error becomes a problem document
            return error_response(exc)
        return Response(answer, media_type="application/json")

    def _answer(self, body: bytes, gone: threading.Event) -> bytes:
        with self.pauses.request(gone.is_set) as should_stop:
            return self._generator.handle_generate(body, should_stop=should_stop)


class _watching:  # noqa: N801 - used as a block
    """Sets `gone` when the client of a request goes away inside the block, or the block ends."""

    def __init__(self, request: Request, gone: threading.Event) -> None:
        self._request = request
        self._gone = gone

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def __aexit__(self, *_: object) -> None:
        self._gone.set()
        self._task.cancel()

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._gone.set()


class _Server(uvicorn.Server):
    """Stops the requests before it waits for them."""

    def __init__(self, config: uvicorn.Config, owner: RolloutServer) -> None:
        super().__init__(config)
        self._owner = owner

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._owner.stop_requests()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` and `port`; port 0 takes any free one.

    Raises ConfigError when the address is unknown or taken.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"{host!r} is no address to listen on: {exc}") from exc
    # With protocol 0 asyncio would not set TCP_NODELAY on its connections, and an answer whose
    # header and body leave apart would wait 40 ms for the client's delayed ACK.
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {exc}; give another --port, or 0 for any"
        ) from exc
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this host can reach a listening socket."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
