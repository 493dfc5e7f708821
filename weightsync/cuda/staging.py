"""Pairs of host and device memory, and asynchronous copies between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from weightsync.cuda import devices
from weightsync.errors import BackendUnavailableError, ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEVICE_BUFFERS = 2
"""Device buffers: one is filled while the other is copied to the host."""


class CpuGpuBuffer:
    """A host tensor `cpu` and a device tensor `gpu` of the same shape and dtype, zeros at first.

    With `pin_memory`, the host tensor is pinned where CUDA is available and `device` is a GPU.
    Without CUDA both are on the host, and copies are plain copies. Fill `cpu` (or `np`), then call
    `copy_to_gpu`. The caller synchronises the stream before it changes the host side again, and
    before it reads it after `copy_to_cpu`.
    """

    def __init__(
        self,
        *size: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        pin_memory: bool = True,
    ) -> None:
        """Allocate both; `device` is the current GPU by default. Raises ConfigError for a size."""
        if not _is_size(size):
            raise ConfigError(
                f"a buffer's size is one whole number for each of one dimension or more, as in "
                f"CpuGpuBuffer(3, 4, dtype=…); this is {size}"
            )
        target = torch.device(device) if device is not None else devices.default()
        pinned = pin_memory and target.type == "cuda" and torch.cuda.is_available()
        self.cpu = torch.zeros(*size, dtype=dtype, device="cpu", pin_memory=pinned)
        self.gpu = torch.zeros(*size, dtype=dtype, device=target)

    @classmethod
    def around(cls, cpu: torch.Tensor, gpu: torch.Tensor) -> Self:
        """Make a pair of existing tensors, whose contents are kept; the caller owns their memory.

        Raises ConfigError when the two differ in shape or dtype.
        """
        if cpu.shape != gpu.shape or cpu.dtype is not gpu.dtype:
            raise ConfigError(
                f"the sides of a pair must have one shape and dtype; these are {cpu.dtype} "
                f"{list(cpu.shape)} and {gpu.dtype} {list(gpu.shape)}"
            )
        pair = cls.__new__(cls)
        pair.cpu, pair.gpu = cpu, gpu
        return pair

    @property
    def np(self) -> NDArray[Any]:
        """A NumPy view of the host side, made on each access; raises as `numpy_view` does."""
        return numpy_view(self.cpu)

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """Enqueue a copy of the first `n` rows (all by default) to the device; return them."""
        return copy_slice(self.cpu, self.gpu, self._rows(n))

    def copy_to_cpu(self, n: int | None = None) -> torch.Tensor:
        """Enqueue a copy of the first `n` rows (all by default) to the host; return these rows.

        From a GPU, synchronise the stream before you read them.
        """
        return copy_slice(self.gpu, self.cpu, self._rows(n))

    def _rows(self, n: int | None) -> int:
        return self.cpu.shape[0] if n is None else n


class CopyWork(Protocol):
    """A copy in progress."""

    def wait_on_stream(self) -> None:
        """Make later work on the caller's current stream wait for the copy; does not wait."""

    def wait(self) -> None:
        """Return when the copy is complete."""


class CopyStream(Protocol):
    """Executes copies one after the other, beside the caller's stream."""

    def run(self, copy: Callable[[], object]) -> CopyWork:
        """Enqueue `copy` after all work now on the caller's current stream; does not wait."""

    def close(self) -> None:
        """Return when all copies are complete."""


class CudaCopyStream:
    """A CUDA stream of `device` for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's

    def run(self, copy: Callable[[], object]) -> CopyWork:
        """Enqueue `copy` after all work now on the caller's current stream; does not wait."""
        # Each thread has its own current device, and Triton launches on that one.
        with torch.cuda.device(self._device):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                copy()
            event.record(self._stream)
        return CudaCopyWork(event, self._device)

    def close(self) -> None:
        """Return when all copies are complete."""
        self._stream.synchronize()


