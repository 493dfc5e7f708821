"""Forwards the messages of an actor to a ScriptedReceiver in the test's process."""

from __future__ import annotations

import asyncio
import builtins
import json
import socket
import socketserver
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

import weightsync as ws
from tests.transports.scripted import ScriptedReceiver
from weightsync.errors import RemoteError
from weightsync.ray import WeightSyncActor
from weightsync.wire import problem

WAIT_S = 60.0


class RelayServer(socketserver.ThreadingUnixStreamServer):
    """Answers each connection's one message from `receiver`."""

    daemon_threads = True
    request_queue_size = 64
    receiver: ScriptedReceiver


class _Answer(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        message = json.loads(self.rfile.readline())
        try:
            answer: object = {"reply": cast(RelayServer, self.server).receiver.handle(message)}
        except Exception as exc:  # noqa: BLE001  # the actor raises it again
            answer = {"problem": msgspec.to_builtins(problem.to_problem(exc))}
        self.wfile.write(json.dumps(answer).encode())


def serve(path: Path) -> RelayServer:
    """Return a server on a Unix socket; the caller runs and closes it."""
    return RelayServer(str(path), _Answer)


class RelayReceiver:
    """Replacement for an actor's WeightReceiver."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def handle(self, message: Mapping[str, object]) -> dict[str, object]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WAIT_S)
            connection.connect(str(self._path))
            connection.sendall(json.dumps(message).encode() + b"\n")
            with connection.makefile("rb") as answers:
                answer: dict[str, Any] = json.load(answers)
        if "problem" in answer:
            raise as_raised(msgspec.convert(answer["problem"], problem.Problem))
        return cast("dict[str, object]", answer["reply"])


def as_raised(said: problem.Problem) -> Exception:
    """Return the error as the scripted receiver raised it: a foreign one of its own class again."""
    error = problem.from_problem(said)
    if isinstance(error, RemoteError):
        kind: type[Exception] = getattr(builtins, error.remote_type)
        return kind(error.remote_message)
    return error


class Relay(WeightSyncActor):
    def __init__(self, path: Path) -> None:
        self.weightsync_receiver = RelayReceiver(path)  # type: ignore[assignment]  # stands for one


class AsyncRelay(Relay):
    async def beat(self) -> None:
        await asyncio.sleep(0)


RelayActor = ws.ray.remote(num_cpus=0)(Relay)
AsyncRelayActor = ws.ray.remote(num_cpus=0)(AsyncRelay)
