from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from tests.server.live import TOKEN, make_app, serving
from tests.transports.contract import UPDATE, Connect, TransportContract
from tests.transports.scripted import ScriptedReceiver
from weightsync.errors import (
    AuthError,
    ConfigError,
    ConnectError,
    ProtocolError,
    RemoteError,
    TransportTimeout,
)
from weightsync.integrations.engine_control import EngineClient
from weightsync.transports.base import Transport
from weightsync.transports.http import HttpTransport
from weightsync.wire import codec
from weightsync.wire.messages import FinishRequest, StatusRequest, StepReply
from weightsync.wire.problem import encode_problem, to_problem

ANSWER = codec.encode(StepReply(state="READY", version=1))


def http(status: str, body: bytes, extra: str = "") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{extra}\r\n"
    ).encode() + body


OK = http("200 OK", ANSWER)


@contextmanager
def scripted_peer(*connections: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[int]]]:
    """A peer that treats its first connection by the first function, and so on; then is gone."""
    accepted: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def run() -> None:
            for treat in connections:
                connection, _ = listener.accept()
                accepted.append(1)
                with connection:
                    connection.settimeout(10)
                    treat(connection)

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(run)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", accepted
            served.result(20)


def read_request(connection: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(1 << 20)
        if not piece:
            return received
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    want = int(lengths[0].split(b":")[1]) if lengths else 0
    while len(body) < want:
        piece = connection.recv(1 << 20)
        assert piece
        body += piece
    return head + b"\r\n\r\n" + body


def answering(*answers: bytes) -> Callable[[socket.socket], None]:
    def treat(connection: socket.socket) -> None:
        for answer in answers:
            read_request(connection)
            connection.sendall(answer)

    return treat


def hang_up(connection: socket.socket) -> None:
    read_request(connection)


class TestHttp(TransportContract):
    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        with ExitStack() as stack:

            def connect(receiver: ScriptedReceiver) -> Transport:
                url = stack.enter_context(serving(make_app(receiver)))
                transport = HttpTransport(url, TOKEN)
                stack.callback(transport.close)
                return transport

            yield connect


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://host",
        "file:///etc/passwd",
        "http://",
        "http://host:99999",
        "http://host:0",
        "http://a host:1",
        "http://[::1",
        "http://user:secret@host",
        "http://host?token=x",
        "http://host/#x",
        "",
    ],
)
def test_what_is_no_http_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HttpTransport(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("token", ["two words", "line\r\nX-Evil: 1", "größe", "\x00"])
def test_a_token_that_would_break_the_header_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        HttpTransport("http://host", token)


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    with serving(make_app(ScriptedReceiver())) as url:
        for token, wanted in ((None, None), ("", 401), ("other", 403)):
            transport = HttpTransport(url, token)
            if wanted is None:
                transport.call(FinishRequest(), timeout_s=10)
            else:
                with pytest.raises(AuthError) as caught:
                    transport.call(FinishRequest(), timeout_s=10)
                assert caught.value.status == wanted
                assert TOKEN not in str(caught.value)
            transport.close()


def test_a_refused_token_is_told_though_the_body_is_long() -> None:
    receiver = ScriptedReceiver()
    with serving(make_app(receiver)) as url:
        transport = HttpTransport(url, "other")
        with pytest.raises(AuthError):
            transport.call(FinishRequest(table_digest="x" * (8 << 20)), timeout_s=30)
        transport.close()
    assert receiver.seen == []


def test_a_path_before_the_calls_is_kept() -> None:
    def treat(connection: socket.socket) -> None:
        assert read_request(connection).startswith(b"POST /fleet/a/finish_weight_update HTTP/1.1")
        connection.sendall(OK)

    with scripted_peer(treat) as (url, _):
        transport = HttpTransport(f"{url}/fleet/a/")
        transport.call(FinishRequest(), timeout_s=10)
        transport.close()


def test_head_and_body_leave_in_one_segment() -> None:
    first: list[bytes] = []

    def treat(connection: socket.socket) -> None:
        for _ in range(5):
            first.append(connection.recv(1 << 20))
            connection.sendall(OK)

    with scripted_peer(treat) as (url, accepted):
        transport = HttpTransport(url)
        for _ in range(5):
            transport.call(FinishRequest(update_id="u1"), timeout_s=10)
        transport.close()
    assert all(piece.endswith(b'\r\n\r\n{"update_id":"u1"}') for piece in first), first
    assert len(accepted) == 1


def test_an_idle_connection_that_was_closed_is_replaced() -> None:
    with scripted_peer(answering(OK), answering(OK)) as (url, accepted):
        transport = HttpTransport(url)
        transport.call(FinishRequest(), timeout_s=10)
        time.sleep(0.1)  # the peer has hung up; the next call finds out either way
        transport.call(FinishRequest(), timeout_s=10)
        transport.close()
    assert len(accepted) == 2


def test_a_connection_that_breaks_in_use_is_retried_once() -> None:
    def one_answer(connection: socket.socket) -> None:
        answering(OK)(connection)
        hang_up(connection)  # the second request was read, and nothing answered

    with scripted_peer(one_answer, answering(OK)) as (url, accepted):
        transport = HttpTransport(url)
        transport.call(FinishRequest(), timeout_s=10)
        reply = transport.call(FinishRequest(), timeout_s=10)
        transport.close()
    assert isinstance(reply, StepReply)
    assert len(accepted) == 2
    assert transport.sent_messages == 3


def test_it_is_not_retried_twice() -> None:
    def one_answer(connection: socket.socket) -> None:
        answering(OK)(connection)
        hang_up(connection)

    with scripted_peer(one_answer, hang_up) as (url, accepted):
        transport = HttpTransport(url)
        transport.call(FinishRequest(), timeout_s=10)
        with pytest.raises(ConnectError, match="broke during finish_weight_update"):
            transport.call(FinishRequest(), timeout_s=10)
        transport.close()
    assert len(accepted) == 2


def test_a_new_connection_that_breaks_is_not_retried() -> None:
    with scripted_peer(hang_up) as (url, accepted):
        transport = HttpTransport(url)
        with pytest.raises(ConnectError, match=url):
            transport.call(FinishRequest(), timeout_s=10)
        transport.close()
    assert len(accepted) == 1


def test_an_answer_cut_short_is_not_retried() -> None:
    def cut(connection: socket.socket) -> None:
        answering(OK)(connection)
        answering(OK[:-4])(connection)

    with scripted_peer(cut) as (url, accepted):
        transport = HttpTransport(url)
        transport.call(FinishRequest(), timeout_s=10)
        with pytest.raises(ConnectError):
            transport.call(FinishRequest(), timeout_s=10)
        transport.close()
    assert len(accepted) == 1


def test_a_connection_is_closed_after_a_server_error() -> None:
    with scripted_peer(answering(http("500 Oops", b"{}")), answering(OK)) as (url, accepted):
        transport = HttpTransport(url)
        with pytest.raises(RemoteError):
            transport.call(FinishRequest(), timeout_s=10)
        transport.call(FinishRequest(), timeout_s=10)
        transport.close()
    assert len(accepted) == 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b'{"title":1}',
        b'{"title":"x","status":"y"}',
        b"\xff\xfe",
        b"[" * 9999,
        b'{"attributes":{"names":' + b"[" * 9999,
        b'{"title":"\xe9"}',
    ],
)
def test_what_is_no_problem_document_is_quoted(body: bytes) -> None:
    with scripted_peer(answering(http("502 Bad", body))) as (url, _):
        transport = HttpTransport(url)
        with pytest.raises(RemoteError, match="answered 502, not a problem document") as caught:
            transport.call(FinishRequest(), timeout_s=10)
        transport.close()
    assert caught.value.remote_type == "HTTP 502"


