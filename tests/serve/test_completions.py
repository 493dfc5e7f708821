"""From an engine's tokens to completions: stops, versions, several prompts, and hanging up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.serve.scripted_engine import END_ID, TOKENIZER, ScriptedEngine, say, tokens_of
from weightsync.errors import ConfigError, NotReadyError, PeerLostError
from weightsync.serve.completions import (
    GenerationRequest,
    Prompt,
    StreamDelta,
    complete,
    stream_deltas,
)
from weightsync.serve.messages import EngineRequest
from weightsync.serve.requests import VersionSpan, spans
from weightsync.serve.text import TokenizerService

TEXTS = TokenizerService(TOKENIZER)
WAIT_S = 60


def work(
    *prompts: str, stops: tuple[str, ...] = (), n: int = 1, room: int = 64
) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        prompts=[Prompt(token_ids=tokens_of(prompt)) for prompt in prompts or ("hi",)],
        max_new_tokens=room,
        n=n,
        stops=stops,
    )


def whole(engine: ScriptedEngine, asked: GenerationRequest) -> list[StreamDelta]:
    return asyncio.run(asyncio.wait_for(complete(engine, TEXTS, asked), WAIT_S))


def listed(engine: ScriptedEngine, asked: GenerationRequest) -> list[StreamDelta]:
    async def run() -> list[StreamDelta]:
        return [increment async for increment in stream_deltas(engine, TEXTS, asked)]

    return asyncio.run(asyncio.wait_for(run(), WAIT_S))


def echo(job: EngineRequest, index: int) -> list[int]:
    return [*job.prompt, *tokens_of(str(index)), END_ID]


def test_prompts_and_completions_come_in_order() -> None:
    engine = ScriptedEngine(script=echo)
    found = whole(engine, work("a", "long", "bcd", n=2))
    assert [c.text for c in found] == ["a0", "a1", "long0", "long1", "bcd0", "bcd1"]
    assert [(c.prompt_index, c.index) for c in found] == [(p, i) for p in range(3) for i in (0, 1)]
    assert {c.finish_reason for c in found} == {"stop"}
    assert found[0].token_ids == [*tokens_of("a0"), END_ID]
    assert len({job.request_id for job in engine.jobs}) == 3
    assert engine.running == 0
    assert engine.closed == []


def test_versions_are_spans_over_all_tokens() -> None:
    engine = ScriptedEngine(script=say("abcde"), versions=lambda place: 4 + place // 2)
    engine.prompt_version = 3
    parts = listed(engine, work())
    assert [part.text for part in parts] == ["a", "b", "c", "d", "e", ""]
    assert parts[3].weight_versions == [VersionSpan(version=5, start=3, stop=4)]
    completion = whole(engine, work())[0].completion(logprobs=False)
    assert completion.weight_versions == [
        VersionSpan(version=4, start=0, stop=2),
        VersionSpan(version=5, start=2, stop=4),
        VersionSpan(version=6, start=4, stop=6),
    ]
    assert completion.prompt_version == 3
    assert completion.logprobs is None


def test_half_a_character_comes_with_all_its_tokens() -> None:
    parts = listed(ScriptedEngine(script=say("a€"), versions=lambda place: place), work())
    assert [(part.text, part.start, len(part.tokens)) for part in parts] == [
        ("a", 0, 1),
        ("€", 1, 3),
        ("", 4, 1),
    ]
    assert [span.version for span in parts[1].weight_versions] == [1, 2, 3]


def test_a_stop_text_cancels_its_completion_and_keeps_its_tokens() -> None:
    engine = ScriptedEngine(
        script=lambda _job, index: tokens_of("xxSTOPyyyyyyyyyyyyyyyyyy"[index:])
    )
    found = whole(engine, work(stops=("STOP",), n=2))
    assert [c.text for c in found] == ["xx", "x"]
    assert [c.finish_reason for c in found] == ["stop", "stop"]
    assert [c.token_ids for c in found] == [tokens_of("xxSTOP"), tokens_of("xSTOP")]
    assert sorted(engine.cancelled) == [("r-0", 0), ("r-0", 1)]
    assert engine.running == 0


def test_one_stops_and_the_other_goes_on() -> None:
    texts = ["a.bc", "abcdefgh"]
    engine = ScriptedEngine(script=lambda _job, index: [*tokens_of(texts[index]), END_ID])
    found = whole(engine, work(stops=(".",), n=2))
    assert [(c.text, c.finish_reason) for c in found] == [("a", "stop"), ("abcdefgh", "stop")]
    assert engine.cancelled == [("r-0", 0)]
    assert engine.closed == []


def test_the_last_token_may_complete_the_stop_text() -> None:
    found = whole(ScriptedEngine(script=say("ab.")), work(stops=("b.",), room=3))
    assert (found[0].text, found[0].finish_reason) == ("a", "stop")


def test_length_and_abort_show_what_was_held_back() -> None:
    for room, script, reason in ((3, say("abST"), "length"), (9, None, "abort")):
        engine = ScriptedEngine(script=script or (lambda _job, _index: tokens_of("abS")))
        found = whole(engine, work(stops=("STOP",), room=room))
        assert (found[0].text, found[0].finish_reason) == ("abS", reason)


def test_closing_early_cancels_every_prompt() -> None:
    engine = ScriptedEngine(hang_at=2)

    async def run() -> None:
        source = stream_deltas(engine, TEXTS, work("a", "b", "c"))
        assert (await anext(source)).text == "h"
        assert engine.running == 3
        await source.aclose()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert engine.running == 0
    assert sorted(engine.closed) == ["r-0", "r-1", "r-2"]


def test_cancelling_the_task_ends_every_prompt() -> None:
    engine = ScriptedEngine(hang_at=2)

    async def run() -> None:
        task = asyncio.create_task(complete(engine, TEXTS, work("a", "b")))
        while engine.running < 2:  # noqa: ASYNC110 # it tells by its count
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert engine.running == 0


def test_one_failing_prompt_ends_the_others() -> None:
    engine = ScriptedEngine(hang_at=2)
    error = NotReadyError("torn", state="TORN")

    def script(job: EngineRequest, index: int) -> list[int]:
        if job.request_id == "r-1":
            raise error
        return tokens_of("abc")

    engine.script = script
    with pytest.raises(NotReadyError, match="torn"):
        whole(engine, work("a", "b", "c"))
    assert engine.running == 0
    assert sorted(engine.closed) == ["r-0", "r-2"]


def test_an_engine_that_is_lost_is_not_ready() -> None:
    with pytest.raises(NotReadyError, match="does not answer: worker 3 died"):
        whole(ScriptedEngine(error=PeerLostError("worker 3 died"), fail_at=1), work())


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (lambda: work("a", n=1025), "send 1 to 1024"),
        (lambda: work("a" * 449), "449 tokens and asks for 64 more, the model has room for 512"),
        (lambda: GenerationRequest(request_id="r", prompts=[], max_new_tokens=1), "0 prompts"),
        (
            lambda: GenerationRequest(
                request_id="r", prompts=[Prompt(token_ids=[9999])], max_new_tokens=1
            ),
            "prompt 0 is empty or has token ids outside 0 to",
        ),
        (
            lambda: GenerationRequest(
                request_id="r", prompts=[Prompt(token_ids=[])], max_new_tokens=1
            ),
            "prompt 0 is empty",
        ),
    ],
)
def test_what_the_model_cannot_take_is_refused_before(
    asked: Callable[[], GenerationRequest], text: str
) -> None:
    engine = ScriptedEngine()
    with pytest.raises(ConfigError, match=text):
        whole(engine, asked())
    assert engine.jobs == []


def test_spans() -> None:
    assert spans([]) == []
    assert [(s.version, s.start, s.stop) for s in spans([1, 1, 2, 1], 5)] == [
        (1, 5, 7),
        (2, 7, 8),
        (1, 8, 9),
    ]
