from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import requests
from fastapi import APIRouter, Depends, FastAPI, HTTPException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import nn

from tests.server.live import TOKEN, make_app, raw, read_answer, serving
from tests.transports.contract import UPDATE
from tests.transports.scripted import STATUS, ScriptedReceiver
from weightsync.errors import RemoteError, UpdateConflictError
from weightsync.receiver import WeightReceiver
from weightsync.sender import connect
from weightsync.server.router import weight_router
from weightsync.wire import codec
from weightsync.wire.messages import ALL_CALLS, ANNOUNCED_CALLS, CALLS, StatusRequest, StepReply

POSTS = [call for call, kind in CALLS.items() if kind is not StatusRequest]
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
MAX_NBYTES = 1 << 20


@pytest.fixture(scope="module")
def scripted() -> ScriptedReceiver:
    return ScriptedReceiver()


@pytest.fixture(scope="module")
def url(scripted: ScriptedReceiver) -> Iterator[str]:
    with serving(make_app(scripted, max_body_nbytes=MAX_NBYTES)) as url:
        yield url


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.headers.update(AUTHORIZED)
        session.trust_env = False
        yield session


def check_problem(answer: requests.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text[:300]
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["status"] == status
    assert document["detail"]
    return document


BAD_BODIES = {
    "not json": b"update!",
    "binary": bytes(range(256)),
    "invalid utf-8": b'{"update_id":"\xff\xfe"}',
    "lone surrogate": b'{"update_id":"\\ud800"}',
    "utf-16": '{"update_id":"u"}'.encode("utf-16"),
    "a pickle": b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00}\x94.",
    "nested arrays": b"[" * 100_000 + b"]" * 100_000,
    "nested objects": b'{"update_info":' * 50_000 + b"1" + b"}" * 50_000,
    "nested in a known field": b'{"update_info":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "nested in init_info": b'{"init_info":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "truncated": b'{"update_id":"u',
    "two documents": b'{"reason":"a"}{"reason":"b"}',
    "an array": b"[]",
    "null": b"null",
    "a number": b"12",
    "a giant number": b"9" * 5000,
    "a giant number in a field": b'{"version":' + b"9" * 5000 + b"}",
    "a float out of range": b'{"version":1e999}',
    "an unknown field": b'{"no_such_field":1}',
    "nan": b'{"version":NaN}',
}


@pytest.mark.parametrize("call", POSTS)
@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_bad_body_is_the_callers_fault(
    url: str, session: requests.Session, scripted: ScriptedReceiver, call: str, body: bytes
) -> None:
    before = len(scripted.seen)
    answer = session.post(f"{url}/{call}", data=body, timeout=10)
    document = check_problem(answer, 400)
    assert document["error"] == "ProtocolError"
    assert len(scripted.seen) == before


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner),
    max_leaves=12,
)
UPDATE_FIELDS = ["update_info", "update_id", "start", "prepare", "version", "registered"]
INFO_FIELDS = ["names", "shapes", "dtype_names", "ipc_handles", "packed", "checksums"]
field_names = st.sampled_from([*UPDATE_FIELDS, *INFO_FIELDS, "init_info", "backend", "mode"])
shaped = st.dictionaries(
    field_names, json_values | st.dictionaries(field_names, json_values, max_size=5), max_size=4
)
bodies = st.binary(max_size=200) | (json_values | shaped).map(lambda v: json.dumps(v).encode())


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    database=None,
)
@given(call=st.sampled_from(POSTS), body=bodies)
def test_no_body_makes_the_server_fail(
    url: str, session: requests.Session, call: str, body: bytes
) -> None:
    answer = session.post(f"{url}/{call}", data=body, timeout=10)
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, (body, answer.text)
    if answer.status_code != 200:
        check_problem(answer, answer.status_code)


@pytest.mark.parametrize("call", [call for call in POSTS if call != "update_weights"])
def test_an_empty_body_is_an_empty_message(
    url: str, session: requests.Session, scripted: ScriptedReceiver, call: str
) -> None:
    if call in ("update_weight_version", "fetch_weights"):  # a field must be there
        check_problem(session.post(f"{url}/{call}", timeout=10), 400)
        return
    for body in (b"", b"{}"):
        assert session.post(f"{url}/{call}", data=body, timeout=10).status_code == 200
        assert scripted.seen[-1] == CALLS[call]()


