"""Host memory and device memory in pairs, and copies between them that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from weightsync.errors import BackendUnavailableError, ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

TWINS = 2
"""One is filled while what is in the other crosses."""


class CpuGpuBuffer:
    """A host tensor `cpu` and its twin `gpu` on `device`, of one shape and dtype, both zeros.

    The host side is pinned where that makes sense: with CUDA, for a GPU. Without CUDA both are on
    the host, and copies are plain copies. Fill `cpu` (or `np`), then `copy_to_gpu`; before the host
    side is changed again, or read after `copy_to_cpu`, the caller synchronises the stream.
    """

    def __init__(
        self,
        *size: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        pin_memory: bool = True,
    ) -> None:
        """Allocate both; `device` is the current GPU by default. Raises ConfigError."""
        if not _is_size(size):
            raise ConfigError(
                f"a buffer's size is one whole number for each of one dimension or more, as in "
                f"CpuGpuBuffer(3, 4, dtype=…); this is {size}"
            )
        target = torch.device(device) if device is not None else _default_device()
        pinned = pin_memory and target.type == "cuda" and torch.cuda.is_available()
        self.cpu = torch.zeros(*size, dtype=dtype, device="cpu", pin_memory=pinned)
        self.gpu = torch.zeros(*size, dtype=dtype, device=target)

    @classmethod
    def around(cls, cpu: torch.Tensor, gpu: torch.Tensor) -> Self:
        """Make a pair of memory that is there, contents and all; the caller frees it.

        Raises ConfigError when the two differ in shape or dtype.
        """
        if cpu.shape != gpu.shape or cpu.dtype is not gpu.dtype:
            raise ConfigError(
                f"the two sides of a pair are alike; these are {cpu.dtype} {list(cpu.shape)} and "
                f"{gpu.dtype} {list(gpu.shape)}"
            )
        pair = cls.__new__(cls)
        pair.cpu, pair.gpu = cpu, gpu
        return pair

    @property
    def np(self) -> NDArray[Any]:
        """A NumPy view of the host side. Raises ConfigError for dtypes that NumPy does not have."""
        return numpy_view(self.cpu)

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """Copy the first `n` rows (all by default) to the device; returns them there."""
        return copy_slice(self.cpu, self.gpu, self._rows(n))

    def copy_to_cpu(self, n: int | None = None) -> torch.Tensor:
        """Copy the first `n` rows (all by default) to the host; returns them, maybe not yet there.

        From a GPU, synchronise the stream before reading them.
        """
        return copy_slice(self.gpu, self.cpu, self._rows(n))

    def _rows(self, n: int | None) -> int:
        return self.cpu.shape[0] if n is None else n


class CopyWork(Protocol):
    """A copy on its way."""

    def wait_on_stream(self) -> None:
        """Make what the caller's stream does from now on wait for the copy; return at once."""

    def wait(self) -> None:
        """Return when the copy is complete."""


class CopyStream(Protocol):
    """Where copies run beside the caller's stream, one after the other."""

    def run(self, copy: Callable[[], object]) -> CopyWork:
        """Enqueue `copy`, behind all that the caller's stream has been given so far."""

    def close(self) -> None:
        """Return when all copies are complete."""


class CudaCopyStream:
    """A stream of `device` for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's

    def run(self, copy: Callable[[], object]) -> CopyWork:
        """Enqueue `copy`; see the contract."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        event.record(self._stream)
        return _CudaTicket(event, self._device)

    def close(self) -> None:
        """Return when all copies are complete."""
        self._stream.synchronize()


class _CudaTicket:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait_on_stream(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        self._event.synchronize()


class StagedSlots:
    """Host `slots` (`uint8[slot_nbytes]` each) as pairs, whose device side they share by turns.

    What is to arrive in a slot is put together on `device`, in the slot's twin, by the caller's
    stream, and crosses in one copy on `lane`. Nothing here waits but `close`. Raises torch's
    OutOfMemoryError when `device` has no room for the twins.
    """

    def __init__(
        self, slots: Sequence[torch.Tensor], device: torch.device, lane: CopyStream
    ) -> None:
        self.device = device
        self._lane = lane
        self._twins = min(TWINS, len(slots))
        memories = [torch.empty_like(slot, device=device) for slot in slots[: self._twins]]
        self.nbytes = sum(memory.numel() for memory in memories)
        self._pairs = [
            CpuGpuBuffer.around(slot, memories[i % self._twins]) for i, slot in enumerate(slots)
        ]
        self._crossing: dict[int, CopyWork] = {}

    def device_buffer(self, slot: int) -> torch.Tensor:
        """Return the slot's device side; the caller's stream may write it from now on."""
        last = self._crossing.pop(slot % self._twins, None)
        if last is not None:
            last.wait_on_stream()
        return self._pairs[slot].gpu

    def copy_to_slot(self, slot: int, nbytes: int) -> CopyWork:
        """Send the first `nbytes` of the slot's twin to the slot, which is free."""
        ticket = self._lane.run(partial(self._pairs[slot].copy_to_cpu, nbytes))
        self._crossing[slot % self._twins] = ticket
        return ticket

    def copy_directly_to_slot(self, slot: int, source: torch.Tensor) -> CopyWork:
        """Send `uint8[nbytes]` that lie on `device` to the beginning of the slot, which is free.

        The caller may overwrite or free the source at once, on its own stream.
        """
        target = self._pairs[slot].cpu
        ticket = self._lane.run(partial(copy_slice, source, target, source.numel()))
        ticket.wait_on_stream()
        return ticket

    def close(self) -> None:
        """Wait for the copies, and free the twins. Idempotent."""
        self._lane.close()
        self._crossing.clear()
        self._pairs.clear()


def copy_slice(source: torch.Tensor, target: torch.Tensor, length: int) -> torch.Tensor:
    """Copy the first `length` elements of dimension 0, without waiting; returns them in `target`.

    Raises ConfigError when one of the two is shorter, or scalar.
    """
    rows = [tensor.shape[0] if tensor.ndim else 0 for tensor in (source, target)]
    if not 0 <= length <= min(rows):
        raise ConfigError(
            f"{length} rows are to be copied; the source has {rows[0]}, the target {rows[1]}"
        )
    return target[:length].copy_(source[:length], non_blocking=True)


def numpy_view(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a NumPy array that shares a CPU tensor's memory.

    Raises ConfigError for dtypes that NumPy does not have and tensors on a device, and
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
        raise BackendUnavailableError(f"there is no NumPy here ({exc}): pip install numpy") from exc
    return view


def _is_size(size: Sequence[object]) -> bool:
    return bool(size) and all(isinstance(rows, int) and rows >= 0 for rows in size)


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
