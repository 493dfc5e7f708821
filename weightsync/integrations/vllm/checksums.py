"""Fingerprints of the weights that a vLLM worker computes with.

On CPU vLLM packs linear layers and leaves an empty weight, so that its own checker compares empty
tensors. A packed layer is multiplied with the unit vectors instead: the product is its weight,
where -0.0 is 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from weightsync.errors import ConfigError, shorten
from weightsync.tensors import as_bytes
from weightsync.weights.copying.fingerprint import mix64, to_hex

_ROWS = 1024


def held_checksums(model: nn.Module, names: Iterable[str] | None = None) -> dict[str, str]:
    """Return mix64 by vLLM's own names; tied parameters are read in each of their places.

    Raises ConfigError for unknown names, and for a layer that cannot be read.
    """
    places = _places(model)
    chosen = list(places) if names is None else list(names)
    unknown = [name for name in chosen if name not in places]
    if unknown:
        raise ConfigError(
            f"{shorten(unknown)}: no parameters of this worker; vLLM's names are like "
            f"{shorten(places, 3)}"
        )
    with torch.inference_mode(False), torch.no_grad():
        return {name: to_hex(_fingerprint(name, *places[name])) for name in chosen}


_STATES = ("kv_cache",)
"""Attributes of layers with what was computed for requests."""


def _places(model: nn.Module) -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Return each parameter and its layer, by name, in every place where it is used.

    Also what is derived, where it holds anything: buffers (scales, rotary caches), and tensors that
    are plain attributes of a layer or of its `quant_method`, also in lists and dicts (the absorbed
    projections of MLA).
    """
    layers = dict(model.named_modules())
    held = {
        (path, name): tensor
        for path, layer in layers.items()
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items(), *_plain(layer))
        if tensor is not None and (name in layer._parameters or tensor.numel())
    }
    return {
        f"{path}.{name}" if path else name: (layers[path], tensor)
        for (path, name), tensor in held.items()
    }


_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module: its parameters, buffers, hooks and so on."""


def _plain(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, held in vars(layer).items():
        if name == "quant_method":
            yield from _tensors(name, getattr(held, "__dict__", {}))
        elif name not in _OF_TORCH and name not in _STATES:
            yield from _tensors(name, held)


def _tensors(name: str, held: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(held, torch.Tensor):
        if not held.is_meta:
            yield name, held
    elif isinstance(held, Mapping):
        for key, one in held.items():
            yield from _tensors(f"{name}.{key}", one)
    elif isinstance(held, list | tuple):
        for index, one in enumerate(held):
            yield from _tensors(f"{name}.{index}", one)


def _fingerprint(name: str, layer: nn.Module, parameter: torch.Tensor) -> int:
    packed = getattr(layer, "cpu_linear", None)
    looked_up = type(layer).__name__ == "VocabParallelEmbedding"  # read by row, never multiplied
    if callable(packed) and parameter is layer._parameters.get("weight") and not looked_up:
        parameter = _unpacked(layer, parameter, packed)
        if not parameter.isfinite().all():
            raise ConfigError(f"{name} holds a value that is not finite, which hides others here")
    held = parameter.detach().contiguous()
    if not held.numel():
        raise ConfigError(f"{name} is empty here: its layer keeps the weight in a form of its own")
    return mix64(as_bytes(held))


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
