"""The file lock that shows whether the owner of a shared file is alive.

The kernel keeps a `flock` until the last reference to the *open file description* is gone. A
mapping is such a reference, and so is the descriptor that `mmap.mmap` duplicates; forked children
inherit both. So the lock has its own description on one descriptor, which children close. A data
loader that outlives its trainer must not keep the trainer's lock.
"""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path

# Held during every fork, so that no child inherits a lock that is not in the set. Reentrant,
# because garbage collection may release a lock while the same thread holds the guard.
_guard = threading.RLock()
_held: set[OwnerLock] = set()


class OwnerLock:
    """An exclusive lock on a new file without a name, mode 0600; `fd` is open read-write.

    `ours` is true in the process that created it, also after `release`; false in forked children.
    """

    def __init__(self, directory: Path) -> None:
        """Create the file in `directory` and lock it; raises OSError."""
        with _guard:
            self.fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            self.ours = True
            _held.add(self)
        try:
            os.fchmod(self.fd, 0o600)  # the umask may have removed bits
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock, which shows other processes that the owner is gone. Idempotent."""
        with _guard:
            if self in _held:
                _held.remove(self)
                os.close(self.fd)

    def link(self, path: Path) -> None:
        """Give the file the name `path`, which must be free; raises OSError."""
        directory_fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # os.link calls linkat, which follows the link, only with a directory descriptor.
            source = f"/proc/self/fd/{self.fd}"
            os.link(source, path.name, dst_dir_fd=directory_fd, follow_symlinks=True)
        finally:
            os.close(directory_fd)


def reopen(fd: int, access: int) -> int:
    """Open the file behind `fd` again: a new open file description, which shares no lock."""
    return os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC)


def try_shared(fd: int) -> bool:
    """Take a shared lock on `fd` if the owner is dead, else return False; never waits.

    A shared lock is enough, because a dead owner's lock never comes back. An exclusive lock would
    look like a living owner to other processes that probe now. Undo with `unlock_and_close`.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock_and_close(fd: int) -> None:
    """Release the lock that `try_shared` took, and close `fd`."""
    # Unlock first, because a child that was forked meanwhile has a copy of this descriptor.
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _after_fork_in_child() -> None:
    # Closing keeps the parent's lock; LOCK_UN would release it.
    for lock in _held:
        os.close(lock.fd)
        lock.ours = False
    _held.clear()
    _guard.release()


os.register_at_fork(
    before=_guard.acquire,
    after_in_parent=_guard.release,
    after_in_child=_after_fork_in_child,
)
