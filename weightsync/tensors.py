"""Tensors as specs and as bytes: the one table of dtypes, and views that copy nothing."""

from __future__ import annotations

import ctypes
import warnings

import torch

from weightsync.errors import ConfigError, ProtocolError
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


# torch warns once per process when it is shown read-only memory; that once is spent here.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def dense_spec(tensor: torch.Tensor, name: str = "tensor") -> TensorSpec:
    """Describe a tensor. Raises ConfigError for those that cannot travel, and names too long."""
    dtype = NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise ConfigError(
            f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot be sent; "
            f"dense ones of {', '.join(TORCH_DTYPES)} can"
        )
    return TensorSpec(name, dtype, tuple(tensor.shape))


def contiguous_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return `uint8[nbytes]`: a view of a contiguous tensor, else of a contiguous copy."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def view_as(flat: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """View `uint8[nbytes]`, which must fit, as the tensor described."""
    return flat.view(TORCH_DTYPES[dtype]).view(shape)


def view_bytes(view: memoryview, offset: int, count: int) -> torch.Tensor:
    """Return `uint8[count]` from `offset` of memory that may be read-only; it holds `view`."""
    if count == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(view, dtype=torch.uint8, count=count, offset=offset)


def tensor_of(data: bytes | bytearray | memoryview, dtype: str, shape: list[int]) -> torch.Tensor:
    """Return a tensor from its bytes: a view of them if they may be written, else a copy.

    Raises ProtocolError unless the bytes are as many as dtype and shape say.
    """
    spec = checked_spec("tensor", dtype, shape)
    view = memoryview(data)
    if view.nbytes != spec.nbytes:
        raise ProtocolError(f"{spec} takes {spec.nbytes} bytes, and {view.nbytes} came")
    if not spec.nbytes:
        return view_as(torch.empty(0, dtype=torch.uint8), dtype, spec.shape)
    flat = torch.frombuffer(view, dtype=torch.uint8)
    # Whoever wrote the frame chose its alignment.
    usable = not view.readonly and flat.data_ptr() % TORCH_DTYPES[dtype].itemsize == 0
    return view_as(flat if usable else flat.clone(), dtype, spec.shape)


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
    dense_spec(tensor)
    flat = contiguous_bytes(tensor).cpu()
    array = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    array.keeps = flat  # type: ignore[attr-defined]  # ctypes instances take attributes
    return memoryview(array).cast("B").toreadonly()
