"""Messages between the processes of a server.

All workers of a replica make the same steps in the same order. Rank 0 chooses the tokens, and the
core sends them to all workers with the next step.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from weightsync.queues.codec import Tensor
from weightsync.queues.message_queue import QueueHandle

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "wait", "keep"]
Action = Literal["hold", "clear_cache", "pause", "resume"]


class _Tagged(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of the messages that are distinguished by their field `kind`."""


# Steps of the workers.

NO_LOGPROBS = -1

RowId = int
"""The number of a completion in progress. The core never uses a number twice."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of a row.

    `temperature` 0 chooses the likeliest token. `seed` makes the tokens repeatable, independently
    of other rows; each completion of a request has its own random stream. `logprobs` is the number
    of likeliest tokens to return with the chosen one, or NO_LOGPROBS for no log-probabilities.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=NO_LOGPROBS, le=20)] = NO_LOGPROBS


class NewRows(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to read, and the rows that continue it: one for each completion.

    `prompt` are token ids. `completions` are the indices of the rows' completions in their request,
    by default 0, 1, …. The first `reuse_length` tokens are taken from the kept prompt `reuse`; this
    prompt is kept as `keep_as`. `inputs` are more arguments of the model's first forward pass, by
    name: pixel values, for instance. `adapter` is the key of an adapter's version, or "".
    """

    rows: list[RowId]
    prompt: list[int]
    sampling_params: SamplingParams
    completions: list[int] = []
    reuse: int | None = None
    reuse_length: int = 0
    keep_as: int | None = None
    adapter: str = ""
    inputs: dict[str, Tensor] | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of all workers: reads the prompts of `new`, or continues each of `rows`.

    First the rows of `drop` and the kept prompts of `evict` are removed. `rows` are all live rows,
    and `tokens` are their last tokens, one each. A step with `new` has no `rows`.
    """

    number: int
    drop: list[RowId] = []
    evict: list[int] = []
    new: list[NewRows] = []
    rows: list[RowId] = []
    tokens: list[int] = []


class SampledToken(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The next token of one row. `top` are (token id, log-probability) pairs, the likeliest first.

    Log-probabilities are those of the model, before temperature and top_p.
    """

    row: RowId
    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's result of a step, with weights of `version`.

    `sampled` has the tokens of each row in their order, several where a draft model proposes
    tokens; only rank 0 fills it. `refused` maps the first row of a prompt that could not be read to
    the reason; the other prompts were read. Of `proposed` tokens of the draft, `accepted` are among
    those sampled.
    """

    number: int
    version: int
    sampled: list[SampledToken] = []
    refused: dict[RowId, str] = {}
    proposed: int = 0
    accepted: int = 0


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a loaded model that other processes need.

    `max_length` is the most tokens of a prompt and its completion together. A token of `end_ids`
    ends a completion. The tokenizer and the processor are loaded from `directory`, which may be the
    name of a built-in model. `image_token_id` is None for a text-only model. `weights_id` is the id
    of the weights that a worker has fetched.
    """

    name: str
    directory: str
    vocab_size: int
    max_length: int
    end_ids: list[int]
    architecture: str = ""
    dtype: str = ""
    device: str = ""
    num_parameters: int = 0
    image_token_id: int | None = None
    weights_id: str = ""


# From an API server to an engine core.


class EngineRequest(_Tagged, frozen=True, kw_only=True, tag="request"):
    """Generate `n` completions of one prompt of token ids, at most `max_new_tokens` tokens each.

    `inputs` are more arguments of the model's first forward pass, by name: pixel values, for
    instance. With `stop_at_end` False, generation continues after the model's end token.

    `adapter` is the name of an adapter, None for the base model alone, and `adapter_version` its
    version, None for the one in use. The core sets that, and `adapter_key`, when it accepts the
    request.
    """

    request_id: str
    prompt: list[int]
    max_new_tokens: int
    n: int = 1
    sampling_params: SamplingParams = SamplingParams()
    stop_at_end: bool = True
    adapter: str | None = None
    adapter_version: int | None = None
    adapter_key: str = ""
    inputs: dict[str, Tensor] | None = None


class Cancel(_Tagged, frozen=True, kw_only=True, tag="cancel"):
    """Stop a request, or only its completion `index`."""

    request_id: str
    index: int | None = None


class StatsRequest(_Tagged, frozen=True, kw_only=True, tag="stats_request"):
    """Request the statistics of an engine core. StatsReply carries the same `call`."""

    call: int


