"""Every segment of this user on this host: whose owner lives, and which processes have it open.

Processes are named for people to read. Whether an owner lives is asked of its lock alone.
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
    """One segment. `mapped_by` are `name (pid)`, as far as this process may see them.

    `named` is False for one whose name was removed while readers have it open; its size and the
    life of its owner can then not be told, and are 0 and False.
    """

    name: str
    nbytes: int
    age_s: float
    owner_alive: bool
    mapped_by: tuple[str, ...]
    named: bool = True


def list_segments(directory: Path = DIRECTORY) -> list[HostSegment]:
    """Return this user's segments in `directory`, the oldest first. Raises SegmentError."""
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
        with suppress(OSError):  # gone since, which is no harm
            info = os.lstat(directory / name) if PATTERN.fullmatch(name) else None
            if info is not None and info.st_uid == os.geteuid():
                found[name] = info
    return found


def _mappings() -> tuple[dict[tuple[int, int], list[str]], dict[str, list[str]]]:
    """Return which processes map which file, by device and inode, and which unlinked segments.

    An owner's mapping is of a file that had no name yet, so names alone would not find it.
    """
    files: dict[tuple[int, int], list[str]] = defaultdict(list)
    unlinked: dict[str, list[str]] = defaultdict(list)
    for pid in sorted(int(entry) for entry in os.listdir(_PROC) if entry.isdecimal()):
        with suppress(OSError):  # ended since, or another user's
            maps = (_PROC / str(pid) / "maps").read_text("utf-8", "replace")
            comm = (_PROC / str(pid) / "comm").read_text("utf-8", "replace").strip()
            lines = [match.group("device", "inode", "gone") for match in _LINE.finditer(maps)]
            for device, inode in {line[:2] for line in lines}:
                major, minor = (int(part, 16) for part in device.split(":"))
                files[os.makedev(major, minor), int(inode)].append(f"{comm} ({pid})")
            for gone in {line[2] for line in lines if line[2]}:
                unlinked[gone.partition(" ")[0]].append(f"{comm} ({pid})")
    return files, unlinked