@pytest.mark.parametrize("kind", [HttpTransport, EngineClient])
@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_of_any_server_is_an_auth_error(kind: type[HttpTransport], status: int) -> None:
    with scripted_peer(answering(http(f"{status} No", b'{"error":"no"}'))) as (url, _):
        transport = kind(url)
        with pytest.raises(AuthError, match=f"refused finish_weight_update with {status}"):
            transport.call(FinishRequest(), timeout_s=10)
        transport.close()


@pytest.mark.parametrize("error", [{"message": "no such route"}, "no such route"])
def test_an_engines_own_error_has_its_reason(error: object) -> None:
    body = json.dumps({"error": error}).encode()
    with scripted_peer(answering(http("400 Bad", body))) as (url, _):
        transport = EngineClient(url)
        with pytest.raises(RemoteError, match="answered 400: no such route") as caught:
            transport.deliver(FinishRequest(), timeout_s=10)
        transport.close()
    assert caught.value.remote_message == "no such route"


def test_a_problem_document_to_a_client_of_engines_is_its_error() -> None:
    problem = to_problem(ConfigError("no such thing"))
    body = encode_problem(problem)
    with scripted_peer(answering(http("400 Bad", body))) as (url, _):
        transport = EngineClient(url)
        with pytest.raises(ConfigError, match="no such thing"):
            transport.deliver(FinishRequest(), timeout_s=10)
        transport.close()


