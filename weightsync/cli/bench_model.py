"""Models to measure with: many equal tensors, or the shapes of a real one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from weightsync.errors import ConfigError
from weightsync.tensors import TORCH_DTYPES

Shape = tuple[int, ...]


def shapes_of(name: str | None, *, nbytes: int, tensors: int, dtype: torch.dtype) -> list[Shape]:
    """Return the shapes of `tensors` equal tensors, `nbytes` in all, or of a named model."""
    if name is None:
        numel = nbytes // tensors // dtype.itemsize
        if numel < 1:
            raise ConfigError(f"{nbytes} bytes do not make {tensors} tensors of {dtype}")
        width = 64 if numel % 64 == 0 else 1
        return [(numel // width, width)] * tensors
    if name != "smollm2":
        raise ConfigError(f"--shapes knows smollm2, not {name!r}")
    return smollm2()


def smollm2() -> list[Shape]:
    """The 272 tensors of SmolLM2-135M: 30 layers of width 576, three key heads, tied head."""
    hidden, inner, keys, layers, vocabulary = 576, 1536, 192, 30, 49_152
    layer: Sequence[Shape] = (
        (hidden, hidden),
        (keys, hidden),
        (keys, hidden),
        (hidden, hidden),
        (inner, hidden),
        (inner, hidden),
        (hidden, inner),
        (hidden,),
        (hidden,),
    )
    return [(vocabulary, hidden), *(shape for _ in range(layers) for shape in layer), (hidden,)]


def make_model(shapes: Sequence[Shape], dtype_name: str, *, value: int) -> nn.Module:
    """Return a module with one parameter per shape, every element `value`.

    Raises ConfigError where there is no memory for it.
    """
    dtype = TORCH_DTYPES[dtype_name]
    model = nn.Module()
    try:
        parameters = [
            nn.Parameter(torch.full(shape, value, dtype=dtype), requires_grad=False)
            for shape in shapes
        ]
    # torch's words for too much memory, and for numbers that are too large for it.
    except (MemoryError, OverflowError, RuntimeError, TypeError) as exc:
        said = str(exc).partition("\n")[0]
        raise ConfigError(
            f"no memory for {total_nbytes(shapes, dtype)} bytes ({said}); give a smaller --nbytes"
        ) from exc
    model.weights = nn.ParameterList(parameters)
    return model


def total_nbytes(shapes: Sequence[Shape], dtype: torch.dtype) -> int:
    """Bytes of all tensors."""
    return sum(math.prod(shape) for shape in shapes) * dtype.itemsize
