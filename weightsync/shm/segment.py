"""Named shared-memory segments: creation, checked opening, and cleanup after dead owners."""

from __future__ import annotations

import atexit
import errno
import functools
import logging
import mmap
import os
import re
import resource
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
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
_MAP_NORESERVE = 0x4000
_PAGE = mmap.PAGESIZE
_OF_FILE, _SWAPPED = 1, 2
# mmap.madvise holds the GIL, so other threads (heartbeats) can run between two pieces only.
_PIECE_NBYTES = 64 << 20


def ask_for_huge_pages(mapping: mmap.mmap) -> None:
    """Request huge pages for memory populated from now on; a refusal is logged once per process."""
    _advise(mapping, mmap.MADV_HUGEPAGE, 0, len(mapping))


def populate(mapping: mmap.mmap, *, writable: bool = True) -> None:
    """Pre-fault all pages, piece by piece; a refusal is logged once per process."""
    advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
    for start in range(0, len(mapping), _PIECE_NBYTES):
        if not _advise(mapping, advice, start, min(_PIECE_NBYTES, len(mapping) - start)):
            return


def _advise(mapping: mmap.mmap, advice: int, start: int, nbytes: int) -> bool:
    try:
        mapping.madvise(advice, start, nbytes)
    except OSError as exc:
        _log_once(advice, exc.strerror)
        return False
    return True


@functools.cache
def _log_once(advice: int, reason: str) -> None:
    feature = "huge pages" if advice == mmap.MADV_HUGEPAGE else "pre-faulting"
    logger.warning("%s not available (%s); continuing without", feature, reason)


DIRECTORY = Path("/dev/shm")
PATTERN = re.compile(r"weightsync-[0-9a-f]{32}")
_SOCKET_SUFFIX = ".sock"

_ENLARGE = (
    "enlarge it (docker run --shm-size=…, an emptyDir of medium Memory in Kubernetes, or "
    "mount -o remount,size=…) or ask for fewer or smaller buckets"
)

_live: dict[int, Segment] = {}


class Segment:
    """Shared memory of `nbytes` bytes under `name`, mapped at `address` until `close`.

    The owner removes the name, at the latest at the exit of its interpreter. Readers only unmap.
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
        """Take ownership of `mapping`, `fd` and `lock`. Called by `create` and `open` only."""
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
        """Create a zeroed, locked, writable segment of exactly `nbytes` bytes, owned by the caller.

        The memory is reserved here: a full `directory` is a SegmentError now, never a SIGBUS later.
        Raises ConfigError for an invalid size.
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

        Raises HandleError if `name` is not the name of a segment (nothing is opened then), and
        SegmentError unless it is a regular file of this user with exactly `nbytes` bytes.
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
        """True in the process that created the segment, also after `close`; false in its forks."""
        return self._lock is not None and self._lock.ours

    @property
    def buffer(self) -> memoryview:
        """A view `uint8[nbytes]`, read-only unless `writable`. The view keeps the memory mapped."""
        return memoryview(self._open_mapping())

    def tensor(self, offset: int = 0, nbytes: int | None = None) -> torch.Tensor:
        """Return `uint8[nbytes]` from `offset`, by default to the end.

        The tensor keeps the memory mapped. Each call makes a new storage. A write through a view of
        a read-only segment is a SIGSEGV, because torch has no read-only tensors: code of the user
        gets views of `private`. Raises SegmentError for a range outside the segment.
        """
        count = self.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or count < 0 or offset + count > self.nbytes:
            raise SegmentError(
                f"bytes {offset} to {offset + count} are outside segment {self.name}, "
                f"which has {self.nbytes} bytes; the handle does not fit the segment"
            )
        # Imported here because most uses of a segment need no torch.
        from weightsync.tensors import view_bytes  # noqa: PLC0415 - see above

        # torch keeps the object but not its buffer export, and only the export prevents an early
        # unmapping. The private memoryview holds that export as long as the tensor lives.
        return view_bytes(self.buffer, offset, count)

    def private(self) -> PrivateMapping:
        """Map the segment once more, so that this process may write to what it sees of it."""
        self._open_mapping()
        with _mapped_errors(f"cannot map segment {self._path} for writes of this process alone"):
            return PrivateMapping(self._fd, self.nbytes)

    def owner_alive(self) -> bool:
        """Return whether the creator still holds its lock, also after the name was removed.

        Safe to call at any time from any number of readers, because readers try a shared lock.
        """
        if self.owner:
            return self._mapping is not None
        self._open_mapping()
        with _mapped_errors(f"cannot check the lock of segment {self._path}"):
            probe = reopen(self._fd, os.O_RDONLY)
            try:
                return not try_shared(probe)
            finally:
                unlock_and_close(probe)

    def unlink(self) -> None:
        """Remove the name, so that no other process can open it; open mappings stay. Idempotent.

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
        """Unmap, and unlink if this process is the owner. Idempotent.

        Memory that tensors or buffers still view is unmapped when the last view is collected.
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        role = "owner" if self.owner else "writer" if self.writable else "reader"
        return f"<Segment {self.name} {self.nbytes} bytes, {role}>"


