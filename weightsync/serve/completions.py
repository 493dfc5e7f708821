"""Generation requests: prompts to tokens, tokens to text, whole completions or event streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from weightsync.errors import (
    ConfigError,
    NotReadyError,
    TransferError,
    TransportError,
    WeightSyncError,
)
from weightsync.serve.engine_client import EngineClient
from weightsync.serve.messages import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    ModelCard,
    SamplingParams,
)
from weightsync.serve.requests import Completion, ModelName, VersionSpan, spans
from weightsync.serve.text import CompletionText, TokenizerService

if TYPE_CHECKING:
    import torch


MAX_COMPLETIONS = 1024
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express. OpenAI uses the same number."""
_PROMPT_SIZE = 32  # characters; the fixed cost of tokenizing a prompt

T = TypeVar("T")

_AS_IT_COMES = SamplingParams()
_BASE = ModelName()


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as token ids. `inputs` are tensors that were made of its images."""

    token_ids: list[int]
    inputs: dict[str, torch.Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A request for `n` completions of every prompt.

    With a seed, a prompt's tokens do not depend on the other prompts: equal prompts get equal
    tokens.
    """

    request_id: str
    prompts: Sequence[Prompt]
    max_new_tokens: int
    n: int = 1
    sampling_params: SamplingParams = _AS_IT_COMES
    stops: tuple[str, ...] = ()
    stop_at_end: bool = True
    model: ModelName = _BASE

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedToken:
    """A generated token. Its text begins `offset` characters into the text of its completion.

    `base_version` is that of the base model where an adapter made it.
    """

    token: int
    version: int
    offset: int
    logprob: float | None
    top: list[tuple[int, float]]
    base_version: int | None = None


@dataclass(frozen=True, kw_only=True)
class StreamDelta:
    """The next text and tokens of completion `index` of prompt `prompt_index`.

    `start` is the position of the first token in the completion. A token whose text is held back is
    part of a later delta. `text` never contains a stop text; `tokens` contain its tokens, up to the
    one that completed it.
    """

    prompt_index: int
    index: int
    start: int
    text: str
    tokens: list[GeneratedToken]
    prompt_version: int
    finish_reason: FinishReason | None

    @property
    def weight_versions(self) -> list[VersionSpan]:
        """The weight versions of the tokens, by their position in the completion."""
        bases = [made.base_version for made in self.tokens]
        return spans([made.version for made in self.tokens], self.start, bases=bases)

    @property
    def token_ids(self) -> list[int]:
        """The ids of the tokens."""
        return [made.token for made in self.tokens]

    def followed_by(self, later: StreamDelta) -> StreamDelta:
        """Return one delta in place of this one and the next."""
        return replace(
            later, start=self.start, text=self.text + later.text, tokens=self.tokens + later.tokens
        )

    def completion(self, *, logprobs: bool) -> Completion:
        """Return a whole completion in the form of `/generate`."""
        return Completion(
            prompt_index=self.prompt_index,
            text=self.text,
            token_ids=self.token_ids,
            logprobs=[made.logprob or 0.0 for made in self.tokens] if logprobs else None,
            weight_versions=self.weight_versions,
            prompt_version=self.prompt_version,
            finish_reason=self.finish_reason or "abort",
        )


def check_work(work: GenerationRequest, card: ModelCard) -> None:
    """Raise ConfigError for a request that the model cannot take."""
    _check_count(len(work.prompts), work.n)
    for index, prompt in enumerate(work.prompts):
        ids = prompt.token_ids
        if not ids or not 0 <= min(ids) <= max(ids) < card.vocab_size:
            raise ConfigError(
                f"prompt {index} is empty or has token ids outside 0 to {card.vocab_size - 1}; "
                "encode it with the model's own tokenizer"
            )
        if prompt.inputs is None and card.image_token_id in ids:
            raise ConfigError(
                f"prompt {index} has a placeholder of an image and none comes with it; send images "
                "as parts of a chat message"
            )
        _check_length(index, ids, work.max_new_tokens, card)


async def read_prompts(
    texts: TokenizerService,
    card: ModelCard,
    texts_or_ids: Sequence[str | list[int]],
    *,
    n: int,
    max_new_tokens: int,
) -> list[Prompt]:
    """Return prompts as token ids. Raises ConfigError for too many, or for one that is too long."""
    _check_count(len(texts_or_ids), n)

    def read() -> list[Prompt]:
        found: list[Prompt] = []
        for index, item in enumerate(texts_or_ids):
            ids = texts.encode(item) if isinstance(item, str) else item
            _check_length(index, ids, max_new_tokens, card)
            found.append(Prompt(token_ids=ids))
        return found

    return await texts.run(read, sum(_PROMPT_SIZE + len(item) for item in texts_or_ids))


def _check_count(num_prompts: int, n: int) -> None:
    if not 1 <= num_prompts * n <= MAX_COMPLETIONS:
        raise ConfigError(
            f"{num_prompts} prompts, {n} completions each, are requested; "
            f"send 1 to {MAX_COMPLETIONS} completions at a time"
        )


def _check_length(index: int, ids: list[int], max_new_tokens: int, card: ModelCard) -> None:
    if len(ids) + max_new_tokens > card.max_length:
        raise ConfigError(
            f"prompt {index} has {len(ids)} tokens and asks for {max_new_tokens} more, "
            f"the model has room for {card.max_length}; shorten the prompt or ask for less"
        )


