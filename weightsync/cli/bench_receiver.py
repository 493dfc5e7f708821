"""The receiving process of `weightsync bench`, and the model that it and the sender make.

`python -m weightsync.cli.bench_receiver SETUP`, where SETUP is a BenchSetup as JSON. The process
writes a line when it is ready: its URL with the transport "http". With "callback" it then answers
each message on stdin with a line.
"""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
import torch
from torch import nn

from weightsync.cli.child import take_stdout
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.receiver import WeightReceiver
from weightsync.tensors import TORCH_DTYPES
from weightsync.transports.tokens import TOKEN_VARIABLE
from weightsync.wire.problem import decode_error, encode_error

TransportName = Literal["http", "callback"]
ShapesName = Literal["smollm2"]
SinkName = Literal["module", "hook"]
ApplyName = Literal["auto", "staged", "in_place"]
Shape = tuple[int, ...]


class BenchSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a run. `shapes` names a real model, and replaces `nbytes` and `tensors`."""

    nbytes: int
    tensors: int
    dtype: str
    shapes: ShapesName | None
    packed: bool
    backend: str
    transport: TransportName
    readers: int
    sink: SinkName
    apply: ApplyName
    rounds: int
    delta: float | None = None


def shapes_of(setup: BenchSetup) -> list[Shape]:
    """Return the shape of every tensor. Raises ConfigError where a tensor would be empty."""
    if setup.shapes == "smollm2":
        return smollm2()
    dtype = TORCH_DTYPES[setup.dtype]
    numel = setup.nbytes // setup.tensors // dtype.itemsize
    if numel < 1:
        raise ConfigError(f"{setup.nbytes} bytes do not make {setup.tensors} tensors of {dtype}")
    width = 64 if numel % 64 == 0 else 1
    return [(numel // width, width)] * setup.tensors


def smollm2() -> list[Shape]:
    """Return the 272 shapes of SmolLM2-135M: 30 layers of width 576, three key heads, tied head."""
    hidden, inner, keys, layers, vocabulary = 576, 1536, 192, 30, 49_152
    layer: list[Shape] = [
        (hidden, hidden),
        (keys, hidden),
        (keys, hidden),
        (hidden, hidden),
        (inner, hidden),
        (inner, hidden),
        (hidden, inner),
        (hidden,),
        (hidden,),
    ]
    return [(vocabulary, hidden), *layer * layers, (hidden,)]


def make_model(shapes: Sequence[Shape], dtype: torch.dtype, *, value: int) -> nn.Module:
    """Return a module with one parameter per shape, every element `value`.

    Raises ConfigError where there is not enough memory.
    """
    model = nn.Module()
    try:
        parameters = [
            nn.Parameter(torch.full(shape, value, dtype=dtype), requires_grad=False)
            for shape in shapes
        ]
    # Torch raises these where memory is missing, and for sizes that exceed its integers.
    except (MemoryError, OverflowError, RuntimeError, TypeError) as exc:
        reason = str(exc).partition("\n")[0]
        raise ConfigError(
            f"no memory for {total_nbytes(shapes, dtype)} bytes ({reason}); give a smaller --nbytes"
        ) from exc
    model.weights = nn.ParameterList(parameters)
    return model


def total_nbytes(shapes: Sequence[Shape], dtype: torch.dtype) -> int:
    """Return the bytes of all tensors."""
    return sum(math.prod(shape) for shape in shapes) * dtype.itemsize


def decode_reply(line: bytes, *, peer: str = "") -> bytes:
    """Return the content of a reply. Raises the error if the reply carries one."""
    if line.startswith(b"-"):
        raise decode_error(line[1:], peer=peer)
    return line[1:]


def _encode_error(error: Exception) -> bytes:
    return b"-" + encode_error(error)


def main() -> None:
    """Serve a receiver until stdin ends or SIGTERM comes."""
    send = take_stdout()
    torch.set_num_threads(1)
    try:
        _receive(msgspec.json.decode(sys.argv[1], type=BenchSetup), send)
    except Exception as exc:  # noqa: BLE001 - the sender's process reports it, in one line
        send(_encode_error(exc))
        raise SystemExit(1) from None


def _receive(setup: BenchSetup, send: Callable[[bytes], None]) -> None:
    model = make_model(shapes_of(setup), TORCH_DTYPES[setup.dtype], value=0)
    parameters = dict(model.named_parameters())

    def load_weights(pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        names = set()
        for name, tensor in pairs:
            parameters[name].copy_(tensor)
            names.add(name)
        return names

    receiver = WeightReceiver(model if setup.sink == "module" else load_weights, apply=setup.apply)
    try:
        if setup.transport == "http":
            _serve_http(receiver, send)
        else:
            _serve_stdin(receiver, send)
    finally:
        receiver.close()


def _serve_stdin(receiver: WeightReceiver, send: Callable[[bytes], None]) -> None:
    send(b"+")
    for line in sys.stdin.buffer:
        try:
            send(b"+" + msgspec.json.encode(receiver.handle(msgspec.json.decode(line))))
        except WeightSyncError as exc:
            send(_encode_error(exc))


def _serve_http(receiver: WeightReceiver, send: Callable[[bytes], None]) -> None:
    # Only this transport needs the server extra; the verb checked that it is installed.
    import uvicorn  # noqa: PLC0415
    from fastapi import FastAPI  # noqa: PLC0415

    from weightsync.server.listening import listen, url_of  # noqa: PLC0415
    from weightsync.server.router import weight_router  # noqa: PLC0415

    listener = listen("127.0.0.1", 0)
    app = FastAPI()
    app.include_router(weight_router(receiver, token=os.environ[TOKEN_VARIABLE]))
    gc.collect()
    gc.freeze()  # as weightsync serve does
    send(b"+" + url_of(listener).encode())
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", http="h11", ws="none"
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
