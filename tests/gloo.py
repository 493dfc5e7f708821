"""A process as one rank of a Gloo group that meets in a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


@contextmanager
def as_rank(rank: int, size: int, folder: str, timeout_s: float) -> Iterator[None]:
    """Join the group of `folder` as `rank` of `size`, with the settings that transformers needs."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), GLOO_SOCKET_IFNAME="lo"
    )
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
