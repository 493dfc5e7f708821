"""Runs programs that use Ray in isolation, and removes all their processes and files.

Ray opens ports on every address of its node, without authentication. So a program gets a network of
its own with loopback only, and a process tree of its own that the kernel ends with it. Where
neither root nor user namespaces permit that, Ray listens on the machine's own address, since
`ray.init` turns 127.0.0.1 into it; callers then need the token that newer Ray makes for each run,
and remaining processes are ended by pid.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import ray

from weightsync.shm.segment import find_leftovers

ROOT = Path(__file__).parents[2]
NAMESPACES = ("--net", "--pid", "--fork", "--kill-child", "--mount-proc")
LOOPBACK_ONLY = ("sh", "-c", 'ip link set lo up && "$@"', "sh")
SHM = Path("/dev/shm")
GRACE_S = 5.0
OBJECT_STORE_NBYTES = 80 << 20


def start(cpus: int = 2) -> None:
    """Start a node of Ray in a program that `run` runs, as small as it gets."""
    ray.init(num_cpus=cpus, object_store_memory=OBJECT_STORE_NBYTES, include_dashboard=False)


def run(*arguments: str | Path, timeout_s: float) -> str:
    """Run `python ARGUMENTS` from the root of the project; return its output.

    Fails if it fails, takes longer, or leaves a process or a file.
    """
    before = _left_in_shm()
    # Unix sockets have short names, so this is not pytest's deep directory.
    with tempfile.TemporaryDirectory(prefix="wsr-", dir="/tmp") as home:
        try:
            done = subprocess.run(
                [*_wrapper(), sys.executable, *map(str, arguments)],
                cwd=ROOT,
                env=_environment(home),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        finally:
            left = _end_all(home)
    assert done.returncode == 0, done.stdout[-20_000:]
    assert not left, f"Ray left {left}"
    deadline = time.monotonic() + GRACE_S
    while (segments := _left_in_shm() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not segments, f"{segments} are left in {SHM}"
    return done.stdout


def run_pytest(*paths: Path, timeout_s: float) -> int:
    """Run the tests of files that pytest does not collect by itself; return how many passed.

    None may be skipped.
    """
    # Ray forgets the Popen objects of its processes before these have ended.
    options = ("-p", "no:cacheprovider", "-q", "-W", "ignore::ResourceWarning")
    said = run("-m", "pytest", *options, *paths, timeout_s=timeout_s)
    summary = re.search(r"^(\d+) passed in .*$", said, re.MULTILINE)
    assert summary is not None, said
    return int(summary[1])


@functools.cache
def _wrapper() -> tuple[str, ...]:
    """Return the start of a command line that gives a program namespaces of its own, if any may."""
    for how in (("unshare", *NAMESPACES), ("unshare", "--map-root-user", *NAMESPACES)):
        command = (*how, *LOOPBACK_ONLY)
        try:
            tried = subprocess.run([*command, "true"], capture_output=True, timeout=20, check=False)
        except FileNotFoundError:
            break
        if tried.returncode == 0:
            return command
    return ()


def _environment(home: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {
        **kept,
        "HOME": home,  # where Ray writes the token of the cluster
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": home,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",
        # Ray's own is 15: on a busy machine its actors would not start before a test times out.
        "RAY_worker_niceness": "0",
        # Nor does Ray end actors because other programs of the machine fill its memory.
        "RAY_memory_monitor_refresh_ms": "0",
    }


def _end_all(home: str) -> list[str]:
    """End by pid every process that was started with this `home`; return their command lines."""
    found = [process for process in psutil.process_iter() if _home_of(process) == home]
    for process in found:
        process.kill()
    psutil.wait_procs(found, timeout=20)
    return [str(process) for process in found]


def _home_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("RAY_TMPDIR")
    except psutil.Error:
        return None


def _left_in_shm() -> set[str]:
    """Return the names of Ray's files and of segments whose owners are dead."""
    plasma = {path.name for path in SHM.glob("plasma*")}
    return plasma | {leftover.name for leftover in find_leftovers()}
