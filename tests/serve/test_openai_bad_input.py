"""What the OpenAI-compatible routes refuse, and how they say it; nothing makes them fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import response_schema_conformance

from tests.serve.scripted_engine import MAX_BODY_NBYTES, MODEL, ScriptedEngine, app_of
from tests.server.live import serving
from weightsync.errors import ConfigError
from weightsync.serve.completions import read_prompts
from weightsync.serve.model_files import TINY_VISION, byte_tokenizer, load_tokenizer
from weightsync.serve.openai_protocol import REFUSED, ChatMessage
from weightsync.serve.openai_routes import chat_prompt, render
from weightsync.serve.requests import RequestError
from weightsync.serve.text import TokenizerService

WAIT_S = 60


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(app_of(ScriptedEngine())) as served:
        yield served


def post(url: str, call: str, **fields: Any) -> requests.Response:
    common: dict[str, Any] = {"model": MODEL}
    if call == "completions":
        common["prompt"] = "hi"
    else:
        common["messages"] = [{"role": "user", "content": "hi"}]
    return requests.post(f"{url}/v1/{call}", json=common | fields, timeout=WAIT_S)


CALLS = ["completions", "chat/completions"]
BAD = [
    ({"n": 0}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"seed": 1.5}, "seed"),
    ({"stream": 3}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"echo": True}, "echo"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"top_k": 5}, "top_k"),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("fields", "param"), BAD)
def test_the_error_names_the_field(url: str, call: str, fields: Any, param: str) -> None:
    answer = post(url, call, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt"),
        ({"prompt": [3, [4]]}, "prompt"),
        ({"prompt": [[4], [-1]]}, "prompt[1][0]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [[]]}, None),
        ({"prompt": [9999]}, None),
        ({"max_tokens": 512}, None),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_completions_refuse(url: str, fields: Any, param: str | None) -> None:
    answer = post(url, "completions", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": user({"type": "input_audio"})}, "messages[0].content[0].type"),
        (
            {"messages": user({"type": "image_url", "image_url": {"url": "data:,"}})},
            "messages",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"max_completion_tokens": 512}, None),
    ],
)
def test_chats_refuse(url: str, fields: Any, param: str | None) -> None:
    answer = post(url, "chat/completions", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize("call", CALLS)
def test_what_asks_for_nothing_is_no_reason_to_refuse(url: str, call: str) -> None:
    neutral = {name: values[-1] for name, values in REFUSED.items()}
    answer = post(url, call, user="me", metadata={}, store=False, service_tier="auto", **neutral)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[" * 100_000, b"\xff", b'"x"'])
def test_bodies_that_are_no_object(url: str, call: str, body: bytes) -> None:
    answer = requests.post(f"{url}/v1/{call}", data=body, timeout=WAIT_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, None)


@pytest.mark.parametrize("call", CALLS)
def test_a_body_that_is_too_long(url: str, call: str) -> None:
    answer = requests.post(f"{url}/v1/{call}", data=b" " * (MAX_BODY_NBYTES + 1), timeout=WAIT_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "nope", 404, None),
        ("GET", "models/a%0Ab", 404, None),
        ("GET", "completions", 405, "POST"),
        ("POST", "models", 405, "GET"),
    ],
)
def test_what_is_not_there_is_said_in_openais_shape(
    url: str, method: str, path: str, status: int, allow: str | None
) -> None:
    answer = requests.request(method, f"{url}/v1/{path}", timeout=WAIT_S)
    assert (answer.status_code, answer.headers.get("allow")) == (status, allow)
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_prompts_are_counted_before_any_is_encoded() -> None:
    engine = ScriptedEngine()
    texts = TokenizerService(*engine.reader)
    encoded: list[str] = []
    encode = texts.encode

    def counting(text: str, *, add_special_tokens: bool = True) -> list[int]:
        encoded.append(text)
        return encode(text, add_special_tokens=add_special_tokens)

    texts.encode = counting  # type: ignore[method-assign] # counts, and passes on
    for prompts, message in ((["a"] * 1025, "at a time"), (["a" * 9999] * 9, "prompt 0 has 9999")):
        with pytest.raises(ConfigError, match=message):
            asyncio.run(read_prompts(texts, engine.card, prompts, n=1, max_new_tokens=1))
    assert len(encoded) == 1


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ 'a' % 1 }}"])
def test_a_template_that_fails_is_a_refusal(template: str) -> None:
    texts = TokenizerService(byte_tokenizer())
    texts.tokenizer.chat_template = template
    with pytest.raises(RequestError, match="does not take these messages"):
        render(texts, [{"role": "user", "content": "hi"}])


def test_a_model_of_images_gets_parts_even_of_text_alone() -> None:
    tokenizer, processor = load_tokenizer(TINY_VISION)
    template = (
        "{% for m in messages %}{% for part in m.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    tokenizer.chat_template, processor.chat_template = None, template
    texts = TokenizerService(tokenizer, processor)
    prompt = asyncio.run(chat_prompt(texts, [ChatMessage(role="user", content="What?")]))
    assert texts.decode(prompt.token_ids) == "What?"


def test_nothing_that_fits_the_document_makes_it_fail(url: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    seen: dict[str, set[int]] = {}
    for result in schema.get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()

        @settings(
            max_examples=25,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def call(case: Any) -> None:
            answer = case.call(timeout=WAIT_S)
            seen.setdefault(case.operation.label, set()).add(answer.status_code)
            case.validate_response(answer, checks=[not_a_server_error, response_schema_conformance])

        call()
    assert len(seen) == 5
    assert all(200 in statuses or 404 in statuses for statuses in seen.values()), seen
