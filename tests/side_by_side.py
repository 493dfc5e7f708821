"""Tests side by side, of several runs or workers of pytest-xdist: each has a /dev/shm of its own.

Tests check it for leaks, and servers remove segments of dead processes there: neither may see the
segments of a concurrent test.
"""

from __future__ import annotations

import ctypes
import subprocess
from typing import TypeVar

T = TypeVar("T")
WORKERS = 4
"""Two for each of the cores that tests are timed on: most wait half of their time."""
LONG = (
    "tests/ray/test_ray.py",
    "tests/backends/test_contract.py",
    "tests/examples/test_demo.py",
    "tests/e2e/test_fault_matrix.py",
    "tests/e2e/test_exit.py",
    "tests/cli/test_certify.py",
    "tests/soak/test_killed.py",
    "tests/e2e/test_ranks_waits.py",
    "tests/e2e/test_streams_deltas.py",
    "tests/docs/test_quickstart.py",
    "tests/serve/test_adapters.py",
    "tests/e2e/test_streams_stopped.py",
    "tests/e2e/test_hosts_chain.py",
    "tests/serve/test_draft.py",
    "tests/e2e/test_streams_faults.py",
    "tests/e2e/test_fetching.py",
    "tests/benchmarks/test_compare.py",
    "tests/e2e/test_ranks_interrupts.py",
    "tests/backends/test_tcp.py",
    "tests/e2e/test_stopped_peers.py",
    "tests/soak/test_delta_chain.py",
    "tests/soak/test_ranks_that_age.py",
    "tests/e2e/test_hosts.py",
    "tests/e2e/test_hosts_faults.py",
    "tests/serve/test_generation_during_updates.py",
    "tests/protocol/test_fleet_machine.py",
)
"""The files that take longest run first: a late one would leave a worker idle."""
_PRIVATE = 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC, from linux/mount.h
_PLAIN = 1 << 1 | 1 << 2  # MS_NOSUID | MS_NODEV
_NEW_MOUNTS = 1 << 17  # CLONE_NEWNS, from linux/sched.h
_TRIAL = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]


def turn(nodeid: str) -> tuple[int, str]:
    """Return the place of a test's file: first come the long ones, then all others by name."""
    file = nodeid.partition("::")[0]
    return (LONG.index(file) if file in LONG else len(LONG)), file


def begin_at_own_part(parts: list[T], worker: int, workers: int) -> None:
    """Rotate `parts`, so that no two of the workers 0 to `workers` - 1 begin at the same place."""
    first = len(parts) * worker // workers
    parts[:] = parts[first:] + parts[:first]


def number_of_workers() -> int:
    """Return how many to start for `-n auto`: none where /dev/shm cannot be had apart."""
    return WORKERS if may_mount() else 0


def may_mount() -> bool:
    """Whether this process may have a /dev/shm of its own."""
    try:
        return subprocess.run(_TRIAL, check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def mount_own_shm() -> None:
    """Give this thread, and all that it starts from now on, an empty /dev/shm."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount.argtypes = [*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p]
    _check(libc.unshare(_NEW_MOUNTS))
    _check(libc.mount(b"none", b"/", None, _PRIVATE, None))
    _check(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", _PLAIN, b"mode=1777"))


def _check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), "a /dev/shm apart from the other workers'")
