"""vLLM's own engines `ipc` and `nccl` without a GPU: stand-ins for CUDA's memory handles and NCCL.

Only what belongs to a driver is replaced, in the trainer and in the server's workers: the two
functions of torch that make and open a CUDA handle, and vLLM's communicator (here a group of Gloo).
A handle here is a file in /dev/shm with a copy of the tensor: one that is overwritten while it is
sent stays right here, and does not with CUDA. Gloo notices a peer that dies, and NCCL does not.
"""

from __future__ import annotations

import itertools
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.weight_transfer import ipc_engine

_numbers = itertools.count()
_SHM = Path("/dev/shm")
_GROUP: Any = dist.ProcessGroupGloo


def reduce_tensor(tensor: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
    """Return a handle of seven fields, as CUDA's has them up to the number of the device."""
    path = _SHM / f"conformance-{os.getpid()}-{next(_numbers)}"
    path.write_bytes(tensor.view(-1).view(torch.uint8).numpy().tobytes() or b"\0")
    weakref.finalize(tensor, path.unlink, missing_ok=True)
    return None, (str(path), tensor.nbytes, str(tensor.dtype), tuple(tensor.shape), 0, 0, 0)


def rebuild_cuda_tensor(
    path: str, nbytes: int, dtype: str, shape: tuple[int, ...], *_: Any
) -> torch.Tensor:
    """Return the tensor of a handle."""
    held = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    return held.view(getattr(torch, dtype.removeprefix("torch."))).view(shape)


class GlooCommunicator:
    """The methods of vLLM's PyNcclCommunicator that its `nccl` engine calls."""

    def __init__(self, group: Any, device: Any) -> None:
        del device
        store = PrefixStore("communicator", group.store)
        self._held = group
        self._group: Any = _GROUP(store, group.rank, group.world_size)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Broadcast a tensor, and wait for it."""
        del stream
        options = BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        """Leave the group."""
        del self._group, self._held


def install() -> None:
    """Put the stand-ins in their places, and remove files of processes that were killed."""
    for path in _SHM.glob("conformance-*-*"):
        if not Path("/proc", path.name.split("-")[1]).exists():
            path.unlink(missing_ok=True)
    cuda: Any = torch.cuda
    accelerator: Any = torch.accelerator
    accelerator.current_device_index = lambda: 0
    accelerator.synchronize = cuda.synchronize = cuda.ipc_collect = lambda *_: None
    cuda.current_stream = lambda *_: SimpleNamespace(synchronize=lambda: None)
    cuda.get_device_properties = lambda *_: SimpleNamespace(uuid="no-gpu")
    ipc_engine.reduce_tensor = reduce_tensor
    ipc_engine.rebuild_cuda_tensor = rebuild_cuda_tensor
    pynccl.PyNcclCommunicator = GlooCommunicator
