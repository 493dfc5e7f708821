"""Tensors lent to a hook for the time of one call, and how a view kept beyond it is found out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightsync.errors import TransferError, shorten
from weightsync.weights.copier import host_view


def own_storage(flat: torch.Tensor) -> torch.Tensor:
    """View `uint8[nbytes]` of the host through a storage of its own, whose uses can be counted.

    The caller keeps the memory alive.
    """
    if flat.device.type != "cpu" or not flat.numel():
        return flat
    return torch.frombuffer(host_view(flat.data_ptr(), flat.numel()), dtype=torch.uint8)


def uses(tensor: torch.Tensor) -> int:
    """Return how many tensors and wrappers use the storage of `tensor`."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def refuse_kept(lent: Sequence[tuple[str, torch.Tensor]], counts: Sequence[int]) -> None:
    """Raise TransferError naming the bases in `lent` whose views outlive the call.

    `counts` are their uses while the views were lent: a count that did not fall was kept.
    """
    kept = [
        name
        for (name, base), count in zip(lent, counts, strict=True)
        if base.numel() and uses(base) >= count
    ]
    if kept:
        raise TransferError(
            f"load_weights kept views of {len(kept)} tensors after it returned: {shorten(kept)}; "
            "their memory is about to be overwritten. Copy them in the hook, or give "
            "HookSink(hook, keeps_views=True), which hands out clones"
        )
