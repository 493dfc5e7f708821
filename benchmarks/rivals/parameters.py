"""The benchmarked parameters: creation, changes, copies and comparison, without weightsync."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import nn

from benchmarks.shapes import Tensor

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
NOISE_NBYTES = 4 << 20
TOUCHED = 16
Parameters = Mapping[str, torch.Tensor]


def make_module(tensors: Iterable[Tensor]) -> nn.Module:
    """Return a module with these parameters, all zero, nested as their names say."""
    root = nn.Module()
    for tensor in tensors:
        *path, last = tensor.name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        made = torch.zeros(tensor.shape, dtype=DTYPES[tensor.dtype])
        owner.register_parameter(last, nn.Parameter(made, requires_grad=False))
    return root


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters by name: the objects themselves, wherever their memory is moved.

    `.data` would be a second user of the memory, which could then not be moved.
    """
    return dict(module.named_parameters())


def addresses(module: nn.Module) -> list[int]:
    """Return the address of each parameter's memory."""
    return [parameter.data_ptr() for parameter in module.parameters()]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return uint8[nbytes], a view of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    array: Any = as_bytes(
        tensor
    ).numpy()  # numpy's types have no buffer protocol before Python 3.12
    return memoryview(array)


def load(parameters: Parameters, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Copy each tensor into the parameter of its name: the last step of every reader."""
    names = set()
    for name, tensor in pairs:
        parameters[name].copy_(tensor)
        names.add(name)
    return names


def fill(parameters: Parameters, seed: int) -> None:
    """Give every parameter other bytes than before, and other bytes than its neighbours."""
    noise = torch.empty(NOISE_NBYTES, dtype=torch.uint8)
    noise.random_(generator=torch.Generator().manual_seed(seed))
    _fill_from(noise, parameters)


def fill_as_weights(parameters: Parameters) -> None:
    """Give every bf16 parameter the values of an initialised model: codings depend on them."""
    noise = torch.empty(NOISE_NBYTES // 2, dtype=torch.bfloat16)
    noise.normal_(0, 0.02, generator=torch.Generator().manual_seed(1))
    _fill_from(as_bytes(noise), parameters)


def _fill_from(noise: torch.Tensor, parameters: Parameters) -> None:
    for number, tensor in enumerate(parameters.values()):
        left = as_bytes(tensor)
        start = number * 4_098 % (NOISE_NBYTES // 2)
        while len(left):
            piece = noise[start : start + len(left)]
            left[: len(piece)].copy_(piece)
            left, start = left[len(piece) :], 0


def touch(parameters: Sequence[torch.Tensor]) -> None:
    """Change some bytes of the parameters, in place of a training step, which changes all."""
    for tensor in parameters[:: max(1, len(parameters) // TOUCHED)]:
        as_bytes(tensor)[0] ^= 1


def digests(parameters: Parameters) -> dict[str, str]:
    """Return a digest of each parameter's content."""
    return {
        name: xxhash.xxh3_64_hexdigest(memory_of(tensor)) for name, tensor in parameters.items()
    }
