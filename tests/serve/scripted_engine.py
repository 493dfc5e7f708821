"""An engine with scripted tokens, for tests of the HTTP layer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

from weightsync.serve.adapter_leases import AdapterLeases
from weightsync.serve.generate_route import generation_router
from weightsync.serve.messages import (
    NO_LOGPROBS,
    EngineOutput,
    EngineRequest,
    EngineStats,
    FinishReason,
    ModelCard,
)
from weightsync.serve.model import make_tiny_model
from weightsync.serve.text import TokenizerService

MODEL = "scripted"
MAX_LENGTH = 512
MAX_BODY_NBYTES = 1 << 20

TOKENIZER = make_tiny_model().tokenizer
END_ID: int = TOKENIZER.eos_token_id


def tokens_of(text: str) -> list[int]:
    """The tokens of a text, one a byte."""
    ids: list[int] = TOKENIZER(text)["input_ids"]
    return ids


def say(text: str) -> Callable[[EngineRequest, int], list[int]]:
    """A script that gives every completion the same text, and the end token."""
    return lambda _job, _index: [*tokens_of(text), END_ID]


@dataclass
class ScriptedEngine:
    """Yields the tokens of `script(job, index)`; token `i` is of version `versions(i)`.

    Before token `fail_at` it raises `error`; before token `hang_at` it waits without end.
    `reader` is the tokenizer and, for a model that takes images, its processor.
    """

    script: Callable[[EngineRequest, int], Sequence[int]] = field(
        default_factory=lambda: say("hello")
    )
    versions: Callable[[int], int] = lambda _place: 7
    prompt_version: int = 7
    error: Exception | None = None
    fail_at: int = 0
    hang_at: int | None = None
    max_length: int = MAX_LENGTH
    reader: tuple[Any, Any] = (TOKENIZER, None)
    jobs: list[EngineRequest] = field(default_factory=list)
    cancelled: list[tuple[str, int]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    running: int = 0

    @property
    def card(self) -> ModelCard:
        return ModelCard(
            name=MODEL,
            directory="tiny",
            vocab_size=len(self.reader[0]),
            max_length=self.max_length,
            end_ids=[END_ID],
            image_token_id=getattr(self.reader[1], "image_token_id", None),
        )

    async def generate(
        self, requests: Sequence[EngineRequest]
    ) -> AsyncGenerator[EngineOutput, None]:
        for request in requests:
            if request.adapter is not None:
                AdapterLeases(base=MODEL).find(request.adapter, request.adapter_version)
        self.jobs.extend(requests)
        self.running += len(requests)
        going = {job.request_id: self._deltas(job) for job in requests}
        try:
            while going:
                for request_id, deltas in list(going.items()):
                    try:
                        delta = await anext(deltas, None)
                    except Exception:
                        del going[request_id]
                        raise
                    if delta is None:
                        del going[request_id]
                    else:
                        yield delta
        except BaseException:
            self.closed.extend(going)
            raise
        finally:
            await asyncio.sleep(0)
            self.running -= len(requests)

    def cancel(self, request_id: str, index: int) -> None:
        self.cancelled.append((request_id, index))

    async def stats(self) -> list[EngineStats]:
        return [EngineStats(running=self.running)]

    async def _deltas(self, job: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        said = {index: list(self.script(job, index)) for index in range(job.n)}
        place = 0
        while said:
            await asyncio.sleep(0)
            if place == self.hang_at:
                await asyncio.Event().wait()
            if self.error is not None and place == self.fail_at:
                raise self.error
            for index in list(said):
                delta = self._delta(job, index, place, said[index])
                if delta.finish_reason is not None:
                    del said[index]
                yield delta
            place += 1

    def _delta(self, job: EngineRequest, index: int, place: int, said: list[int]) -> EngineOutput:
        def made(token: int | None, finish_reason: FinishReason | None) -> EngineOutput:
            wants = job.sampling_params.logprobs
            return EngineOutput(
                request_id=job.request_id,
                index=index,
                token=token,
                version=self.versions(place),
                prompt_version=self.prompt_version,
                logprob=None if wants == NO_LOGPROBS else logprob_of(place),
                top=[(3 + i, logprob_of(i)) for i in range(wants)],
                finish_reason=finish_reason,
            )

        if (job.request_id, index) in self.cancelled or place == len(said):
            return made(None, "abort")
        token = said[place]
        if token == END_ID and job.stop_at_end:
            return made(token, "stop")
        return made(token, "length" if place + 1 == job.max_new_tokens else None)


def logprob_of(place: int) -> float:
    """The log-probability of the token at a place."""
    return -0.25 * (place + 1)


def app_of(engine: ScriptedEngine) -> FastAPI:
    """The app that serves an engine."""
    app = FastAPI()
    app.include_router(
        generation_router(engine, TokenizerService(*engine.reader), max_body_nbytes=MAX_BODY_NBYTES)
    )
    return app
