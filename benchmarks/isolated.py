"""Runs a program in isolation: unreachable from outside, and removed completely afterwards.

With namespaces, where the kernel allows them: a network with loopback only (Ray and Gloo open
ports), a tree of processes that the kernel ends as one, and a /dev/shm that vanishes with them.
Without, the program's processes are known by an environment variable, and ended by pid.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
MARK = "WEIGHTS_BENCH_HOME"
SPACES = ("--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
INSIDE = 'ip link set lo up && mount -t tmpfs -o size="$0" tmpfs /dev/shm && exec "$@"'
END_S = 20.0
SAID_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a program: `problem` is empty after a success."""

    problem: str


@contextmanager
def home() -> Iterator[Path]:
    """Make a directory for one program; its name is short, because Ray puts Unix sockets there."""
    with tempfile.TemporaryDirectory(prefix="wb-", dir="/tmp", ignore_cleanup_errors=True) as made:
        yield Path(made)


def run_module(
    module: str, *arguments: str | Path, directory: Path, shm_nbytes: int, timeout_s: float
) -> Ended:
    """Run `python -m MODULE ARGUMENTS` from the project's root, for at most `timeout_s`."""
    command = [*_wrapper(shm_nbytes), sys.executable, "-m", module, *map(str, arguments)]
    with (directory / "said").open("w+", encoding="utf-8") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(directory), stdout=said, stderr=said
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return Ended(f"took longer than its limit of {timeout_s:g} s")
        finally:
            process.kill()
            process.wait()
            _end_marked(directory)
        said.seek(0)
        if code == 0:
            return Ended("")
        last = said.read().strip()[-SAID_CHARACTERS:]
    # A shell reports a child's signal as 128 and more, Popen as its negative.
    killed = ", killed: out of memory?" if code in {-9, 137} else ""
    return Ended(f"ended with status {code}{killed}: {last}")


def _wrapper(shm_nbytes: int) -> list[str]:
    how = _spaces()
    return [*how, "sh", "-c", INSIDE, str(shm_nbytes)] if how else []


@functools.cache
def _spaces() -> tuple[str, ...]:
    """Return the command that makes namespaces on this machine, empty if none works."""
    for how in (("unshare", *SPACES), ("unshare", "--map-root-user", *SPACES)):
        command = [*how, "sh", "-c", INSIDE, "1048576", "true"]
        try:
            tried = subprocess.run(command, capture_output=True, timeout=END_S, check=False)
        except FileNotFoundError:
            break
        if tried.returncode == 0:
            return how
    return ()


def _environment(directory: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {
        **kept,
        MARK: str(directory),
        "HOME": str(directory),  # where Ray writes the token of the cluster
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",
    }


def _end_marked(directory: Path) -> None:
    found = [p for p in psutil.process_iter() if _mark_of(p) == str(directory)]
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=END_S)


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except (psutil.Error, OSError):
        return None
