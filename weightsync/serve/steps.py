"""What an engine core tells its workers to compute, and what they answer: one message a step.

Every worker of a replica makes the same steps in the same order; the first of them chooses the
tokens, and the core hands its choice to all with the next step.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from weightsync.queues.message_codec import Tensor

NO_LOGPROBS = -1

RowId = int
"""One completion being generated; the core numbers them and never uses a number twice."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of a row are chosen.

    `temperature` 0 takes the likeliest. `seed` makes the choice repeatable, whatever else is in the
    batch; completion `i` of a request draws from a stream of its own. `logprobs` is how many of the
    likeliest tokens are told beside the chosen one; NO_LOGPROBS tells none at all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=NO_LOGPROBS, le=20)] = NO_LOGPROBS


class NewRows(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to read, and the rows that go on from it: one for each completion asked for.

    `completions` numbers them, where it is not 0, 1 and so on. `prompt` are its token ids. The
    first `reuse_length` of them are taken from the prompt that was kept as `reuse`; `keep_as` keeps
    what was read of this one for later prompts. `inputs` are further arguments of the model's first
    pass (pixel values, for instance), by name.
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
    """One step: forget, then either read new prompts or give every named row one more token.

    `drop` are rows that have ended and `evict` are kept prompts, both forgotten first. `tokens` are
    those chosen last for `rows`, int64 ids, one each; `rows` is every living row but the new ones.
    A step with `new` has no `rows`: prompts are read by themselves.
    """

    number: int
    drop: list[RowId] = []
    evict: list[int] = []
    new: list[NewRows] = []
    rows: list[RowId] = []
    tokens: list[int] = []


class SampledToken(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The token of one row; `top` are (token id, log-probability), the likeliest first.

    Log-probabilities are of the model's own distribution, before temperature and top_p.
    """

    row: RowId
    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker made of a step, with weights of `version`.

    `chosen` is in the order of the rows of the step, and empty but at the first worker. `refused`
    holds, by its first row, why a prompt could not be read; the others went on.
    """

    number: int
    version: int
    chosen: list[SampledToken] = []
    refused: dict[RowId, str] = {}
    seconds: float = 0.0


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What the other processes have to know of a loaded model.

    `max_length` is how many tokens a prompt and its completion may take together; `end_ids` end a
    completion. `directory` is where its tokenizer, and its processor where it takes images, are
    loaded from; a built-in name otherwise. `image_token_id` is None for a model of text alone.
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
