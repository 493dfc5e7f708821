"""One large piece of memory that holds a whole stream, made once and reused."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from weightsync.errors import TransferError
from weightsync.shm.segment import ask_for_huge_pages, populate
from weightsync.weights.layout import ALIGNMENT

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return zeroed `uint8[nbytes]` whose pages are already there.

    Memory touched for the first time costs ten times a warm copy; huge pages and pre-faulting are
    asked for and done without where the kernel refuses. Raises TransferError, naming the size
    needed, where there is no room: to touch more than there is would end the process later.
    """
    if device.type != "cpu":
        # Parameters will point here: an inference tensor could never be trained again.
        with torch.inference_mode(False), no_room(nbytes, device):
            return torch.zeros(max(nbytes, ALIGNMENT), dtype=torch.uint8, device=device)[:nbytes]
    with no_room(nbytes, device):
        if nbytes > (free := available(device) + _kilobytes("SwapFree:")):
            raise MemoryError(f"{free} bytes are free")
        memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
    ask_for_huge_pages(memory)
    populate(memory)
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


def fits(nbytes: int, device: torch.device) -> bool:
    """Whether `nbytes` more fit into the free memory of `device`, with a tenth to spare."""
    return nbytes * 1.1 < available(device)


def available(device: torch.device) -> int:
    """Return the bytes of `device` that are free, as the system and its control groups say.

    In a container with a memory limit (cgroup v2) that limit counts; caches that the kernel would
    give up are taken as free.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_kilobytes("MemAvailable:"), *_group_rooms(_CGROUPS, _OWN_CGROUP)])


@contextmanager
def no_room(nbytes: int, device: torch.device) -> Iterator[None]:
    """Have errors of an allocation say what it was for, as TransferError."""
    try:
        yield
    except (MemoryError, OSError, torch.OutOfMemoryError) as exc:
        reason = str(exc).partition("\n")[0]
        raise TransferError(
            f"this update takes {nbytes} bytes of memory on {device} beside the weights, and there "
            f"is no room: {reason}; free some, or, where it is kept aside until it is whole, let "
            'the receiver write into the weights in use with apply="in_place"'
        ) from exc


def _kilobytes(field: str) -> int:
    """Return a field of /proc/meminfo in bytes; 0 where it is not."""
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        found = next((line for line in lines if line.startswith(field)), f"{field} 0")
    return int(found.split()[1]) * 1024


def _group_rooms(root: Path, own: Path) -> list[int]:
    """Return what is left below the limit of this process's cgroup, and of each one above it."""
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
