"""List of this user's segments on this host, with their owners' state and their readers.

Process names are for display only. The lock alone decides whether an owner lives.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weightsync.shm.segment import DIRECTORY, PATTERN, find_leftovers

_PROC = Path("/proc")
_LINE = re.compile(
    rf"^\S+ \S+ \S+ (?P<device>\S+) (?P<inode>[1-9]\d*) +.*?"
    rf"(?P<gone>{PATTERN.pattern} \(deleted\))?$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSegment:
    """One segment. `mapped_by` lists `name (pid)` of each process that this process may inspect.

    `named` is False if the name was removed while readers still map the segment. Its size and its
    owner's state are then unknown: `nbytes` is 0 and `owner_alive` is False.
    """

    name: str
    nbytes: int
    age_s: float
    owner_alive: bool
    mapped_by: tuple[str, ...]
    named: bool = True


def list_segments(directory: Path = DIRECTORY) -> list[HostSegment]:
    """Return this user's segments in `directory`, oldest first. Raises SegmentError."""
    dead = {leftover.name for leftover in find_leftovers(directory)}
    mapped, unlinked = _mappings()
    found = [
        HostSegment(
            name=name,
            nbytes=info.st_size,
            age_s=max(time.time() - info.st_ctime, 0.0),
            owner_alive=name not in dead,
            mapped_by=tuple(mapped[info.st_dev, info.st_ino]),
        )
        for name, info in _stats(directory).items()
    ]
    gone = [
        HostSegment(
            name=name, nbytes=0, age_s=0.0, owner_alive=False, mapped_by=tuple(by), named=False
        )
        for name, by in sorted(unlinked.items())
        if directory == DIRECTORY
    ]
    return sorted(found, key=lambda segment: -segment.age_s) + gone


def _stats(directory: Path) -> dict[str, os.stat_result]:
    found = {}
    for name in os.listdir(directory):
        with suppress(OSError):  # removed since it was listed
            info = os.lstat(directory / name) if PATTERN.fullmatch(name) else None
            if info is not None and info.st_uid == os.geteuid():
                found[name] = info
    return found


def _mappings() -> tuple[dict[tuple[int, int], list[str]], dict[str, list[str]]]:
    """Return the processes that map each file, by device and inode, and each unlinked segment.

    An owner maps the file before the file has a name, so a search by name would miss owners.
    """
    files: dict[tuple[int, int], list[str]] = defaultdict(list)
    unlinked: dict[str, list[str]] = defaultdict(list)
    for pid in sorted(int(entry) for entry in os.listdir(_PROC) if entry.isdecimal()):
        with suppress(OSError):  # the process ended, or belongs to another user
            maps = (_PROC / str(pid) / "maps").read_text("utf-8", "replace")
            comm = (_PROC / str(pid) / "comm").read_text("utf-8", "replace").strip()
            lines = [match.group("device", "inode", "gone") for match in _LINE.finditer(maps)]
            for device, inode in {line[:2] for line in lines}:
                major, minor = (int(part, 16) for part in device.split(":"))
                files[os.makedev(major, minor), int(inode)].append(f"{comm} ({pid})")
            for gone in {line[2] for line in lines if line[2]}:
                unlinked[gone.partition(" ")[0]].append(f"{comm} ({pid})")
    return files, unlinked