class PrivateMapping:
    """A mapping of a segment whose writes only this process sees: copy on write, page by page.

    A page that was written is a copy from then on: it does not show what the owner writes later,
    until `restore` or `restore_written` drops it. Reads cost what they cost elsewhere.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE  # else it counts as memory that is in use
        mapping = mmap.mmap(fd, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        ask_for_huge_pages(mapping)
        populate(mapping, writable=False)
        self.nbytes = nbytes
        self.address = buffer_address(mapping)
        self._mapping: mmap.mmap | None = mapping
        self._faults: dict[tuple[int, int], tuple[int, int]] = {}

    def tensor(self, offset: int = 0) -> torch.Tensor:
        """Return `uint8[nbytes - offset]`, which keeps the memory mapped."""
        from weightsync.tensors import view_bytes  # noqa: PLC0415 - as in Segment.tensor

        view = memoryview(self._open())
        return view_bytes(view, offset, self.nbytes - offset)

    def holds(self, address: int) -> bool:
        """Whether `address` is in this memory."""
        return self.address <= address < self.address + self.nbytes

    def restore(self, address: int, nbytes: int) -> None:
        """Drop what this process wrote to the pages of a range: they show the segment again."""
        begin, end = self._pages(address, nbytes)
        if begin < end:
            self._open().madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def restore_written(self, address: int, nbytes: int) -> None:
        """The same for the pages that were written: the kernel knows them.

        Reads 8 bytes for each page, and none where this process had no page fault since the last
        call for this range: the first write to a page of this mapping is one, whichever thread or
        system call of this process makes it. A write by another process (`process_vm_writev`, a
        debugger) is not seen.
        """
        begin, end = self._pages(address, nbytes)
        faults = os.getpid(), _page_faults()  # before the pages are read: later ones are seen next
        if self._faults.get((begin, end)) == faults and _counts_page_faults():
            return
        written = _written_pages(self.address + begin, end - begin)
        if written is None:
            self.restore(address, nbytes)
        else:
            for page in written:
                self._open().madvise(mmap.MADV_DONTNEED, begin + page * _PAGE, _PAGE)
        self._faults[begin, end] = faults

    def close(self) -> None:
        """Unmap; memory that tensors view is unmapped when the last view is collected."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with suppress(BufferError):
                mapping.close()

    def _open(self) -> mmap.mmap:
        if self._mapping is None:
            raise SegmentError("this mapping is closed; open the segment again")
        return self._mapping

    def _pages(self, address: int, nbytes: int) -> tuple[int, int]:
        """Return the offsets of the first page of a range, and of the end of its last page."""
        begin = address - self.address
        first = begin - begin % _PAGE
        return first, min(self.nbytes, -(-(begin + nbytes) // _PAGE) * _PAGE)


def _page_faults() -> int:
    """Return how many page faults this process had, in all of its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


@functools.cache
def _counts_page_faults() -> bool:
    """Return whether the kernel counts page faults at all; some sandboxes do not."""
    before = _page_faults()
    with mmap.mmap(-1, _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
        fresh[0] = 1
        return _page_faults() > before


def _written_pages(address: int, nbytes: int) -> list[int] | None:
    """Return the numbers of the pages of a private mapping that are copies; None if unknown.

    From Documentation/admin-guide/mm/pagemap.rst: bit 63 present, 62 swapped, 61 page of a file.
    """
    count = -(-nbytes // _PAGE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(address // _PAGE * 8)
            entries = pagemap.read(count * 8)
    except OSError:
        return None
    if len(entries) != count * 8:
        return None
    import numpy as np  # noqa: PLC0415  # as torch: most uses of a segment need none

    kinds = np.frombuffer(entries, np.uint64) >> np.uint64(61)
    copied: list[int] = np.flatnonzero((kinds >= _SWAPPED) & (kinds & _OF_FILE == 0)).tolist()
    return copied


def socket_path(segment: str) -> Path:
    """Return the path of the socket that belongs to a segment: without that one it is stale."""
    return DIRECTORY / f"{segment}{_SOCKET_SUFFIX}"


@dataclass(frozen=True)
class Leftover:
    """A stale segment of `nbytes` bytes whose owner died without unlinking it, or its socket."""

    name: str
    nbytes: int


def live_segments() -> list[Segment]:
    """Return the segments that this process has open, its own and others', oldest first."""
    return list(_live.values())


def find_leftovers(directory: Path = DIRECTORY) -> list[Leftover]:
    """Return this user's segments in `directory` with a dead owner, and sockets without segment."""
    found = []
    for path in _candidates(directory):
        with _locked_if_stale(path) as info:
            if info is not None:
                found.append(Leftover(path.name, info.st_size))
    return [*found, *(Leftover(path.name, 0) for path in _stale_sockets(directory))]


def remove_leftovers(directory: Path = DIRECTORY) -> list[Leftover]:
    """Unlink what `find_leftovers` finds and return it. Segments of living owners stay.

    Safe to run in several processes at once: each name is reported by the process that removed it.
    """
    removed = []
    for path in _candidates(directory):
        with _locked_if_stale(path) as info, suppress(OSError):
            if info is not None and os.path.samestat(info, os.lstat(path)):
                os.unlink(path)
                removed.append(Leftover(path.name, info.st_size))
    for path in _stale_sockets(directory):  # includes sockets of the segments just removed
        with suppress(OSError):
            os.unlink(path)
            removed.append(Leftover(path.name, 0))
    return removed


def _candidates(directory: Path) -> list[Path]:
    """List the paths with a segment's name, without opening anything."""
    with _mapped_errors(f"cannot list {directory}"), os.scandir(directory) as entries:
        names = [entry.name for entry in entries if PATTERN.fullmatch(entry.name)]
    return [directory / name for name in sorted(names)]


def _stale_sockets(directory: Path) -> list[Path]:
    """List this user's sockets without a segment. A segment always exists before its socket."""
    with _mapped_errors(f"cannot list {directory}"):
        names = sorted(name for name in os.listdir(directory) if name.endswith(_SOCKET_SUFFIX))
    stale = []
    for name in names:
        segment = name.removesuffix(_SOCKET_SUFFIX)
        with suppress(OSError):
            info = os.lstat(directory / name)
            own = stat.S_ISSOCK(info.st_mode) and info.st_uid == os.geteuid()
            if own and PATTERN.fullmatch(segment) and not (directory / segment).exists():
                stale.append(directory / name)
    return stale


@contextmanager
def _locked_if_stale(path: Path) -> Iterator[os.stat_result | None]:
    """Yield the segment's stat under its lock if its owner is dead, else None.

    The lock is shared, as in the readers' probes, so the probes and the cleanup do not mislead
    each other.
    """
    with ExitStack() as undo:
        info = None
        with suppress(OSError):
            if _is_own_file(os.lstat(path)):
                fd = _open_existing(path, os.O_RDONLY)
                undo.callback(unlock_and_close, fd)
                info = os.fstat(fd) if try_shared(fd) else None
        yield info if info is not None and _is_own_file(info) else None


def _is_own_file(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()


def _check_name(name: str) -> None:
    if not PATTERN.fullmatch(name):
        raise HandleError(
            f"{name[:80]!r} is not the name of a segment, which is 'weightsync-' and 32 lower-case "
            "hex digits; the handle is damaged or not from weightsync"
        )


def _check_nbytes(nbytes: int) -> None:
    if not 0 < nbytes <= sys.maxsize:
        raise ConfigError(f"a segment cannot have {nbytes} bytes; give a positive size")


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
            "the segment was changed, or the handle belongs to another segment"
        )


@contextmanager
def _mapped_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as exc:  # mmap's own size check raises a ValueError
        raise SegmentError(f"{doing}: {exc}") from exc


def _open_existing(path: Path, access: int) -> int:
    # O_NONBLOCK, because open() of a FIFO would otherwise wait for its other end.
    return os.open(path, access | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def _reserve(fd: int, nbytes: int, directory: Path) -> None:
    """Set the file's size and reserve its memory. Raises SegmentError."""
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    # Checked first, because fallocate would fill the remaining memory before it fails.
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
# Forked multiprocessing workers exit through os._exit and run finalizers instead of atexit. A
# forked child loses the registration. With a priority below 0, the worker's own work ends first.
_unlink_at_exit_of_worker(_unlink_at_exit)
register_after_fork(_unlink_at_exit, _unlink_at_exit_of_worker)


def cleanup_stale() -> None:
    """Remove the segments of dead owners and log the result. Never raises, so no start fails."""
    try:
        removed = remove_leftovers()
    except SegmentError as exc:
        logger.warning("the cleanup of stale segments failed: %s", exc)
        return
    if removed:
        nbytes = sum(leftover.nbytes for leftover in removed)
        names = shorten(leftover.name for leftover in removed)
        logger.info("removed %d bytes of stale shared memory in %s", nbytes, names)
