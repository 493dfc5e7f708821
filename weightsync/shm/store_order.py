"""Order of stores and loads between the processes of one shared-memory ring.

A ring is safe if two orders hold. The writer's bytes are visible before the counter that publishes
them; a reader's loads of a bucket are complete before the counter that releases it is visible.
x86-64 keeps both: a core's stores become visible in program order, and no store becomes visible
before the core's earlier loads (Intel SDM 3A, 8.2.2). On aarch64, the writer calls membarrier(2)
with MEMBARRIER_CMD_GLOBAL_EXPEDITED, and readers call nothing. It returns once every running thread
of every registered process has passed a full barrier; a thread that does not run has passed one in
the scheduler.

Publish: the writer stores the bytes, calls membarrier, stores the counter. Let B be the barrier of
the reader's core. If B comes after the reader's load of the counter in program order, that load
was complete before the writer stored the counter, and did not see it. So where the load sees the
counter, B comes before it, and the reader's loads of the bytes come after B. They see the bytes.

Release: the reader loads the bytes and stores its counter. The writer sees that counter, calls
membarrier, overwrites the bytes. The counter was visible before B, so B comes after its store in
program order, and after the loads of the bytes before it. These are complete when membarrier
returns. The same holds for a reader that the writer no longer waits for: the writer stores the new
epoch, calls membarrier, overwrites. A reader that loaded an overwritten byte did so after B, so its
check of the epoch afterwards sees the new one.

A sleeping writer: it stores the number that shall wake it, calls membarrier, and loads the reader's
counter; the reader stores its counter and loads that number. With B anywhere in the reader, one of
the two sees the other's store. A sleeping reader: the writer stores its counter and calls the
kernel to wake readers. The kernel orders that store before its look for sleepers, and the entry of
a sleeper before its comparison of the counter (futex(2)), so one of the two sees the other. On
x86-64 the writer calls a full fence instead, and the kernel only if a reader's mark says that it
sleeps.

Both sides register, the writer too where it is a reader of another ring. On x86-64,
WEIGHTSYNC_MEMBARRIER=1 turns the aarch64 half on. It has also run under an emulator of aarch64
(docs/design.md), never on an Arm processor.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable

from weightsync.errors import BackendUnavailableError

VARIABLE = "WEIGHTSYNC_MEMBARRIER"
"""`1` uses membarrier(2) also where the processor keeps the order, to test that code."""

_MEMBARRIER_OF = {"x86_64": 324, "AMD64": 324, "aarch64": 283, "arm64": 283}
_ORDERED = ("x86_64", "AMD64")
_GLOBAL_EXPEDITED = 1 << 1
_REGISTER_GLOBAL_EXPEDITED = 1 << 2

_membarrier = ctypes.CDLL(None, use_errno=True).syscall
_membarrier.restype = ctypes.c_long
_membarrier.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_long)

Fence = Callable[[], None]


def nothing() -> None:
    """Do nothing: the fence for a processor that keeps the order of stores."""


def order_stores() -> Fence:
    """Return the writer's fence, and register this process for the fences of other processes.

    Called for each end of each ring. The registration lasts as long as the process; a forked child
    inherits it. Raises BackendUnavailableError where neither the processor nor the kernel orders
    stores.
    """
    machine = platform.machine()
    if machine in _ORDERED and os.environ.get(VARIABLE) != "1":
        return nothing
    number = _MEMBARRIER_OF.get(machine)
    if number is None:
        raise BackendUnavailableError(
            f"shared-memory rings work on x86-64 and aarch64; this machine is {machine}"
        )
    _call(number, _REGISTER_GLOBAL_EXPEDITED)

    def fence() -> None:
        _call(number, _GLOBAL_EXPEDITED)

    return fence


def _call(number: int, command: int) -> None:
    if _membarrier(number, command, 0, 0) < 0:
        code = ctypes.get_errno()
        raise BackendUnavailableError(
            f"membarrier(2) failed: {os.strerror(code)}; shared-memory rings on "
            f"{platform.machine()} need Linux 4.16, and a sandbox that allows this call"
        )
