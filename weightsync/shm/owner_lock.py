"""The lock that tells a living owner of a shared file from a dead one.

The kernel keeps a `flock` until the last reference to the *open file description* is gone, and a
mapping, or the descriptor that `mmap.mmap` duplicates, is such a reference, which forked children
inherit. So the lock has a description of its own, on one descriptor, which children close: a data
loader that outlives its trainer must not keep the trainer's lock.
"""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path

# Held over every fork, so that no child inherits a lock that is not in the set. Reentrant, because
# garbage collection may release a lock while its thread is inside.
_guard = threading.RLock()
_held: set[OwnerLock] = set()


class OwnerLock:
    """An exclusive lock on a new, nameless file of mode 0600; `fd` is open for reading and writing.

    `ours` is true in the process that made it, also after `release`, and false in forked children.
    """

    def __init__(self, directory: Path) -> None:
        """Make the file in `directory` and lock it; raises OSError."""
        with _guard:
            self.fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            self.ours = True
            _held.add(self)
        try:
            os.fchmod(self.fd, 0o600)  # whatever the umask left
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let the lock go, for all to see that the owner is gone; idempotent."""
        with _guard:
            if self in _held:
                _held.remove(self)
                os.close(self.fd)

    def link(self, path: Path) -> None:
        """Give the file the name `path`, which must be free; raises OSError."""
        directory_fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Only with a directory descriptor does os.link call linkat, which follows the link.
            source = f"/proc/self/fd/{self.fd}"
            os.link(source, path.name, dst_dir_fd=directory_fd, follow_symlinks=True)
        finally:
            os.close(directory_fd)


def reopen(fd: int, access: int) -> int:
    """Open the file behind `fd` once more: a new description, which shares no lock with it."""
    return os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC)


def try_shared(fd: int) -> bool:
    """Take a shared lock on `fd` if the owner is dead, else return False; never waits.

    Shared is enough: a dead owner's lock never comes back, and an exclusive lock would look like a
    living owner to everybody who looks at the same time. Undo it with `unlock_and_close`.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock_and_close(fd: int) -> None:
    """Give up what `try_shared` took, and close `fd`."""
    # Unlocked first, since a child forked meanwhile has a copy of this descriptor.
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _after_fork_in_child() -> None:
    # Closing leaves the parent's lock alone; LOCK_UN would take it away.
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
