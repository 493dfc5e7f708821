"""torch dtypes and tensors as specs."""

from __future__ import annotations

import torch

from weightsync.errors import ConfigError
from weightsync.specs import DTYPE_NBYTES, TensorSpec

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPE_NBYTES if hasattr(torch, name)
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return `bfloat16` for torch.bfloat16. Raises ConfigError for a dtype no weight comes in."""
    name = NAMES.get(dtype)
    if name is None:
        raise ConfigError(
            f"weights of dtype {dtype} cannot be sent; known: {', '.join(NAMES.values())}"
        )
    return name


def spec_of(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    """Describe a tensor; floating-point ones as `dtype` if given."""
    return TensorSpec(name, dtype_name(sent_dtype(tensor.dtype, dtype)), tuple(tensor.shape))


def sent_dtype(dtype: torch.dtype, cast: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor travels: casts change floating-point tensors only."""
    return cast if cast is not None and dtype.is_floating_point else dtype


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as `uint8[nbytes]`, sharing its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def from_bytes(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """View `uint8[spec.nbytes]` as the tensor that `spec` describes."""
    return flat.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
