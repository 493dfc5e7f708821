"""Trainers that run in processes of their own, and die at a chosen moment."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import nn

import weightsync as ws
from tests.e2e import models
from tests.e2e.models import BUCKET_NBYTES
from tests.e2e.processes import NIXL_OVER_TCP
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.shm.ring import Control
from weightsync.transports.http import HttpTransport
from weightsync.weights.deltas import change_log as packets
from weightsync.wire.messages import (
    FinishRequest,
    InitRequest,
    Reply,
    Request,
    Status,
    StatusRequest,
    UpdateRequest,
)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def die_while_it_loads(url: str, *, given: bool = True) -> NoReturn:
    """Die when the receiver is in the middle of this update, and has loaded `given` tensors in
    place."""
    with closing(HttpTransport(url)) as transport:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            status = cast(Status, transport.call(StatusRequest(), timeout_s=5))
            untouched = status.apply == "staged" or not given
            if status.state == "UPDATING" and (untouched or not status.may_generate):
                die()
            time.sleep(0.005)
    raise AssertionError("the receiver never began to load")


def control_of(sender: ws.WeightSender) -> Control:
    """The counters and fingerprints of the trainer's ring."""
    engine = sender._group.worker.engines["ipc"]
    assert isinstance(engine, IpcTrainerEngine)
    return engine._control


class DiesBefore(HttpTransport):
    """Kills its own process instead of sending one kind of message, after `spares` of these."""

    def __init__(self, url: str, kind: type, spares: int = 0) -> None:
        super().__init__(url)
        self._kind = kind
        self._spares = spares

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        if isinstance(request, self._kind):
            self._spares -= 1
            if self._spares < 0:
                die()
        return super().call(request, timeout_s=timeout_s)


def stop() -> None:
    """Stop this process (SIGSTOP). Its threads may still run for a moment."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)


class StopsBefore(HttpTransport):
    """Stops its own process (SIGSTOP) instead of sending one kind of message."""

    def __init__(self, url: str, kind: type) -> None:
        super().__init__(url)
        self._kind = kind

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        if isinstance(request, self._kind):
            stop()
        return super().call(request, timeout_s=timeout_s)


def stopped_before(url: str, kind: type, packed: bool, timeout_s: float) -> None:
    """Stop between two messages of an update."""
    with ws.connect(
        models.make("plain", 7), to=StopsBefore(url, kind), packed=packed, timeout_s=timeout_s
    ) as sender:
        send_in_pieces(sender)


def stopped_while_read(url: str, packed: bool, timeout_s: float) -> None:
    """Stop when the receiver waits for bytes, or for the fingerprints of the bytes that it has
    read."""
    model = models.make("plain", 7)
    with ws.connect(
        model, to=url, packed=packed, bucket_nbytes=16 << 10, num_buckets=2, timeout_s=timeout_s
    ) as sender:
        control = control_of(sender)
        genuine = control.write_fingerprints
        left = 3 if packed else 0  # of its chunks a receiver has loaded some

        def write(at: int, values: Any) -> None:
            nonlocal left
            if not left:
                await_state(url, "UPDATING")
                stop()
            left -= 1
            genuine(at, values)

        control.write_fingerprints = write  # type: ignore[method-assign]  # on purpose
        sender.send_weights()


def send_in_pieces(sender: ws.WeightSender) -> None:
    """An update whose start, tensors, prepare and finish are messages of their own."""
    pairs = list(models.make("plain", 7).named_parameters())
    with sender.update() as update:
        update.send(pairs)


def await_state(url: str, state: str) -> None:
    with closing(HttpTransport(url)) as transport:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if cast(Status, transport.call(StatusRequest(), timeout_s=5)).state == state:
                return
            time.sleep(0.005)
    raise AssertionError(f"{url} never was {state}")


class DyingSource:
    """A model's tensors, made anew for each update.

    Once it is `armed`, the process dies after `tensors` of them.
    """

    def __init__(self, model: nn.Module, tensors: int, url: str) -> None:
        self.armed = False
        self._model = model
        self._url = url
        self._tensors = tensors

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(self._model.named_parameters()):
            if self.armed and i == self._tensors:
                die_while_it_loads(self._url, given=i > 0)
            yield name, tensor.detach().clone()


def before_its_message(url: str) -> None:
    with ws.connect(models.make("plain", 7), to=DiesBefore(url, UpdateRequest)) as sender:
        sender.send_weights()


def _in_the_middle(url: str, tensors: int) -> None:
    source = DyingSource(models.make("plain", 7), tensors, url)
    with ws.connect(source, to=url, bucket_nbytes=16 << 10, num_buckets=2) as sender:
        source.armed = True
        sender.send_weights()


def at_its_first_tensor(url: str) -> None:
    _in_the_middle(url, 0)


def in_the_middle_of_chunks(url: str) -> None:
    _in_the_middle(url, 9)


def while_its_memory_is_read(url: str) -> None:
    """Unpacked: the receivers copy, and wait for fingerprints that never come."""
    with ws.connect(models.make("plain", 7), to=url, packed=False) as sender:
        control = control_of(sender)
        control.write_fingerprints = lambda *_: die_while_it_loads(url)  # type: ignore[method-assign]  # on purpose
        sender.send_weights()


def after_prepared(url: str) -> None:
    with ws.connect(
        models.make("plain", 7),
        to=DiesBefore(url, FinishRequest),
        packed=True,
        bucket_nbytes=BUCKET_NBYTES,
    ) as sender:
        sender.send_weights()


DEATHS: tuple[Callable[[str], None], ...] = (
    before_its_message,
    at_its_first_tensor,
    in_the_middle_of_chunks,
    while_its_memory_is_read,
    after_prepared,
)


def over_nixl(die: Callable[..., None], urls: list[str], *delta: bool) -> None:
    """Run one of the functions below with the backend `nixl`."""
    os.environ.update(NIXL_OVER_TCP, WEIGHTSYNC_ADDRESS="127.0.0.1")
    ws.connect = partial(ws.connect, backend="nixl")  # in a process of its own
    die(urls, *delta)


def _fleet_that_dies(urls: list[str], kind: type) -> None:
    """The last receiver's transport kills the process before one kind of message."""
    to: list[str | HttpTransport] = [*urls[:-1], DiesBefore(urls[-1], kind)]
    with ws.connect(models.make("plain", 7), to=to, packed=True, bucket_nbytes=16 << 10) as sender:
        sender.send_weights()