ClientMessage = EngineRequest | Cancel | StatsRequest


# From an engine core to an API server.


class EngineOutput(_Tagged, frozen=True, kw_only=True, tag="output"):
    """The next token of completion `index` of a request, or the end of the completion.

    `version` is the version of the weights that made the token. `prompt_version` is the version
    that read the prompt; it is older if a kept prompt was reused after an update. With an adapter
    both are the adapter's, and `base_version` is that of the base model. `token` is None if the
    completion ends without another token. `logprob` and `top` are those of SampledToken.
    """

    request_id: str
    index: int
    token: int | None = None
    version: int = 0
    prompt_version: int = 0
    base_version: int | None = None
    logprob: float | None = None
    top: list[tuple[int, float]] = []
    finish_reason: FinishReason | None = None


class Failed(_Tagged, frozen=True, kw_only=True, tag="failed"):
    """The error that ended a request, as a problem document of weightsync.wire.problem.

    `unknown_model`: the request names an adapter, or a version of it, that is not held.
    """

    request_id: str
    problem: bytes
    unknown_model: bool = False


class AdapterVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version of an adapter that a worker holds. `key` is its name between processes.

    A `retired` one was unloaded: no further request may use it.
    """

    name: str
    version: int
    key: str
    retired: bool = False


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a replica. `why_not` is the reason why it does not generate, or "".

    `running` and `waiting` count completions. The totals count from the start of the replica.
    `versions` are the weight versions of its workers, one each. `stall_s` is how long the last
    update kept the replica from making a step, which the wait for its last step is part of.
    `adapters` are the versions that requests may name, the newest of each adapter last.
    `draft_versions` are those of the workers' draft models, [] without; their proposals and those
    that were accepted are counted in tokens.
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
    adapters: list[AdapterVersion] = []
    draft_versions: list[int] = []
    proposed_total: int = 0
    accepted_total: int = 0


class StatsReply(_Tagged, frozen=True, kw_only=True, tag="stats_reply"):
    """The reply to StatsRequest."""

    call: int
    stats: EngineStats


Event = EngineOutput | Failed | StatsReply


READS = frozenset({"weight_info", "worker_report"})
"""The calls of `WeightReceiver.handle_json` that only read."""


# From a worker to its engine core.


class Hello(_Tagged, frozen=True, kw_only=True, tag="hello"):
    """A worker has loaded its model. It sends its results through the queue `results`.

    Done(call) follows, with the queue of its steps.
    """

    call: int
    card: ModelCard
    results: QueueHandle


class WorkerState(_Tagged, frozen=True, kw_only=True, tag="worker_state"):
    """The weights of a worker, and the reason why they may not be used ("": they may).

    `weights_id` distinguishes weights of the same version. `released` ends a hold. `adapters` are
    the versions of adapters that it holds, in the order of their commits. `draft_version` is that
    of its draft model, which was in use together with `version`; None without a draft.
    """

    version: int
    weights_id: str = ""
    state: str = "READY"
    why_not: str = ""
    released: bool = False
    adapters: list[AdapterVersion] = []
    draft_version: int | None = None


class WorkerCall(_Tagged, frozen=True, kw_only=True, tag="call"):
    """A worker asks its core for an action. Done(call) follows when it is in effect.

    `hold`: start no step until this worker releases; in effect when no step is in progress.
    `clear_cache`: drop the prompts that older weights have read. `pause`: pause generation, as
    `mode` says. `resume`: resume generation.
    """

    call: int
    action: Action
    mode: PauseMode = "abort"


WorkerMessage = Hello | WorkerState | WorkerCall


# From an engine core to its workers.


class Done(_Tagged, frozen=True, kw_only=True, tag="done"):
    """The reply to a call, with the problem document of its error if it failed.

    The reply to Hello has the queue `steps`, from which the worker reads its steps.
    """

    call: int
    problem: bytes | None = None
    steps: QueueHandle | None = None


class PauseState(_Tagged, frozen=True, kw_only=True, tag="pause_state"):
    """Whether generation is paused: to the worker that paused it, and, when it goes on, to all."""

    paused: bool


class Forget(_Tagged, frozen=True, kw_only=True, tag="forget"):
    """Versions of adapters that no request uses any more, by key: the worker drops them."""

    keys: list[str]


CoreMessage = Done | PauseState | Forget
