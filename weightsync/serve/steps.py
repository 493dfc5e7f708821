"""Steps that an engine core sends to its workers, and their results: one message per step.

All workers of a replica make the same steps in the same order. Rank 0 chooses the tokens, and the
core sends them to all workers with the next step.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from weightsync.queues.codec import Tensor

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
    name: pixel values, for instance.
    """

    rows: list[RowId]
    prompt: list[int]
    choosing: SamplingParams
    completions: list[int] = []
    reuse: int | None = None
    reuse_length: int = 0
    keep_as: int | None = None
    inputs: dict[str, Tensor] | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of all workers: reads the prompts of `new`, or gives each of `rows` its next token.

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

    `chosen` has the order of the step's rows; only rank 0 fills it. `refused` maps the first row of
    a prompt that could not be read to the reason; the other prompts were read.
    """

    number: int
    version: int
    chosen: list[SampledToken] = []
    refused: dict[RowId, str] = {}
    seconds: float = 0.0


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a loaded model that other processes need.

    `max_length` is the most tokens of a prompt and its completion together. A token of `end_ids`
    ends a completion. The tokenizer and the processor are loaded from `directory`, which may be the
    name of a built-in model. `image_token_id` is None for a text-only model.
    """

    name: str
    directory: str
    vocab_size: int
    max_length: int
    end_ids: list[int]
    architecture: str = ""
    dtype: str = ""
    num_parameters: int = 0
    image_token_id: int | None = None
