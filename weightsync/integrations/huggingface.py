"""Weights of a PEFT model: the base model with its adapters merged, or an adapter alone."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from weightsync.arguments import Dtype, as_dtype
from weightsync.errors import ConfigError, MissingExtraError, install_hint
from weightsync.specs import Manifest
from weightsync.tensors import sent_dtype, spec_of
from weightsync.weights.copying.shards import gather
from weightsync.weights.sinks.module_sink import ModuleTensors, strip_wrappers
from weightsync.weights.sources.base import rounded_by
from weightsync.weights.tensor_kinds import check_sendable, states_beside, warn_of_state

try:
    from peft import PeftModel, get_peft_model_state_dict
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
except ImportError as exc:
    raise MissingExtraError(f"adapters need peft ({exc}); {install_hint('peft')}") from exc

_BASE = "base_layer"
_SAVED = "modules_to_save"
_ORIGINAL = "original_module"
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class MergedSource:
    """A WeightSource of the base model with the active adapters merged in, for plain receivers.

    Names are those of the base model: without `base_model.model.` and `base_layer`. peft merges
    each layer in a copy, which lives until the next layer is read. The trainer's model does not
    change, and one layer's weights are held beside it. The copy is in float32 at least, and the
    result is rounded once, to what is sent: in bf16 many small changes of an adapter would be lost
    in the sum. How many are lost by that one rounding is in `SyncReport.merge`. `dtype` casts
    floating-point tensors. Raises
    ConfigError where `model` is no PeftModel, and for adapters that cannot be merged: trainable
    tokens, or a layer whose weights are tied to an earlier layer without an adapter.
    """

    def __init__(self, model: nn.Module, *, dtype: Dtype | None = None) -> None:
        self._dtype = dtype = as_dtype("dtype", dtype)
        self._base = peft_model(model).get_base_model()
        self._tensors = ModuleTensors(self._base)
        self._names = self._plain_names()
        named = [(name, self._tensors.tensors[i]) for i, name in self._names.items()]
        check_sendable(named, dtype)
        warn_of_state(states_beside(named), "sent")
        self._is_named = True
        self._counts: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        specs = tuple(
            spec_of(name, self._tensors.tensors[i], dtype) for i, name in self._names.items()
        )
        self.rounded = rounded_by(specs, [tensor.dtype for _, tensor in named])
        self._manifest = Manifest(specs, self._aliases())

    @property
    def manifest(self) -> Manifest:
        """The names of a plain model, and the dtypes that are sent."""
        return self._manifest

    def stable_tensors(self) -> None:
        """None: merged tensors are new ones in each update."""
        return

    def made_of(self) -> tuple[list[str], list[torch.Tensor]]:
        """The tensors of the base model and the adapters, under the module's own names."""
        self._look_again()
        return self._tensors.names, self._tensors.tensors

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors; a layer is merged when its first tensor is read."""
        self._look_again()
        layers = _tuner_layers(self._base)
        self._counts = counts = []
        merged: tuple[str, dict[str, _Merged]] = ("", {})
        for i, name in self._names.items():
            prefix, within = _split(self._tensors.names[i], layers)
            if within is None:
                yield name, gather(self._tensors.tensors[i].detach())
                continue
            if merged[0] != prefix:
                merged = prefix, _merge(layers[prefix])
            found = merged[1][within]
            sent = found.whole.to(sent_dtype(self._tensors.tensors[i].dtype, self._dtype))
            counts += found.counts(sent)
            yield name, sent

    def take_merged(self) -> tuple[int, int] | None:
        """Return, and forget, what the last pass counted; see WeightSource.take_merged."""
        counts, self._counts = self._counts, None
        if counts is None:
            return None
        changed = sum(int(changed) for changed, _ in counts)
        return changed, max(0, changed - sum(int(kept) for _, kept in counts))

    def _look_again(self) -> None:
        if self._tensors.refresh() or not self._is_named:
            self._is_named = False  # an error leaves it so, and the next look starts anew
            self._names = self._plain_names()
            self._is_named = True

    def _plain_names(self) -> dict[int, str]:
        """Return the receivers' name of each tensor that is sent, by its index."""
        saved = {}
        for name, module in self._base.named_modules():
            if isinstance(module, ModulesToSaveWrapper):
                saved[strip_wrappers(name)] = module.active_adapter
            elif isinstance(module, AuxiliaryTrainingWrapper):
                raise ConfigError(
                    f"{name} is a {type(module).__name__}, which is not merged on the way; send "
                    "model.merge_and_unload() of a copy"
                )
        layers = _tuner_layers(self._base)
        names = {i: _plain(name, layers, saved) for i, name in enumerate(self._tensors.names)}
        return {i: name for i, name in names.items() if name is not None}

    def _aliases(self) -> dict[str, str]:
        layers = _tuner_layers(self._base)
        plain = {self._tensors.names[i]: name for i, name in self._names.items()}
        aliases = {}
        for alias, name in self._tensors.aliases.items():
            prefix, within = _split(alias, layers)
            if within is not None and _split(name, layers)[1] is None:
                raise ConfigError(
                    f"{prefix} has an adapter, and its weights are tied to {name}, which has none; "
                    "untie them, or put the adapter on the other"
                )
            known = _plain(alias, layers, {})
            if known is not None and name in plain:
                aliases[known] = plain[name]
        return aliases