@dataclass(frozen=True, slots=True)
class CudaCopyWork:
    """A copy on a CUDA stream of `device`: `event` is behind it."""

    event: torch.cuda.Event
    device: torch.device

    def wait_on_stream(self) -> None:
        """Make later work on the caller's current stream wait for the copy; does not wait."""
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait(self) -> None:
        """Return when the copy is complete."""
        self.event.synchronize()


class StagedBuckets:
    """Host `buckets` (`uint8[bucket_nbytes]` each) that share at most two device buffers in turn.

    The caller's stream assembles the bytes of a bucket in its device buffer on `device`; one copy
    on `stream` brings them to the bucket. Only `close` waits. The caller owns the buckets. Raises
    torch.OutOfMemoryError when `device` has no room for the buffers.
    """

    def __init__(
        self, buckets: Sequence[torch.Tensor], device: torch.device, stream: CopyStream
    ) -> None:
        self.device = device
        self._stream = stream
        self._count = min(DEVICE_BUFFERS, len(buckets))
        buffers = [torch.empty_like(bucket, device=device) for bucket in buckets[: self._count]]
        self.nbytes = sum(buffer.numel() for buffer in buffers)
        self._pairs = [
            CpuGpuBuffer.around(bucket, buffers[i % self._count])
            for i, bucket in enumerate(buckets)
        ]
        self._copying: dict[int, CopyWork] = {}

    def device_buffer(self, bucket: int) -> torch.Tensor:
        """Return the bucket's device buffer; later work on the caller's stream may write to it."""
        last = self._copying.pop(bucket % self._count, None)
        if last is not None:
            last.wait_on_stream()
        return self._pairs[bucket].gpu

    def copy_to_bucket(self, bucket: int, nbytes: int) -> CopyWork:
        """Copy the first `nbytes` of the device buffer to its bucket, which must be free."""
        work = self._stream.run(partial(self._pairs[bucket].copy_to_cpu, nbytes))
        self._copying[bucket % self._count] = work
        return work

    def copy_directly_to_bucket(self, bucket: int, source: torch.Tensor) -> CopyWork:
        """Copy `source` (`uint8[nbytes]` on `device`) to the start of a bucket, which must be free.

        Later work on the caller's stream waits for the copy, so it may overwrite or free `source`.
        """
        target = self._pairs[bucket].cpu
        work = self._stream.run(partial(copy_slice, source, target, source.numel()))
        work.wait_on_stream()
        return work

    def close(self) -> None:
        """Wait for the copies, and free the device buffers. Idempotent."""
        self._stream.close()
        self._copying.clear()
        self._pairs.clear()


def copy_slice(source: torch.Tensor, target: torch.Tensor, length: int) -> torch.Tensor:
    """Enqueue a copy of the first `length` rows of `source`; return these rows of `target`.

    Does not wait for a GPU. Raises ConfigError when one of the two is shorter, or a scalar.
    """
    rows = [tensor.shape[0] if tensor.ndim else 0 for tensor in (source, target)]
    if not 0 <= length <= min(rows):
        raise ConfigError(
            f"{length} rows are to be copied; the source has {rows[0]}, the target {rows[1]}"
        )
    return target[:length].copy_(source[:length], non_blocking=True)


def numpy_view(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a NumPy array that shares a CPU tensor's memory.

    Raises ConfigError for tensors on a device and dtypes that NumPy does not have, and
    BackendUnavailableError without NumPy.
    """
    try:
        view: NDArray[Any] = tensor.detach().numpy()
    except TypeError as exc:
        raise ConfigError(
            f"NumPy cannot view a tensor of {tensor.dtype} on {tensor.device}: {exc}; use the "
            "tensor itself, or a view of it as an integer dtype of the same size"
        ) from exc
    except RuntimeError as exc:
        raise BackendUnavailableError(f"NumPy is not installed ({exc}): pip install numpy") from exc
    return view


def _is_size(size: Sequence[object]) -> bool:
    return bool(size) and all(isinstance(rows, int) and rows >= 0 for rows in size)
