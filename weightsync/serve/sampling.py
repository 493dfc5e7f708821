"""Token sampling: each row has its own sampling parameters and random stream."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch.nn import functional

from weightsync.serve.messages import NO_LOGPROBS, RowId, SampledToken, SamplingParams

_COLDEST = 1e-4
"""A softmax overflows below this temperature, and would choose the likeliest token."""

_STEPS = 1 << 23
"""Uniform numbers are (k + 0.5) / _STEPS: exact in float32, and neither 0 nor 1."""
_USUAL_NUCLEUS = 256
"""How many tokens are sorted first; the whole vocabulary only if these do not reach top_p."""


@dataclass(frozen=True)
class _RowSampler:
    """The sampling parameters of one row. `random` is its own stream, None without a seed."""

    params: SamplingParams
    random: torch.Generator | None

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < _COLDEST


@dataclass(frozen=True)
class _Plan:
    """Values that are equal for all steps of the same rows. `…_rows` are indices in the batch."""

    rows: list[RowId]
    temperatures: torch.Tensor  # float32[rows, 1]
    greedy_rows: list[int]
    seeded: list[tuple[int, torch.Generator]]
    free_rows: list[int]
    nucleus_rows: list[int]
    top_p: torch.Tensor  # float32[nucleus rows, 1]
    logprob_rows: list[int]
    top_counts: list[int]

    @property
    def is_greedy(self) -> bool:
        return len(self.greedy_rows) == len(self.rows)


class TokenSampler:
    """Chooses the next tokens of rows. Use it from one thread.

    A token is drawn by an exponential race: each token gets an exponentially distributed time with
    its probability as rate, and the earliest time wins. So other rows of the batch and rounding do
    not change the result, except in a tie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samplers: dict[RowId, _RowSampler] = {}
        self._free = torch.Generator(device=device)
        self._free.seed()
        self._plan = self._plan_of([])

    def add(
        self,
        rows: Sequence[RowId],
        sampling_params: SamplingParams,
        completions: Sequence[int] = (),
    ) -> None:
        """Add the rows of one request. `completions` are their indices (default 0, 1, …)."""
        for completion, row in zip(completions or range(len(rows)), rows, strict=True):
            self._samplers[row] = _RowSampler(
                sampling_params, _stream(sampling_params.seed, completion)
            )

    def drop(self, rows: Sequence[RowId]) -> None:
        """Remove rows. Unknown rows are ignored."""
        for row in rows:
            self._samplers.pop(row, None)

    def sample(self, rows: list[RowId], logits: torch.Tensor) -> list[SampledToken]:
        """Choose a token for each row of `logits`, float32[rows, vocabulary]."""
        plan = self._planned(rows)
        tokens = logits.argmax(dim=-1) if plan.is_greedy else self._race(plan, logits)
        return _told(plan, tokens, logits)

    def propose(self, rows: list[RowId], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose a token for each row of a draft model's `logits`, float32[rows, vocabulary].

        Return the tokens, int64[rows], and the probabilities with which each token was drawn,
        float32[rows, vocabulary].
        """
        plan = self._planned(rows)
        probabilities = _probabilities(plan, logits)
        return self._draw(plan, probabilities), probabilities

    def check(
        self,
        rows: list[RowId],
        proposed: torch.Tensor,
        drafts: torch.Tensor,
        logits: torch.Tensor,
    ) -> tuple[list[SampledToken], torch.Tensor]:
        """Keep the first proposed tokens of each row, and choose one more.

        `proposed` is int64[rows, n], `drafts` float32[rows, n, vocabulary] the probabilities with
        which they were drawn, `logits` float32[rows, n + 1, vocabulary] those of the model. Return
        the tokens, and how many proposed ones were accepted of each row, int64[rows].

        Each token has the distribution of the model: speculative sampling, as in Leviathan et al.,
        "Fast Inference from Transformers via Speculative Decoding", 2023.
        """
        plan = self._planned(rows)
        size = proposed.shape[1]
        wanted = torch.stack([_probabilities(plan, each) for each in logits.unbind(1)], dim=1)
        ours, theirs = (p.gather(2, proposed[..., None])[..., 0] for p in (wanted[:, :-1], drafts))
        taken = self._uniform(plan, size) * theirs < ours  # False for a draft of NaN, too
        accepted = taken.cumprod(dim=1).sum(dim=1)
        places = torch.arange(len(rows), device=self._device), accepted
        last = wanted[places]
        rest = last - functional.pad(drafts, (0, 0, 0, 1))[places]  # nothing if all are accepted
        rest = rest.clamp(min=0.0)
        rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, last)  # or rounded away
        tokens = functional.pad(proposed, (0, 1))
        tokens[places] = self._draw(plan, rest)
        chosen = [_told(plan, tokens[:, at], logits[:, at]) for at in range(size + 1)]
        counts = enumerate(accepted.tolist())
        return [chosen[at][row] for row, count in counts for at in range(count + 1)], accepted

    def _planned(self, rows: list[RowId]) -> _Plan:
        if rows != self._plan.rows:
            self._plan = self._plan_of(rows)
        return self._plan

    def _draw(self, plan: _Plan, probabilities: torch.Tensor) -> torch.Tensor:
        if plan.is_greedy:
            return probabilities.argmax(dim=-1)
        return (probabilities.log() - self._log_times(plan, probabilities)).argmax(dim=-1)

    def _uniform(self, plan: _Plan, count: int) -> torch.Tensor:
        """Return float32[rows, count] in [0, 1), each row's from its own stream."""
        numbers = torch.rand(len(plan.rows), count, generator=self._free, device=self._device)
        for row, random in plan.seeded:
            numbers[row] = torch.rand(count, generator=random).to(self._device)
        return numbers

    def _race(self, plan: _Plan, logits: torch.Tensor) -> torch.Tensor:
        scores = _scores(plan, logits)
        scores -= self._log_times(plan, scores)
        return scores.argmax(dim=-1)

    def _log_times(self, plan: _Plan, scores: torch.Tensor) -> torch.Tensor:
        rows, vocabulary = scores.shape
        bits = torch.zeros(rows, (vocabulary + 1) // 2, dtype=torch.int64, device=scores.device)
        if plan.free_rows:
            bits[plan.free_rows] = torch.empty_like(bits[plan.free_rows]).random_(
                generator=self._free
            )
        for row, random in plan.seeded:
            # Drawn on the CPU, where a seed gives the same numbers on every machine.
            drawn = torch.empty(bits.shape[1], dtype=torch.int64).random_(generator=random)
            bits[row] = drawn.to(scores.device)
        times = _log_exponential(bits.view(torch.int32)[:, :vocabulary])
        times[plan.greedy_rows] = 0.0
        return times

    def _plan_of(self, rows: list[RowId]) -> _Plan:
        samplers = [self._samplers[row] for row in rows]
        hot = [(i, sampler) for i, sampler in enumerate(samplers) if not sampler.is_greedy]
        nucleus = [(i, c.params.top_p) for i, c in hot if c.params.top_p < 1]
        logprob_of = [i for i, c in enumerate(samplers) if c.params.logprobs != NO_LOGPROBS]
        heat = [1.0 if c.is_greedy else c.params.temperature for c in samplers]
        return _Plan(
            rows=list(rows),
            temperatures=self._column(heat),
            greedy_rows=[i for i, sampler in enumerate(samplers) if sampler.is_greedy],
            seeded=[(i, c.random) for i, c in hot if c.random is not None],
            free_rows=[i for i, c in hot if c.random is None],
            nucleus_rows=[i for i, _ in nucleus],
            top_p=self._column([top_p for _, top_p in nucleus]),
            logprob_rows=logprob_of,
            top_counts=[samplers[i].params.logprobs for i in logprob_of],
        )

    def _column(self, numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=self._device)[:, None]


def _stream(seed: int | None, completion: int) -> torch.Generator | None:
    if seed is None:
        return None
    mixed = xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed % 2**64, completion))
    return torch.Generator().manual_seed(mixed)