def adapter_named(model: PeftModel, name: str, given: str | None) -> str:
    """Return the adapter that is meant: `given`, or one of this `name`, or the active one.

    Raises ConfigError where the model has no such adapter.
    """
    wanted = name if given is None else given
    if wanted in model.peft_config:
        return wanted
    if given is None and isinstance(model.active_adapter, str):
        return str(model.active_adapter)
    raise ConfigError(
        f"this model has no adapter {wanted!r}; it has {', '.join(model.peft_config)}; name one of "
        "them with adapter="
    )


def checkpoint_names(model: PeftModel, adapter: str) -> dict[str, str]:
    """Return PEFT's checkpoint names of an adapter's tensors, by the model's own names."""
    named = [*model.named_parameters(), *model.named_buffers()]
    own = {id(tensor): strip_wrappers(name) for name, tensor in named}
    given = {strip_wrappers(name): tensor for name, tensor in named}
    # Embeddings of the base are none of the adapter's. To look whether they were resized, as PEFT
    # does by itself, may take a request to the hub.
    sent = get_peft_model_state_dict(
        model, state_dict=given, adapter_name=adapter, save_embedding_layers=False
    )
    return {own[id(tensor)]: name for name, tensor in sent.items()}


def config_of(model: PeftModel, adapter: str) -> dict[str, Any]:
    """Return an adapter's config without the fields that have PEFT's defaults."""
    config = model.peft_config[adapter]
    defaults = {
        field.name: _default_of(field)
        for field in dataclasses.fields(config)
        if field.name not in _NEEDED_FIELDS
    }
    return {
        name: value
        for name, value in config.to_dict().items()
        # A trainer changes `inference_mode` as it likes: it says nothing about the adapter.
        if name != "inference_mode" and (name not in defaults or value != defaults[name])
    }


_NEEDED_FIELDS = ("peft_type", "r", "lora_alpha", "target_modules", "bias")
"""Fields that servers want in every config."""


