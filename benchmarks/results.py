"""Results of a comparison: rows, their machine, and their file."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import psutil

PACKAGES = ("torch", "ray", "safetensors", "weightsync")


def today() -> str:
    """Return today's date in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


@dataclass(frozen=True, slots=True)
class Ratio:
    """Updates as multiples of the copy that each followed."""

    least: float
    median: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rival and option on one workload; `failed` is the reason for missing figures.

    `memcpy` and `update` are seconds, round by round; the values that readers held were right in
    every row that has them. `setup_s` includes the start of the readers, `connect_s` is the time of
    `connect()` alone, 0 for other rivals. `load` is the machine's at the end.

    In workloads that change little, the last update changed `changed_values` in `changed_lines`
    of 64 bytes, and sent `sent_nbytes` to each reader. `stall_s` is the longest pause of a reader
    of weightsync.
    """

    workload: str
    readers: int
    rival: str
    way: str
    nbytes: int
    tensors: int
    dtype: str
    date: str = field(default_factory=today)
    memcpy: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    setup_s: float = 0.0
    connect_s: float = 0.0
    stall_s: float = 0.0
    changed_values: int = 0
    changed_lines: int = 0
    sent_nbytes: int = 0
    load: float = 0.0
    failed: str = ""

    @property
    def key(self) -> str:
        """The key of this row."""
        return f"{self.workload} x{self.readers} {self.rival} {self.way}"

    @property
    def ratio(self) -> Ratio:
        """The least, the median and the greatest ratio to memcpy. Only for rows with figures."""
        found = [u / m for u, m in zip(self.update, self.memcpy, strict=True)]
        return Ratio(min(found), statistics.median(found), max(found))


@dataclass(slots=True)
class Results:
    """All rows so far; `finished` is True after the last trial of the preset."""

    preset: str
    machine: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    finished: bool = False

    def find(self, workload: str, readers: int, rival: str, way: str = "") -> Row | None:
        """Return the row with this key, of any option if none is given."""
        for row in self.rows:
            found = (row.workload, row.readers, row.rival)
            if found == (workload, readers, rival) and way in {"", row.way}:
                return row
        return None

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        rows = [
            {**asdict(row), "ratio": None if row.failed else asdict(row.ratio)} for row in self.rows
        ]
        text = json.dumps({**asdict(self), "rows": rows}, indent=1)
        part = path.with_suffix(".part")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that `save` wrote."""
        said = json.loads(path.read_text(encoding="utf-8"))
        known = {f.name for f in fields(Row)}
        rows = [Row(**{k: v for k, v in row.items() if k in known}) for row in said["rows"]]
        return cls(said["preset"], said["machine"], rows, said["finished"])


def machine() -> dict[str, Any]:
    """Return the kind of the machine: facts that figures depend on, without its identity."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "huge_pages": _huge_pages("enabled"),
        "huge_pages_of_shared_memory": _huge_pages("shmem_enabled"),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def same_kind(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether figures of the two machines can be compared."""
    return all(one.get(name) == other.get(name) for name in ("cpu", "cores"))


def _cpu() -> str:
    try:
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in said.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def _huge_pages(setting: str) -> str:
    """Return the kernel's setting of transparent huge pages: `always`, `never` or `madvise`."""
    try:
        said = (Path("/sys/kernel/mm/transparent_hugepage") / setting).read_text(encoding="ascii")
    except OSError:
        return "unknown"
    return said.partition("[")[2].partition("]")[0] or "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
