"""Keys that say which processes can open a handle: host id for shared memory, GPU UUID for CUDA.

Keys are hints. They can repeat (cloned machines, several containers), so a probe decides.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

from weightsync.errors import HandleError
from weightsync.wire.offers import Handle, KeyedHandle

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHM = Path("/dev/shm")


@functools.cache
def host_key() -> str:
    """Return `HOST-…`, a hash of the kernel's boot id and of this process's `/dev/shm` device."""
    boot = (
        _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else os.uname().nodename
    )
    device = _SHM.stat().st_dev if _SHM.exists() else 0
    return f"HOST-{hashlib.blake2b(f'{boot}/{device}'.encode(), digest_size=12).hexdigest()}"


class _NoHandleError(HandleError, ValueError):
    """No handle is for this process. vLLM's engine raises a ValueError, which its users catch."""


def pick(handles: KeyedHandle, keys: list[str]) -> Handle:
    """Return the handle that one of `keys` opens.

    Raises HandleError, which is also a ValueError, with the keys offered.
    """
    for key in keys:
        if key in handles:
            return handles[key]
    raise _NoHandleError(
        f"no handle for this process: offered for {', '.join(sorted(handles)) or 'no key'}, "
        f"this process is {', '.join(keys)}; sender and receiver see different hosts or GPUs"
    )
