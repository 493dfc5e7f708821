"""One large piece of memory that holds a whole stream, made once and reused."""

from __future__ import annotations

import logging
import mmap
from pathlib import Path

import torch

from weightsync.weights.buckets import ALIGNMENT

logger = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23
"""From Linux's mman.h; Python has no name for it."""


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return zeroed `uint8[nbytes]` whose pages are already there.

    Memory touched for the first time costs ten times a warm copy; huge pages and pre-faulting are
    asked for and done without where the kernel refuses.
    """
    if device.type != "cpu":
        # Parameters will point here: an inference tensor could never be trained again.
        with torch.inference_mode(False):
            return torch.zeros(max(nbytes, ALIGNMENT), dtype=torch.uint8, device=device)[:nbytes]
    memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
    for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
        try:
            memory.madvise(advice)
        except OSError as exc:
            logger.debug("madvise(%d) of %d bytes refused: %s", advice, nbytes, exc)
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


def fits(nbytes: int, device: torch.device) -> bool:
    """Whether `nbytes` more fit into the free memory of `device`, with a tenth to spare."""
    return nbytes * 1.1 < available(device)


def available(device: torch.device) -> int:
    """Return the bytes of `device` that are free, as the system estimates them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
