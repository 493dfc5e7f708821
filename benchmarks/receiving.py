"""A WeightReceiver behind the HTTP routes, served as inference servers do it."""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI

import weightsync as ws
from weightsync.server.listening import listen


def http_server(receiver: ws.WeightReceiver, token: str) -> uvicorn.Server:
    """Return a server of the receiver's routes; the caller runs it on a listening socket."""
    app = FastAPI()
    app.include_router(ws.server.weight_router(receiver, token=token))
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", http="h11", ws="none"
    )
    return uvicorn.Server(config)


def serve_until_killed(receiver: ws.WeightReceiver, address: str, port: int, token: str) -> None:
    """Serve the receiver, and print `ready` once connections are taken."""
    server = http_server(receiver, token)
    listener = listen(address, port)
    print("ready", flush=True)
    server.run(sockets=[listener])
