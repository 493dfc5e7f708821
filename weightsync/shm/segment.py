"""Named shared-memory segments: made whole, opened with suspicion, cleaned up after the dead."""

from __future__ import annotations

import atexit
import errno
import functools
import logging
import mmap
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from weightsync.errors import ConfigError, HandleError, SegmentError, shorten
from weightsync.shm.buffer_address import buffer_address
from weightsync.shm.owner_lock import OwnerLock, reopen, try_shared, unlock_and_close

if TYPE_CHECKING:
    import torch


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


DIRECTORY = Path("/dev/shm")
PATTERN = re.compile(r"weightsync-[0-9a-f]{32}")
SOCKET_SUFFIX = ".sock"
"""Ends the name of a socket that lies beside a segment, and is nothing without it."""

_ENLARGE = (
    "enlarge it (docker run --shm-size=…, an emptyDir of medium Memory in Kubernetes, or "
    "mount -o remount,size=…) or ask for fewer or smaller buckets"
)

_live: dict[int, Segment] = {}


class Segment:
    """Shared memory of `nbytes` bytes under `name`, mapped at `address` until `close`.

    The owner frees the name, at the latest when its interpreter exits; readers only unmap.
    """

    def __init__(
        self,
        path: Path,
        mapping: mmap.mmap,
        fd: int,
        *,
        writable: bool,
        lock: OwnerLock | None = None,
    ) -> None:
        """Take over `mapping`, `fd` and `lock`; called by `create` and `open` alone."""
        self.name = path.name
        self.nbytes = len(mapping)
        self.writable = writable
        self.address = buffer_address(mapping)
        self._path = path
        self._mapping: mmap.mmap | None = mapping
        self._fd = fd
        self._lock = lock
        _live[id(self)] = self

    @classmethod
    def create(cls, nbytes: int, *, directory: Path = DIRECTORY, prefault: bool = True) -> Segment:
        """Make a zeroed, locked, writable segment of exactly `nbytes` bytes and own it.

        Its memory is reserved here: a full `directory` is a SegmentError now, never a SIGBUS
        later. Raises ConfigError for sizes that cannot be.
        """
        _check_nbytes(nbytes)
        directory = directory.absolute()
        path = directory / f"weightsync-{secrets.token_hex(16)}"
        with ExitStack() as undo, _mapped_errors(f"cannot create a segment in {directory}"):
            lock = OwnerLock(directory)
            undo.callback(lock.release)
            _reserve(lock.fd, nbytes, directory)
            fd = reopen(lock.fd, os.O_RDWR)
            undo.callback(os.close, fd)
            mapping = _map(fd, nbytes, writable=True, prefault=prefault)
            lock.link(path)
            undo.pop_all()
        return cls(path, mapping, fd, writable=True, lock=lock)

    @classmethod
    def open(
        cls, name: str, *, nbytes: int, writable: bool = False, directory: Path = DIRECTORY
    ) -> Segment:
        """Map the segment `name` of another process, read-only unless `writable`.

        Raises HandleError if `name` is none of ours (nothing is opened then), and SegmentError
        unless it is a regular file of our own user with exactly `nbytes` bytes.
        """
        _check_name(name)
        _check_nbytes(nbytes)
        path = directory.absolute() / name
        with ExitStack() as undo, _mapped_errors(f"cannot open segment {path}"):
            fd = _open_existing(path, os.O_RDWR if writable else os.O_RDONLY)
            undo.callback(os.close, fd)
            _check_trusted(os.fstat(fd), path, nbytes)
            mapping = _map(fd, nbytes, writable=writable, prefault=True)
            undo.pop_all()
        return cls(path, mapping, fd, writable=writable)

    @property
    def owner(self) -> bool:
        """True in the process that created the segment, also once closed; false in its forks."""
        return self._lock is not None and self._lock.ours

    @property
    def buffer(self) -> memoryview:
        """A view `uint8[nbytes]`, read-only unless `writable`; it keeps the memory mapped."""
        return memoryview(self._open_mapping())

    def tensor(self, offset: int = 0, nbytes: int | None = None) -> torch.Tensor:
        """Return `uint8[nbytes]` from `offset`, to the end by default; it keeps the memory mapped.

        Each call makes a storage of its own. Writing through a view of a read-only segment is a
        SIGSEGV: torch has no read-only tensors. Raises SegmentError for ranges outside.
        """
        count = self.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or count < 0 or offset + count > self.nbytes:
            raise SegmentError(
                f"bytes {offset} to {offset + count} are wanted of segment {self.name}, "
                f"which has {self.nbytes}; the handle does not fit the segment"
            )
        # Here, since most of what a segment is for needs no torch.
        from weightsync.tensors import view_bytes  # noqa: PLC0415 - see above

        # torch keeps the object but not its buffer export, which is what stops an early unmapping;
        # the private memoryview holds that export as long as the tensor lives.
        return view_bytes(self.buffer, offset, count)

    def owner_alive(self) -> bool:
        """Say whether the creator still holds its lock, whatever became of the name.

        Safe to call at any time from any number of readers: they share the lock they try for.
        """
        if self.owner:
            return self._mapping is not None
        self._open_mapping()
        with _mapped_errors(f"cannot look at the lock of segment {self._path}"):
            probe = reopen(self._fd, os.O_RDONLY)
            try:
                return not try_shared(probe)
            finally:
                unlock_and_close(probe)

    def unlink(self) -> None:
        """Remove the name, so that nobody else can open it; open mappings stay. Idempotent.

        Raises ConfigError in a process that does not own the segment.
        """
        if not self.owner:
            raise ConfigError(
                f"segment {self.name} belongs to another process, and only its owner unlinks it; "
                "names of dead owners are removed with remove_leftovers()"
            )
        with _mapped_errors(f"cannot unlink segment {self._path}"), suppress(FileNotFoundError):
            os.unlink(self._path)

    def close(self) -> None:
        """Unmap, and unlink if this is the owner; idempotent.

        Memory that tensors or buffers still view is unmapped when the last of them is collected.
        """
        if _live.pop(id(self), None) is None or self._mapping is None:
            return
        with ExitStack() as last:
            last.callback(os.close, self._fd)
            if self._lock is not None:
                last.callback(self._lock.release)
            with suppress(BufferError):
                self._mapping.close()
            self._mapping = None
            if self.owner:
                self.unlink()

    def _open_mapping(self) -> mmap.mmap:
        if self._mapping is None:
            raise SegmentError(f"segment {self.name} is closed in this process; open it again")
        return self._mapping

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        role = "owner" if self.owner else "writer" if self.writable else "reader"
        return f"<Segment {self.name} {self.nbytes} bytes, {role}>"


