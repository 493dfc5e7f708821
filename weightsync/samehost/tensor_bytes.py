"""Tensors as bytes and back: which dtypes travel, and views that copy nothing."""

from __future__ import annotations

import ctypes

import torch

from weightsync.errors import ConfigError, ProtocolError
from weightsync.specs import DTYPE_NBYTES, TensorSpec

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPE_NBYTES if hasattr(torch, name)
}
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def spec_of(tensor: torch.Tensor, name: str = "tensor") -> TensorSpec:
    """Describe a tensor. Raises ConfigError for those that cannot travel, and names too long."""
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise ConfigError(
            f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot be sent; "
            f"dense ones of {', '.join(DTYPES)} can"
        )
    return TensorSpec(name, dtype, tuple(tensor.shape))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return `uint8[nbytes]`: a view of a contiguous tensor, else of a contiguous copy."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(flat: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """View `uint8[nbytes]`, which must fit, as the tensor described."""
    return flat.view(DTYPES[dtype]).view(shape)


def checked_spec(name: str, dtype: str, shape: list[int]) -> TensorSpec:
    """Return the spec that another process described. Raises ProtocolError when it is no tensor."""
    try:
        return TensorSpec(name or "tensor", dtype, tuple(shape))
    except ConfigError as exc:
        raise ProtocolError(f"this describes no tensor: {exc}") from exc


def tensor_data(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's bytes as a read-only `memoryview` of format "B", for hashing and sending.

    A view that keeps the tensor's memory alive if it is contiguous and on the CPU, else of a copy.
    Raises ConfigError for dtypes that do not travel.
    """
    spec_of(tensor)
    flat = as_bytes(tensor).cpu()
    array = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    array.keeps = flat  # type: ignore[attr-defined]  # ctypes instances take attributes
    return memoryview(array).cast("B").toreadonly()
