"""The real `openai` client against the routes: whole and streamed, errors, and hanging up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import requests

from tests.serve.scripted_engine import (
    END_ID,
    MAX_LENGTH,
    MODEL,
    TOKENIZER,
    ScriptedEngine,
    app_of,
    logprob_of,
    say,
    tokens_of,
)
from tests.server.live import serving
from weightsync.errors import NotReadyError

WAIT_S = 60.0
CHAT: Any = [{"role": "user", "content": "hi"}]


@contextmanager
def client_of(engine: ScriptedEngine) -> Iterator[openai.OpenAI]:
    with (
        serving(app_of(engine)) as url,
        openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S
        ) as client,
    ):
        yield client


def asynchronous_client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def until_running(engine: ScriptedEngine) -> None:
    deadline = time.monotonic() + WAIT_S
    while not engine.running:
        assert time.monotonic() < deadline, "no job has begun"
        time.sleep(0.01)


def until_idle(engine: ScriptedEngine) -> None:
    deadline = time.monotonic() + WAIT_S
    while engine.running:
        assert time.monotonic() < deadline, "the job still runs"
        time.sleep(0.01)


def extra(choice: Any, name: str) -> Any:
    return choice.model_extra[name]


def span(version: int, start: int, stop: int) -> dict[str, int]:
    return {"version": version, "start": start, "stop": stop}


def test_models() -> None:
    with client_of(ScriptedEngine()) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        model = client.models.retrieve(MODEL)
        assert (model.owned_by, extra(model, "max_model_len")) == ("weightsync", MAX_LENGTH)
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.models.retrieve("some/other")


def test_a_completion() -> None:
    engine = ScriptedEngine(script=say("a€"), versions=lambda place: 4 + place // 3)
    with client_of(engine) as client:
        answer = client.completions.create(
            model=MODEL, prompt="hi", temperature=0, top_p=0.5, seed=-1, max_tokens=9, logprobs=2
        )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, answer.model) == ("a€", "stop", MODEL)
    assert extra(choice, "weight_versions") == [span(4, 0, 3), span(5, 3, 5)]
    assert extra(choice, "prompt_version") == 7
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 5)
    assert answer.usage.total_tokens == 7
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "<eos>"]
    assert choice.logprobs.token_logprobs == [logprob_of(place) for place in range(5)]
    assert choice.logprobs.text_offset == [0, 1, 1, 1, 2]
    assert choice.logprobs.top_logprobs is not None
    tops = choice.logprobs.top_logprobs
    assert [len(top) for top in tops] == [3] * 5  # the chosen one is none of the two likeliest
    assert all(t in top for t, top in zip(choice.logprobs.tokens, tops, strict=True))
    (job,) = engine.jobs
    assert (job.prompt, job.max_new_tokens, job.stop_at_end) == (tokens_of("hi"), 9, True)
    assert (
        job.sampling_params.temperature,
        job.sampling_params.top_p,
        job.sampling_params.logprobs,
    ) == (0, 0.5, 2)
    assert job.sampling_params.seed == 2**63 - 1


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("hi", ["hi"]),
        (["hi", "you"], ["hi", "you"]),
        (tokens_of("hi"), ["hi"]),
        ([tokens_of("hi"), tokens_of("you")], ["hi", "you"]),
    ],
)
def test_every_kind_of_prompt(prompt: Any, told: list[str]) -> None:
    engine = ScriptedEngine(script=lambda job, index: [*job.prompt, *tokens_of(f"{index}"), END_ID])
    with client_of(engine) as client:
        answer = client.completions.create(
            model=MODEL, prompt=prompt, n=2, extra_body={"return_token_ids": True}
        )
    wanted = [f"{text}{index}" for text in told for index in (0, 1)]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == list(range(len(wanted)))
    assert extra(answer.choices[0], "token_ids") == [*tokens_of("hi0"), END_ID]
    assert engine.jobs[0].max_new_tokens == 16


def test_a_streamed_completion_is_the_whole_one_in_pieces() -> None:
    engine = ScriptedEngine(script=say("a€bcSTOP!!"), versions=lambda place: place // 4)
    with client_of(engine) as client:
        asked: Any = {"model": MODEL, "prompt": ["x", "y"], "stop": "STOP", "logprobs": 0, "n": 2}
        whole = client.completions.create(**asked)
        chunks = list(
            client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
    *parts, last = chunks
    assert last.choices == []
    assert last.usage == whole.usage
    assert {chunk.id for chunk in chunks} == {last.id}
    for choice in whole.choices:
        mine = [part.choices[0] for part in parts if part.choices[0].index == choice.index]
        assert "".join(part.text for part in mine) == choice.text == "a€bc"
        assert [part.finish_reason for part in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == choice.finish_reason == "stop"
        told = [part.logprobs.tokens for part in mine if part.logprobs and part.logprobs.tokens]
        assert choice.logprobs is not None
        assert [token for tokens in told for token in tokens] == choice.logprobs.tokens
        spans = [found for part in mine for found in extra(part, "weight_versions")]
        versions = [s["version"] for s in spans for _ in range(s["start"], s["stop"])]
        assert versions == [place // 4 for place in range(10)]
        assert [s["start"] for s in spans[1:]] == [s["stop"] for s in spans[:-1]]
    assert {index for _, index in engine.cancelled} == {0, 1}


def test_a_chat() -> None:
    engine = ScriptedEngine(script=say("hey"))
    messages: Any = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
    ]
    with client_of(engine) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, n=2, logprobs=True, top_logprobs=1
        )
    prompt = "system: be kind\nuser: a\nb\nassistant: c\nassistant:"
    assert TOKENIZER.decode(engine.jobs[0].prompt) == prompt
    assert engine.jobs[0].max_new_tokens == MAX_LENGTH - len(prompt)
    assert [choice.message.content for choice in answer.choices] == ["hey", "hey"]
    assert answer.choices[1].message.role == "assistant"
    assert extra(answer.choices[1], "weight_versions") == [span(7, 0, 4)]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [one.token for one in logprobs.content] == ["h", "e", "y", "<eos>"]
    assert logprobs.content[0].bytes == [ord("h")]
    assert logprobs.content[0].logprob == logprob_of(0)
    assert logprobs.content[0].top_logprobs[0].token == TOKENIZER.decode([3])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_a_streamed_chat_with_the_clients_own_helper() -> None:
    with (
        client_of(ScriptedEngine(script=say("h€y"))) as client,
        client.chat.completions.stream(
            model=MODEL, messages=CHAT, n=1, stream_options={"include_usage": True}
        ) as stream,
    ):
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "h€y"
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert final.usage.completion_tokens == 6
    deltas = [event.delta for event in events if event.type == "content.delta"]
    assert [delta for delta in deltas if delta] == ["h", "€", "y"]


def test_the_first_chunk_of_each_choice_has_a_role() -> None:
    with client_of(ScriptedEngine(script=say("ab"))) as client:
        chunks = list(
            client.chat.completions.create(
                model=MODEL, messages=CHAT, n=2, stream=True, logprobs=True, max_completion_tokens=2
            )
        )
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [choice.delta.role for choice in mine] == ["assistant", None]
        assert [choice.delta.content for choice in mine] == ["a", "b"]
        assert [choice.finish_reason for choice in mine] == [None, "length"]
        assert [extra(choice, "weight_versions") for choice in mine] == [
            [span(7, 0, 1)],
            [span(7, 1, 2)],
        ]
        assert all(choice.logprobs is not None for choice in mine)
    assert all(chunk.usage is None for chunk in chunks)


def test_ignore_eos_goes_on_after_the_end() -> None:
    engine = ScriptedEngine(script=lambda _job, _index: [*tokens_of("a"), END_ID, *tokens_of("b")])
    with client_of(engine) as client:
        answer = client.completions.create(
            model=MODEL, prompt="x", max_tokens=3, extra_body={"ignore_eos": True}
        )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "length")


def test_errors_are_raised_as_the_clients_own() -> None:
    with client_of(ScriptedEngine()) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="gpt-4", prompt="x")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        tools: Any = [{"type": "function", "function": {"name": "f"}}]
        with pytest.raises(openai.BadRequestError, match="tools is not supported") as refused:
            client.chat.completions.create(model=MODEL, messages=CHAT, tools=tools)
        assert refused.value.param == "tools"
        with pytest.raises(openai.BadRequestError, match="asks for 512 more"):
            client.completions.create(model=MODEL, prompt="x", max_tokens=512)
        with pytest.raises(openai.APIStatusError) as long:
            client.completions.create(model=MODEL, prompt="x" * (1 << 20))
        assert long.value.status_code == 413


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine_before_the_first_token(stream: bool) -> None:
    engine = ScriptedEngine(error=NotReadyError("torn by u1", state="TORN"))
    with client_of(engine) as client:
        with pytest.raises(openai.InternalServerError, match="torn by u1") as torn:
            client.completions.create(model=MODEL, prompt="x", stream=stream)
        assert (torn.value.status_code, torn.value.code) == (503, "not_ready")
        assert torn.value.response.headers["retry-after"] == "1"
        engine.error = RuntimeError("a bug")
        with pytest.raises(openai.InternalServerError, match="RuntimeError: a bug") as bug:
            client.chat.completions.create(model=MODEL, messages=CHAT, stream=stream)
        assert bug.value.status_code == 500


def test_an_error_in_the_middle_of_a_stream() -> None:
    engine = ScriptedEngine(error=NotReadyError("torn by u1", state="TORN"), fail_at=2)
    with client_of(engine) as client:
        stream = client.completions.create(model=MODEL, prompt="x", stream=True)
        seen: list[str] = []
        with pytest.raises(openai.APIError, match="torn by u1") as torn:
            seen.extend(chunk.choices[0].text for chunk in stream)
    assert torn.value.code == "not_ready"
    assert seen == ["h", "e"]


def test_the_stream_on_the_wire() -> None:
    with serving(app_of(ScriptedEngine(script=say("a")))) as url:
        body = {"model": MODEL, "messages": CHAT, "stream": True}
        answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT_S)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert "content-length" not in answer.headers
    *events, done, rest = answer.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * 2
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_hanging_up_in_a_stream_cancels_its_jobs(prompt: Any) -> None:
    engine = ScriptedEngine(hang_at=2)
    with client_of(engine) as client:
        stream = client.completions.create(model=MODEL, prompt=prompt, stream=True)
        next(stream)
        assert engine.running == len(engine.jobs)
        stream.close()
        until_idle(engine)
    assert len(engine.closed) == len(engine.jobs)


def test_hanging_up_before_the_first_token_cancels_the_job() -> None:
    engine = ScriptedEngine(hang_at=0)

    async def hang_up(url: str) -> None:
        async with asynchronous_client_of(url) as client:
            for stream in (False, True):
                asked: asyncio.Task[object] = asyncio.ensure_future(
                    client.chat.completions.create(model=MODEL, messages=CHAT, stream=stream)
                )
                await asyncio.to_thread(until_running, engine)
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
                await asyncio.to_thread(until_idle, engine)

    with serving(app_of(engine)) as url:
        asyncio.run(hang_up(url))
    assert len(engine.closed) == 2


def test_many_streams_of_the_asynchronous_client() -> None:
    engine = ScriptedEngine(script=lambda job, _index: [*job.prompt, END_ID])

    async def read(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=f"prompt {number}", stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run(url: str) -> list[str]:
        async with asynchronous_client_of(url) as client:
            whole = await client.chat.completions.create(model=MODEL, messages=CHAT)
            assert whole.choices[0].message.content == "user: hi\nassistant:"
            return await asyncio.gather(*(read(client, number) for number in range(50)))

    with serving(app_of(engine)) as url:
        assert asyncio.run(run(url)) == [f"prompt {number}" for number in range(50)]
    assert engine.running == 0