@dataclass(frozen=True)
class Leftover:
    """A segment of `nbytes` bytes whose owner died without unlinking `name`, or its socket."""

    name: str
    nbytes: int


def live_segments() -> list[Segment]:
    """Return the segments this process has open, created or opened, oldest first."""
    return list(_live.values())


def find_leftovers(directory: Path = DIRECTORY) -> list[Leftover]:
    """Return our own user's segments in `directory` whose owner is dead, and lost sockets."""
    found = []
    for path in _candidates(directory):
        with _dead(path) as info:
            if info is not None:
                found.append(Leftover(path.name, info.st_size))
    return [*found, *(Leftover(path.name, 0) for path in _lost_sockets(directory))]


def remove_leftovers(directory: Path = DIRECTORY) -> list[Leftover]:
    """Unlink what `find_leftovers` finds and return what was removed; never a living owner's.

    Safe to run in several processes at once: each name is reported by the one that removed it.
    """
    removed = []
    for path in _candidates(directory):
        with _dead(path) as info, suppress(OSError):
            if info is not None and os.path.samestat(info, os.lstat(path)):
                os.unlink(path)
                removed.append(Leftover(path.name, info.st_size))
    for path in _lost_sockets(directory):  # those of what was just removed, too
        with suppress(OSError):
            os.unlink(path)
            removed.append(Leftover(path.name, 0))
    return removed


def _candidates(directory: Path) -> list[Path]:
    """List the paths that may be our segments, without opening anything."""
    with _mapped_errors(f"cannot list {directory}"), os.scandir(directory) as entries:
        names = [entry.name for entry in entries if PATTERN.fullmatch(entry.name)]
    return [directory / name for name in sorted(names)]


