"""A model as safetensors files in one directory, written once for all servers that load it."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from weightsync.errors import ConfigError, TransferError, shorten
from weightsync.shm.owner_lock import OwnerLock, try_shared, unlock_and_close
from weightsync.specs import DTYPE_NBYTES, Manifest, TensorSpec
from weightsync.weights.copying.copy_plan import host_view

DTYPE_CODES: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""SGLang's names of our dtypes; a dtype that is not listed cannot be sent."""

INDEX = "model.safetensors.index.json"
_MAX_HEADER_NBYTES = 100_000_000
_ALIGNMENT = 8
_NAMES = {code: name for name, code in DTYPE_CODES.items()}


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a model: its `header`, each name's `offsets` in it, and its size in bytes."""

    header: bytes
    offsets: Mapping[str, int]
    nbytes: int


def lay_out(specs: Iterable[TensorSpec], *, shard_nbytes: int) -> list[Shard]:
    """Distribute tensors, in order, over shards of about `shard_nbytes`. Raises ConfigError."""
    listed = list(specs)
    _check_dtypes(listed)
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in listed:
        if groups[-1] and filled + spec.nbytes > shard_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.nbytes
    return [_make_shard(group) for group in groups]


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of a checkpoint's safetensors files; None where they cannot be read."""
    try:
        specs = [spec for file in _files_of(directory) for spec in _read_header(file)]
        return Manifest(tuple(specs)) if specs else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # a foreign directory may contain anything


def _make_shard(group: list[TensorSpec]) -> Shard:
    # Sorted by element size, the largest first: all tensors are aligned without padding.
    ordered = sorted(group, key=lambda spec: -DTYPE_NBYTES[spec.dtype])
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    at = 0
    for spec in ordered:
        begins[spec.name] = at
        entries[spec.name] = {
            "dtype": DTYPE_CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: len(header) + begin for name, begin in begins.items()}
    return Shard(header, offsets, len(header) + at)


def _check_dtypes(specs: list[TensorSpec]) -> None:
    unknown = [str(spec.name) for spec in specs if spec.dtype not in DTYPE_CODES]
    if unknown:
        raise ConfigError(
            f"{shorten(unknown)}: of a dtype that safetensors files for SGLang cannot hold; "
            f"known: {', '.join(DTYPE_CODES)}; cast with dtype="
        )


