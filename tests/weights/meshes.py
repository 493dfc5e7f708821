"""DTensors of any rank in one process, with a process group that never communicates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def member(rank: int, shape: Sequence[int]) -> Iterator[DeviceMesh]:
    """Act as process `rank` of a mesh of `shape`."""
    world = 1
    for size in shape:
        world *= size
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        # Equal meshes share an entry of these caches, for all of their members.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        yield init_device_mesh("cpu", tuple(shape))
    finally:
        dist.destroy_process_group()


def shard(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """Return this rank's shard, cut by torch itself."""
    return distribute_tensor(tensor, mesh, list(placements), src_data_rank=None)
