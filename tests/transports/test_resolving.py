"""Names of receivers that are slow to be looked up, and addresses that do not answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import fastapi
import pytest
import torch
from torch import nn

import weightsync as ws
from tests.server.live import held_port, make_app, serving
from weightsync.shm import addresses
from weightsync.transports.http import HttpTransport
from weightsync.wire.messages import StatusRequest

TIMEOUT_S = 1.0
FAR_S = 60.0
"""Longer than any test here may wait."""
SLOW = "slow-to-look-up.test"


class Resolver:
    """The system's look-up, which holds one name until `let_go`, and then knows it as `found`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = threading.Event()
        self.found: list[Any] = []
        self.asked = 0
        self._look_up = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host: str, *args: Any, **options: Any) -> Any:
        if host != SLOW or options.get("flags") == socket.AI_NUMERICHOST:
            return self._look_up(host, *args, **options)
        self.asked += 1
        assert self.let_go.wait(FAR_S)
        return self.found


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver(monkeypatch)
    yield made
    made.let_go.set()
    deadline = time.monotonic() + FAR_S
    while addresses._lookups:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def entry(port: int) -> Any:
    return (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_a_name_that_is_not_looked_up_in_time(resolver: Resolver) -> None:
    """The time of `connect` is that of one call, and a second one waits for the same look-up."""
    for _ in range(2):
        begin = time.monotonic()
        with pytest.raises(ws.TransportTimeout, match=f"{SLOW}.* was not resolved within 0.* s"):
            ws.connect(nn.Linear(6, 5), to=f"http://{SLOW}:8000", timeout_s=0.9)
        assert time.monotonic() - begin < FAR_S / 2
    assert resolver.asked == 1


def test_a_name_that_is_looked_up_late_is_reached_by_the_next_call(resolver: Resolver) -> None:
    server = nn.Linear(6, 5)
    app = fastapi.FastAPI()
    with closing(ws.WeightReceiver(server)) as receiver:
        app.include_router(ws.server.weight_router(receiver, token=None))
        with serving(app) as url, closing(HttpTransport(f"http://{SLOW}:{port_of(url)}")) as slow:
            with pytest.raises(ws.TransportTimeout):
                slow.call(StatusRequest(), timeout_s=0.1)
            resolver.found = [entry(port_of(url))]
            resolver.let_go.set()
            slow.call(StatusRequest(), timeout_s=FAR_S)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("token", ["another", ""])
def test_a_refused_token_is_not_hidden_by_a_name_that_is_not_looked_up(
    resolver: Resolver, order: int, token: str
) -> None:
    with refusing() as url:
        begin = time.monotonic()
        to = [f"http://{SLOW}:8000", url][::order]
        with pytest.raises(ws.AuthError, match=url):
            ws.connect(nn.Linear(6, 5), to=to, token=token, timeout_s=TIMEOUT_S)
        assert time.monotonic() - begin < FAR_S / 2
        assert not resolver.let_go.is_set()


@pytest.mark.parametrize("order", [1, -1])
def test_a_refused_token_is_not_hidden_by_a_server_that_is_gone(order: int) -> None:
    with refusing() as url, held_port() as port:
        to = [f"http://127.0.0.1:{port}", url][::order]
        with pytest.raises(ws.AuthError, match=url):
            ws.connect(nn.Linear(6, 5), to=to, token="another")


def test_a_server_that_refuses_everything_does_not_wait_for_a_silent_one(
    resolver: Resolver,
) -> None:
    app = fastapi.FastAPI()

    @app.middleware("http")
    async def refuse(*_: object) -> fastapi.Response:
        return fastapi.Response(status_code=401)

    with serving(app) as url:
        begin = time.monotonic()
        with pytest.raises(ws.AuthError, match=url):
            ws.connect(nn.Linear(6, 5), to=[f"http://{SLOW}:8000", url], timeout_s=FAR_S)
        assert time.monotonic() - begin < 9.0  # a connection may take ten seconds
        assert not resolver.let_go.is_set()


@contextmanager
def refusing() -> Iterator[str]:
    """A receiver behind a token."""
    with (
        closing(ws.WeightReceiver(nn.Linear(6, 5))) as receiver,
        serving(make_app(receiver)) as url,
    ):
        yield url
        assert receiver.status().state == "READY"


@pytest.mark.parametrize("order", [1, -1])
def test_an_error_that_a_receiver_gives_comes_before_a_connection_that_broke(order: int) -> None:
    def broken(_: object) -> object:
        raise ws.ConnectError("nobody there")

    def refuses(_: object) -> object:
        raise ws.AuthError("no such token")

    with pytest.raises(ws.AuthError, match="no such token") as caught:
        ws.connect({"w": torch.zeros(2)}, to=[broken, refuses][::order])
    assert any("nobody there" in note for note in caught.value.__notes__)


def test_an_address_that_does_not_answer_leaves_time_for_the_next(resolver: Resolver) -> None:
    server = nn.Linear(6, 5)
    app = fastapi.FastAPI()
    with ExitStack() as stack:
        silent = stack.enter_context(full_listener())
        receiver = stack.enter_context(closing(ws.WeightReceiver(server)))
        app.include_router(ws.server.weight_router(receiver, token=None))
        url = stack.enter_context(serving(app))
        resolver.found = [entry(silent), entry(port_of(url))]
        resolver.let_go.set()
        there = stack.enter_context(closing(HttpTransport(f"http://{SLOW}:{port_of(url)}")))
        there.call(StatusRequest(), timeout_s=4 * TIMEOUT_S)


def test_an_address_that_never_answers_takes_the_time_of_one_call(resolver: Resolver) -> None:
    """`connect` asks a target for its kind, and then for its status."""
    tries: list[float] = []
    connect = socket.socket.connect

    class Counted(socket.socket):
        def connect(self, address: Any) -> None:
            tries.append(time.monotonic())
            connect(self, address)

    with full_listener() as silent, pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", Counted)
        with pytest.raises(ws.ConnectError, match="timed out"):
            ws.connect(nn.Linear(6, 5), to=f"http://127.0.0.1:{silent}", timeout_s=TIMEOUT_S)
    assert len(tries) == 1


class full_listener:  # noqa: N801  # a context manager
    """A port on which connections are never made: its queue of connections is full."""

    def __enter__(self) -> int:
        self._stack = ExitStack()
        listener = self._stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port: int = listener.getsockname()[1]
        while True:
            waiting = self._stack.enter_context(socket.socket())
            waiting.settimeout(0.3)
            try:
                waiting.connect(("127.0.0.1", port))
            except TimeoutError:
                return port

    def __exit__(self, *_: object) -> None:
        self._stack.close()