def _files_of(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.is_file():
        table = json.loads(index.read_bytes())["weight_map"]
        return [directory / Path(name).name for name in sorted(set(table.values()))]
    return sorted(directory.glob("*.safetensors"))


def _read_header(file: Path) -> list[TensorSpec]:
    with file.open("rb") as opened:
        nbytes = int.from_bytes(opened.read(8), "little")
        if nbytes > _MAX_HEADER_NBYTES:
            raise ValueError(f"{file} begins with no header")
        entries = json.loads(opened.read(nbytes))
    entries.pop("__metadata__", None)
    return [
        TensorSpec(name, _NAMES[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in entries.items()
    ]


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset` of a file. Raises TransferError."""
    try:
        while data.nbytes:
            written = os.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written
    except OSError as exc:
        raise TransferError(f"a file for SGLang cannot be written: {exc}; send again") from exc


logger = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")  # shared with a server of this host on purpose
SHARD_NBYTES = 4 << 30
"""SGLang reads shards in parallel."""

_PREFIX = "weightsync-sglang-"
_LOCK = "owner.lock"
_WEIGHTS = "weights"


class WeightDirectory:
    """The directory of one fleet of servers, with the files of one update at a time.

    It is a subdirectory of `directory`, which both sides see under the same path; None is shared
    memory. The first update creates it; the `close` that answers the last `share` removes it.
    Thread-safe. Raises ConfigError where `directory` is no writable absolute path.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._base = MEMORY if directory is None else directory
        self._private = directory is None
        self._guard = threading.Lock()
        self._home: Path | None = None
        self._forget_home: Callable[[], object] = lambda: None
        self._snapshot: Snapshot | None = None
        self._sharers = 0
        if directory is not None:
            _check_named(directory)

    def share(self) -> None:
        """Add a server that loads from here."""
        with self._guard:
            self._sharers += 1

    def close(self) -> None:
        """Remove a server; with the last one, remove the directory."""
        with self._guard:
            self._sharers -= 1
            if self._sharers <= 0:
                self._forget_home()
                self._home = self._snapshot = None

    def join(self, update_id: str, member: object) -> Snapshot:
        """Join an update as `member`; the first member writes the files. TransferError if busy."""
        with self._guard:
            snapshot = self._snapshot
            if snapshot is None or not snapshot.members:
                snapshot = self._snapshot = Snapshot(
                    update_id, self._open_home(), self._base, self._mode
                )
            if snapshot.update_id != update_id:
                raise TransferError(
                    f"files of update {snapshot.update_id} still lie in {snapshot.weights}; send "
                    "again when that is over"
                )
            snapshot.members.add(member)
            if snapshot.writer is None:
                snapshot.writer = member
            return snapshot

    def leave(self, snapshot: Snapshot, member: object) -> None:
        """Leave an update as `member`; with the last member its files are removed. Idempotent."""
        with self._guard:
            snapshot.members.discard(member)
            if snapshot.members or snapshot is not self._snapshot:
                return
            self._snapshot = None
            snapshot.remove()

    @property
    def _mode(self) -> int:
        """The mode of new directories: private in shared memory, else as the base directory's."""
        return 0o700 if self._private else stat.S_IMODE(self._base.stat().st_mode) & 0o755 | 0o700

    def _open_home(self) -> Path:
        if self._home is not None:
            return self._home
        remove_stale_homes(self._base)
        home = self._base / f"{_PREFIX}{secrets.token_hex(8)}"
        try:
            home.mkdir(mode=0o700)
            home.chmod(self._mode)
            lock = OwnerLock(home)
            lock.link(home / _LOCK)
        except OSError as exc:
            shutil.rmtree(home, ignore_errors=True)
            raise TransferError(f"no directory for weights in {self._base}: {exc}") from exc
        self._home = home
        self._forget_home = weakref.finalize(self, _forget, home, lock)
        return home


class Snapshot:
    """The files of one update. The member `writer` writes them; all members' servers load them."""

    def __init__(self, update_id: str, home: Path, base: Path, mode: int) -> None:
        self.update_id = update_id
        self.weights = home / _WEIGHTS
        self.members: set[object] = set()
        self.writer: object | None = None
        self._base = base
        self._mode = mode
        self._draft = home / f"writing-{secrets.token_hex(4)}"
        self._files: dict[str, tuple[str, ...]] = {}
        self._open = 0
        self._published = False
        self._guard = threading.Lock()

    def add(self, shards: Sequence[Shard]) -> SnapshotWriter:
        """Create files, with all bytes allocated. Raises TransferError where space is missing."""
        nbytes = sum(shard.nbytes for shard in shards)
        room = shutil.disk_usage(self._base).free
        if nbytes > room:
            raise TransferError(
                f"{self._base} has {room} bytes left, and the weights take {nbytes}; make room, "
                "or name another directory that the server sees too"
            )
        places: dict[str, tuple[int, int]] = {}
        files: dict[str, tuple[str, ...]] = {}
        with ExitStack() as opened:
            try:
                self._draft.mkdir(mode=0o700, exist_ok=True)
                for number, shard in enumerate(shards, len(self._files) + 1):
                    name = f"model-{number:05d}.safetensors"
                    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
                    fd = os.open(self._draft / name, flags, self._mode & 0o666)
                    opened.callback(os.close, fd)
                    os.fchmod(fd, self._mode & 0o666)
                    os.posix_fallocate(fd, 0, shard.nbytes)
                    write_all(fd, memoryview(shard.header), 0)
                    places.update({key: (fd, at) for key, at in shard.offsets.items()})
                    files[name] = tuple(shard.offsets)
            except OSError as exc:
                raise TransferError(
                    f"{nbytes} bytes of weights cannot be put into {self._base}: {exc}; "
                    "make room, or name another directory that the server sees too"
                ) from exc
            kept = opened.pop_all()
        self._files.update(files)
        self._open += 1
        return SnapshotWriter(self, places, kept)

    def written(self) -> None:
        """Note that one SnapshotWriter is complete."""
        self._open -= 1

    def publish(self) -> Path:
        """Rename the files into place, once; return their directory. Raises TransferError."""
        with self._guard:
            if self._published:
                return self.weights
            if self._open or not self._files:
                raise TransferError(
                    "the files of this update are not complete: their writer left; send again"
                )
            try:
                table = {name: file for file, names in self._files.items() for name in names}
                index = json.dumps({"metadata": {}, "weight_map": table}).encode()
                (self._draft / INDEX).write_bytes(index)
                (self._draft / INDEX).chmod(self._mode & 0o666)
                self._draft.chmod(self._mode)
                shutil.rmtree(self.weights, ignore_errors=True)
                self._draft.rename(self.weights)
            except OSError as exc:
                raise TransferError(f"{self.weights} cannot be made: {exc}; send again") from exc
            self._published = True
            return self.weights

    def remove(self) -> None:
        """Remove every file."""
        for path in (self._draft, self.weights):
            shutil.rmtree(path, ignore_errors=True)


class SnapshotWriter:
    """Writes tensors to open files; `places` are the descriptor and the offset of each name."""

    def __init__(
        self, snapshot: Snapshot, places: Mapping[str, tuple[int, int]], opened: ExitStack
    ) -> None:
        self._snapshot = snapshot
        self._places = places
        self._opened = opened
        weakref.finalize(self, opened.close)

    def write(self, name: str, flat: torch.Tensor) -> None:
        """Write the bytes of `name`; `flat` is `uint8[nbytes]` on the host."""
        fd, offset = self._places[name]
        write_all(fd, host_view(flat.data_ptr(), flat.numel()), offset)

    def done(self) -> None:
        """Close the files: every byte is written."""
        self._opened.close()
        self._snapshot.written()

    def discard(self) -> None:
        """Close the files of an update that is aborted."""
        self._opened.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A directory of weights, of `nbytes` bytes, and whether the process that made it lives."""

    path: Path
    nbytes: int
    age_s: float
    owner_alive: bool


def list_homes(base: Path = MEMORY) -> list[Home]:
    """Return this user's directories in `base`, sorted by name; never raises."""
    found = []
    for path in _own_homes(base):
        with suppress(OSError):
            age_s = max(time.time() - path.stat().st_ctime, 0.0)
            nbytes = sum(file.stat().st_blocks * 512 for file in path.rglob("*"))
            with _dead(path) as dead:
                found.append(Home(path=path, nbytes=nbytes, age_s=age_s, owner_alive=not dead))
    return found


def remove_stale_homes(base: Path = MEMORY) -> list[Path]:
    """Remove the directories that this user's dead processes left in `base`; never raises."""
    removed = []
    for home in _own_homes(base):
        with suppress(OSError), _dead(home) as dead:
            if dead:
                shutil.rmtree(home, ignore_errors=True)
                removed.append(home)
                logger.info("removed %s, which a dead process left", home)
    return removed


def _own_homes(base: Path) -> list[Path]:
    found = []
    with suppress(OSError):
        for home in sorted(base.glob(f"{_PREFIX}*")):
            with suppress(OSError):
                if home.stat(follow_symlinks=False).st_uid == os.getuid():
                    found.append(home)
    return found


@contextmanager
def _dead(home: Path) -> Iterator[bool]:
    """Yield whether the owner is dead; hold its lock meanwhile.

    Raises OSError where there is no lock: the owner has only just made the directory.
    """
    fd = os.open(home / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not try_shared(fd):
        os.close(fd)
        yield False
        return
    try:
        yield True
    finally:
        unlock_and_close(fd)


def _forget(home: Path, lock: OwnerLock) -> None:
    if lock.ours:
        shutil.rmtree(home, ignore_errors=True)
        lock.release()


def _check_named(directory: Path) -> None:
    if not directory.is_absolute() or not directory.is_dir():
        raise ConfigError(
            f"{directory} is no absolute path of a directory here; name one that this host and "
            "the server both see under that path"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"{directory} cannot be written; the weights for SGLang go there")
