"""Waits of a sender that no transport bounds, and what an error leaves behind."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Literal

import pytest
import torch
from torch import nn

import weightsync as ws
from weightsync.observe import Observer
from weightsync.update import fleet

TIMEOUT_S = 1.0


class Watcher(Observer):
    """Notes the names of all commands."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_command(self, name: str) -> None:
        self.told.append(name)


@pytest.fixture
def receiver() -> Iterator[ws.WeightReceiver]:
    made = ws.WeightReceiver(nn.Linear(6, 5))
    yield made
    made.close()


@pytest.mark.parametrize("call", ["update_weights", "finish_weight_update"])
def test_a_callback_that_never_returns(receiver: ws.WeightReceiver, call: str) -> None:
    """Nothing but this sender bounds it. What is asked beside it is answered."""
    held, let_go = threading.Event(), threading.Event()

    def carry(message: Mapping[str, object]) -> object:
        if message["call"] == call and not held.is_set():
            held.set()
            let_go.wait(60)
            raise ConnectionError("far too late")
        return receiver.handle(message)

    try:
        with ws.connect(nn.Linear(6, 5), to=carry, timeout_s=TIMEOUT_S) as sender:
            if call == "finish_weight_update":
                sender.send_weights()  # told again, it goes through
            else:
                with pytest.raises(ws.TransportTimeout, match="was lost"):
                    sender.send_weights()
                sender.send_weights()
        assert held.is_set()
        assert receiver.version == 1
    finally:
        let_go.set()


@pytest.mark.parametrize(("apply", "backend"), [("staged", "tcp"), ("in_place", "ipc")])
def test_a_slow_hook_behind_a_door_that_takes_one_call_at_a_time(
    apply: Literal["staged", "in_place"], backend: Literal["ipc", "tcp"]
) -> None:
    """It cannot answer for its status beside the step: that its reader works is seen elsewhere."""
    timeout_s = 2.0  # time enough to connect on a busy machine
    held: list[float] = []

    def hook(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _ in pairs:
            pass
        time.sleep(2.5 * timeout_s)

    receiver = ws.WeightReceiver(hook, apply=apply)
    door = threading.Lock()

    def carry(message: Mapping[str, object]) -> object:
        with door:
            began = time.monotonic()
            answer = receiver.handle(message)
            held.append(time.monotonic() - began)
            return answer

    try:
        sender = ws.connect(nn.Linear(6, 5), to=carry, timeout_s=timeout_s, backend=backend)
        with sender:
            assert sender.send_weights().version == 1
        assert max(held) > 2 * timeout_s
    finally:
        receiver.close()


def test_a_hook_that_never_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heart beats on and nothing but the sender bounds the call: it has its patience, once."""
    let_go, finishes = threading.Event(), list[object]()

    def hook(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _ in pairs:
            pass
        let_go.wait(120)

    receiver = ws.WeightReceiver(hook)

    def carry(message: Mapping[str, object]) -> object:
        if message["call"] == "finish_weight_update":
            finishes.append(message)
        return receiver.handle(message)

    monkeypatch.setattr(fleet, "HEARTBEAT_TIMEOUT_FACTOR", 3)
    try:
        with ws.connect(nn.Linear(6, 5), to=carry, timeout_s=TIMEOUT_S) as sender:
            began = time.monotonic()
            with pytest.raises(ws.TransportTimeout, match=r"within 3 s and is alive"):
                sender.send_weights()
            assert 2 * TIMEOUT_S < time.monotonic() - began < 20 * TIMEOUT_S
            assert len(finishes) == 1
    finally:
        let_go.set()
        receiver.close()


def test_a_server_that_is_stopped_in_front_of_a_receiver_that_lives(
    receiver: ws.WeightReceiver,
) -> None:
    """The receiver's heart beats while it is at work, and not because its process lives."""
    let_go, stopped = threading.Event(), threading.Event()

    def carry(message: Mapping[str, object]) -> object:
        if stopped.is_set():
            let_go.wait(60)
            raise ConnectionError("far too late")
        answer = receiver.handle(message)
        if message["call"] == "update_weights":
            stopped.set()
            return carry(message)
        return answer

    try:
        with ws.connect(nn.Linear(6, 5), to=carry, timeout_s=TIMEOUT_S) as sender:
            begun = time.monotonic()
            with pytest.raises(ws.TransportTimeout, match="no sign of life"):
                sender.send_weights()
            assert time.monotonic() - begun < 8 * TIMEOUT_S
    finally:
        let_go.set()


def test_silent_targets_are_asked_at_the_same_time() -> None:
    with ExitStack() as kept:
        silent = [kept.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(12)]
        urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in silent]
        begun = time.monotonic()
        with pytest.raises(ws.TransportTimeout, match=urls[0]):
            ws.connect(nn.Linear(6, 5), to=urls, timeout_s=TIMEOUT_S)
        assert time.monotonic() - begun < len(urls) * TIMEOUT_S / 1.5


def test_a_backend_that_there_is_not_is_refused_before_anybody_is_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ws.ConfigError, match="no backend 'typo'; known: auto, ipc, nixl, tcp"):
            ws.connect(nn.Linear(6, 5), to=url, backend="typo", timeout_s=TIMEOUT_S)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_begin_that_fails_is_ended(receiver: ws.WeightReceiver) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.zeros(5, 6)
        raise ZeroDivisionError("in the source")

    watcher = Watcher()
    with ws.connect(nn.Linear(6, 5), to=receiver.handle) as sender:
        sender._group.observers.append(watcher)
        with pytest.raises(ZeroDivisionError), sender.update(partial=True) as update:
            update.send(broken())
        sender._group.observers.remove(watcher)
        assert [name for name in watcher.told if name in ("begin", "end")] == ["begin", "end"]
        assert sender.send_weights().version == 1
