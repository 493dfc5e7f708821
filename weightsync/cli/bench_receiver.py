"""The receiving process of `weightsync bench`."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import msgspec
import torch

from weightsync.cli.bench_model import Shape, make_model
from weightsync.cli.child import end_with
from weightsync.errors import RemoteError, WeightSyncError
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
    parent: Connection, parent_pid: int, shapes: Sequence[Shape], dtype_name: str, place: Place
) -> None:
    """Serve a receiver until the parent hangs up or ends, or ends this process.

    What goes wrong before it is ready is told to the parent, see `hear_ready`.
    """
    end_with(parent_pid)
    torch.set_num_threads(1)
    try:
        _receive(parent, shapes, dtype_name, place)
    except Exception as exc:  # noqa: BLE001 - the parent says it, in one line
        with contextlib.suppress(OSError):
            parent.send_bytes(b"-" + encode_problem(to_problem(exc)))
        raise SystemExit(1) from None
    finally:
        # It ends anyway, and what torch does at the end is not to be interrupted.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def hear_ready(child: Connection, timeout_s: float) -> str:
    """Return what a receiving process says when it is ready: its URL, where it serves HTTP.

    Raises what it failed with, and RemoteError where it says nothing.
    """
    if not child.poll(timeout_s):
        raise RemoteError(f"the receiving process did not start in {timeout_s:g} s")
    try:
        said = child.recv_bytes()
    except (EOFError, OSError) as exc:
        raise RemoteError(
            "the receiving process ended before it was ready; is there enough memory for --nbytes?"
        ) from exc
    if said[:1] == b"-":
        problem = msgspec.json.decode(said[1:], type=Problem)
        raise from_problem(problem, peer="the receiving process failed")
    return said.decode()


def _receive(parent: Connection, shapes: Sequence[Shape], dtype_name: str, place: Place) -> None:
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
            # Only this carrier needs the server extra; the parent has looked for it.
            from weightsync.cli.bench_server import serve_receiver  # noqa: PLC0415

            serve_receiver(parent, receiver, place.token)
        else:
            _answer(parent, receiver)
    finally:
        receiver.close()


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
        try:
            self._connection.send_bytes(msgspec.json.encode(message))
            answer = self._connection.recv_bytes()
        except (EOFError, OSError) as exc:
            raise RemoteError("the receiving process ended") from exc
        if answer[:1] == b"-":
            raise from_problem(msgspec.json.decode(answer[1:], type=Problem))
        return msgspec.json.decode(answer[1:])
