"""Tensors lent to a hook for the time of one call, and how a view kept beyond it is found out."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from weightsync.errors import TransferError, shorten


def own_storage(flat: torch.Tensor) -> torch.Tensor:
    """View `uint8[nbytes]` of the host through a storage of its own, whose uses can be counted.

    It keeps the memory of `flat` alive: a view that a hook keeps may go stale, but never dangles.
    """
    if flat.device.type != "cpu" or not flat.numel():
        return flat
    array = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    array.keeps = flat  # type: ignore[attr-defined]  # ctypes instances take attributes
    return torch.frombuffer(array, dtype=torch.uint8)


def uses(tensor: torch.Tensor) -> int:
    """Return how many tensors and wrappers use the storage of `tensor`."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


HOOK_ADVICE = (
    "copy them in the hook, or give HookSink(hook, keeps_views=True), which hands out clones"
)


def refuse_kept(
    lent: Sequence[tuple[str, torch.Tensor]], counts: Sequence[int], advice: str = HOOK_ADVICE
) -> None:
    """Raise TransferError naming the bases in `lent` whose views outlive the call.

    `counts` are their uses before any view of them was made: a larger one means a view lives on.
    `advice` ends the message.
    """
    kept = [
        name
        for (name, base), count in zip(lent, counts, strict=True)
        if base.numel() and uses(base) > count
    ]
    if kept:
        raise TransferError(
            f"load_weights kept views of {len(kept)} tensors after it returned: {shorten(kept)}; "
            f"their memory is about to be overwritten; {advice}"
        )
