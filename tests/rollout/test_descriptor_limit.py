"""A server at its limit of descriptors closes what it cannot take, says so once, and goes on."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psutil

from tests.samehost.processes import environment, line_of

WAIT_S = 60.0
SPARE = 20
SERVER = """
import logging, os, resource, sys, uvicorn
from weightsync.server.listening import SparingListener, listen

async def app(scope, receive, send):
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"well"})

logging.basicConfig()
listener = listen("127.0.0.1", 0)
config = uvicorn.Config(app, lifespan="off", log_level="warning", http="h11")

class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        limit = len(os.listdir("/proc/self/fd")) + int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        print(sockets[0].getsockname()[1], flush=True)

Server(config).run(sockets=[SparingListener.taking(listener)])
"""


def connected(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    client.settimeout(WAIT_S)
    return client


def was_closed(client: socket.socket) -> bool:
    """Wait for the end of a connection."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_beyond_the_limit_are_closed_and_the_server_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", SERVER, str(SPARE)]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment()
        ) as server,
    ):
        try:
            port = int(line_of(server))
            with ExitStack() as stack:
                clients = [stack.enter_context(connected(port)) for _ in range(4 * SPARE)]
                # Those that came last found no descriptor: their clients are told, and do not hang.
                assert all(was_closed(client) for client in clients[2 * SPARE :])
                process = psutil.Process(server.pid)
                before = process.cpu_times()
                time.sleep(1.0)
                after = process.cpu_times()
                assert (after.user + after.system) - (before.user + before.system) < 0.3
                assert process.num_fds() <= process.rlimit(resource.RLIMIT_NOFILE)[0]
            deadline = time.monotonic() + WAIT_S
            answer = b""
            while answer != b"well" and time.monotonic() < deadline:
                try:  # the server sees the ends of its connections in its own time
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=WAIT_S) as got:
                        answer = got.read()
                except OSError:
                    time.sleep(0.05)
            assert answer == b"well"
        finally:
            server.kill()
            server.wait(WAIT_S)
    said = log.read_text(encoding="utf-8").splitlines()
    assert len(said) == 1
    assert "no descriptor is left" in said[0]
