"""Tensors as specs and as bytes: the one table of dtypes, and conversions in both directions."""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Mapping

import torch

from weightsync.errors import ConfigError, ProtocolError
from weightsync.specs import DTYPE_NBYTES, TensorSpec

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and "q" not in str(dtype) and "bits" not in str(dtype)
}
"""Dtypes of this torch whose bytes are their value, by name without `torch.`."""
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: DTYPES[name] for name in DTYPE_NBYTES if name in DTYPES
}
"""Dtypes of weights, by name without `torch.`, as far as this torch has them."""
PLAIN_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes of tensors that are nothing but their values."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

# torch warns once per process when it first wraps read-only memory. It wraps some here, silenced.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    """Return `bfloat16` for torch.bfloat16. Raises ConfigError for a dtype that cannot be sent."""
    name = _NAMES.get(dtype)
    if name is None:
        raise ConfigError(
            f"tensors of dtype {dtype} cannot be sent; those of {', '.join(TORCH_DTYPES)} can"
        )
    return name


def sent_dtype(dtype: torch.dtype, cast: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor is sent: a cast changes floating-point tensors only."""
    return cast if cast is not None and dtype.is_floating_point else dtype


def spec_of(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    """Describe a tensor as it is sent: cast to `dtype`, if given and it is floating-point.

    The tensor may be on the meta device. Raises ConfigError for dtypes that cannot be sent, and
    for names and shapes beyond the limits of TensorSpec.
    """
    return TensorSpec(name, dtype_name(sent_dtype(tensor.dtype, dtype)), tuple(tensor.shape))


def checked_spec(name: str, dtype: str, shape: list[int]) -> TensorSpec:
    """Return the spec of a description from another process; an empty name becomes `tensor`.

    Raises ProtocolError when the description is not a valid spec.
    """
    try:
        return TensorSpec(name or "tensor", dtype, tuple(shape))
    except ConfigError as exc:
        raise ProtocolError(f"this describes no tensor: {exc}") from exc


def check_dense(tensor: torch.Tensor, dtypes: Mapping[str, torch.dtype] = TORCH_DTYPES) -> None:
    """Raise ConfigError unless the tensor has one of `dtypes` and dense memory with data in it."""
    known = str(tensor.dtype).removeprefix("torch.") in dtypes
    if not known or tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise ConfigError(
            f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot be sent; "
            f"dense ones of {', '.join(dtypes)} can"
        )


def is_plain(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Say whether the tensor's own memory holds the bytes of `spec`, on any device.

    False for tensors that need a cast, strided copies, a conjugation or a negation.
    """
    return (
        tensor.dtype is TORCH_DTYPES[spec.dtype]
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as `uint8[nbytes]` that shares its memory; never copies."""
    return as_flat(tensor).view(torch.uint8)


def as_flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as one dimension whose elements follow each other; never copies."""
    flat = tensor.detach().view(-1)
    # Of one element, or none, torch keeps any stride, and then refuses a view of another dtype.
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 where it has none, on any device and layout."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return 0


def contiguous_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of any dense tensor as `uint8[nbytes]`, to be read only.

    A view of the tensor where it is contiguous, else a contiguous copy on the same device. Lazy
    conjugation and negation are carried out.
    """
    return as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def from_bytes(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """View `uint8[spec.nbytes]` as the tensor that `spec` describes, sharing its memory."""
    return flat.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


def as_integers(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View two tensors of one shape as integers, the widest possible, to copy one to the other.

    torch._foreach_copy_ copies floating-point tensors of a GPU through float32, which changes
    signaling NaNs (seen with torch 2.11). Tensors of two dtypes, whose copy is a cast, and
    subclasses of torch.Tensor are returned without a change, detached.
    """
    ends = (target.detach(), source.detach())
    width = target.dtype.itemsize
    plain = all(
        type(end) in PLAIN_CLASSES and not end.is_conj() and not end.is_neg() for end in ends
    )
    if target.dtype is not source.dtype or not plain or width not in _INTEGERS:
        return ends
    if all(end.is_contiguous() for end in ends):
        ends = (as_flat(ends[0]), as_flat(ends[1]))
        places = [n for end in ends for n in (end.data_ptr(), end.storage_offset() * width)]
        width = math.gcd(target.nbytes, *places, max(_INTEGERS))
    return ends[0].view(_INTEGERS[width]), ends[1].view(_INTEGERS[width])


def view_bytes(view: memoryview, offset: int, count: int) -> torch.Tensor:
    """Return `uint8[count]` from `offset` of `view`, which the tensor keeps alive.

    The memory may be read-only: then a write through the tensor ends the process (SIGSEGV).
    """
    if count == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(view, dtype=torch.uint8, count=count, offset=offset)


def tensor_of(
    data: memoryview, dtype: torch.dtype, shape: list[int], *, copy: bool
) -> torch.Tensor:
    """Return the tensor of these bytes, of which the caller has checked that they fit the shape.

    A copy, or a view that keeps `data` alive; also a copy if `data` is not aligned for the dtype,
    because another process chose its alignment. A view of read-only data must not be written.
    """
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(data, dtype=dtype)
    if copy or tensor.data_ptr() % dtype.itemsize:
        source, tensor = tensor, torch.empty(tensor.shape, dtype=dtype)
        ctypes.memmove(tensor.data_ptr(), source.data_ptr(), len(data))
    return tensor.view(shape)


def tensor_data(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes as a read-only `memoryview` of format "B", for hashing and sending.

    A view that keeps the tensor's memory alive if it is contiguous and on the CPU, else of a copy
    on the CPU. Raises ConfigError for tensors that `check_dense` refuses; all `DTYPES` are taken.
    """
    check_dense(tensor, DTYPES)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    if not plain.numel():
        return memoryview(b"")
    memory = _Memory.from_address(plain.data_ptr())
    memory.keeps = plain  # type: ignore[attr-defined]  # ctypes instances take attributes
    return memoryview(memory)[: plain.nbytes].cast("B").toreadonly()


# An array type for each size would cost more than the view; only the first bytes are viewed.
_Memory = ctypes.c_ubyte * (1 << 62)
