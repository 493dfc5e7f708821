"""Fingerprints of the weights that a vLLM worker computes with.

On CPU vLLM packs linear layers and leaves an empty weight, so that its own checker compares empty
tensors. A packed layer is multiplied with the unit vectors instead: the product is its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from weightsync.errors import ConfigError, shorten
from weightsync.tensors import as_bytes
from weightsync.weights.fingerprint import mix64, to_hex

_ROWS = 1024


def held_checksums(model: nn.Module, names: Iterable[str] | None = None) -> dict[str, str]:
    """Return mix64 by vLLM's own names; tied parameters are read in each of their places.

    Raises ConfigError for unknown names, and for a layer that cannot be read.
    """
    layers = _places(model)
    chosen = list(layers) if names is None else list(names)
    unknown = [name for name in chosen if name not in layers]
    if unknown:
        raise ConfigError(
            f"{shorten(unknown)}: no parameters of this worker; vLLM's names are like "
            f"{shorten(layers, 3)}"
        )
    with torch.inference_mode(False), torch.no_grad():
        return {name: to_hex(_fingerprint(name, layers[name])) for name in chosen}


def _places(model: nn.Module) -> dict[str, Callable[[], torch.Tensor]]:
    """Return a reader of each parameter, in every place where it is used."""
    places: dict[str, Callable[[], torch.Tensor]] = {}
    for path, layer in model.named_modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                places[f"{path}.{name}" if path else name] = _reader(layer, name, parameter)
    return places


def _reader(layer: nn.Module, name: str, parameter: torch.Tensor) -> Callable[[], torch.Tensor]:
    packed = getattr(layer, "cpu_linear", None)
    looked_up = type(layer).__name__ == "VocabParallelEmbedding"  # read by row, never multiplied
    if name == "weight" and callable(packed) and not looked_up:
        return lambda: _unpacked(layer, parameter, packed)
    return lambda: parameter


def _unpacked(
    layer: nn.Module, weight: torch.Tensor, linear: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Multiply with the unit vectors. All products but one are zero, so the sums are exact."""
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    width = next((size for name in names if (size := getattr(layer, name, None))), None)
    if not isinstance(width, int):
        raise ConfigError(f"a packed {type(layer).__name__} does not say how wide it is")
    rows = []
    for start in range(0, width, _ROWS):
        units = torch.zeros(min(_ROWS, width - start), width, dtype=weight.dtype)
        units[:, start : start + _ROWS].fill_diagonal_(1)
        rows.append(linear(units, weight, None))
    return torch.cat(rows).t().contiguous()


def _fingerprint(name: str, read: Callable[[], torch.Tensor]) -> int:
    held = read().detach().contiguous()
    if not held.numel():
        raise ConfigError(f"{name} is empty here: its layer keeps the weight in a form of its own")
    return mix64(as_bytes(held))