async def stream_deltas(
    engine: EngineClient, texts: TokenizerService, work: GenerationRequest
) -> AsyncGenerator[StreamDelta, None]:
    """Yield the deltas of every completion as they arrive, each up to its finish_reason.

    Closing the generator early cancels the generation. Raises ConfigError before the first delta,
    the errors of the engine, and NotReadyError when the engine cannot be reached any more.
    """
    await texts.run(lambda: check_work(work, engine.card), work.num_prompt_tokens)
    requests = [_engine_request(work, index) for index in range(len(work.prompts))]
    rows = {
        (request.request_id, index): _Row(
            prompt_index=prompt_index,
            index=index,
            text=texts.completion(work.stops, engine.card.end_ids),
        )
        for prompt_index, request in enumerate(requests)
        for index in range(work.n)
    }
    num_open = num_running = len(rows)
    try:
        async with closing(engine.generate(requests)) as events:
            async for made in events:
                row = rows[made.request_id, made.index]
                num_running -= made.finish_reason is not None
                if row.finish_reason is not None:
                    continue
                delta = row.take(made)
                if row.text.stopped and made.finish_reason is None:
                    engine.cancel(made.request_id, made.index)
                num_open -= row.finish_reason is not None
                if delta is not None:
                    yield delta
                if num_running and not num_open:
                    return
    except (TransportError, TransferError) as exc:
        raise NotReadyError(f"the engine does not answer: {exc}", state="LOST") from exc
    for row in rows.values():
        if row.finish_reason is None:
            yield row.end()


async def complete(
    engine: EngineClient, texts: TokenizerService, work: GenerationRequest
) -> list[StreamDelta]:
    """Return all completions, in the order of their prompts, `n` for each prompt."""
    whole: dict[tuple[int, int], StreamDelta] = {}
    async with closing(stream_deltas(engine, texts, work)) as source:
        async for increment in source:
            place = (increment.prompt_index, increment.index)
            before = whole.get(place)
            whole[place] = before.followed_by(increment) if before else increment
    return [whole[place] for place in sorted(whole)]


@asynccontextmanager
async def closing(source: AsyncGenerator[T, None]) -> AsyncIterator[AsyncGenerator[T, None]]:
    """Close a generator at the end of the block, also when the block is cancelled."""
    try:
        yield source
    finally:
        with anyio.CancelScope(shield=True):
            await source.aclose()


@dataclass(kw_only=True)
class _Row:
    """The state of one completion that is not finished."""

    prompt_index: int
    index: int
    text: CompletionText
    unsent: list[GeneratedToken] = field(default_factory=list)
    num_sent: int = 0
    prompt_version: int | None = None
    finish_reason: FinishReason | None = None

    def take(self, delta: EngineOutput) -> StreamDelta | None:
        """Add a delta of the engine; return None while there is no text to send."""
        if self.prompt_version is None:
            self.prompt_version = delta.prompt_version
        text = "" if delta.token is None else self._push(delta, delta.token)
        if delta.finish_reason is not None and not self.text.stopped:
            text += self.text.finish()
        self.finish_reason = "stop" if self.text.stopped else delta.finish_reason
        return self._next_delta(text) if text or self.finish_reason else None

    def end(self) -> StreamDelta:
        """Finish a completion that the engine left unfinished."""
        self.finish_reason = "abort"
        return self._next_delta(self.text.finish())

    def _push(self, delta: EngineOutput, token: int) -> str:
        self.unsent.append(
            GeneratedToken(
                token=token,
                version=delta.version,
                offset=self.text.num_characters,
                logprob=None if delta.logprob is None else max(delta.logprob, LEAST_LOGPROB),
                top=delta.top,
                base_version=delta.base_version,
            )
        )
        return self.text.push(token)

    def _next_delta(self, text: str) -> StreamDelta:
        start, tokens = self.num_sent, self.unsent
        self.num_sent += len(tokens)
        self.unsent = []
        return StreamDelta(
            prompt_index=self.prompt_index,
            index=self.index,
            start=start,
            text=text,
            tokens=tokens,
            prompt_version=self.prompt_version or 0,
            finish_reason=self.finish_reason,
        )


def _engine_request(work: GenerationRequest, prompt_index: int) -> EngineRequest:
    prompt = work.prompts[prompt_index]
    return EngineRequest(
        request_id=f"{work.request_id}-{prompt_index}",
        prompt=prompt.token_ids,
        max_new_tokens=work.max_new_tokens,
        n=work.n,
        sampling_params=work.sampling_params,
        stop_at_end=work.stop_at_end,
        adapter=work.model.adapter,
        adapter_version=work.model.version,
        inputs=prompt.inputs,
    )


GONE_STATUS = 499
"""The status of a client that hung up, for logs; the client does not read it."""


class ClientGoneError(Exception):
    """The client hung up before it was answered."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, and cancel it when the client disconnects.

    The body of the request must have been read. Raises ClientGoneError when the client
    disconnects, and the errors of `work`.
    """
    return await _first_of(work, request.receive)


async def _first_of(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError("the client hung up")
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A response of server-sent events. `events` is closed in every case.

    `events` yields results of `event`, and must not raise: the status is sent before the first.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Called by the ASGI server."""
        async with closing(self._events):
            try:
                await _first_of(self.stream_response(send), receive)
            except WeightSyncError:
                raise  # of the engine; TransportTimeout is an OSError too
            except (ClientGoneError, OSError):
                return


def event(data: bytes) -> bytes:
    """Return one server-sent event with one line of data."""
    return b"data: " + data + b"\n\n"


async def begun(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Wait for the first event and return a generator of all events.

    An error before the first event is raised here, while it can still become an HTTP status.
    """
    first = await anext(events, None)

    async def every() -> AsyncGenerator[bytes, None]:
        async with closing(events):
            if first is not None:
                yield first
            async for item in events:
                yield item

    return every()
