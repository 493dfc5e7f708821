"""The receivers of a host process behind one HTTP server, each under a path of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from tests.server.live import Server
from weightsync.receiver import WeightReceiver
from weightsync.server import weight_router

Mount = Callable[[str, WeightReceiver], None]


def serve_http(listener: socket.socket) -> tuple[Mount, Callable[[], None]]:
    """Serve on a bound socket; return functions that add a receiver and end the server."""
    app = FastAPI()
    server = Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()

    def mount(name: str, receiver: WeightReceiver) -> None:
        # One route of `app`: of an included router every route is matched before the next one's.
        own = FastAPI()
        own.include_router(weight_router(receiver, token=None))
        app.mount(f"/{name}", own)

    def stop() -> None:
        server.should_exit = True
        thread.join(10)

    return mount, stop
