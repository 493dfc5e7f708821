"""Detection of NaN and infinity in weights, at the speed of a sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

CheckFinite = Literal["off", "warn", "raise"]

_SUMMED = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_WIDENED = frozenset(
    {
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    }
)
"""Dtypes with NaN that torch cannot add."""


def not_finite(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the names of tensors that hold NaN or infinity.

    A sum with such a value is not finite; only a tensor whose sum is not, which may also have
    overflowed, is looked at value by value. Each device is waited for once.
    """
    sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in enumerate(map(_local, tensors)):
        total = _sum(tensor) if tensor.numel() else None
        if total is not None:
            sums.setdefault(total.device, []).append((index, total))
    found = []
    for on_device in sums.values():
        finite = torch.stack([total for _, total in on_device]).isfinite().tolist()
        suspects = [i for (i, _), is_finite in zip(on_device, finite, strict=True) if not is_finite]
        found += [i for i in suspects if not _is_finite(_local(tensors[i]))]
    return [names[index] for index in sorted(found)]


def _sum(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.dtype in _SUMMED:
        return tensor.sum().float()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).sum().float()
    return tensor.float().sum() if tensor.dtype in _WIDENED else None


def _is_finite(tensor: torch.Tensor) -> bool:
    wide = tensor.float() if tensor.dtype in _WIDENED else tensor
    return bool(wide.isfinite().all())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, else the tensor."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()
