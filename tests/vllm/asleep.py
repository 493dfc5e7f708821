"""A stand-in for vLLM's allocator of GPU memory, for its sleep mode on a CPU.

vLLM's workers on a CPU ignore `sleep`. Here they run the code of its GPU worker, and all of it but
the allocator, whose memory is that of the model and of the KV cache on the host: what sleeps is
overwritten, and comes back from a copy where vLLM has asked for one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

GARBAGE = 0xFF


class HostAllocator:
    """Has the methods and the table of vLLM's CuMemAllocator that its sleep mode uses.

    `tensors_of` returns the tensors of a tag: reloads and captures may make others at any time.
    """

    def __init__(self, tensors_of: Callable[[str], Collection[torch.Tensor]]) -> None:
        self._tensors_of = tensors_of
        self.pointer_to_data: dict[int, Any] = {}

    def sleep(self, offload_tags: Collection[str] | str | None = None) -> None:
        from vllm.device_allocator.cumem import AllocationData

        kept = (offload_tags,) if isinstance(offload_tags, str) else tuple(offload_tags or ())
        for tag in ("weights", "kv_cache"):
            for tensor in self._tensors_of(tag):
                data = self.pointer_to_data.get(tensor.data_ptr())
                if data is not None and data.is_asleep:
                    continue
                handle = (0, tensor.nbytes, tensor.data_ptr(), 0)
                data = AllocationData(handle, tag, is_asleep=True)
                if tag in kept:
                    data.cpu_backup_tensor = tensor.clone()
                data.tensor = tensor
                self.pointer_to_data[tensor.data_ptr()] = data
                tensor.reshape(-1).view(torch.uint8).fill_(GARBAGE)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        for place, data in list(self.pointer_to_data.items()):
            if tags is None or data.tag in tags:
                if data.cpu_backup_tensor is not None:
                    data.tensor.copy_(data.cpu_backup_tensor)
                elif data.tag == "kv_cache":
                    data.tensor.zero_()  # kernels of a CPU multiply what was never written by 0
                del self.pointer_to_data[place]


@contextmanager
def sleep_mode(llm: Any) -> Iterator[HostAllocator]:
    """Let the worker of an `LLM` in this process sleep as one on a GPU does."""
    from vllm import device_allocator
    from vllm.device_allocator import cumem
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    worker = llm.llm_engine.model_executor.driver_worker.worker

    def tensors_of(tag: str) -> list[torch.Tensor]:
        if tag == "weights":
            model = worker.model_runner.model
            found = [t.data for t in (*model.parameters(), *model.buffers())]
        else:
            found = list(_tensors_in(worker.model_runner.kv_caches))
        return [t for t in found if t.nbytes and t.is_contiguous()]

    allocator = HostAllocator(tensors_of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cumem.CuMemAllocator, "instance", allocator)
        patch.setattr(device_allocator, "get_mem_allocator_instance", lambda: allocator)
        patch.setattr(cumem.CuMemAllocator, "get_instance", staticmethod(lambda: allocator))
        patch.setattr(torch.accelerator, "synchronize", lambda *_: None)
        patch.setattr(torch.accelerator, "get_memory_info", lambda *_: (1 << 30, 1 << 31))
        for name in ("sleep", "wake_up"):
            patch.setattr(CPUWorker, name, vars(Worker)[name])
        yield allocator


def _tensors_in(held: Any) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, list | tuple):
        for each in held:
            yield from _tensors_in(each)
