"""The memory of tensors that sleep: given back to the system or the GPU, and taken again."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from weightsync.cuda import devices
from weightsync.weights.copying.layout import ALIGNMENT

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def give_back(tensors: Iterable[torch.Tensor]) -> int:
    """Let the kernel take the pages of host tensors back; return the number of bytes it may take.

    What they held is lost: a page reads as before, or as zeros, from now on. MADV_FREE: the kernel
    takes pages when it needs memory, and a page that was not taken is written to without a fault.
    Pages that a tensor shares with other memory stay, and so does memory of other processes or of
    files.
    """
    freed = 0
    for begin, end in _runs(tensors):
        first = begin + -begin % mmap.PAGESIZE
        nbytes = end - end % mmap.PAGESIZE - first
        if nbytes > 0 and _madvise(first, nbytes, mmap.MADV_FREE) == 0:
            freed += nbytes
    return freed


def _runs(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the addresses of the tensors' bytes, those that touch joined: small ones fill pages.

    Between the tensors of an arena are up to 63 bytes that nothing uses.
    """
    places = sorted(
        (tensor.untyped_storage().data_ptr(), tensor.data_ptr(), tensor.nbytes)
        for tensor in tensors
        if tensor.device.type == "cpu" and tensor.nbytes and tensor.is_contiguous()
    )
    runs: list[tuple[int, int]] = []
    last = 0
    for storage, begin, nbytes in places:
        if runs and storage == last and begin - runs[-1][1] < ALIGNMENT:
            runs[-1] = runs[-1][0], max(runs[-1][1], begin + nbytes)
        else:
            runs.append((begin, begin + nbytes))
        last = storage
    return runs


@dataclass(slots=True)
class _Moved:
    """A storage without memory, its size, and the bytes that it had, None: they are gone."""

    storage: torch.UntypedStorage
    nbytes: int
    kept: torch.UntypedStorage | None


class GpuMemory:
    """The memory of tensors on GPUs while they sleep. Has never run on a GPU.

    Their storages lose their memory and get other memory, so that tensors and views stay as they
    are, but for their addresses. Called while nothing uses the tensors.
    """

    def __init__(self) -> None:
        self._moved: list[_Moved] = []

    def fall_asleep(self, tensors: Sequence[torch.Tensor], *, keep: bool) -> None:
        """Free the tensors' memory; with `keep` their bytes move to the host before.

        An error of the copies, for which the host may have no room, changes nothing.
        """
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        storages.pop(0, None)
        moved = [
            _Moved(storage, storage.nbytes(), _on_host(storage) if keep else None)
            for storage in storages.values()
        ]
        for each in moved:
            each.storage.resize_(0)
        self._moved += moved
        devices.empty_cache()

    def wake_up(self) -> None:
        """Take memory again, and bring kept bytes back. May be called again after an error."""
        while self._moved:
            each = self._moved[-1]
            each.storage.resize_(each.nbytes)
            if each.kept is not None:
                each.storage.copy_(each.kept)
            self._moved.pop()


def _on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
    copy.copy_(storage)
    return copy