def _lost_sockets(directory: Path) -> list[Path]:
    """List our own user's sockets that lie beside no segment any more; one is made after it."""
    with _mapped_errors(f"cannot list {directory}"):
        names = sorted(name for name in os.listdir(directory) if name.endswith(SOCKET_SUFFIX))
    lost = []
    for name in names:
        segment = name.removesuffix(SOCKET_SUFFIX)
        with suppress(OSError):
            info = os.lstat(directory / name)
            ours = stat.S_ISSOCK(info.st_mode) and info.st_uid == os.geteuid()
            if ours and PATTERN.fullmatch(segment) and not (directory / segment).exists():
                lost.append(directory / name)
    return lost


@contextmanager
def _dead(path: Path) -> Iterator[os.stat_result | None]:
    """Yield the segment's stat under its lock if its owner is dead, else None.

    It is the shared lock of the readers' own probes, so neither misleads the other.
    """
    with ExitStack() as undo:
        info = None
        with suppress(OSError):
            if _ours(os.lstat(path)):
                fd = _open_existing(path, os.O_RDONLY)
                undo.callback(unlock_and_close, fd)
                info = os.fstat(fd) if try_shared(fd) else None
        yield info if info is not None and _ours(info) else None


def _ours(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()


def _check_name(name: str) -> None:
    if not PATTERN.fullmatch(name):
        raise HandleError(
            f"{name[:80]!r} is not the name of a segment, which is 'weightsync-' and 32 lower-case "
            "hex digits; the handle is damaged or not ours"
        )


def _check_nbytes(nbytes: int) -> None:
    if not 0 < nbytes <= sys.maxsize:
        raise ConfigError(f"a segment of {nbytes} bytes is asked for; give a positive size")


def _check_trusted(info: os.stat_result, path: Path, nbytes: int) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise SegmentError(f"{path} is not a regular file but {stat.filemode(info.st_mode)}")
    if info.st_uid != os.geteuid():
        raise SegmentError(
            f"{path} belongs to uid {info.st_uid}, and this process runs as {os.geteuid()}; "
            "run both sides as the same user"
        )
    if info.st_size != nbytes:
        raise SegmentError(
            f"{path} has {info.st_size} bytes where the handle says {nbytes}; "
            "the segment was changed, or the handle is of another one"
        )


@contextmanager
def _mapped_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as exc:  # mmap's own size check raises a ValueError
        raise SegmentError(f"{doing}: {exc}") from exc


def _open_existing(path: Path, access: int) -> int:
    # O_NONBLOCK, because opening a FIFO would otherwise wait for its other end.
    return os.open(path, access | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def _reserve(fd: int, nbytes: int, directory: Path) -> None:
    """Give the file its size and its memory, or raise SegmentError."""
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    # Looked at first, since fallocate would fill the memory that is left before it gives up.
    if space.f_blocks and nbytes > free:
        raise _no_space(nbytes, free, directory)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        raise _no_space(nbytes, free, directory) from exc


def _no_space(nbytes: int, free: int, directory: Path) -> SegmentError:
    return SegmentError(
        f"a segment of {nbytes} bytes is wanted and {directory} has {free} bytes free; {_ENLARGE}"
    )


def _map(fd: int, nbytes: int, *, writable: bool, prefault: bool) -> mmap.mmap:
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    mapping = mmap.mmap(fd, nbytes, access=access)
    ask_for_huge_pages(mapping)
    if prefault:
        populate(mapping, writable=writable)
    return mapping


def _unlink_at_exit() -> None:
    for segment in live_segments():
        if segment.owner:
            with suppress(SegmentError):
                segment.unlink()


def _unlink_at_exit_of_worker(unlink: Callable[[], None]) -> None:
    Finalize(None, unlink, exitpriority=-100)


atexit.register(_unlink_at_exit)
# Forked multiprocessing workers leave through os._exit and run these instead of atexit; forked
# children forget the registration, and a lower priority than 0 lets them end their work first.
_unlink_at_exit_of_worker(_unlink_at_exit)
register_after_fork(_unlink_at_exit, _unlink_at_exit_of_worker)


def cleanup_stale() -> None:
    """Remove leftovers, and say so; a start never fails for it."""
    try:
        removed = remove_leftovers()
    except SegmentError as exc:
        logger.warning("leftover segments could not be looked for: %s", exc)
        return
    if removed:
        nbytes = sum(leftover.nbytes for leftover in removed)
        names = shorten(leftover.name for leftover in removed)
        logger.info("removed what dead owners left: %d bytes in %s", nbytes, names)
