"""A real server on a real socket, in a thread of the test."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI

from weightsync.server import weight_router
from weightsync.server.dispatcher import DEFAULT_MAX_BODY_NBYTES, Receiver
from weightsync.server.listening import listen, url_of

TOKEN = "the-token"


@contextmanager
def held_port() -> Iterator[int]:
    """A port of this test alone: bound and not listening, so that a server may bind it as well."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def make_app(
    receiver: Receiver,
    token: str | None = TOKEN,
    max_body_nbytes: int = DEFAULT_MAX_BODY_NBYTES,
) -> FastAPI:
    app = FastAPI()
    app.include_router(weight_router(receiver, token=token, max_body_nbytes=max_body_nbytes))
    return app


class Server(uvicorn.Server):
    """Looks every 10 ms whether to end, and not every 100: most tests take no longer."""

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            await asyncio.sleep(0.01)
            counter = (counter + 1) % 1000


@contextmanager
def serving(
    app: Callable[..., object],
    *,
    keep_alive_s: int = 60,
    port: int = 0,
    certfile: Path | None = None,
    keyfile: Path | None = None,
) -> Iterator[str]:
    """Serve `app` while the block lasts, over HTTPS with a certificate; yields its URL."""
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        lifespan="off",
        http="h11",
        ws="none",
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=2,
        ssl_certfile=certfile,
        ssl_keyfile=keyfile,
    )
    server = Server(config)
    with listen("127.0.0.1", port) as listener:
        thread = threading.Thread(target=asyncio.run, args=[serve_to_the_end(server, listener)])
        thread.start()
        try:
            yield url_of(listener, tls=certfile is not None)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


async def serve_to_the_end(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until the end of the block, and close all connections: uvicorn forgets the last one."""
    await server.serve(sockets=[listener])
    for connection in list(server.server_state.connections):
        assert connection.transport is not None
        connection.transport.abort()
    await asyncio.sleep(0.01)


@contextmanager
def raw(url: str) -> Iterator[socket.socket]:
    """A plain connection to the server at `url`."""
    parts = urlsplit(url)
    assert parts.hostname
    assert parts.port
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        yield connection


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Read one answer with a Content-Length."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(65536)
        assert piece, f"the server closed after {received!r}"
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while len(body) < int(fields[b"content-length"]):
        piece = connection.recv(65536)
        assert piece, "the server closed within the body"
        body += piece
    return int(head.split()[1]), body
