"""Errors of public calls fit on a screen: one exception, the user's lines, nothing twice."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.server.live import make_app, serving


def raised(call: Callable[[], object]) -> tuple[ws.WeightSyncError, str]:
    """Return the error of a call, and what Python prints for it."""
    with pytest.raises(ws.WeightSyncError) as caught:
        call()
    return caught.value, "".join(traceback.format_exception(caught.value))


def assert_short(error: ws.WeightSyncError, printed: str) -> None:
    assert len(printed.splitlines()) <= 20, printed
    assert printed.count(str(error)) == 1, printed
    own = [line for line in printed.splitlines() if "/weightsync/" in line]
    assert all("tracebacks.py" in line for line in own), printed


def hook_that_fails(pairs: Any) -> None:
    for _ in pairs:
        raise OSError("no space left")


def source_that_fails() -> Any:
    yield "weight", torch.zeros(2, 2)
    raise KeyError("gone")


def test_a_server_that_is_down() -> None:
    error, printed = raised(lambda: ws.connect(nn.Linear(2, 2), to="http://127.0.0.1:9"))
    assert isinstance(error, ws.ConnectError)
    assert_short(error, printed)
    assert printed.count("Traceback") == 1
    assert not hasattr(error, "__notes__")


def test_a_wrong_token() -> None:
    with serving(make_app(ws.WeightReceiver(nn.Linear(2, 2)), "right")) as url:
        error, printed = raised(lambda: ws.connect(nn.Linear(2, 2), to=url, token="wrong"))
    assert isinstance(error, ws.AuthError)
    assert_short(error, printed)
    assert printed.count("Traceback") == 1


def test_tensors_that_do_not_fit() -> None:
    receiver = ws.WeightReceiver(nn.Linear(2, 2))
    error, printed = raised(lambda: ws.connect(nn.Linear(3, 2), to=receiver.handle))
    assert isinstance(error, ws.ManifestMismatchError)
    assert_short(error, printed)


def test_a_hook_that_raises_is_shown_from_its_own_line() -> None:
    with (
        closing(ws.WeightReceiver(hook_that_fails)) as receiver,
        ws.connect(nn.Linear(2, 2), to=receiver.handle) as sender,
    ):
        error, printed = raised(sender.send_weights)
        assert isinstance(error, ws.RemoteError)
        assert_short(error, printed)
        assert printed.count("Traceback") == 2
        assert 'raise OSError("no space left")' in printed


def test_lines_of_an_interactive_session_are_shown() -> None:
    code = (
        "import torch, weightsync as ws\n"
        "def hook(pairs):\n"
        "    for _ in pairs: 1 / 0\n"
        "ws.connect(torch.nn.Linear(2, 2), to=ws.WeightReceiver(hook)).send_weights()\n"
    )
    done = subprocess.run(
        [sys.executable, "-"], input=code, capture_output=True, text=True, timeout=120, check=False
    )
    assert 'File "<stdin>", line 3, in hook' in done.stderr
    assert "ZeroDivisionError: division by zero" in done.stderr


def test_a_source_that_raises_keeps_its_error() -> None:
    with pytest.raises(KeyError) as caught:
        ws.connect(source_that_fails, to=ws.WeightReceiver(nn.Linear(2, 2)).handle)
    assert 'raise KeyError("gone")' in "".join(traceback.format_exception(caught.value))


def test_errors_of_blocks_and_of_coroutines_are_as_short() -> None:
    receiver = ws.WeightReceiver(hook_that_fails)
    model = nn.Linear(2, 2)

    def block(sender: ws.WeightSender) -> None:
        with sender.update() as update:
            update.send(model.named_parameters())

    with closing(receiver), ws.connect(model, to=receiver.handle) as sender:
        for call in (lambda: block(sender), lambda: asyncio.run(sender.asend_weights())):
            error, printed = raised(call)
            assert isinstance(error, ws.RemoteError)
            assert printed.count(str(error)) == 1
            assert "coordinator.py" not in printed
            assert 'raise OSError("no space left")' in printed
        own = ValueError("of the block")
        with pytest.raises(ValueError, match="of the block") as caught, sender.update():
            raise own
        assert caught.value is own


def test_of_several_receivers_each_failure_is_said_once() -> None:
    def fail(pairs: Any) -> None:
        raise ValueError(len(list(pairs)))

    receivers = [ws.WeightReceiver(fail) for _ in range(3)]
    with ws.connect(nn.Linear(2, 2), to=[r.handle for r in receivers]) as sender:
        error, printed = raised(sender.send_weights)
    assert len(error.__notes__) == 2
    assert printed.count("WeightReceiver.handle#2:") == 1
    assert printed.count("WeightReceiver.handle#3:") == 1


def test_the_whole_traceback_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "weightsync.runtime.tracebacks"):
        raised(lambda: ws.connect(nn.Linear(2, 2), to="http://127.0.0.1:9"))
    assert "fleet.py" in caplog.text
