"""The receiving process of `weightsync bench`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import msgspec
import torch

from weightsync.cli.bench_model import Shape, make_model
from weightsync.errors import WeightSyncError
from weightsync.receiver import WeightReceiver
from weightsync.wire.problem import Problem, encode_problem, from_problem, to_problem

Carrier = Literal["http", "callback"]
SinkKind = Literal["module", "hook"]


@dataclass(frozen=True, slots=True)
class Place:
    """How one receiving process is reached, and what it loads into."""

    carrier: Carrier
    sink: SinkKind
    apply: Literal["auto", "staged", "in_place"]
    token: str


def receive(
    parent: Connection,
    shapes: Sequence[Shape],
    dtype_name: str,
    place: Place,
) -> None:
    """Serve a receiver until the parent hangs up or ends this process."""
    torch.set_num_threads(1)
    model = make_model(shapes, dtype_name, value=0)
    parameters = dict(model.named_parameters())

    def load_weights(pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        names = set()
        for name, tensor in pairs:
            parameters[name].copy_(tensor)
            names.add(name)
        return names

    receiver = WeightReceiver(model if place.sink == "module" else load_weights, apply=place.apply)
    try:
        if place.carrier == "http":
            _serve(parent, receiver, place.token)
        else:
            _answer(parent, receiver)
    finally:
        receiver.close()


def _serve(parent: Connection, receiver: WeightReceiver, token: str) -> None:
    # Only this carrier needs the server extra.
    import uvicorn  # noqa: PLC0415
    from fastapi import FastAPI  # noqa: PLC0415

    from weightsync.server.listening import listen, url_of  # noqa: PLC0415
    from weightsync.server.router import weight_router  # noqa: PLC0415

    listener = listen("127.0.0.1", 0)
    app = FastAPI()
    app.include_router(weight_router(receiver, token=token))
    parent.send_bytes(url_of(listener).encode())
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none")
    uvicorn.Server(config).run(sockets=[listener])


def _answer(parent: Connection, receiver: WeightReceiver) -> None:
    parent.send_bytes(b"ready")
    with contextlib.suppress(EOFError):
        while True:
            message = msgspec.json.decode(parent.recv_bytes())
            try:
                answer = msgspec.json.encode(receiver.handle(message))
                parent.send_bytes(b"+" + answer)
            except WeightSyncError as exc:
                parent.send_bytes(b"-" + encode_problem(to_problem(exc)))


class PipeCallback:
    """Carries plain messages over a pipe, as JSON: one at a time, which is all a bench needs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self, message: object) -> object:
        """Return the receiver's answer, or raise its error."""
        self._connection.send_bytes(msgspec.json.encode(message))
        answer = self._connection.recv_bytes()
        if answer[:1] == b"-":
            raise from_problem(msgspec.json.decode(answer[1:], type=Problem))
        return msgspec.json.decode(answer[1:])