def test_an_update_arrives(url: str, session: requests.Session, scripted: ScriptedReceiver) -> None:
    answer = session.post(f"{url}/update_weights", data=codec.encode(UPDATE), timeout=10)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert scripted.seen[-1] == UPDATE
    assert codec.decode_reply("update_weights", answer.content) == scripted.answer(UPDATE)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_long(url: str, session: requests.Session, chunked: bool) -> None:
    body = b" " * (MAX_NBYTES + 1)
    pieces = (body[i : i + 65536] for i in range(0, len(body), 65536))
    answer = session.post(f"{url}/update_weights", data=pieces if chunked else body, timeout=10)
    assert "max_body_nbytes" in check_problem(answer, 413)["detail"]


@pytest.mark.parametrize("length", [MAX_NBYTES + 1, 10**15, 10**18])
def test_a_length_that_is_too_long_is_refused_before_the_body(url: str, length: int) -> None:
    head = (
        f"POST /update_weights HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    )
    with raw(url) as connection:
        connection.sendall(head.encode())
        assert read_answer(connection)[0] == 413
        assert connection.recv(1) == b""  # and the rest is not waited for


def test_an_endless_chunked_body_is_refused_in_the_middle(url: str) -> None:
    head = (
        f"POST /update_weights HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {TOKEN}\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with raw(url) as connection:
        connection.sendall(head.encode())
        for _ in range(MAX_NBYTES // 65536 + 1):
            connection.sendall(chunk)
        assert read_answer(connection)[0] == 413


def test_a_client_that_goes_away_in_its_body_harms_nobody(
    url: str, session: requests.Session
) -> None:
    head = (
        f"POST /resume HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {TOKEN}\r\n"
        "Content-Length: 10\r\n\r\n{"
    )
    with raw(url) as connection:
        connection.sendall(head.encode())
    assert session.post(f"{url}/resume", timeout=10).status_code == 200


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_takes_its_mode_from_the_url(
    url: str, session: requests.Session, scripted: ScriptedReceiver, mode: str
) -> None:
    assert session.post(f"{url}/pause?mode={mode}", timeout=10).status_code == 200
    assert scripted.seen[-1] == codec.decode_request("pause", json.dumps({"mode": mode}).encode())
    assert session.post(f"{url}/pause", json={"mode": mode}, timeout=10).status_code == 200
    assert scripted.seen[-1] == codec.decode_request("pause", json.dumps({"mode": mode}).encode())


def test_pause_refuses_other_modes(url: str, session: requests.Session) -> None:
    check_problem(session.post(f"{url}/pause?mode=sleep", timeout=10), 400)
    check_problem(session.post(f"{url}/pause?mode=keep", json={"mode": "wait"}, timeout=10), 400)


def test_the_readings(url: str, session: requests.Session) -> None:
    def read(path: str) -> Any:
        answer = session.get(f"{url}/{path}", timeout=10)
        assert answer.status_code == 200
        return answer.json()

    assert read("get_world_size") == {"world_size": 1}
    assert read("is_paused") == {"is_paused": False}
    assert read("health") == {"status": "ok", "state": "READY", "version": 7}
    assert codec.decode_reply("weight_info", session.get(f"{url}/weight_info").content) == STATUS
    assert session.get(f"{url}/update_weights", timeout=10).status_code == 405


def test_health_is_503_where_it_may_not_generate() -> None:
    receiver = ScriptedReceiver()
    receiver.state = structs.replace(STATUS, state="TORN", may_generate=False, update_id="u9")
    with serving(make_app(receiver)) as url:
        document = check_problem(requests.get(f"{url}/health", timeout=10), 503)
    assert document["error"] == "NotReadyError"
    assert document["attributes"] == {"state": "TORN", "update_id": "u9"}


def test_errors_have_the_status_of_their_class() -> None:
    receiver = ScriptedReceiver()
    with serving(make_app(receiver)) as url:

        def finish() -> requests.Response:
            return requests.post(f"{url}/finish_weight_update", headers=AUTHORIZED, timeout=10)

        receiver.error = UpdateConflictError("held", state="UPDATING", update_id="u1")
        assert check_problem(finish(), 409)["attributes"]["update_id"] == "u1"
        receiver.error = RuntimeError("a bug")
        assert check_problem(finish(), 500)["attributes"]["remote_type"] == "RuntimeError"
        receiver.error = None
        assert finish().status_code == 200


def test_metrics() -> None:
    receiver = ScriptedReceiver()
    with serving(make_app(receiver)) as url:
        lines = requests.get(f"{url}/metrics", timeout=10).text.splitlines()
        assert "weightsync_version 7.0" in lines
        assert 'weightsync_state{state="READY"} 1.0' in lines
        assert 'weightsync_state{state="TORN"} 0.0' in lines
        assert 'weightsync_updates_total{result="committed"} 3.0' in lines
        assert not any("last_update" in line for line in lines)
        receiver.last_reply = StepReply(
            state="READY", version=7, nbytes=640, stall_s=0.5, seconds={"load": 0.25}
        )
        lines = requests.get(f"{url}/metrics", timeout=10).text.splitlines()
        assert 'weightsync_last_update_seconds{phase="load"} 0.25' in lines
        assert "weightsync_last_update_bytes 640.0" in lines
        assert "weightsync_last_update_stall_seconds 0.5" in lines


def test_every_post_documents_its_body(url: str, session: requests.Session) -> None:
    document = session.get(f"{url}/openapi.json", timeout=10).json()
    posts = {path: item["post"] for path, item in document["paths"].items() if "post" in item}
    assert set(posts) == {f"/{call}" for call in (*POSTS, *ANNOUNCED_CALLS)}
    for path, operation in posts.items():
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert schema["type"] == "object"
        fields = {f.encode_name for f in structs.fields(ALL_CALLS[path[1:]])}
        assert set(schema.get("properties", {})) == fields
        assert "$ref" not in json.dumps(schema)
    info = posts["/update_weights"]["requestBody"]["content"]["application/json"]["schema"]
    assert len(info["properties"]["update_info"]["anyOf"]) == 3


def test_a_real_receiver_stands_behind_the_routes() -> None:
    loaded: list[str] = []

    def load_weights(pairs: Any) -> set[str]:
        loaded.extend(name for name, _ in pairs)
        return set(loaded)

    receiver = WeightReceiver(load_weights)
    with serving(make_app(receiver)) as url:

        def post(call: str, data: bytes = b"") -> requests.Response:
            return requests.post(f"{url}/{call}", data=data, headers=AUTHORIZED, timeout=10)

        reply = post("init_weight_transfer_engine").json()
        assert reply["status"]["version"] == 0
        check_problem(post("finish_weight_update", b'{"update_id":"nobody"}'), 409)
        assert 400 <= post("update_weights", codec.encode(UPDATE)).status_code < 500
        assert post("pause?mode=keep").json()["paused"] is True
        assert requests.get(f"{url}/is_paused", timeout=10).json() == {"is_paused": True}
        assert post("resume").json().get("paused", False) is False
        status = requests.get(f"{url}/health", timeout=10).json()
        assert status == {"status": "ok", "state": "READY", "version": 0}
        assert "weightsync_version 0.0" in requests.get(f"{url}/metrics", timeout=10).text
    receiver.close()
    assert loaded == []


@pytest.mark.parametrize("place", ["app", "include_router", "router around it"])
def test_dependencies_of_an_app_are_resolved_before_a_control_message(place: str) -> None:
    def refuse() -> None:
        raise HTTPException(418)

    receiver = ScriptedReceiver()
    refusal = Depends(refuse)
    app = FastAPI(dependencies=[refusal] if place == "app" else [])
    router = weight_router(receiver, token=None)
    if place == "router around it":
        outer = APIRouter(dependencies=[refusal])
        outer.include_router(router)
        router = outer
    app.include_router(router, dependencies=[refusal] if place == "include_router" else [])
    with serving(app) as url:
        answers = [requests.post(f"{url}/{call}", json={}, timeout=10) for call in POSTS]
        answers.append(requests.get(f"{url}/weight_info", timeout=10))
    assert [answer.status_code for answer in answers] == [418] * len(answers)
    assert receiver.seen == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_a_hook_raises_that_is_no_exception_is_named_and_the_server_goes_on(
    kind: type[BaseException],
) -> None:
    raised: list[BaseException] = []

    def load(pairs: Iterable[tuple[str, Any]]) -> list[str]:
        names = [name for name, _ in pairs]
        if not raised:
            raised.append(kind("of the hook"))
            raise raised[0]
        return names

    receiver = WeightReceiver(load)
    with (
        serving(make_app(receiver)) as url,
        connect(nn.Linear(4, 4), url, token=TOKEN, timeout_s=30) as sender,
    ):
        with pytest.raises(RemoteError, match=f"the peer raised {kind.__name__}: of the hook"):
            sender.send_weights()
        assert receiver.status().version == 0
        assert sender.send_weights().version == receiver.status().version == 1
    receiver.close()
