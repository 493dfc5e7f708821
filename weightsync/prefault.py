"""Pages that are there before they are needed: huge ones, where the kernel grants them."""

from __future__ import annotations

import functools
import logging
import mmap

logger = logging.getLogger(__name__)

# From linux/mman.h (5.14); the mmap module does not name them.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
# mmap.madvise keeps the interpreter lock: heartbeats of other threads get a turn between pieces.
_PIECE_NBYTES = 64 << 20


def ask_for_huge_pages(mapping: mmap.mmap) -> None:
    """Ask for huge pages from now on; a refusal is logged once a process."""
    _advise(mapping, mmap.MADV_HUGEPAGE, 0, len(mapping))


def populate(mapping: mmap.mmap, *, writable: bool = True) -> None:
    """Have all pages mapped, some at a time; a refusal is logged once a process."""
    advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
    for start in range(0, len(mapping), _PIECE_NBYTES):
        if not _advise(mapping, advice, start, min(_PIECE_NBYTES, len(mapping) - start)):
            return


def _advise(mapping: mmap.mmap, advice: int, start: int, nbytes: int) -> bool:
    try:
        mapping.madvise(advice, start, nbytes)
    except OSError as exc:
        _say_once(advice, exc.strerror)
        return False
    return True


@functools.cache
def _say_once(advice: int, reason: str) -> None:
    what = "huge pages" if advice == mmap.MADV_HUGEPAGE else "pre-faulting"
    logger.warning("%s cannot be had (%s); going on without", what, reason)