def in_a_fleet_at_init(urls: list[str]) -> None:
    _fleet_that_dies(urls, InitRequest)


def in_a_fleet_at_start(urls: list[str]) -> None:
    to: list[str | HttpTransport] = [DiesBefore(url, UpdateRequest) for url in urls]
    with ws.connect(models.make("plain", 7), to=to) as sender:
        sender.send_weights()


def send_a_base(sender: ws.WeightSender, model: nn.Module) -> None:
    """Send the weights that the delta builds on, and make those of the delta."""
    sender.send_weights()
    models.touch(model, seed=7)


def in_a_fleet_in_the_middle(urls: list[str], delta: bool = False) -> None:
    packets._PACKET_LINES = 128  # several packets, of which receivers have some
    model = models.make("plain", 1 if delta else 7)
    source = DyingSource(model, 9, urls[0])
    with ws.connect(
        source,
        to=urls,
        bucket_nbytes=16 << 10,
        num_buckets=2,
        delta="always" if delta else "off",
    ) as sender:
        if delta:
            send_a_base(sender, model)
        source.armed = True
        sender.send_weights()


def in_a_fleet_while_read(urls: list[str]) -> None:
    with ws.connect(models.make("plain", 7), to=urls, packed=False) as sender:
        control = control_of(sender)
        control.write_fingerprints = lambda *_: die_while_it_loads(urls[0])  # type: ignore[method-assign]  # on purpose
        sender.send_weights()


def _send(to: list[str | HttpTransport], delta: bool) -> None:
    """Send a whole model; or its base, and then a delta."""
    model = models.make("plain", 1 if delta else 7)
    with ws.connect(model, to=to, delta="always" if delta else "off") as sender:
        if delta:
            send_a_base(sender, model)
        sender.send_weights()


def in_a_fleet_after_prepared(urls: list[str], delta: bool = False) -> None:
    _send([DiesBefore(url, FinishRequest, spares=int(delta)) for url in urls], delta)


class DiesOnceOthersHave(HttpTransport):
    """Delays its `finish`, after `spares` of these, until others have finished version 2; then it
    kills its process."""

    def __init__(self, url: str, others: list[str], spares: int = 0) -> None:
        super().__init__(url)
        self._others = others
        self._spares = spares

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        self._spares -= isinstance(request, FinishRequest)
        if self._spares < 0:
            for other in self._others:
                await_version(other, 2)
            die()
        return super().call(request, timeout_s=timeout_s)


class DiesWhenItHas(HttpTransport):
    """Sends its `finish`, and kills its process as soon as the receiver has committed."""

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        if isinstance(request, FinishRequest):
            threading.Thread(target=super().call, args=(request,), kwargs={"timeout_s": 5}).start()
            await_version(self.target, 2)
            die()
        return super().call(request, timeout_s=timeout_s)


def await_version(url: str, version: int) -> None:
    with closing(HttpTransport(url)) as transport:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if cast(Status, transport.call(StatusRequest(), timeout_s=5)).version == version:
                return
            time.sleep(0.005)
    raise AssertionError(f"{url} never held version {version}")


def in_a_fleet_during_finish(urls: list[str]) -> None:
    to: list[str | HttpTransport] = [DiesWhenItHas(urls[0]), *urls[1:]]
    with ws.connect(models.make("plain", 7), to=to) as sender:
        sender.send_weights()


def in_a_fleet_between_finishes(urls: list[str], delta: bool = False) -> None:
    dying = [DiesOnceOthersHave(url, urls[:1], spares=int(delta)) for url in urls[1:]]
    _send([urls[0], *dying], delta)
