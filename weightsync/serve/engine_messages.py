"""Messages between API servers and engine cores."""

from __future__ import annotations

from typing import Literal

import msgspec

from weightsync.queues.codec import Tensor
from weightsync.serve.steps import SamplingParams

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "wait", "keep"]


class _Tagged(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of the messages that are distinguished by their field `kind`."""


# To an engine core.


class Job(_Tagged, frozen=True, kw_only=True, tag="job"):
    """Generate `n` completions of one prompt of token ids, at most `max_new_tokens` tokens each.

    `inputs` are more arguments of the model's first forward pass, by name: pixel values, for
    instance. With `stop_at_end` False, generation continues after the model's end token.
    """

    request_id: str
    prompt: list[int]
    max_new_tokens: int
    n: int = 1
    choosing: SamplingParams = SamplingParams()
    stop_at_end: bool = True
    inputs: dict[str, Tensor] | None = None


class Cancel(_Tagged, frozen=True, kw_only=True, tag="cancel"):
    """Stop a job, or only its completion `index`."""

    request_id: str
    index: int | None = None


class StatsRequest(_Tagged, frozen=True, kw_only=True, tag="stats_request"):
    """Request the statistics of an engine core. StatsReply carries the same `call`."""

    call: int


Order = Job | Cancel | StatsRequest


# From an engine core.


class TopToken(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One of the likeliest tokens of a position, and its log-probability."""

    token: int
    logprob: float


class Delta(_Tagged, frozen=True, kw_only=True, tag="delta"):
    """The next token of completion `index` of a job, or the end of the completion.

    `version` is the version of the weights that made the token. `prompt_version` is the version
    that read the prompt; it is older if a kept prompt was reused after an update. `token` is None
    if the completion ends without another token. `logprob` and `top` are set on request.
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
    """The error that ended a job, as a problem document of weightsync.wire.problem."""

    request_id: str
    problem: bytes


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a replica. `why_not` is the reason why it does not generate, or "".

    `running` and `waiting` count completions. The totals count from the start of the replica.
    `versions` are the weight versions of its workers, one each. `stall_s` is how long the last
    update stopped generation.
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


class StatsReply(_Tagged, frozen=True, kw_only=True, tag="stats_reply"):
    """The reply to StatsRequest."""

    call: int
    stats: EngineStats


Event = Delta | Failed | StatsReply
