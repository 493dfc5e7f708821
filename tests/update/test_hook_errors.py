"""Errors of a hook are its own: none is taken for a lost message or a refused step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.server.live import TOKEN, make_app, serving

pytestmark = pytest.mark.usefixtures("shm_clean")

TIMEOUT_S = 60.0


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class UnreadableTransfer(ws.TransferError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS: list[Callable[[], Exception]] = [
    lambda: ws.ConnectError("the parameter server is gone"),
    lambda: ws.TransportError("the parameter server is gone"),
    lambda: ws.TransportTimeout("the parameter server is gone"),
    lambda: ws.TransferTimeout("the parameter server is gone"),
    lambda: ws.NotReadyError("the parameter server is gone"),
    lambda: ws.AuthError("the parameter server is gone"),
    lambda: ws.SourceLostError("the parameter server is gone"),
    lambda: ws.UnknownSenderError("the parameter server is gone"),
    lambda: ws.StaleVersionError("the parameter server is gone"),
    lambda: ws.UpdateConflictError("the parameter server is gone"),
    lambda: ws.SenderReplacedError("the parameter server is gone"),
    lambda: ws.TransferError("the parameter server is gone"),
    lambda: RuntimeError("the parameter server is gone"),
    lambda: Unreadable("the parameter server is gone"),
    lambda: UnreadableTransfer("the parameter server is gone"),
]


class Hook:
    """Loads what it is given, or raises the next error that it has."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.held: dict[str, torch.Tensor] = {}

    def __call__(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self.errors:
            raise self.errors.pop()
        self.held = {name: tensor.clone() for name, tensor in pairs}


def counted(call: Callable[[], object], most_s: float) -> None:
    """Make the call, which must not wait for `most_s`: a timeout of the sender, or part of it."""
    began = time.monotonic()
    call()
    assert time.monotonic() - began < most_s


@pytest.mark.parametrize("make", ERRORS, ids=lambda make: type(make()).__name__)
@pytest.mark.parametrize("over_http", [False, True], ids=["in process", "http"])
def test_the_next_send_heals_what_a_staged_hook_raised(
    over_http: bool, make: Callable[[], Exception]
) -> None:
    hook, source = Hook(), nn.Linear(4, 4)
    receiver = ws.WeightReceiver(hook, apply="staged")
    with ExitStack() as stack:
        stack.callback(receiver.close)
        to = receiver.handle if not over_http else stack.enter_context(serving(make_app(receiver)))
        sender = stack.enter_context(
            ws.connect(source, to=to, token=TOKEN if over_http else None, timeout_s=TIMEOUT_S)
        )
        (told,) = sender.send_weights().receivers
        hook.errors = [make()]
        with torch.no_grad():
            source.weight.add_(1)
        with pytest.raises(ws.WeightSyncError) as raised:
            counted(sender.send_weights, TIMEOUT_S / 3)
        assert not isinstance(raised.value, ws.TransportError | ws.NotReadyError)
        assert receiver.status().state == "TORN"
        counted(sender.send_weights, TIMEOUT_S / 3)
        assert receiver.status().state == "READY"
        assert torch.equal(hook.held["weight"], source.weight.detach())
        counted(lambda: sender.resync(told.target), TIMEOUT_S / 3)


@pytest.mark.parametrize("make", ERRORS, ids=lambda make: type(make()).__name__)
@pytest.mark.parametrize("packed", [False, True])
def test_the_next_send_heals_what_a_hook_in_place_raised(
    packed: bool, make: Callable[[], Exception]
) -> None:
    hook, source = Hook(), nn.Linear(4, 4)
    receiver = ws.WeightReceiver(hook, apply="in_place")
    to: Any = receiver.handle
    settings: dict[str, Any] = {"packed": packed, "timeout_s": TIMEOUT_S}
    with closing(receiver), ws.connect(source, to=to, **settings) as sender:
        sender.send_weights()
        hook.errors = [make()]
        with pytest.raises(ws.WeightSyncError) as raised:
            counted(sender.send_weights, TIMEOUT_S / 3)
        assert "the parameter server is gone" in str(raised.value) or "message" in str(raised.value)
        assert not isinstance(raised.value, ws.TransportError | ws.NotReadyError)
        assert receiver.status().state == "TORN"
        counted(sender.send_weights, TIMEOUT_S / 3)
        assert receiver.status().state == "READY"


def test_a_cache_that_is_cleared_elsewhere_cannot_be_reached_once() -> None:
    """As the hook: `on_clear_cache` is the user's code too."""
    errors: list[Exception] = []

    def clear() -> None:
        if errors:
            raise errors.pop()

    source = nn.Linear(4, 4)
    receiver = ws.WeightReceiver(nn.Linear(4, 4), on_clear_cache=clear)
    to = receiver.handle
    with closing(receiver), ws.connect(source, to=to, timeout_s=TIMEOUT_S) as sender:
        sender.send_weights()
        errors.append(ws.ConnectError("the cache's server is gone"))
        with pytest.raises(ws.TransferError, match="on_clear_cache raised ConnectError"):
            sender.send_weights()
        sender.send_weights()
        assert receiver.status().state == "READY"
