"""The receiving process of `weightsync bench` over HTTP, which alone needs the server extra."""

from __future__ import annotations

import gc
from multiprocessing.connection import Connection

import uvicorn
from fastapi import FastAPI

from weightsync.receiver import WeightReceiver
from weightsync.server.listening import listen, url_of
from weightsync.server.router import weight_router


def serve_receiver(parent: Connection, receiver: WeightReceiver, token: str) -> None:
    """Tell `parent` the URL, and serve there until this process is ended."""
    listener = listen("127.0.0.1", 0)
    app = FastAPI()
    app.include_router(weight_router(receiver, token=token))
    gc.collect()
    gc.freeze()  # as weightsync serve does
    parent.send_bytes(url_of(listener).encode())
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", http="h11", ws="none"
    )
    uvicorn.Server(config).run(sockets=[listener])