def _default_of(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def other_scales(model: PeftModel, adapter: str) -> list[str]:
    """Return the layers whose scale is not the one that the adapter's config tells."""
    rooted: bool = getattr(model.peft_config[adapter], "use_rslora", False)
    found = []
    for path, module in _tuner_layers(model).items():
        layer: Any = module  # of LoRA, which has these tables
        scale = getattr(layer, "scaling", {}).get(adapter)
        if scale is None:
            continue
        rank, alpha = layer.r[adapter], layer.lora_alpha[adapter]
        wanted = alpha / (math.sqrt(rank) if rooted else rank)
        if not math.isclose(scale, wanted, rel_tol=1e-6):
            found.append(f"{path} ({scale:g}, not {wanted:g})")
    return found


def adapter_tensors(
    model: nn.Module, *, adapter: str | None = None
) -> list[tuple[str, torch.Tensor]]:
    """Return an adapter's own tensors, for receivers that hold a PEFT model of the same config.

    `adapter` is the active one by default. Modules that are trained whole (`modules_to_save`) are
    included. For `sender.update(partial=True)`, after the whole model was sent once. Raises
    ConfigError where `model` is no PeftModel, or has no such adapter.
    """
    found = peft_model(model)
    name = found.active_adapter if adapter is None else adapter
    if name not in found.peft_config:
        known = ", ".join(found.peft_config)
        raise ConfigError(f"this model has no adapter {name!r}; it has {known}")
    kinds = (f".{found.base_model.prefix}", f".{_SAVED}.")
    return [
        (strip_wrappers(own), parameter.detach())
        for own, parameter in model.named_parameters()
        if any(kind in own for kind in kinds) and name in own.split(".")
    ]


def peft_model(model: nn.Module) -> PeftModel:
    """Return the PeftModel that DDP or torch.compile may wrap. Raises ConfigError for others."""
    found = getattr(model, "module", model)
    found = getattr(found, "_orig_mod", found)
    if not isinstance(found, PeftModel):
        raise ConfigError(
            f"a {type(model).__name__} is no PeftModel; give connect() the module itself"
        )
    return found


def _tuner_layers(base: nn.Module) -> dict[str, BaseTunerLayer]:
    return {
        strip_wrappers(name): module
        for name, module in base.named_modules()
        if isinstance(module, BaseTunerLayer)
    }


def _split(name: str, layers: dict[str, BaseTunerLayer]) -> tuple[str, str | None]:
    """Return the adapted layer's name, and the tensor's name in its base layer.

    The latter is None of a tensor without adapter, and of an adapter's own. A layer whose
    parameters have an adapter each is wrapped once for each: the name is that of the outermost.
    """
    prefix, found, within = name.partition(f".{_BASE}.")
    if not found or prefix not in layers:
        return prefix, None
    inner = prefix
    while (inner := f"{inner}.{_BASE}") in layers:
        if not within.startswith(f"{_BASE}."):
            return prefix, None
        within = within.removeprefix(f"{_BASE}.")
    return prefix, within


def _plain(
    name: str, layers: dict[str, BaseTunerLayer], saved: dict[str, str | list[str]]
) -> str | None:
    """Return the plain model's name of a tensor; None where it has no such tensor."""
    prefix, within = _split(name, layers)
    if within is not None:
        return f"{prefix}.{within}"
    if any(name.startswith(f"{layer}.") for layer in layers):
        return None
    if f".{_ORIGINAL}." in name:
        return None
    prefix, found, within = name.partition(f".{_SAVED}.")
    if not found:
        return name
    adapter, _, own = within.partition(".")
    active = saved.get(prefix, [])
    return (
        f"{prefix}.{own}" if adapter in ([active] if isinstance(active, str) else active) else None
    )


class _Merged(NamedTuple):
    """A tensor with the adapters merged in, in float32 at least.

    `base` is the tensor without, and `delta` what peft added, None where it does not say it.
    """

    whole: torch.Tensor
    base: torch.Tensor
    delta: torch.Tensor | None

    def counts(self, sent: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return how many elements the adapters change, and of how many `sent` shows it.

        Both on the tensor's device, which nothing waits for; no pair for what is not merged.
        """
        if not sent.is_floating_point() or self.whole is self.base:
            return []
        before = self.base.to(sent.dtype)
        if sent.dtype.itemsize == 1:  # torch computes nothing in 8 bits
            sent, before = sent.float(), before.float()
        delta = self.whole - self.base if self.delta is None else self.delta
        # What the adapters do not change is equal in `sent`, too: no mask of both is needed.
        return [(_count_others(delta), _count_others(sent - before))]


def _count_others(tensor: torch.Tensor) -> torch.Tensor:
    """Return how many elements are not 0. The signs of zeros are lost in `tensor`.

    In integers torch counts them in a third of the time.
    """
    return tensor.add_(0.0).view(_INTEGERS[tensor.dtype.itemsize]).count_nonzero()


def _merge(layer: BaseTunerLayer) -> dict[str, _Merged]:
    """Return the tensors of a layer with its active adapters merged in by peft."""
    module: nn.Module = layer  # type: ignore[assignment]  # every BaseTunerLayer is a module
    whole = {id(parameter): gather(parameter.detach()) for parameter in module.parameters()}
    # The copy has no gradients, and whole tensors in place of shards.
    memo: dict[int, object] = {
        key: nn.Parameter(_widened(tensor), requires_grad=False) for key, tensor in whole.items()
    }
    deltas: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        merged = copy.deepcopy(layer, memo)
        for wrapper in _wrappers(merged):
            with _noting(wrapper, deltas):
                wrapper.merge()
    before = {name: whole[id(p)] for name, p in layer.get_base_layer().named_parameters()}
    base = merged.get_base_layer()
    found = {
        name: _Merged(parameter.detach(), before[name], deltas.get(name))
        for name, parameter in base.named_parameters()
    }
    return found | {name: _Merged(b, b, None) for name, b in base.named_buffers()}


def _wrappers(layer: Any) -> Iterator[Any]:
    """Yield a layer, and those that it wraps: one for each parameter with an adapter of its own."""
    while isinstance(layer, BaseTunerLayer):
        yield layer
        layer = getattr(layer, _BASE, None)


@contextmanager
def _noting(layer: Any, deltas: dict[str, torch.Tensor]) -> Iterator[None]:
    """Note what the merge of a LoRA adds to its weight, by the weight's name.

    A variant (DoRA) does more than to add, and what other tuners compute is no sum.
    """
    is_sum = isinstance(layer, LoraLayer) and not getattr(layer, "lora_variant", None)
    if not is_sum:
        yield
        return
    name = getattr(layer, "parameter_name", "weight")
    compute = layer.get_delta_weight

    def noted(adapter: str) -> torch.Tensor:
        delta: torch.Tensor = compute(adapter)
        deltas[name] = deltas[name] + delta if name in deltas else delta
        return delta

    layer.get_delta_weight = noted
    try:
        yield
    finally:
        del layer.get_delta_weight  # or the layer would be in a cycle, and wait for the collector


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, of a floating-point tensor in float32 at least."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize >= torch.float32.itemsize:
        return tensor.clone()
    return tensor.float()