def _log_exponential(bits: torch.Tensor) -> torch.Tensor:
    """Return logarithms of exponential times from random int32: 4 times as fast as drawing them."""
    uniform = (bits & (_STEPS - 1)).float().add_(0.5).div_(_STEPS)
    return uniform.log_().neg_().log_()


def _scores(plan: _Plan, logits: torch.Tensor) -> torch.Tensor:
    scores = logits / plan.temperatures
    if plan.nucleus_rows:
        scores[plan.nucleus_rows] = _nucleus(scores[plan.nucleus_rows], plan.top_p)
    return scores


def _probabilities(plan: _Plan, logits: torch.Tensor) -> torch.Tensor:
    """Return the probabilities with which tokens are drawn; 1 for the likeliest of greedy rows."""
    if plan.is_greedy:
        return functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
    found = _scores(plan, logits).softmax(dim=-1)
    if plan.greedy_rows:
        best = logits[plan.greedy_rows].argmax(dim=-1)
        found[plan.greedy_rows] = functional.one_hot(best, logits.shape[-1]).float()
    return found


def _nucleus(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask all but the fewest likeliest tokens, at least one, that together reach top_p."""
    mass = scores.logsumexp(dim=-1, keepdim=True)
    for candidates in (min(_USUAL_NUCLEUS, scores.shape[-1]), scores.shape[-1]):
        ordered, places = scores.topk(candidates, dim=-1)
        probabilities = (ordered - mass).exp()
        reached = probabilities.cumsum(dim=-1)
        if (reached[:, -1:] >= top_p).all():
            break
    kept = ordered.masked_fill(reached - probabilities >= top_p, float("-inf"))
    kept[:, :1] = ordered[:, :1]  # a very small top_p is 0 in float32
    return torch.full_like(scores, float("-inf")).scatter_(1, places, kept)


def _told(plan: _Plan, tokens: torch.Tensor, logits: torch.Tensor) -> list[SampledToken]:
    if plan.logprob_rows:
        return _with_logprobs(plan, tokens, logits)
    pairs = zip(plan.rows, tokens.tolist(), strict=True)
    return [SampledToken(row=row, token=token) for row, token in pairs]


def _with_logprobs(plan: _Plan, tokens: torch.Tensor, logits: torch.Tensor) -> list[SampledToken]:
    logprobs = torch.log_softmax(logits[plan.logprob_rows], dim=-1)
    own = logprobs.gather(1, tokens[plan.logprob_rows][:, None])[:, 0].tolist()
    best = logprobs.topk(min(max(plan.top_counts), logprobs.shape[-1]), dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    tops = [list(zip(ids, values, strict=True)) for ids, values in pairs]
    logprob_of = dict(
        zip(plan.logprob_rows, zip(own, tops, plan.top_counts, strict=True), strict=True)
    )
    chosen = []
    for i, (row, token) in enumerate(zip(plan.rows, tokens.tolist(), strict=True)):
        logprob, top, count = logprob_of.get(i, (None, [], 0))
        chosen.append(SampledToken(row=row, token=token, logprob=logprob, top=top[:count]))
    return chosen