def test_a_late_answer_is_a_timeout() -> None:
    receiver = ScriptedReceiver(hold=type(UPDATE))
    with serving(make_app(receiver)) as url:
        transport = HttpTransport(url, TOKEN)
        with pytest.raises(TransportTimeout, match=rf"{url}.*update_weights within 0\.2 s"):
            transport.call(UPDATE, timeout_s=0.2)
        receiver.let_go.set()
        receiver.hold = None
        assert transport.call(UPDATE, timeout_s=10) == receiver.answer(UPDATE)
        transport.close()


def test_nobody_there() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound, and not listening: nobody else gets this port
        transport = HttpTransport(f"http://127.0.0.1:{bound.getsockname()[1]}")
        with pytest.raises(ConnectError, match=r"cannot be reached: .*running\?"):
            transport.call(StatusRequest(), timeout_s=10)
        transport.close()


def test_a_name_that_is_not_known() -> None:
    transport = HttpTransport("http://no-such-host.invalid:8000")
    with pytest.raises(ConnectError, match="no-such-host"):
        transport.call(StatusRequest(), timeout_s=10)
    transport.close()


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    receiver = ScriptedReceiver()
    with serving(make_app(receiver)) as url:
        transport = HttpTransport(url, TOKEN)
        transport.call(StatusRequest(), timeout_s=10)
        transport.close()
    assert len(receiver.seen) == 1


def test_a_redirect_is_not_followed() -> None:
    away = http("307 Elsewhere", b"", "location: http://127.0.0.1:9/steal\r\n")
    with scripted_peer(answering(away)) as (url, _):
        transport = HttpTransport(url, TOKEN)
        with pytest.raises(RemoteError, match="307"):
            transport.call(FinishRequest(), timeout_s=10)
        transport.close()


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (http("200 OK", b"<html>"), ProtocolError, "is this a weightsync server"),
        (http("200 OK", b"\xff\xfe"), ProtocolError, "is this a weightsync server"),
        (http("404 No", b'{"detail":"Not Found"}'), RemoteError, "Not Found"),
        (http("401 No", b"nginx"), AuthError, "401"),
        (http("403 No", b"nginx"), AuthError, "403"),
        (http("500 No", b"[" * 100_000), RemoteError, "500"),
        (http("502 No", b"\xff\xfe"), RemoteError, "502"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", ConnectError, "broke"),
    ],
)
def test_answers_of_something_else(answer: bytes, error: type[Exception], text: str) -> None:
    with scripted_peer(answering(answer)) as (url, _):
        transport = HttpTransport(url)
        with pytest.raises(error, match=text):
            transport.call(FinishRequest(), timeout_s=10)
        transport.close()


def test_many_updates_open_no_more_connections() -> None:
    done = threading.Event()

    def treat(connection: socket.socket) -> None:
        for _ in range(200):
            read_request(connection)
            connection.sendall(OK)
        done.set()

    with scripted_peer(treat) as (url, accepted):
        transport = HttpTransport(url)
        for _ in range(200):
            transport.call(FinishRequest(), timeout_s=10)
        assert done.wait(10)
        transport.close()
    assert len(accepted) == 1


def test_transports_below_a_url_share_connections_and_are_closed_one_by_one() -> None:
    with serving(make_app(ScriptedReceiver())) as url:
        root = HttpTransport(f"{url}/", TOKEN)
        first, second = root.expand(["workers/0", "workers/1"])
        assert [first.target, second.target] == [f"{url}/workers/0", f"{url}/workers/1"]
        for transport in (first, second):  # nothing is served there
            with pytest.raises(RemoteError, match="404"):
                transport.call(StatusRequest(), timeout_s=10)
        first.close()
        first.close()
        with pytest.raises(ConnectError, match="is closed"):
            first.call(StatusRequest(), timeout_s=10)
        with pytest.raises(RemoteError, match="404"):
            second.call(StatusRequest(), timeout_s=10)
        root.call(FinishRequest(update_id="u"), timeout_s=10)
        second.close()
        with pytest.raises(ConnectError, match="is closed"):
            second.call(StatusRequest(), timeout_s=10)
        root.close()
