from __future__ import annotations

import json
import os
from contextlib import closing
from typing import Any
from urllib.request import urlopen

import pytest
import torch

import weightsync as ws
from tests.children import CONTEXT
from tests.e2e.processes import started
from tests.server.live import TOKEN, make_app, raw, read_answer, serving
from tests.transports.scripted import ScriptedReceiver
from weightsync.errors import AuthError, ConfigError
from weightsync.server.auth import (
    TokenAuth,
    check_authorization,
    check_local,
    is_protected,
    resolve_token,
)
from weightsync.wire.messages import CALLS, StatusRequest

POSTS = [call for call, kind in CALLS.items() if kind is not StatusRequest]


def head(path: str, *fields: str, length: int = 1000) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {length}", *fields]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@pytest.mark.parametrize("guarded_by", ["router", "middleware"])
@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ((), 401),
        ((f"Authorization: Basic {TOKEN}",), 403),
        (("Authorization: Bearer other",), 403),
        (("Authorization: Bearer",), 403),
        ((f"Authorization: Bearer {TOKEN}x",), 403),
        ((f"Authorization: Bearer {TOKEN[:-1]}",), 403),
        ((f"Authorization: {TOKEN}",), 403),
        ((f"Authorization: Bearer {TOKEN}", "Authorization: Bearer other"), 403),
    ],
)
def test_without_the_token_the_answer_comes_before_the_body(
    fields: tuple[str, ...], status: int, guarded_by: str
) -> None:
    receiver = ScriptedReceiver()
    app = make_app(receiver, TOKEN if guarded_by == "router" else None)
    guarded = app if guarded_by == "router" else TokenAuth(app, TOKEN)
    with serving(guarded) as url:
        for call in POSTS if fields == () else POSTS[:1]:
            with raw(url) as connection:
                connection.sendall(head(f"/{call}", *fields))  # and no byte of the body
                got, body = read_answer(connection)
            assert got == status, call
            assert b'"error":"AuthError"' in body
            assert TOKEN.encode() not in body
    assert receiver.seen == []


def test_with_the_token_it_passes() -> None:
    receiver = ScriptedReceiver()
    with serving(TokenAuth(make_app(receiver), TOKEN)) as url, raw(url) as connection:
        for scheme in ("Bearer", "bearer"):
            connection.sendall(head("/resume", f"Authorization: {scheme} {TOKEN}", length=0))
            assert read_answer(connection)[0] == 200
    assert len(receiver.seen) == 2


def test_reading_needs_no_token() -> None:
    with serving(TokenAuth(make_app(ScriptedReceiver()), TOKEN)) as url, raw(url) as connection:
        for path in ("health", "weight_info", "get_world_size", "is_paused", "metrics"):
            connection.sendall(f"GET /{path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
            assert read_answer(connection)[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "wanted"),
    [
        ("POST", "/update_weights", True),
        ("PUT", "/anything", True),
        ("DELETE", "/generate/../x", True),
        ("POST", "/generatex", True),
        ("POST", "//generate", True),
        ("POST", "/v1x/completions", True),
        ("POST", "/generate", False),
        ("POST", "/v1/completions", False),
        ("GET", "/update_weights", False),
        ("HEAD", "/health", False),
    ],
)
def test_what_is_protected(method: str, path: str, wanted: bool) -> None:
    assert is_protected(method, path) is wanted


def test_a_header_that_is_not_ascii_is_wrong_and_no_failure() -> None:
    scope = {"headers": [(b"authorization", b"Bearer \xff\xfe")]}
    with pytest.raises(AuthError) as caught:
        check_authorization(scope, TOKEN)
    assert caught.value.status == 403


def test_where_a_token_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTSYNC_TOKEN", raising=False)
    made, other = resolve_token(), resolve_token()
    assert made.made
    assert len(made.text) >= 32
    assert made.text != other.text
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "")
    assert resolve_token().made
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "from-the-environment")
    assert resolve_token().text == "from-the-environment"
    assert resolve_token("given").text == "given"
    assert not resolve_token("given").made
    assert "given" not in repr(resolve_token("given"))


@pytest.mark.parametrize("token", ["", "two words", "größe", "new\nline", "x" * 5000])
def test_a_token_that_cannot_be_sent_is_refused(token: str) -> None:
    with pytest.raises(ConfigError):
        resolve_token(token)
    with pytest.raises(ConfigError):
        make_app(ScriptedReceiver(), token)


@pytest.mark.parametrize(
    ("host", "origin", "passes"),
    [
        ("127.0.0.1:8000", None, True),
        ("[::1]:8000", None, True),
        ("localhost", "http://localhost", True),
        ("127.0.0.1:8000", "https://evil.example", False),
        ("127.0.0.1:8000", "http://127.0.0.1:3000", False),
        ("127.0.0.1:8000", "null", False),
        ("evil.example:8000", "http://evil.example:8000", False),
        ("127.0.0.1.evil.example", None, False),
        ("", None, False),
    ],
)
def test_without_a_token_web_pages_change_nothing(
    host: str, origin: str | None, passes: bool
) -> None:
    headers = [(b"host", host.encode())]
    if origin is not None:
        headers.append((b"origin", origin.encode()))
    scope = {"type": "http", "method": "POST", "path": "/pause", "headers": headers}
    if passes:
        check_local(scope)
        return
    with pytest.raises(AuthError) as refused:
        check_local(scope)
    assert refused.value.status == 403


def connect_and_die(url: str, connection: Any) -> None:
    """Connect, say so, and end without a word to the receiver."""
    sender = ws.connect({"w": torch.zeros(8)}, to=url, token=TOKEN)
    connection.send(sender.version)
    connection.recv()
    os._exit(0)


def test_a_status_without_the_token_frees_what_a_dead_sender_left_and_nothing_of_a_living_one() -> (
    None
):
    receiver = ws.WeightReceiver(lambda pairs: list(pairs) and None)
    with closing(receiver), serving(make_app(receiver)) as url:

        def read() -> dict[str, Any]:
            with urlopen(f"{url}/weight_info", timeout=30) as answer:
                found: dict[str, Any] = json.load(answer)
            return found

        ours, theirs = CONTEXT.Pipe()
        with started(connect_and_die, url, theirs) as process:
            assert ours.poll(60)
            ours.recv()
            before = read()
            assert len(before["senders"]) == 1
            assert receiver.shared_memory_usage()
            ours.send("die")
            process.join(60)
        after = read()
        assert not after.get("senders")
        assert not receiver.shared_memory_usage()
        kept = ("state", "version", "instance", "may_generate")
        assert [after.get(name) for name in kept] == [before.get(name) for name in kept]
