"""HTTP on loopback without a framework: a server in a reader, kept-alive connections to several."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import BinaryIO

from benchmarks.rivals.contract import WAIT_S, RivalError

Take = Callable[[str, BinaryIO, int], None]
Body = bytes | Callable[[], Iterable[bytes]]


class Server:
    """Passes each POST's path, stream and length to `take`; the reply has the text of an error."""

    def __init__(self, take: Take) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = -1  # header and body of a reply are sent together

            def do_POST(self) -> None:
                try:
                    take(self.path, self.rfile, int(self.headers["Content-Length"]))  # type: ignore[arg-type]
                    status, said = 200, b"ok"
                except Exception as exc:  # noqa: BLE001 # the trainer raises it
                    status, said = 500, f"{type(exc).__name__}: {exc}".encode()
                    self.close_connection = True
                self.send_response(status)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)
                self.wfile.flush()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # its name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The URL of the server."""
        return self._server.server_port

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class Clients:
    """One connection to each server, used concurrently."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._connections = [HTTPConnection("127.0.0.1", port, timeout=WAIT_S) for port in ports]
        for connection in self._connections:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pool = ThreadPoolExecutor(len(ports))

    def post(self, path: str, body: Body, nbytes: int) -> None:
        """Send the same body to all servers; return when all have replied."""
        if len(self._connections) == 1:
            _post(self._connections[0], path, body, nbytes)
            return
        sent = [self._pool.submit(_post, c, path, body, nbytes) for c in self._connections]
        for one in sent:
            one.result()

    def close(self) -> None:
        """Close all connections."""
        self._pool.shutdown()
        for connection in self._connections:
            connection.close()


def _post(connection: HTTPConnection, path: str, body: Body, nbytes: int) -> None:
    connection.putrequest("POST", path)
    connection.putheader("Content-Length", str(nbytes))
    connection.endheaders()
    for part in (body,) if isinstance(body, bytes) else body():
        connection.send(part)
    answer = connection.getresponse()
    said = answer.read()
    if answer.status != 200:
        raise RivalError(f"a reader failed: {said.decode()}")
