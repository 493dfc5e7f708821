"""Adapters of a transformers model in this process: their receivers, versions and computation.

A version never changes: a commit adds one, and what generates with an earlier one keeps it. So an
update needs no pause, and no lock but that of the tables.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from weightsync.errors import ConfigError, shorten
from weightsync.integrations.adapter_receivers import AdapterReceivers
from weightsync.integrations.adapter_sink import AdapterSink, LoraPair, LoraPairs, other_base
from weightsync.receiver import WeightReceiver
from weightsync.specs import Manifest

_PREFIX = "base_model.model."
_NOT_COMPUTED = (
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "velora_config",
)
"""Fields of PEFT's config that change what is computed."""


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """The matrices of one layer: A is [rank, inputs], B is [outputs, rank]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    is_embedding: bool = False

    def added_to(self, output: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return a layer's output with what the adapter adds to it, as PEFT computes it."""
        if self.is_embedding:
            found = functional.embedding(given, self.a.T) @ self.b.T
        else:
            found = functional.linear(functional.linear(given.to(self.a.dtype), self.a), self.b)
        return (output + found * self.scale).to(output.dtype)


@dataclass(frozen=True, slots=True)
class HeldAdapter:
    """One version of an adapter; `layers` are by the module's path. No other has the same `key`.

    A `retired` one was unloaded: it is there for what uses it already.
    """

    name: str
    version: int
    key: str
    layers: Mapping[str, LoraLayer]
    retired: bool = False


class ModuleAdapters:
    """The adapters of a module by name, each with its receiver, and the versions that are held.

    `taken` are names that no adapter may have. A version is held until `forget` names it. With the
    receiver of the base model `beside` them, base and adapters can be a set. Every method is
    thread-safe.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        taken: Collection[str] = (),
        beside: WeightReceiver | None = None,
    ) -> None:
        self._beside = beside
        self._modules = dict(module.named_modules())
        self._lock = threading.Lock()
        self._receivers = AdapterReceivers(self._make, taken=taken)
        self._held: dict[str, HeldAdapter] = {}
        self._made_by: dict[str, WeightReceiver] = {}
        self._commits = 0
        self.receiver = self._receivers.get
        self.close = self._receivers.close

    def unload(self, name: str) -> None:
        """Retire all versions of an adapter, and close its receiver. None of the name is no error.

        An update of it that is open is aborted. One that is committed at this time arrives retired,
        unless it is by the receiver that another sender made meanwhile.
        """
        self._receivers.remove(name)
        with self._lock:
            for key, receiver in self._made_by.items():
                held = self._held[key]
                if held.name == name and not self._receivers.has(name, receiver):
                    self._held[key] = replace(held, retired=True)

    def forget(self, keys: Collection[str]) -> None:
        """Drop versions that nothing uses any more."""
        with self._lock:
            for key in keys:
                self._held.pop(key, None)
                self._made_by.pop(key, None)

    def held(self) -> list[HeldAdapter]:
        """Return all versions that are held, in the order of their commits."""
        with self._lock:
            return list(self._held.values())

    def get(self, key: str) -> HeldAdapter:
        """Return the version of a key. Raises ConfigError for one that is not held."""
        with self._lock:
            found = self._held.get(key)
        if found is None:
            raise ConfigError(f"this worker does not hold the adapter {key!r:.120}")
        return found

    def _make(self, name: str) -> WeightReceiver:
        added = list[str]()

        def commit(version: int) -> None:
            layers = sink.take()
            if layers is None:
                return  # another part of the set failed, and the former version is in use again
            with self._lock:
                self._commits += 1
                key = f"{name}@{version}#{self._commits}"
                # A commit may wait for readers for longer than an unload waits for it.
                gone = not self._receivers.has(name, receiver)
                self._held[key] = HeldAdapter(name, version, key, layers, retired=gone)
                self._made_by[key] = receiver
            added[:] = [key]

        sink = ModuleAdapterSink(self._modules, undo=lambda: self.forget(added))
        receiver = WeightReceiver(sink, apply="staged", on_commit=commit, beside=self._beside)
        return receiver


class ModuleAdapterSink(AdapterSink[Mapping[str, LoraLayer]]):
    """Builds the layers of an adapter for the modules of a model, given by path.

    `undo` takes back what was made of the last ones.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, undo: Callable[[], None]) -> None:
        super().__init__()
        self._modules = modules
        self._undo = undo

    def check(self, offered: Manifest) -> None:
        """Raise ManifestMismatchError for what does not fit the modules."""
        found = LoraPairs.of(offered)
        for pair in found:
            why = self._refusal(pair)
            if why:
                found.refuse(why, pair.prefix.removeprefix(_PREFIX))
        found.check(self.server)

    def build(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, object], digest: str
    ) -> Mapping[str, LoraLayer]:
        """Return the layers. Raises ConfigError for what PEFT would compute in another way."""
        if refused := [f"{f}={config[f]!r:.60}" for f in _NOT_COMPUTED if config.get(f)]:
            raise ConfigError(f"this server does not compute {', '.join(refused)}")
        scales = _Scales(config)
        layers, other = dict[str, LoraLayer](), list[str]()
        for name, a in tensors.items():
            prefix, kind, rest = name.partition(".lora_embedding_A")
            if not kind:
                prefix, kind, rest = name.partition(".lora_A")
            if not kind:
                continue  # B, which goes with its A
            path = prefix.removeprefix(_PREFIX)
            rank, scale = scales.of(path)
            if rank != a.shape[0]:
                other.append(f"{path} (rank {rank}, tensors of rank {a.shape[0]})")
                continue
            module: Any = self._modules[path]
            device, b = module.weight.device, tensors[prefix + kind[:-1] + "B" + rest]
            layers[path] = LoraLayer(
                a.to(device), b.to(device, a.dtype), scale, is_embedding="embedding" in kind
            )
        if other:
            raise ConfigError(f"the config has other ranks than the tensors: {shorten(other)}")
        return layers

    def undo(self) -> Callable[[], None]:
        """Return what takes the next commit back."""
        return self._undo

    def _refusal(self, pair: LoraPair) -> str:
        """Return why the tensors of one layer are not taken; empty where they are."""
        module = self._modules.get(pair.prefix.removeprefix(_PREFIX))
        if module is None or not pair.prefix.startswith(_PREFIX):
            return "modules that the model of this server does not have"
        sizes = _sizes(module, is_embedding=pair.is_embedding)
        if sizes is None or len(pair.a.shape) != 2 or len(pair.b.shape) != 2:
            return f"modules of which this server computes no LoRA ({type(module).__name__})"
        return other_base(pair, *sizes)


