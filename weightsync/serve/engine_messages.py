"""What API servers and engine cores say to each other."""

from __future__ import annotations

from typing import Literal

import msgspec

from weightsync.queues.message_codec import Tensor
from weightsync.serve.steps import SamplingParams

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "wait", "keep"]


class _Tagged(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of what is told apart by its `kind`."""


# To an engine core.


class Job(_Tagged, frozen=True, kw_only=True, tag="job"):
    """Generate `n` completions of one prompt of token ids, at most `max_new_tokens` tokens each.

    `inputs` are further arguments of the model's first pass, by name: what an image became, for
    instance. `stop_at_end` False goes on after the model's end token.
    """

    request_id: str
    prompt: list[int]
    max_new_tokens: int
    n: int = 1
    choosing: SamplingParams = SamplingParams()
    stop_at_end: bool = True
    inputs: dict[str, Tensor] | None = None


class Cancel(_Tagged, frozen=True, kw_only=True, tag="cancel"):
    """Nobody wants the rest of a job any more: all of it, or one completion (`index`)."""

    request_id: str
    index: int | None = None


class Ask(_Tagged, frozen=True, kw_only=True, tag="ask"):
    """How is it going? `call` comes back with the Answer."""

    call: int


Order = Job | Cancel | Ask


# From an engine core.


class TopToken(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One of the likeliest tokens of a place, and its log-probability."""

    token: int
    logprob: float


class Delta(_Tagged, frozen=True, kw_only=True, tag="delta"):
    """One more token of completion `index` of a job, or only its end.

    `version` is of the weights that made the token, `prompt_version` of those that read the prompt
    (older where a kept prompt outlived an update). `token` is None where a completion ends without
    one. `logprob` and `top` are there if they were asked for.
    """

    request_id: str
    index: int
    token: int | None = None
    version: int = 0
    prompt_version: int = 0
    logprob: float | None = None
    top: list[TopToken] = []
    finish_reason: FinishReason | None = None


class Failed(_Tagged, frozen=True, kw_only=True, tag="failed"):
    """A job ends with an error: the problem document of weightsync.wire.problem."""

    request_id: str
    problem: bytes


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """How one replica is doing. `why_not` says why it does not generate, if it does not.

    `tokens_total` and `steps_total` count from its start; `versions` are those its workers hold.
    """

    running: int = 0
    waiting: int = 0
    paused: PauseMode | None = None
    tokens_total: int = 0
    steps_total: int = 0
    requests_total: int = 0
    tokens_per_s: float = 0.0
    kept_prompts: int = 0
    versions: list[int] = []
    stall_s: float = 0.0
    why_not: str = ""


class Answer(_Tagged, frozen=True, kw_only=True, tag="answer"):
    """The answer to Ask."""

    call: int
    stats: EngineStats


Event = Delta | Failed | Answer
