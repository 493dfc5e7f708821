"""A module with tensors of torchao or bitsandbytes, sent as the values that these stand for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from weightsync.arguments import Dtype
from weightsync.errors import ConfigError
from weightsync.specs import Manifest
from weightsync.weights.sinks.module_sink import ModuleTensors, Rename, rename_with
from weightsync.weights.sources.base import IterableSource
from weightsync.weights.tensor_kinds import quantizer_of


class DequantizedSource(IterableSource):
    """The tensors of a module; those that torchao or bitsandbytes quantized, as their values.

    Each is dequantized by its own package when it is sent, in the dtype that the package gives,
    and `dtype` casts then. One dequantized tensor lives at a time. What a package has not quantized
    yet is sent as it is. The servers keep plain tensors.

    Raises ConfigError for what is no module, and names a tensor that cannot be dequantized.
    """

    def __init__(
        self, module: nn.Module, *, dtype: Dtype | None = None, rename: Rename | None = None
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"a DequantizedSource is of a module, not {type(module).__name__}")
        self._found = ModuleTensors(module)
        super().__init__(self._values, dtype=dtype, rename=rename)
        renamed = rename_with(rename)
        aliases = {renamed(a): renamed(name) for a, name in self._found.aliases.items()}
        self._manifest = Manifest(self._manifest.specs, aliases)

    def _values(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._found.refresh()
        states = {
            id(layer._parameters.get("weight")): getattr(layer, "state", None)
            for layer in self._found.modules
        }
        for name, tensor in zip(self._found.names, self._found.tensors, strict=True):
            package = quantizer_of(tensor)
            if package is None:
                yield name, tensor.detach()
            else:
                yield name, _dequantized(name, tensor, package, states.get(id(tensor)))


def _dequantized(name: str, tensor: Any, package: str, state: Any) -> torch.Tensor:
    """Return a plain tensor of the values. `state` is what a layer of bitsandbytes keeps beside."""
    try:
        with torch.no_grad():
            if package == "torchao":
                made = tensor.detach().dequantize()
            else:
                made = _of_bitsandbytes(tensor, state)
    except Exception as exc:  # a foreign class, whatever it raises
        raise _refused(name, tensor, package, f"{type(exc).__name__}: {exc}") from exc
    if type(made) is not torch.Tensor:
        raise _refused(name, tensor, package, f"it becomes a {type(made).__name__}")
    return made


def _of_bitsandbytes(tensor: Any, state: Any) -> Any:
    data = tensor.data
    functional = importlib.import_module("bitsandbytes.functional")
    # First, since bnb_4bit_quant_storage keeps packed values in a floating-point dtype, too.
    if getattr(tensor, "quant_state", None) is not None:
        return functional.dequantize_4bit(data, tensor.quant_state)
    if data.is_floating_point():
        return data.as_subclass(torch.Tensor)  # not quantized yet: it has its values
    # The first forward moves the scales from the parameter to the layer.
    scales = tensor.SCB if tensor.SCB is not None else state.SCB
    return functional.int8_vectorwise_dequant(data, scales)


def _refused(name: str, tensor: torch.Tensor, package: str, why: str) -> ConfigError:
    line = " ".join(why.split())
    return ConfigError(
        f"{name}, a {package} {type(tensor).__name__}, cannot be dequantized: {line:.200}; give "
        "connect() a callable that yields plain tensors"
    )
