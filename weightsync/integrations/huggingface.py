"""What a PEFT model sends: its base model with the adapter merged in, or the adapter alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn

from weightsync.errors import BackendUnavailableError, ConfigError
from weightsync.specs import Manifest
from weightsync.tensors import spec_of
from weightsync.weights.module_sink import ModuleTensors, strip_wrappers
from weightsync.weights.shards import gather

try:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
except ImportError as exc:
    raise BackendUnavailableError(
        f"adapters need peft ({exc}); pip install 'weightsync[peft]'"
    ) from exc

_BASE = "base_layer"
_SAVED = "modules_to_save"
_ORIGINAL = "original_module"


class MergedSource:
    """A WeightSource of the base model with the active adapters merged in, for plain receivers.

    Names are those of the model under the adapters: no `base_model.model.`, no `base_layer`. Each
    layer is merged by peft itself, in a copy that lives until the next layer is asked for: the
    trainer's model stays as it is, and one layer's weights are held beside it. `dtype` casts
    floating-point tensors on the way. Raises ConfigError for what is no PeftModel, and for
    adapters that cannot be merged so: trainable tokens, or a layer whose weights are tied to
    another's that comes first.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
        self._base = _peft_model(model).get_base_model()
        self._tensors = ModuleTensors(self._base)
        self._names = self._plan()
        specs = tuple(
            spec_of(name, self._tensors.tensors[i], dtype) for i, name in self._names.items()
        )
        self._manifest = Manifest(specs, self._aliases())

    @property
    def manifest(self) -> Manifest:
        """Names as a plain model has them, dtypes as sent."""
        return self._manifest

    def stable_tensors(self) -> None:
        """None: merged tensors are new ones every time."""
        return

    def made_of(self) -> tuple[list[str], list[torch.Tensor]]:
        """The base model's and the adapters' own tensors, under the names of the module itself."""
        self._look_again()
        return self._tensors.names, self._tensors.tensors

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensor by tensor; a layer is merged when its first one is asked for."""
        self._look_again()
        layers = _tuner_layers(self._base)
        merged: tuple[str, dict[str, torch.Tensor]] = ("", {})
        for i, name in self._names.items():
            prefix, within = _split(self._tensors.names[i])
            if within is None or prefix not in layers:
                yield name, gather(self._tensors.tensors[i].detach())
                continue
            if merged[0] != prefix:
                merged = prefix, _merge(layers[prefix])
            yield name, merged[1][within]

    def _look_again(self) -> None:
        if self._tensors.refresh():
            self._names = self._plan()

    def _plan(self) -> dict[int, str]:
        """Return the receivers' name of each tensor that travels, by its place in the walk."""
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
            prefix, within = _split(alias)
            if within is not None and prefix in layers and _split(name)[0] not in layers:
                raise ConfigError(
                    f"{prefix} has an adapter, and its weights are tied to {name}, which has none; "
                    "untie them, or put the adapter on the other"
                )
            known = _plain(alias, layers, {})
            if known is not None and name in plain:
                aliases[known] = plain[name]
        return aliases


def adapter_tensors(
    model: nn.Module, *, adapter: str | None = None
) -> list[tuple[str, torch.Tensor]]:
    """Return an adapter's own tensors, for receivers that hold a PEFT model of the same config.

    `adapter` is the active one by default; modules that are trained as a whole come along. For
    `sender.update(partial=True)`, after the whole model was sent once. Raises ConfigError for what
    is no PeftModel, and for an adapter that it has not.
    """
    found = _peft_model(model)
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


def _peft_model(model: nn.Module) -> PeftModel:
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


def _split(name: str) -> tuple[str, str | None]:
    """Return the layer, and what a tensor is called in the layer that an adapter was put around."""
    prefix, found, within = name.partition(f".{_BASE}.")
    return prefix, within if found else None


def _plain(
    name: str, layers: dict[str, BaseTunerLayer], saved: dict[str, str | list[str]]
) -> str | None:
    """Return what a plain model calls a tensor; None where a plain model has no such tensor."""
    prefix, within = _split(name)
    if within is not None and prefix in layers:
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


def _merge(layer: BaseTunerLayer) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer with its active adapters merged in, by peft's own `merge`."""
    module: nn.Module = layer  # type: ignore[assignment]  # every one of them is a module as well
    # Gradients stay out of the copy, and shards become whole.
    memo: dict[int, object] = {
        id(parameter): nn.Parameter(gather(parameter.detach()).clone(), requires_grad=False)
        for parameter in module.parameters()
    }
    with torch.no_grad():
        merged = copy.deepcopy(layer, memo)
        merged.merge()
        base = merged.get_base_layer()
    tensors = [*base.named_parameters(), *base.named_buffers()]
    return {name: tensor.detach() for name, tensor in tensors}
