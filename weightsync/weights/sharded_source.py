"""Tensors that are spread over the ranks of a trainer: full ones, made group by group."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from weightsync.errors import ConfigError
from weightsync.weights.dtypes import sent_dtype
from weightsync.weights.shards import is_sharded


def gather(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the full tensor of a DTensor, on its mesh's own device; others as they are.

    Collective over the mesh. Every rank casts its own shard to `dtype` first, so that fewer bytes
    travel and nothing is kept in two dtypes.
    """
    if not is_sharded(tensor):
        return tensor.detach()
    shard = cast("Any", tensor.detach())
    partial = any(placement.is_partial() for placement in shard.placements)
    target = shard.dtype if partial else sent_dtype(shard.dtype, dtype)
    # A shard that is offloaded to the host travels through its mesh's device all the same.
    device = shard.device_mesh.device_type
    moved = shard.to(dtype=target) if shard.device.type == device else shard.to(device, target)
    full: torch.Tensor = moved.full_tensor()
    return full


def gather_groups(
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    groups: Iterable[range],
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield full tensors; a group is gathered when its first is asked for, and none before.

    Nothing of a group is kept here once its last has been asked for: the peak is one group, and
    what the consumer holds.
    """
    for group in groups:
        made: deque[torch.Tensor] = deque()
        with torch.no_grad():
            made.extend(gather(tensors[i], dtype) for i in group)
        for i in group:
            yield names[i], made.popleft()


def find_fsdp(module: nn.Module) -> list[Any]:
    """Return the parts of `module` that `fully_shard` manages; call `reshard` on each of them.

    After a forward pass without a backward, or with `reshard_after_forward=False`, gathered copies
    stand in the place of the parameters: plain tensors, perhaps in the compute dtype, which the
    next optimizer step leaves behind. Raises ConfigError for FullyShardedDataParallel.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    parts = list(module.modules())
    if any(isinstance(part, fsdp.FullyShardedDataParallel) for part in parts):
        raise ConfigError(
            "the model is wrapped in FullyShardedDataParallel, whose parameters are flat pieces "
            "without names; shard it with fully_shard, or give a callable that yields "
            "(name, full tensor) on every rank"
        )
    return [part for part in parts if isinstance(part, fsdp.FSDPModule)]
