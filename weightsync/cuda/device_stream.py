"""A trainer's tensors on a GPU, registered in place for receivers on the same GPU.

The unpacked path of the `ipc` backend reads them there. A contiguous tensor that needs no cast is
registered itself; any other is copied into a buffer of its own before each update.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch

from weightsync.cuda.wait import wait_for_stream
from weightsync.tensors import as_bytes

_PLACE: Sequence[Callable[[torch.Tensor], object]] = (
    torch.Tensor.data_ptr,
    torch.Tensor.stride,
    operator.attrgetter("shape"),
)
"""The properties that locate a tensor in memory that is held."""


class DeviceStream:
    """The registered tensors of one stream on `device`.

    `dtypes` and `shapes` are those in which tensors are sent. `stable` are the trainer's tensors;
    with None every tensor has a buffer, filled by `write`. `tensors` are the registered bytes
    (`uint8[nbytes]` each). Holds a reference to every registered storage until `close`, so that
    its memory is not reused while receivers have it open. Raises torch.OutOfMemoryError where the
    device has no room for the buffers.
    """

    def __init__(
        self,
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[Sequence[int]],
        device: torch.device,
        stable: Sequence[torch.Tensor] | None,
    ) -> None:
        self._device = device
        self._dtypes = dtypes
        self._buffers: dict[int, torch.Tensor] = {}
        self._storages: list[torch.Tensor] = []
        self._where: list[int] = []
        self._offsets: list[int] = []
        self.tensors: list[torch.Tensor] = []
        self._seen = [list(map(part, stable or [])) for part in _PLACE]
        known: dict[int, int] = {}
        for i, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True)):
            own = stable is None or not self._lies_here(stable[i], dtype)
            if own:
                self._buffers[i] = torch.empty(tuple(shape), dtype=dtype, device=device)
            tensor = self._buffers[i] if stable is None or own else stable[i]
            self._register(tensor.detach(), known)
        self._addresses = list(map(torch.Tensor.data_ptr, self._storages))

    @property
    def copied_nbytes(self) -> int:
        """Bytes of the buffers, which are memory beside the model."""
        return sum(b.numel() * b.element_size() for b in self._buffers.values())

    def storages(self) -> tuple[list[torch.Tensor], list[int], list[int]]:
        """Return the storages (`uint8[nbytes]`), and each tensor's storage and byte offset."""
        return self._storages, self._where, self._offsets

    def moved(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a tensor of `stable` now has another address, stride or shape.

        Or memory of a storage was freed, as by `resize_(0)`: another may have its address then.
        """
        if list(map(torch.Tensor.data_ptr, self._storages)) != self._addresses:
            return True
        return len(tensors) != len(self._seen[0]) or not all(
            all(map(operator.eq, map(part, tensors), seen))
            for part, seen in zip(_PLACE, self._seen, strict=True)
        )

    def refresh(self, tensors: Sequence[torch.Tensor]) -> int:
        """Copy tensors to their buffers on the current stream; return the number of bytes.

        Does not wait: call `wait` before a receiver reads the buffers.
        """
        copied = 0
        for i, buffer in self._buffers.items():
            buffer.copy_(tensors[i].detach())
            copied += buffer.numel() * buffer.element_size()
        return copied

    def write(self, index: int, tensor: torch.Tensor) -> None:
        """Copy one tensor to its buffer, and wait, so that the caller may overwrite the tensor."""
        self._buffers[index].copy_(tensor.detach())
        self.wait()

    def wait(self) -> None:
        """Wait for the device's current stream: for the copies, and the trainer's kernels on it."""
        wait_for_stream(self._device)

    def close(self) -> None:
        """Free the buffers and drop the trainer's storages. Receivers have closed before."""
        self._buffers.clear()
        self._storages.clear()
        self.tensors.clear()

    def _lies_here(self, tensor: torch.Tensor, dtype: torch.dtype) -> bool:
        return tensor.device == self._device and tensor.dtype is dtype and tensor.is_contiguous()

    def _register(self, tensor: torch.Tensor, known: dict[int, int]) -> None:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in known:
            known[key] = len(self._storages)
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._storages.append(whole)
        self._where.append(known[key])
        self._offsets.append(int(tensor.storage_offset()) * tensor.element_size())
        self.tensors.append(as_bytes(tensor))
