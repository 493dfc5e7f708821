"""A server at its limit of descriptors closes what it cannot take, says so once, and goes on.

One of several leaves it to the others.
"""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests.shm.processes import environment, line_of
from weightsync.server.listening import listen

WAIT_S = 60.0
SPARE = 20
SERVER = """
import asyncio, logging, os, resource, socket, sys, uvicorn
from weightsync.server.listening import SparingListener, listen, ignore_logged_errors

spare, shared = map(int, sys.argv[1:])
if shared:  # a number below the limit, whatever it is in the process of the test
    given, shared = shared, os.dup(shared)
    os.close(given)

async def app(scope, receive, send):
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"well"})

logging.basicConfig()
listener = socket.socket(fileno=shared) if shared else listen("127.0.0.1", 0)
config = uvicorn.Config(app, lifespan="off", log_level="warning", http="h11")

class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        asyncio.get_running_loop().set_exception_handler(ignore_logged_errors)
        limit = len(os.listdir("/proc/self/fd")) + spare
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        print(sockets[0].getsockname()[1], flush=True)

Server(config).run(sockets=[SparingListener.taking(listener, shared=bool(shared))])
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


@contextmanager
def serving(log: Path, *, spare: int, shared: int = 0) -> Iterator[tuple[psutil.Process, int]]:
    """A server and its port; `shared`: the descriptor of its socket."""
    command = [sys.executable, "-c", SERVER, str(spare), str(shared)]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(),
            pass_fds=[shared] if shared else [],
        ) as server,
    ):
        try:
            yield psutil.Process(server.pid), int(line_of(server))
        finally:
            server.kill()
            server.wait(WAIT_S)


def is_at_rest(process: psutil.Process) -> bool:
    """Whether a server at its limit computes little, and keeps to the limit."""
    before = process.cpu_times()
    time.sleep(1.0)
    after = process.cpu_times()
    assert (after.user + after.system) - (before.user + before.system) < 0.3
    return bool(process.num_fds() <= process.rlimit(resource.RLIMIT_NOFILE)[0])


def test_connections_beyond_the_limit_are_closed_and_the_server_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log, spare=SPARE) as (process, port):
        with ExitStack() as stack:
            clients = [stack.enter_context(connected(port)) for _ in range(4 * SPARE)]
            # Those that came last found no descriptor: their clients are told, and do not hang.
            assert all(was_closed(client) for client in clients[2 * SPARE :])
            assert is_at_rest(process)
        deadline = time.monotonic() + WAIT_S
        answer = b""
        while answer != b"well" and time.monotonic() < deadline:
            try:  # the server sees the ends of its connections in its own time
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=WAIT_S) as got:
                    answer = got.read()
            except OSError:
                time.sleep(0.05)
        assert answer == b"well"
    said = log.read_text(encoding="utf-8").splitlines()
    assert len(said) == 1
    assert "no descriptor is left" in said[0]


def test_what_one_of_several_servers_cannot_take_another_takes(tmp_path: Path) -> None:
    log, other_log = tmp_path / "log", tmp_path / "other log"
    with ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1", 0))
        shared = listener.fileno()
        process, port = stack.enter_context(serving(log, spare=SPARE, shared=shared))
        clients = [stack.enter_context(connected(port)) for _ in range(4 * SPARE)]
        assert is_at_rest(process)
        stack.enter_context(serving(other_log, spare=10 * SPARE, shared=shared))
        for client in clients:
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert all(client.recv(64).startswith(b"HTTP/1.1 200 ") for client in clients)
    said = log.read_text(encoding="utf-8").splitlines()
    assert len(said) == 1
    assert "left to the other servers" in said[0]
    assert not other_log.read_text(encoding="utf-8")
