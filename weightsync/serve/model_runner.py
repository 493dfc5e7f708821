"""Execution of steps on a model: reads prompts, or gives every live row its next token.

The tokens of a row do not depend on the other rows of the batch: padding is masked, positions count
from the row's own first token, and a row with a seed has its own random stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, get_layer_types_and_kwargs

from weightsync.errors import ConfigError
from weightsync.serve.hugging_face import hf
from weightsync.serve.kv_cache import BatchedKVCache, CachedPrefix, PreallocatedLayer
from weightsync.serve.messages import NewRows, RowId, SampledToken, Step, StepResult
from weightsync.serve.sampling import TokenSampler

_CACHED_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_NO_CACHE = "dummy"
_CACHE_ARGUMENTS = ("past_key_values", "cache")  # before transformers 5.24, and since then
_NEEDED_ARGUMENTS = {"input_ids", "attention_mask"}
_NO_LIMIT = 1 << 30
_OWN_ARGUMENTS = {*_NEEDED_ARGUMENTS, *_CACHE_ARGUMENTS, "position_ids", "inputs_embeds", "labels"}


class InputsRejectedError(ConfigError):
    """The model rejects the extra inputs of a prompt. Raised before the cache was changed."""


class CausalModel:
    """A model, empty caches for it, and the logits of the last token.

    Raises ConfigError for an architecture whose cache does not hold keys and values per token.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._config = model.config.get_text_config(decoder=True)
        parameters = inspect.signature(model.forward).parameters
        self._arguments = set(parameters)
        caches = [name for name in _CACHE_ARGUMENTS if name in parameters]
        if caches and "dict" in str(parameters[caches[0]]):  # XLM: a dict of its own
            caches = []
        self._cache_argument = caches[0] if caches else ""
        self._layer_types = self._check_layers()
        length = getattr(self._config, "max_position_embeddings", None)
        self._last_position = length - 1 if isinstance(length, int) else _NO_LIMIT

    @property
    def device(self) -> torch.device:
        """The device of the model and of its inputs."""
        device: torch.device = self.model.device
        return device

    def new_cache(self) -> Cache:
        """Make an empty cache that holds all tokens of every layer."""
        cache: Cache = hf.DynamicCache(config=self.model.config)
        cache.layers = [
            empty if layer_type == _NO_CACHE else PreallocatedLayer()
            for empty, layer_type in zip(cache.layers, self._layer_types, strict=True)
        ]
        return cache

    def why_not(self, inputs: Iterable[str]) -> str:
        """Return why a prompt with these inputs cannot be read, or "". The same at every rank."""
        names = set(inputs)
        unknown = sorted(names - self._arguments | names & _OWN_ARGUMENTS)
        if unknown:
            return f"{type(self.model).__name__} takes no inputs named {', '.join(unknown)}"
        if names and hasattr(getattr(self.model, "model", None), "get_rope_index"):
            return (
                f"{type(self.model).__name__} numbers the places of an image in three dimensions, "
                "which is not supported; send text alone"
            )
        return ""

    def forward(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache,
        inputs: dict[str, torch.Tensor] | None = None,
        keep: int = 1,
    ) -> torch.Tensor:
        """Read new tokens; return the logits of the last ones, float32[rows, keep, vocabulary].

        `tokens` and `positions` are int64[rows, new tokens], `mask` is int64[rows, all tokens]. The
        new keys and values are appended to `cache`. Tokens beyond the length of the model, which
        are proposed and not used, have its last position.
        Raises InputsRejectedError when `inputs` do not fit the model or the prompt.
        """
        fitted = {name: self._fit(tensor) for name, tensor in (inputs or {}).items()}
        if "position_ids" in self._arguments:
            fitted["position_ids"] = positions.clamp(max=self._last_position)
        arguments = {**fitted, self._cache_argument: cache, "use_cache": True}
        if "logits_to_keep" in self._arguments:
            arguments["logits_to_keep"] = keep
        try:
            output = self.model(input_ids=tokens, attention_mask=mask, **arguments)
        except (ValueError, TypeError, IndexError, RuntimeError) as exc:
            # The model uses the inputs before its first attention layer. A later error, which
            # finds a cache that is not empty, has another cause.
            if inputs and not cache.get_seq_length():
                raise InputsRejectedError(f"the model rejects its inputs: {exc}") from exc
            raise
        logits: torch.Tensor = output.logits[:, -keep:]
        return logits.float()

    def _fit(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.model.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(self.device, dtype)

    def _check_layers(self) -> list[str]:
        architecture = type(self.model).__name__
        is_causal = self._cache_argument and self._arguments >= _NEEDED_ARGUMENTS
        if not is_causal or self.model.config.is_encoder_decoder:
            raise ConfigError(
                f"{architecture} is not a causal language model with an attention cache; serve a "
                "decoder-only model"
            )
        layer_types: list[str] = get_layer_types_and_kwargs(self._config)[0]
        unknown = sorted(set(layer_types) - _CACHED_TYPES - {_NO_CACHE})
        if unknown or getattr(self.model, "_is_stateful", False):
            kinds = ", ".join(unknown) or "recurrent"
            raise ConfigError(
                f"{architecture} has layers of kind {kinds}, whose state cannot be cut, joined and "
                "padded token by token; serve a model with attention layers only"
            )
        return layer_types


_BATCH_TOKENS = 2048
"""The most tokens, padding included, of prompts that one forward pass reads."""


class Adapters(Protocol):
    """Has the model compute with a version of an adapter."""

    def using(self, key: str) -> AbstractContextManager[object]:
        """Compute with the version of this key inside the block. Raises ConfigError for no key."""


class ModelRunner:
    """Executes steps on a model. The parameters may be overwritten in place between two steps.

    The rows of each version of an adapter are computed by themselves: one forward pass per version
    and step. `adapters` has them; without it no step may name any.

    A `draft` model of the same vocabulary proposes `num_speculative_tokens` tokens for each row
    without an adapter in each step; those that are accepted, and one more, are sampled.

    `model` is a transformers causal language model in eval mode, or a tensor-parallel rank's shard
    of one. Only the rank with `samples` true samples tokens: rank 0. Raises ConfigError for an
    architecture without an attention cache. Use it from one thread.
    """

    def __init__(
        self,
        model: Any,
        *,
        samples: bool = True,
        adapters: Adapters | None = None,
        draft: Any = None,
        num_speculative_tokens: int = 0,
    ) -> None:
        self._model = CausalModel(model)
        self._draft = None if draft is None else Draft(draft, num_speculative_tokens)
        self._adapters = adapters
        self._batches: dict[str, BatchedKVCache] = {}
        self._kept: dict[int, CachedPrefix] = {}
        self._sampler = TokenSampler(self._model.device) if samples else None

    @torch.inference_mode()
    def execute(self, step: Step, version: int) -> StepResult:
        """Make one step with the current weights, whose version is `version`.

        A prompt that cannot be read is refused, equally at every rank.
        """
        self._drop(step)
        refused: dict[RowId, str] = {}
        chosen: list[SampledToken] = []
        proposed = 0
        if step.new:
            chosen = self._prefill(step.new, refused)
        elif step.rows:
            chosen, proposed = self._decode(step)
        return StepResult(
            number=step.number,
            version=version,
            sampled=chosen,
            refused=refused,
            proposed=proposed,
            accepted=len(chosen) - len(step.rows) if proposed else 0,
        )

    def free_caches(self) -> None:
        """Free all keys and values. Called between steps, while no row is in progress."""
        self._batches.clear()
        self._kept.clear()
        if self._draft:
            self._draft.batch.drop(self._draft.batch.rows)

    def _drop(self, step: Step) -> None:
        for key, batch in list(self._batches.items()):
            batch.drop(step.drop)
            if not batch.rows:
                del self._batches[key]
        if self._draft:
            self._draft.batch.drop(step.drop)
        if self._sampler:
            self._sampler.drop(step.drop)
        for prompt in step.evict:
            self._kept.pop(prompt, None)

    def _decode(self, step: Step) -> tuple[list[SampledToken], int]:
        """Return the next tokens of all rows, and how many a draft has proposed for them."""
        rows = [row for batch in self._batches.values() for row in batch.rows]
        assert sorted(step.rows) == sorted(rows), "a step names every live row once"
        token_of = dict(zip(step.rows, step.tokens, strict=True))
        batches = dict(self._batches)
        if self._draft is None or "" not in batches:
            return self._continue(step.rows, token_of, batches), 0
        base = batches.pop("")
        chosen, proposed = self._speculate(base, token_of, self._draft)
        adapted = [row for row in step.rows if row not in set(base.rows)]
        return chosen + self._continue(adapted, token_of, batches), proposed

    def _continue(
        self,
        wanted: list[RowId],
        token_of: Mapping[RowId, int],
        batches: Mapping[str, BatchedKVCache],
    ) -> list[SampledToken]:
        """Give each row of some batches its next token."""
        if not wanted:
            return []
        rows = [row for batch in batches.values() for row in batch.rows]
        found = []
        for key, batch in batches.items():
            tokens = self._tensor([[token_of[row]] for row in batch.rows])
            with self._using(key):
                read = self._model.forward(tokens, batch.mask(), batch.positions(), batch.cache)
            found.append(read[:, -1])
        logits = found[0] if len(found) == 1 else torch.cat(found)
        if wanted != rows:
            place_of = {row: place for place, row in enumerate(rows)}
            logits = logits[[place_of[row] for row in wanted]]
        return self._sample(wanted, logits)

    def _speculate(
        self, batch: BatchedKVCache, token_of: Mapping[RowId, int], draft: Draft
    ) -> tuple[list[SampledToken], int]:
        """Give each row of a batch those of the draft's tokens that are accepted, and one more."""
        assert self._sampler is not None, "shards have no draft"
        last = self._tensor([[token_of[row]] for row in batch.rows])
        proposed, drafts = draft.propose(last, self._sampler)
        tokens = torch.cat((last, proposed), dim=1)
        new = tokens.shape[1]
        logits = self._model.forward(
            tokens, batch.mask(new), batch.positions(new), batch.cache, keep=new
        )
        chosen, accepted = self._sampler.check(batch.rows, proposed, drafts, logits)
        for each in (batch, draft.batch):
            each.cut(proposed.shape[1] - accepted)
        return chosen, proposed.numel()

    def _using(self, key: str) -> AbstractContextManager[object]:
        """Compute with the version of an adapter, "": with the base model alone."""
        if not key:
            return nullcontext()
        if self._adapters is None:
            raise ConfigError(f"this server has no adapters, and was asked for {key!r:.120}")
        return self._adapters.using(key)

    def _sample(self, rows: list[RowId], logits: torch.Tensor) -> list[SampledToken]:
        return self._sampler.sample(rows, logits) if self._sampler else []

    def _prefill(self, new: Sequence[NewRows], refused: dict[RowId, str]) -> list[SampledToken]:
        readable: list[NewRows] = []
        for prompt in new:
            if why := self._model.why_not(prompt.inputs or ()):
                refused[prompt.rows[0]] = why
            else:
                readable.append(prompt)
        logits: dict[int, torch.Tensor] = {}
        for places in _groups(readable):
            try:
                self._prefill_group([readable[place] for place in places], places, logits)
            except InputsRejectedError as exc:
                refused[readable[places[0]].rows[0]] = str(exc)
        return self._sample_first(readable, logits)

    def _prefill_group(
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
        given = self._tensor(tokens)[:, reused:], mask, positions[:, reused:], cache
        with self._using(prompts[0].adapter):
            found = self._model.forward(*given, prompts[0].inputs)[:, -1]
        logits.update(zip(places, found, strict=True))
        self._keep(prompts, cache)
        self._join(prompts, cache, pads)
        if self._draft and not prompts[0].adapter:
            # Images are left out: they would only make its proposals better.
            self._draft.read(self._tensor(tokens), mask, positions, prompts, pads)

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
                self._kept[new.keep_as] = CachedPrefix.of(new.prompt, cache, row)

    def _join(self, prompts: list[NewRows], cache: Cache, pads: list[int]) -> None:
        key = prompts[0].adapter
        if key not in self._batches:
            self._batches[key] = BatchedKVCache(self._model.new_cache(), self._model.device)
        _join(self._batches[key], prompts, cache, pads)

    def _sample_first(
        self, new: Sequence[NewRows], logits: dict[int, torch.Tensor]
    ) -> list[SampledToken]:
        if not self._sampler or not logits:
            return []
        rows: list[RowId] = []
        of_rows: list[torch.Tensor] = []
        for place in sorted(logits):
            self._sampler.add(new[place].rows, new[place].sampling_params, new[place].completions)
            rows.extend(new[place].rows)
            of_rows.extend([logits[place]] * len(new[place].rows))
        return self._sample(rows, torch.stack(of_rows))

    def _tensor(self, numbers: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(numbers, device=self._model.device)


class Draft:
    """A draft model, whose cache has the tokens of the runner's rows, in the same columns.

    It proposes `count` tokens for each row in each step.
    """

    def __init__(self, model: Any, count: int) -> None:
        self._model = CausalModel(model)
        self._count = count
        self.batch = BatchedKVCache(self._model.new_cache(), self._model.device)

    def read(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        prompts: list[NewRows],
        pads: list[int],
    ) -> None:
        """Read prompts, whose rows join the batch. Kept prompts are read again."""
        cache = self._model.new_cache()
        self._model.forward(tokens, mask, positions, cache)
        _join(self.batch, prompts, cache, pads)

    def propose(
        self, last: torch.Tensor, sampler: TokenSampler
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the last token of each row, int64[rows, 1], and the tokens that are proposed.

        Return these, int64[rows, count], and the probabilities with which they were drawn,
        float32[rows, count, vocabulary].
        """
        tokens, drafts = [last], []
        for _ in range(self._count):
            drawn, drafted = sampler.propose(self.batch.rows, self._next(tokens[-1]))
            tokens.append(drawn[:, None])
            drafts.append(drafted)
        self._next(tokens[-1])  # for the cache: it may be accepted
        return torch.cat(tokens[1:], dim=1), torch.stack(drafts, dim=1)

    def _next(self, tokens: torch.Tensor) -> torch.Tensor:
        batch = self.batch
        return self._model.forward(tokens, batch.mask(), batch.positions(), batch.cache)[:, -1]


def _join(
    batch: BatchedKVCache, prompts: Sequence[NewRows], cache: Cache, pads: Sequence[int]
) -> None:
    """Add the rows of prompts, whose caches are the rows of `cache`, to a batch."""
    owners = [i for i, new in enumerate(prompts) for _ in new.rows]
    if len(owners) > len(prompts):
        cache.batch_select_indices(torch.tensor(owners, device=batch.device))
    rows = [row for new in prompts for row in new.rows]
    batch.join(rows, cache, [pads[i] for i in owners])


def _groups(prompts: Sequence[NewRows]) -> list[list[int]]:
    """Group prompts of similar length for one forward pass; some prompts form their own group.

    All prompts of a group have the same version of an adapter.
    """
    groups: list[list[int]] = []
    alone: list[list[int]] = []
    for place, new in sorted(
        enumerate(prompts), key=lambda entry: (entry[1].adapter, len(entry[1].prompt))
    ):
        last = [prompts[i] for i in groups[-1]] if groups else []
        if new.inputs or new.reuse is not None:
            alone.append([place])
        elif (
            last
            and last[0].adapter == new.adapter
            and _fits(len(new.prompt), [len(other.prompt) for other in last])
        ):
            groups[-1].append(place)
        else:
            groups.append([place])
    # The others come last, because they may reuse a prompt of this step.
    return groups + alone


def _fits(length: int, lengths: Sequence[int]) -> bool:
    return length <= 2 * lengths[0] and length * (len(lengths) + 1) <= _BATCH_TOKENS
