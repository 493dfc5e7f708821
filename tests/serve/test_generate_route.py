"""`/generate` over HTTP: its struct, its errors, and clients that hang up."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import requests

from tests.serve.scripted_engine import (
    END_ID,
    MAX_BODY_NBYTES,
    ScriptedEngine,
    app_of,
    logprob_of,
    say,
    tokens_of,
)
from tests.server.live import raw, serving
from weightsync.errors import NotReadyError, ProtocolError
from weightsync.serve.requests import VersionSpan, decode_request, decode_response

WAIT_S = 60


@contextmanager
def engine_at(**options: Any) -> Iterator[tuple[ScriptedEngine, str]]:
    engine = ScriptedEngine(**options)
    with serving(app_of(engine)) as url:
        yield engine, url


def generate(url: str, **fields: Any) -> requests.Response:
    return requests.post(f"{url}/generate", json={"prompts": ["hi"]} | fields, timeout=WAIT_S)


def until_running(engine: ScriptedEngine, jobs: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while engine.running < jobs:
        assert time.monotonic() < deadline, f"{engine.running} of {jobs} jobs run"
        time.sleep(0.01)


def until_idle(engine: ScriptedEngine) -> None:
    deadline = time.monotonic() + WAIT_S
    while engine.running:
        assert time.monotonic() < deadline, "the job still runs"
        time.sleep(0.01)


def test_text_and_tokens_in_and_tokens_with_versions_out() -> None:
    with engine_at(script=say("abc"), versions=lambda place: 5 + place // 2) as (engine, url):
        answer = generate(url, prompts=["hi", [70, 71]], n=2, logprobs=True, seed=3, top_p=0.5)
        found = decode_response(answer.content).completions
    assert [c.prompt_index for c in found] == [0, 0, 1, 1]
    assert found[0].text == "abc"
    assert found[0].token_ids == [*tokens_of("abc"), END_ID]
    assert found[0].logprobs == [logprob_of(place) for place in range(4)]
    assert found[0].weight_versions == [
        VersionSpan(version=5, start=0, stop=2),
        VersionSpan(version=6, start=2, stop=4),
    ]
    assert found[0].prompt_version == 7
    first, second = engine.jobs
    assert (first.prompt, second.prompt, first.n) == (tokens_of("hi"), [70, 71], 2)
    assert (
        first.sampling_params.seed,
        first.sampling_params.top_p,
        first.sampling_params.logprobs,
    ) == (3, 0.5, 0)
    assert first.max_new_tokens == 16


def test_a_stop_text_ends_the_completion() -> None:
    with engine_at(script=say("one, two, three")) as (engine, url):
        found = generate(url, stop=[", th"]).json()["completions"][0]
    assert (found["text"], found["finish_reason"]) == ("one, two", "stop")
    assert found["token_ids"] == tokens_of("one, two, th")
    assert engine.cancelled == [(engine.jobs[0].request_id, 0)]
    assert found["logprobs"] is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b'{"prompts":["\xff"]}',
        b'{"prompts":["a"],"top_k":3}',
        b"9" * 999,
    ],
)
def test_what_is_no_request_is_a_problem_document(body: bytes) -> None:
    with engine_at() as (engine, url):
        answer = requests.post(f"{url}/generate", data=body, timeout=WAIT_S)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["error"] == "ProtocolError"
    assert engine.jobs == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b'{"prompts": ["\xff"]}', "body of /generate"),
        (b'{"prompts": []}', r"length >= 1 - at `\$.prompts`"),
        (b'{"prompts": "text"}', r"Expected `array`, got `str` - at `\$.prompts`"),
        (b'{"prompts": [[]]}', r"\$.prompts\[0\]"),
        (b'{"prompts": [[-1]]}', r">= 0 - at `\$.prompts\[0\]\[0\]`"),
        (b'{"n": 2}', "missing required field `prompts`"),
        (b'{"prompts": ["a"], "prompt": "b"}', "unknown field `prompt`"),
        (b'{"prompts": ["a"], "n": 0}', r">= 1 - at `\$.n`"),
        (b'{"prompts": ["a"], "temperature": -1}', r">= 0.0 - at `\$.temperature`"),
        (b'{"prompts": ["a"], "temperature": NaN}', "malformed"),
        (b'{"prompts": ["a"], "top_p": 0}', r"> 0.0 - at `\$.top_p`"),
        (b'{"prompts": ["a"], "max_new_tokens": 1e9}', r"\$.max_new_tokens"),
        (b'{"prompts": ["a"], "stop": [""]}', r"\$.stop\[0\]"),
    ],
)
def test_a_body_that_is_no_request_names_the_field(body: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode_request(body)


def test_an_answer_that_is_none_of_ours_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match=r"not a response of /generate: .*`completions`"):
        decode_response(b"{}")


def test_what_the_model_cannot_take_is_a_problem_document() -> None:
    with engine_at() as (engine, url):
        for fields in (
            {"max_new_tokens": 600},
            {"prompts": [[999]]},
            {"n": 256, "prompts": ["a"] * 5},
        ):
            answer = generate(url, **fields)
            assert (answer.status_code, answer.json()["error"]) == (400, "ConfigError")
    assert engine.jobs == []


def test_a_body_that_is_too_long() -> None:
    with engine_at() as (_, url):
        answer = requests.post(f"{url}/generate", data=b" " * (MAX_BODY_NBYTES + 1), timeout=WAIT_S)
    assert answer.status_code == 413


def test_errors_of_the_engine() -> None:
    with engine_at(error=NotReadyError("torn by u1", state="TORN", update_id="u1")) as (_, url):
        answer = generate(url)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["attributes"] == {"state": "TORN", "update_id": "u1"}
    with engine_at(error=RuntimeError("a bug"), fail_at=2) as (engine, url):
        answer = generate(url)
        assert (answer.status_code, answer.json()["error"]) == (500, "RemoteError")
    assert engine.running == 0


def test_a_client_that_hangs_up_cancels_its_jobs() -> None:
    with engine_at(hang_at=1) as (engine, url):
        body = json.dumps({"prompts": ["a", "b", "c"]}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
        with raw(url) as connection:
            connection.sendall(head.encode() + body)
            until_running(engine, 3)
        until_idle(engine)
        assert len(engine.closed) == len(engine.jobs) == 3
        engine.hang_at = None
        assert generate(url).status_code == 200


def test_a_client_that_leaves_in_its_body_starts_nothing() -> None:
    with engine_at() as (engine, url):
        with raw(url) as connection:
            connection.sendall(b"POST /generate HTTP/1.1\r\nHost: h\r\nContent-Length: 99\r\n\r\n{")
            connection.shutdown(socket.SHUT_RDWR)
        assert generate(url).status_code == 200
    assert len(engine.jobs) == 1


def test_two_hundred_at_once_are_all_answered() -> None:
    def ask(number: int) -> tuple[int, list[str]]:
        answer = generate(url, prompts=[f"{number} " * 40], n=2, max_new_tokens=64)
        return answer.status_code, [c["text"] for c in answer.json()["completions"]]

    with engine_at(script=lambda job, _index: [*job.prompt[:5], END_ID]) as (engine, url):
        with ThreadPoolExecutor(200) as pool:
            answers = list(pool.map(ask, range(200)))
        assert answers == [(200, [(f"{number} " * 40)[:5]] * 2) for number in range(200)]
        assert engine.running == 0


def test_the_event_loop_answers_while_a_long_prompt_is_encoded() -> None:
    text = "weights " * 30_000  # refused in the end, but encoded first
    with engine_at() as (_, url), ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(generate, url, prompts=[text]) for _ in range(2)]
        while not all(one.done() for one in slow):
            assert generate(url).status_code == 200
        assert {one.result().status_code for one in slow} == {400}


def test_the_document_describes_every_body() -> None:
    with engine_at() as (_, url):
        document = requests.get(f"{url}/openapi.json", timeout=WAIT_S).json()
    posts = {path: item["post"] for path, item in document["paths"].items() if "post" in item}
    assert set(posts) == {"/generate", "/v1/completions", "/v1/chat/completions"}
    for operation in posts.values():
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert schema["type"] == "object"
        assert "$ref" not in json.dumps(schema)
        assert "default" in operation["responses"]
