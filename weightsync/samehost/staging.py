"""Host memory and device memory in pairs, and copies between them that nobody waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weightsync.errors import BackendUnavailableError, ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
        if not size or any(rows < 0 for rows in size):
            raise ConfigError(f"a buffer needs a size of one dimension or more, this is {size}")
        target = torch.device(device) if device is not None else _default_device()
        pinned = pin_memory and target.type == "cuda" and torch.cuda.is_available()
        self.cpu = torch.zeros(*size, dtype=dtype, device="cpu", pin_memory=pinned)
        self.gpu = torch.zeros(*size, dtype=dtype, device=target)

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


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
