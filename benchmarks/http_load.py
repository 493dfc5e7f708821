"""HTTP clients that repeat one request on kept-alive connections, in a process of their own.

Other benchmarks start it (`Load`). The first line on stdin is the request; each "go" starts a run,
and each "halt" ends it and returns a line of figures. It parses only the necessary part of a
response, so that the clients use little processor time.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

START_S = 120.0
END_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """Figures of one run, from "go" to "halt"; `cpu_s` is the clients' processor time."""

    count: int
    seconds: float
    cpu_s: float
    median_s: float

    @property
    def per_s(self) -> float:
        """Responses per second."""
        return self.count / self.seconds


@dataclass(slots=True)
class _Taken:
    """Latencies of the current run; responses after its end do not count."""

    going: bool = True
    seconds: list[float] = field(default_factory=list)


class Load:
    """A process of `connections` clients that request `path` of `url`; a `body` is posted."""

    def __init__(self, url: str, path: str, body: object = None, *, connections: int = 1) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.http_load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parent.parent,
        )
        try:
            order = {"url": url, "path": path, "body": body, "connections": connections}
            self._say(json.dumps(order), START_S)
        except BaseException:
            self.close()
            raise

    def go(self) -> None:
        """Start a run; return when it has started."""
        self._say("go", START_S)

    def halt(self) -> Run:
        """End the run; return when all its requests are answered."""
        return Run(**json.loads(self._say("halt", END_S)))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _say(self, line: str, timeout_s: float) -> str:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the clients were started without pipes")
        watchdog = threading.Timer(timeout_s, self._process.kill)
        watchdog.start()
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not answer:
            raise RuntimeError("the clients of the benchmark ended; the reason is above")
        return answer


def runs_of(loads: list[Load], seconds: float) -> list[Run]:
    """Run all clients for `seconds`."""
    for load in loads:
        load.go()
    time.sleep(seconds)
    return [load.halt() for load in loads]


def request_of(url: str, path: str, body: object) -> bytes:
    host = urlsplit(url).netloc
    if body is None:
        return f"GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, found, rest = head.partition(b"content-length:")
    if not found:
        raise RuntimeError(f"an answer without its length: {head!r}")
    body = await reader.readexactly(int(rest.partition(b"\r\n")[0]))
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise RuntimeError(f"{head!r} {body[:500]!r}")


async def client(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, taken: _Taken
) -> None:
    while taken.going:
        began = time.perf_counter()
        await ask(reader, writer, request)
        if taken.going:
            taken.seconds.append(time.perf_counter() - began)


async def serve_orders() -> None:
    order = json.loads(sys.stdin.readline())
    request = request_of(order["url"], order["path"], order["body"])
    place = urlsplit(order["url"])
    pairs = [
        await asyncio.open_connection(place.hostname, place.port)
        for _ in range(order["connections"])
    ]
    for reader, writer in pairs:
        await ask(reader, writer, request)
    say("ready")
    while await asyncio.to_thread(sys.stdin.readline):
        await one_run(pairs, request)


async def one_run(
    pairs: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]], request: bytes
) -> None:
    taken, began, cpu = _Taken(), time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for reader, writer in pairs:
            group.create_task(client(reader, writer, request, taken))
        say("going")
        await asyncio.to_thread(sys.stdin.readline)
        taken.going = False
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    median_s = statistics.median(taken.seconds) if taken.seconds else 0.0
    run = Run(count=len(taken.seconds), seconds=seconds, cpu_s=cpu, median_s=median_s)
    say(json.dumps(asdict(run)))


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    asyncio.run(serve_orders())
