"""Processes that the kernel ends with the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when `parent`, which started it, ends.

    More exactly: when the thread of `parent` ends that started this process. May be called between
    fork and exec. Raises ProcessLookupError where `parent` has ended already, and OSError.
    """
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # A parent that ended before the call causes no signal.
    if os.getppid() != parent:
        raise ProcessLookupError(f"the process {parent} that started this one has ended")
