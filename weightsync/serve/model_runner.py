"""Execution of steps on a model: reads prompts, or gives every live row its next token.

The tokens of a row do not depend on the other rows of the batch: padding is masked, positions count
from the row's own first token, and a row with a seed has its own random stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from weightsync.errors import ProtocolError, shorten
from weightsync.serve.causal_model import CausalModel, InputsRejectedError
from weightsync.serve.kv_cache import BatchedKVCache, Cache, KeptPrompt
from weightsync.serve.messages import ModelCard, NewRows, RowId, SampledToken, Step, StepResult
from weightsync.serve.sampling import TokenSampler

_BATCH_TOKENS = 2048
"""The most tokens, padding included, of prompts that one forward pass reads."""


class ModelRunner:
    """Executes steps on a model. The parameters may be overwritten in place between two steps.

    `model` is a transformers causal language model in eval mode, or a tensor-parallel rank's shard
    of one. Only the rank with `chooses` true chooses tokens: rank 0. Raises ConfigError for an
    architecture without an attention cache. Use it from one thread.
    """

    def __init__(self, model: Any, *, chooses: bool = True) -> None:
        self._model = CausalModel(model)
        self._living = BatchedKVCache(self._model.new_cache(), self._model.device)
        self._kept: dict[int, KeptPrompt] = {}
        self._chooser = TokenSampler(self._model.device) if chooses else None

    @property
    def max_length(self) -> int:
        """The most tokens of a prompt and its completion together."""
        return self._model.max_length

    @property
    def vocab_size(self) -> int:
        """The number of token ids; every id is smaller."""
        return self._model.vocab_size

    @property
    def cache_nbytes(self) -> int:
        """The bytes of the keys and values of live rows and kept prompts."""
        return self._living.nbytes + sum(kept.nbytes for kept in self._kept.values())

    def card(self, name: str, directory: str, tokenizer: Any) -> ModelCard:
        """Return the facts about the model that other processes need."""
        return self._model.card(name, directory, tokenizer)

    @torch.inference_mode()
    def execute(self, step: Step, version: int) -> StepResult:
        """Make one step with the current weights, whose version is `version`.

        A prompt that cannot be read is refused, equally at every rank. Raises ProtocolError when
        the step does not name exactly the live rows; only `drop` and `evict` have been done then.
        """
        begin = time.perf_counter()
        self._forget(step)
        refused: dict[RowId, str] = {}
        chosen: list[SampledToken] = []
        if step.new:
            chosen = self._read(step.new, refused)
        elif step.rows:
            chosen = self._go_on(step)
        return StepResult(
            number=step.number,
            version=version,
            chosen=chosen,
            refused=refused,
            seconds=time.perf_counter() - begin,
        )

    def _forget(self, step: Step) -> None:
        self._living.drop(step.drop)
        if self._chooser:
            self._chooser.drop(step.drop)
        for prompt in step.evict:
            self._kept.pop(prompt, None)

    def _go_on(self, step: Step) -> list[SampledToken]:
        self._check_rows(step)
        living = self._living
        token_of = dict(zip(step.rows, step.tokens, strict=True))
        tokens = torch.tensor([[token_of[row]] for row in living.rows], device=self._model.device)
        logits = self._model.forward(tokens, living.mask(), living.positions(), living.cache)
        if step.rows != living.rows:
            place_of = {row: place for place, row in enumerate(living.rows)}
            logits = logits[[place_of[row] for row in step.rows]]
        return self._choose(step.rows, logits)

    def _check_rows(self, step: Step) -> None:
        named, living = set(step.rows), set(self._living.rows)
        if named != living or not len(named) == len(step.rows) == len(step.tokens):
            raise ProtocolError(
                f"step {step.number} gives {len(step.tokens)} tokens to {len(step.rows)} rows, "
                f"{len(living)} live (unlike: {shorten(map(str, sorted(named ^ living)))}); name "
                "every living row once and drop those that ended"
            )

    def _choose(self, rows: list[RowId], logits: torch.Tensor) -> list[SampledToken]:
        return self._chooser.choose(rows, logits) if self._chooser else []

    def _read(self, new: Sequence[NewRows], refused: dict[RowId, str]) -> list[SampledToken]:
        readable: list[NewRows] = []
        for prompt in new:
            if why := self._model.why_not(prompt):
                refused[prompt.rows[0]] = why
            else:
                readable.append(prompt)
        logits: dict[int, torch.Tensor] = {}
        for places in _groups(readable):
            try:
                self._read_group([readable[place] for place in places], places, logits)
            except InputsRejectedError as exc:
                refused[readable[places[0]].rows[0]] = str(exc)
        return self._begin(readable, logits)

    def _read_group(
        self, prompts: list[NewRows], places: list[int], logits: dict[int, torch.Tensor]
    ) -> None:
        cache = self._model.new_cache()
        reused = self._fill(cache, prompts[0])
        lengths = [len(new.prompt) for new in prompts]
        width = max(lengths)
        pads = [width - length for length in lengths]
        mask = self._tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        tokens = [[0] * pad + new.prompt for pad, new in zip(pads, prompts, strict=True)]
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        found = self._model.forward(
            self._tensor(tokens)[:, reused:], mask, positions[:, reused:], cache, prompts[0].inputs
        )
        logits.update(zip(places, found, strict=True))
        self._keep(prompts, cache)
        self._join(prompts, cache, pads)

    def _fill(self, cache: Cache, new: NewRows) -> int:
        """Fill the cache from a kept prompt; return the number of tokens, without the last one."""
        if new.reuse is None or new.reuse not in self._kept or new.inputs:
            return 0
        kept = self._kept[new.reuse]
        length = min(new.reuse_length, kept.common_length(new.prompt), len(new.prompt) - 1)
        if length > 0:
            kept.fill(cache, length)
        return max(length, 0)

    def _keep(self, prompts: list[NewRows], cache: Cache) -> None:
        for row, new in enumerate(prompts):
            # Different images have equal tokens, so a prompt with images cannot be reused.
            if new.keep_as is not None and not new.inputs:
                self._kept[new.keep_as] = KeptPrompt.of(new.prompt, cache, row)

    def _join(self, prompts: list[NewRows], cache: Cache, pads: list[int]) -> None:
        owners = [i for i, new in enumerate(prompts) for _ in new.rows]
        if len(owners) > len(prompts):
            cache.batch_select_indices(self._tensor(owners))
        rows = [row for new in prompts for row in new.rows]
        self._living.join(rows, cache, [pads[i] for i in owners])

    def _begin(self, new: Sequence[NewRows], logits: dict[int, torch.Tensor]) -> list[SampledToken]:
        if not self._chooser or not logits:
            return []
        rows: list[RowId] = []
        of_rows: list[torch.Tensor] = []
        for place in sorted(logits):
            self._chooser.add(new[place].rows, new[place].choosing, new[place].completions)
            rows.extend(new[place].rows)
            of_rows.extend([logits[place]] * len(new[place].rows))
        return self._choose(rows, torch.stack(of_rows))

    def _tensor(self, numbers: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(numbers, device=self._model.device)


def _groups(prompts: Sequence[NewRows]) -> list[list[int]]:
    """Group prompts of similar length for one forward pass; some prompts form their own group."""
    groups: list[list[int]] = []
    alone: list[list[int]] = []
    for place, new in sorted(enumerate(prompts), key=lambda entry: len(entry[1].prompt)):
        if new.inputs or new.reuse is not None:
            alone.append([place])
        elif groups and _fits(len(new.prompt), [len(prompts[i].prompt) for i in groups[-1]]):
            groups[-1].append(place)
        else:
            groups.append([place])
    # The others come last, because they may reuse a prompt of this step.
    return groups + alone


def _fits(length: int, lengths: Sequence[int]) -> bool:
    return length <= 2 * lengths[0] and length * (len(lengths) + 1) <= _BATCH_TOKENS