def _sizes(module: nn.Module, *, is_embedding: bool) -> tuple[int, int] | None:
    """Return the sizes of a layer that LoRA is added to: inputs and outputs; None for others.

    Other classes of embeddings may scale their output, which PEFT does with the adapter's as well.
    """
    if is_embedding:
        plain = type(module) is nn.Embedding
        return (module.num_embeddings, module.embedding_dim) if plain else None  # type: ignore[return-value]  # of an Embedding these are numbers
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D":  # transformers' linear layer of GPT-2, transposed
        inputs, outputs = module.weight.shape  # type: ignore[misc]  # a matrix
        return inputs, outputs
    return None


class _Scales:
    """The rank and the scale of each layer, as PEFT reads them from a config."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config
        self._root = bool(config.get("use_rslora"))

    def of(self, path: str) -> tuple[int, float]:
        """Return a layer's rank and scale. Raises ConfigError for a config that has none."""
        rank = self._number("r", "rank_pattern", path, 8)
        alpha = self._number("lora_alpha", "alpha_pattern", path, 8)
        if rank != int(rank) or rank < 1:
            raise ConfigError(f"the config has the rank {rank} for {path}")
        return int(rank), alpha / (math.sqrt(rank) if self._root else rank)

    def _number(self, field: str, patterns: str, path: str, default: float) -> float:
        found = self._config.get(field, default)
        given = self._config.get(patterns) or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"{patterns} of the config is a {type(given).__name__}")
        try:
            # PEFT takes the first key that the end of the path matches.
            found = next((v for k, v in given.items() if re.match(rf"(.*\.)?({k})$", path)), found)
        except re.error as exc:
            raise ConfigError(f"{patterns} of the config has no pattern: {exc}") from exc
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ConfigError(f"{field} of the config is {found!r:.60}, not a number")
        return found


class AdaptedModule:
    """Computes with one adapter at a time in a module. Use it from one thread.

    Neither the module's parameters nor their names change: what an adapter adds is added to the
    outputs of its layers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = dict(module.named_modules())
        self._hooked: set[str] = set()
        self._layers: Mapping[str, LoraLayer] = {}

    @contextmanager
    def using(self, adapter: HeldAdapter | None) -> Iterator[None]:
        """Compute with an adapter inside the block, None: with the base model alone."""
        self._layers = adapter.layers if adapter is not None else {}
        for path in self._layers.keys() - self._hooked:
            self._modules[path].register_forward_hook(self._hook_of(path), with_kwargs=True)
            self._hooked.add(path)
        try:
            yield
        finally:
            self._layers = {}

    def _hook_of(self, path: str) -> Callable[..., torch.Tensor | None]:
        def added(
            _: nn.Module, given: Sequence[Any], named: Mapping[str, Any], output: torch.Tensor
        ) -> torch.Tensor | None:
            layer = self._layers.get(path)
            if layer is None:
                return None
            return layer.added_to(output, given[0] if given else named["input"])

        return added
