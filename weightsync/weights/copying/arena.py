"""Arenas: one large allocation that holds a whole stream, made once and reused."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from weightsync.cuda import devices
from weightsync.errors import TransferError
from weightsync.shm.segment import ask_for_huge_pages, populate
from weightsync.weights.copying.layout import ALIGNMENT

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return zeroed `uint8[nbytes]` on `device`, its pages touched; freed with the last view of it.

    A copy into pages touched for the first time takes ten times as long as into warm ones. Huge
    pages and pre-faulting are requested; the arena works without them where the kernel refuses.
    Raises TransferError, naming the size, where there is no room. The check comes first, because
    the kernel ends a process that touches more memory than there is.
    """
    if device.type != "cpu":
        # Parameters will point here, and an inference tensor can never be trained again.
        with torch.inference_mode(False), no_room(nbytes, device):
            return torch.zeros(max(nbytes, ALIGNMENT), dtype=torch.uint8, device=device)[:nbytes]
    with no_room(nbytes, device):
        if nbytes > (free := available(device) + _kilobytes("SwapFree:")):
            raise MemoryError(f"{free} bytes are free")
        # Private: a forked child keeps what the weights were, and the kernel takes them back.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=flags)
    ask_for_huge_pages(memory)
    populate(memory)
    return _of_pages(memory, nbytes)


def with_new_storage(buffer: torch.Tensor) -> torch.Tensor:
    """Return the memory of an arena as a tensor that has a storage of its own.

    torch moves the storage of a tensor that is shared with other processes (share_memory_, queues
    of torch.multiprocessing), and with it all views of that storage. Tensors on a GPU, which it
    does not move, are returned as they are.
    """
    pages = getattr(buffer._base, "pages", None)
    return buffer if pages is None else _of_pages(pages, buffer.numel())


def _of_pages(pages: mmap.mmap, nbytes: int) -> torch.Tensor:
    with torch.inference_mode(False):
        buffer = torch.frombuffer(pages, dtype=torch.uint8)
    # They stay mapped when torch moves the storage, since plans to copy have their addresses.
    buffer.pages = pages  # type: ignore[attr-defined]  # tensors take attributes
    return buffer[:nbytes]


def fits(nbytes: int, device: torch.device) -> bool:
    """Whether `nbytes` more fit into the free memory of `device`, with a tenth to spare."""
    return nbytes * 1.1 < available(device)


def available(device: torch.device) -> int:
    """Return the number of free bytes of `device`: the smallest limit of the system and cgroups.

    In a container with a memory limit (cgroup v2) that limit counts. Caches that the kernel can
    reclaim count as free.
    """
    if device.type == "cuda":
        return devices.memory(device)[0]
    return min([_kilobytes("MemAvailable:"), *_group_rooms(_CGROUPS, _OWN_CGROUP)])


@contextmanager
def no_room(nbytes: int, device: torch.device) -> Iterator[None]:
    """Turn errors of an allocation of `nbytes` into a TransferError that names its purpose."""
    try:
        yield
    except (MemoryError, OSError, torch.OutOfMemoryError) as exc:
        reason = str(exc).partition("\n")[0]
        raise TransferError(
            f"this update takes {nbytes} bytes of memory on {device} beside the weights, and there "
            f"is no room: {reason}; free some, or write into the weights in use, which needs no "
            'second copy: WeightReceiver(..., apply="in_place")'
        ) from exc


def _kilobytes(field: str) -> int:
    """Return a field of /proc/meminfo in bytes, 0 where the field is missing."""
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        found = next((line for line in lines if line.startswith(field)), f"{field} 0")
    return int(found.split()[1]) * 1024


def _group_rooms(root: Path, own: Path) -> list[int]:
    """Return the bytes left below the limit of this process's cgroup, and of each parent's."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    group = root / path if not path.startswith("..") else root
    return [
        room
        for folder in (group, *group.parents)
        if folder.is_relative_to(root) and (room := _group_room(folder)) is not None
    ]


def _group_room(folder: Path) -> int | None:
    """Return the bytes left below a cgroup's limit, None without a limit or readable files."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    caches = sum(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
    return max(int(limit) - used + caches, 0)
