"""A transformers causal language model: the prompts that it can read, and one forward pass."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from weightsync.errors import ConfigError
from weightsync.serve.hugging_face import hf
from weightsync.serve.kv_cache import Cache, PreallocatedLayer, get_layer_types_and_kwargs
from weightsync.serve.messages import ModelCard, NewRows

_CACHED_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_NO_CACHE = "dummy"
_NEEDED_ARGUMENTS = {"input_ids", "attention_mask", "past_key_values"}
_OWN_ARGUMENTS = {*_NEEDED_ARGUMENTS, "position_ids", "inputs_embeds", "use_cache", "labels"}
_NO_LIMIT = 1 << 30


class InputsRejectedError(ConfigError):
    """The model rejects the extra inputs of a prompt. Raised before the cache was changed."""


class CausalModel:
    """A model with its limits, empty caches for it, and the logits of the last token.

    Raises ConfigError for an architecture whose cache does not hold keys and values per token.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._config = model.config.get_text_config(decoder=True)
        self._arguments = set(inspect.signature(model.forward).parameters)
        self._layer_types = self._check_layers()
        self._optional = {"logits_to_keep": 1} if "logits_to_keep" in self._arguments else {}

    @property
    def device(self) -> torch.device:
        """The device of the model and of its inputs."""
        device: torch.device = self.model.device
        return device

    @property
    def vocab_size(self) -> int:
        """The number of token ids; every id is smaller."""
        return int(self._config.vocab_size)

    @property
    def max_length(self) -> int:
        """The most tokens of a prompt and its completion together."""
        return int(getattr(self._config, "max_position_embeddings", None) or _NO_LIMIT)

    def new_cache(self) -> Cache:
        """Make an empty cache that holds all tokens of every layer."""
        cache: Cache = hf.DynamicCache(config=self.model.config)
        cache.layers = [
            empty if layer_type == _NO_CACHE else PreallocatedLayer()
            for empty, layer_type in zip(cache.layers, self._layer_types, strict=True)
        ]
        return cache

    def card(self, name: str, directory: str, tokenizer: Any) -> ModelCard:
        """Return the facts about the model that other processes need."""
        parameters = list(self.model.parameters())
        return ModelCard(
            name=name,
            directory=directory,
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            end_ids=sorted(end_token_ids(self.model, tokenizer)),
            architecture=type(self.model).__name__,
            dtype=str(self.model.dtype).removeprefix("torch."),
            num_parameters=sum(parameter.numel() for parameter in parameters),
            image_token_id=getattr(self.model.config, "image_token_id", None),
        )

    def why_not(self, new: NewRows) -> str:
        """Return why a prompt cannot be read, or "". The same at every tensor-parallel rank."""
        prompt, room = new.prompt, self.max_length
        if not prompt or not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            return (
                f"the prompt is empty or has token ids outside 0 to {self.vocab_size - 1}; encode "
                "it with the model's own tokenizer"
            )
        if len(prompt) >= room:
            return (
                f"the prompt takes {len(prompt)} tokens, the model has room for {room} with the "
                "completion; shorten it"
            )
        return self._why_not_inputs(set(new.inputs or ()))

    def forward(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache,
        inputs: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Read new tokens; return the logits of the last one, float32[rows, vocabulary].

        `tokens` and `positions` are int64[rows, new tokens], `mask` is int64[rows, all tokens]. The
        new keys and values are appended to `cache`.
        Raises InputsRejectedError when `inputs` do not fit the model or the prompt.
        """
        fitted = {name: self._fit(tensor) for name, tensor in (inputs or {}).items()}
        if "position_ids" in self._arguments:
            fitted["position_ids"] = positions
        arguments = {**self._optional, **fitted, "past_key_values": cache, "use_cache": True}
        try:
            output = self.model(input_ids=tokens, attention_mask=mask, **arguments)
        except (ValueError, TypeError, IndexError, RuntimeError) as exc:
            # The model uses the inputs before its first attention layer. A later error, which
            # finds a cache that is not empty, has another cause.
            if inputs and not cache.get_seq_length():
                raise InputsRejectedError(f"the model rejects its inputs: {exc}") from exc
            raise
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float()

    def _fit(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.model.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(self.device, dtype)

    def _why_not_inputs(self, names: set[str]) -> str:
        unknown = sorted(names - self._arguments | names & _OWN_ARGUMENTS)
        if unknown:
            return f"{type(self.model).__name__} takes no inputs named {', '.join(unknown)}"
        if names and hasattr(getattr(self.model, "model", None), "get_rope_index"):
            return (
                f"{type(self.model).__name__} numbers the places of an image in three dimensions, "
                "which is not supported; send text alone"
            )
        return ""

    def _check_layers(self) -> list[str]:
        architecture = type(self.model).__name__
        missing = _NEEDED_ARGUMENTS - self._arguments
        if missing or self.model.config.is_encoder_decoder:
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


def end_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a completion, from the model's configurations and its tokenizer."""
    sources = (
        model.config,
        model.config.get_text_config(decoder=True),
        getattr(model, "generation_config", None),
        tokenizer,
    )
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update(ids if isinstance(ids, list | tuple) else (ids,))
    return frozenset(found)
