"""The process of an API server, and its app."""

from __future__ import annotations

import asyncio
import platform
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from importlib import metadata

import msgspec
import uvicorn
from fastapi import FastAPI, Response

from weightsync.integrations.adapter_paths import PATHS, adapter_path, check_name
from weightsync.serve.engine_client import EngineClient, EngineCoreClient, engine_metrics
from weightsync.serve.generate_route import generation_router
from weightsync.serve.messages import ModelCard
from weightsync.serve.model_files import load_tokenizer
from weightsync.serve.options import DRAFT_PATH, Addresses, CoreAddress, Ready, ServeOptions
from weightsync.serve.status_page import status_router
from weightsync.serve.text import TokenizerService
from weightsync.serve.worker_client import RemoteWorker, WorkerClient
from weightsync.server.auth import LocalOnly, TokenAuth
from weightsync.server.dispatcher import Receiver, RemoteReceiver
from weightsync.server.listening import SparingListener, ignore_logged_errors
from weightsync.server.named import NamedReceivers
from weightsync.server.workers import Workers, worker_path, workers_router
from weightsync.wire.messages import UNLOAD_CALL

FEATURES = (
    "staged updates",
    "in-place updates",
    "version spans",
    "kept prompts",
    "pause modes",
    "openai",
    "adapters",
)


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/server_info`: the model, the parallel layout and the features."""

    model: ModelCard
    api_servers: int
    data_parallel: int
    tensor_parallel: int
    apply: str
    tensor_ipc: str
    draft_model: str | None = None
    features: tuple[str, ...] = FEATURES
    torch: str = metadata.version("torch")
    python: str = platform.python_version()


KEEP_ALIVE_S = 600
SHUTDOWN_S = 2

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def make_app(
    engine: EngineClient,
    receivers: Sequence[Receiver],
    texts: TokenizerService,
    *,
    token: str | None,
    tensor_parallel: int = 1,
    lifespan: Lifespan | None = None,
    adapter: Callable[[str], Sequence[RemoteReceiver]] | None = None,
    draft: Sequence[RemoteReceiver] = (),
) -> FastAPI:
    """Return the app of a served model: weights, generation and status.

    `adapter` returns an adapter's receivers in the workers, by its name; None: it takes none.
    `draft` are the receivers of the workers' draft models, whose weight routes are below `/draft`.

    `receivers` are the receivers of its workers, ordered by replica and rank. With several, each
    also has its own weight routes below `/workers/N`, for senders. Every POST that changes
    something needs `token`, if it is not None.
    """
    app = FastAPI(
        title="weightsync serve",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    workers = _by_path(receivers, tensor_parallel)
    app.include_router(workers_router(workers, token=token, more_metrics=engine_metrics(engine)))
    app.include_router(generation_router(engine, texts))
    app.include_router(status_router(engine, receivers))
    if adapter is not None:
        app.mount(f"/{PATHS}{{name}}", _adapters(adapter, tensor_parallel, token))
    if draft:
        app.mount(f"/{DRAFT_PATH}", workers_router(_by_path(draft, tensor_parallel), token=token))
    if token is not None:
        app.add_middleware(TokenAuth, token=token)
    else:
        app.add_middleware(LocalOnly)
    return app


def _by_path(receivers: Sequence[Receiver], tensor_parallel: int) -> Workers:
    paths = {worker_path(index): receiver for index, receiver in enumerate(receivers)}
    return Workers(paths, tensor_parallel=tensor_parallel)


def _adapters(
    adapter: Callable[[str], Sequence[RemoteReceiver]], tensor_parallel: int, token: str | None
) -> NamedReceivers:
    def make(name: str) -> Workers:
        return _by_path(adapter(check_name(name)), tensor_parallel)

    def unload(name: str) -> None:
        for receiver in adapter(check_name(name)):
            receiver.handle_json(UNLOAD_CALL, b"{}")

    return NamedReceivers(make, unload, token=token)


def main(
    ready: Ready,
    options: ServeOptions,
    addresses: Addresses,
    index: int,
    card: ModelCard,
    cores: list[CoreAddress],
    listener: socket.socket,
) -> None:
    """Serve on the shared `listener` until SIGTERM. Calls `ready` when it serves."""
    identity = b"api-server-%d" % index
    workers = WorkerClient(addresses.workers, identity=identity)
    engine = EngineCoreClient(cores, card, identity=identity, tensor_ipc=options.tensor_ipc)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await workers.open()
        await engine.open()
        try:
            yield
        finally:
            engine.close()
            workers.close()

    def of_workers(below: str) -> list[RemoteWorker]:
        return [RemoteWorker(workers, index, below) for index in range(len(addresses.workers))]

    app = make_app(
        engine,
        of_workers(""),
        TokenizerService(*load_tokenizer(card.directory)),
        token=options.token,
        tensor_parallel=options.tensor_parallel,
        lifespan=lifespan,
        adapter=lambda name: of_workers(adapter_path(name)),
        draft=of_workers(DRAFT_PATH),
    )
    config = uvicorn.Config(
        app,
        log_level="info" if options.access_log else "warning",
        access_log=options.access_log,
        lifespan="on",
        http="h11",  # httptools, if installed, would not limit headers
        ws="none",
        proxy_headers=False,
        server_header=False,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        # Longer than a training step: a trainer keeps its connection between updates.
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    info = ServerInfo(
        model=card,
        api_servers=options.api_servers,
        data_parallel=options.data_parallel,
        tensor_parallel=options.tensor_parallel,
        apply=options.apply,
        tensor_ipc=options.tensor_ipc,
        draft_model=options.draft_model,
    )
    body = msgspec.json.encode(info)

    @app.get("/server_info", response_class=Response, tags=["status"])
    async def server_info() -> Response:
        """Return the model, the layout and the features."""
        return Response(body, media_type="application/json")

    sparing = SparingListener.taking(listener, shared=options.api_servers > 1)
    _Server(config, engine, ready).run(sockets=[sparing])


class _Server(uvicorn.Server):
    """A uvicorn server that reports when it listens, and ends its requests at SIGTERM."""

    def __init__(self, config: uvicorn.Config, engine: EngineCoreClient, ready: Ready) -> None:
        super().__init__(config)
        self._engine = engine
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(ignore_logged_errors)
        await super().startup(sockets)
        self._ready(b"")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.stop()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # SIGTERM only: a terminal sends SIGINT to every process, and the supervisor handles it.
        before = signal.signal(signal.SIGTERM, self.handle_exit)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
