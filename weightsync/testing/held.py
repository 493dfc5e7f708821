"""The resources that a process holds, to see whether they grow."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from contextlib import suppress
from pathlib import Path


class Held:
    """The resources of a process: names in /dev/shm, descriptors, threads, memory."""

    def __init__(self) -> None:
        gc.collect()
        with suppress(AttributeError):  # glibc's: freed memory that it keeps is no leak
            ctypes.CDLL(None).malloc_trim(0)
        self.shm = {path.name for path in Path("/dev/shm").iterdir()}
        self.fds = sum(1 for _ in Path("/proc/self/fd").iterdir())
        self.threads = sum(1 for _ in Path("/proc/self/task").iterdir())
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        # Without the pages of libraries, which the kernel may drop and load again at any time.
        self.rss_nbytes = sum(
            int(line.split()[1]) << 10
            for line in status.splitlines()
            if line.startswith(("RssAnon:", "RssShmem:"))
        )

    @classmethod
    def now(cls) -> Held:
        """Return the resources when two readings agree, because threads take a moment to end."""
        held = cls()
        for _ in range(50):
            time.sleep(0.1)
            again = cls()
            if (again.fds, again.threads) == (held.fds, held.threads):
                return again
            held = again
        return held

    def since(self, before: Held, *, names: int = 1) -> dict[str, object]:
        """Return the growth: memory in steps of 2 MiB, names that no other process has open.

        Fewer new names than `names` belong to other programs, which ended meanwhile.
        """
        new = {name for name in self.shm - before.shm if not _used_elsewhere(name)}
        return {
            "shm": sorted(new) if len(new) >= names else [],
            "fds": max(self.fds - before.fds, 0),
            "threads": max(self.threads - before.threads, 0),
            "rss_mib": max(self.rss_nbytes - before.rss_nbytes, 0) // (2 << 20) * 2,
        }


def _used_elsewhere(name: str) -> bool:
    """Whether another process has a file of /dev/shm open or mapped, or the file is gone by now."""
    path = Path("/dev/shm", name)
    for _ in range(20):
        if not path.exists():
            return True
        for process in Path("/proc").glob("[0-9]*"):
            if process.name == str(os.getpid()):
                continue
            with suppress(OSError):
                if str(path) in (process / "maps").read_text(encoding="utf-8"):
                    return True
                if any(fd.readlink() == path for fd in (process / "fd").iterdir()):
                    return True
        time.sleep(0.1)
    return False
