"""What `weightsync doctor` sees of this machine without starting a process."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from weightsync.backends.ipc.sender import HOST_BUCKET_NBYTES, HOST_BUCKETS
from weightsync.cli.doctor_findings import Finding, ok, problem, warning
from weightsync.errors import BackendUnavailableError, SegmentError
from weightsync.integrations.sglang.files import list_homes, remove_stale_homes
from weightsync.shm.host_keys import host_key
from weightsync.shm.ring import require_ordered_stores
from weightsync.shm.segment import (
    DIRECTORY,
    PATTERN,
    find_leftovers,
    remove_leftovers,
)

_MIB = 1 << 20
RING_NBYTES = HOST_BUCKET_NBYTES * HOST_BUCKETS
ROOMY_NBYTES = 1 << 30
"""What shared memory should have: CPU parameters are adopted into it, whole."""

LOW_FILES = 256
ROOMY_FILES = 1024
OLDEST_TORCH = (2, 11)
OLDEST_RAY = (2, 40)
# linux/proc_ns.h: what the first namespaces of a kernel are called.
_FIRST_NAMESPACES = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}
_ENLARGE = "docker run --shm-size=…, a Memory emptyDir in Kubernetes, or mount -o remount,size=…"


def look_at_cpu() -> Sequence[Finding]:
    """The rings rely on the store order of x86-64."""
    try:
        require_ordered_stores()
    except BackendUnavailableError as exc:
        return [problem("cpu", str(exc), "run trainer and servers on x86-64")]
    return [ok("cpu", f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores")]


def look_at_versions() -> Sequence[Finding]:
    """Python, torch, and what torch was built for."""
    python = ".".join(map(str, sys.version_info[:3]))
    seen = f"Python {python}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    if _numbers(torch.__version__) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return [
            problem("versions", f"{seen}: torch is too old", f"install torch {oldest} or later")
        ]
    return [ok("versions", f"{seen}; have the same torch on trainers and servers")]


def look_at_host() -> Sequence[Finding]:
    """The name by which shared memory of this host is known."""
    return [ok("host", f"{host_key()}: receivers with this key may share memory with you")]


def look_at_shm(directory: Path = DIRECTORY) -> Sequence[Finding]:
    """Size and free bytes of the memory that processes share."""
    if not directory.is_dir():
        return [
            problem("shm", f"{directory} does not exist", f"mount a tmpfs there ({_ENLARGE})"),
        ]
    space = os.statvfs(directory)
    size, free = (blocks * space.f_frsize for blocks in (space.f_blocks, space.f_bavail))
    seen = f"{directory}: {size / _MIB:,.0f} MiB, {free / _MIB:,.0f} MiB free"
    return [judge_shm(free, seen)]


def judge_shm(free: int, seen: str) -> Finding:
    """Say what so many free bytes are good for."""
    if free < RING_NBYTES:
        needed = f"{RING_NBYTES // _MIB} MiB are the least"
        return problem("shm", f"{seen}; {needed}", f"enlarge it: {_ENLARGE}")
    if free < ROOMY_NBYTES:
        return warning(
            "shm",
            f"{seen}; enough to stream (packed=True), too little for a model's parameters",
            f"enlarge it by the model's size, or connect(adopt=False): {_ENLARGE}",
        )
    return ok("shm", seen)


def look_at_leftovers(*, clean: bool, directory: Path = DIRECTORY) -> Sequence[Finding]:
    """What dead owners left; with `clean` it is removed, living owners' never."""
    if not directory.is_dir():
        return []
    try:
        dead = remove_leftovers(directory) if clean else find_leftovers(directory)
    except SegmentError as exc:
        return [problem("leftovers", str(exc), f"look at the permissions of {directory}")]
    homes = [home for home in list_homes(directory) if not home.owner_alive]
    if clean:
        remove_stale_homes(directory)
    names = {leftover.name for leftover in dead}
    sockets = [leftover for leftover in dead if not PATTERN.fullmatch(leftover.name)]
    living = [path for path in directory.iterdir() if PATTERN.fullmatch(path.name)]
    alive = f"{len([path for path in living if path.name not in names])} segments in use"
    left = [
        _left("segments", [leftover.nbytes for leftover in dead if leftover not in sockets]),
        _left("sockets", [leftover.nbytes for leftover in sockets]),
        _left("directories of weights for SGLang", [home.nbytes for home in homes]),
    ]
    seen = ", ".join(filter(None, left))
    if not seen:
        return [ok("leftovers", f"none; {alive}")]
    if clean:
        return [ok("leftovers", f"removed {seen}; {alive}")]
    remedy = "weightsync doctor --clean removes them; so does the next connect()"
    return [warning("leftovers", f"{seen}; {alive}", remedy)]


def _left(what: str, sizes: Sequence[int]) -> str:
    return f"{len(sizes)} {what} of dead owners, {sum(sizes) / _MIB:,.1f} MiB" if sizes else ""


def look_at_namespaces(*, gpu: bool) -> Sequence[Finding]:
    """Whether this is a container, whose processes others cannot see."""
    own = {
        kind: Path(f"/proc/self/ns/{kind}").stat().st_ino != first
        for kind, first in _FIRST_NAMESPACES.items()
    }
    apart = [kind.upper() for kind, apart in own.items() if apart]
    if not apart:
        return [ok("namespaces", "PID and IPC namespaces are the host's")]
    seen = f"{' and '.join(apart)} namespace of its own (a container)"
    if not gpu:
        return [
            ok("namespaces", f"{seen}; other containers need the same /dev/shm to share memory")
        ]
    return [
        warning(
            "namespaces",
            f"{seen}: CUDA IPC works inside it, not to processes of other containers",
            "start both containers with --ipc=host --pid=host, or trainer and server in one",
        )
    ]


def look_at_limits(*, gpu: bool) -> Sequence[Finding]:
    """Open files, and memory that may be locked for GPUs."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return [judge_files(files), judge_memlock(locked, gpu=gpu)]


def judge_files(limit: int) -> Finding:
    """Say what so many open files are good for."""
    if limit == resource.RLIM_INFINITY or limit >= ROOMY_FILES:
        return ok("files", f"{_limit(limit)} open files allowed")
    seen = f"{limit} open files allowed, and every segment, connection and worker takes some"
    make = problem if limit < LOW_FILES else warning
    return make("files", seen, "raise it: ulimit -n 65536, or LimitNOFILE= of the service")


def judge_memlock(limit: int, *, gpu: bool) -> Finding:
    """Say what so many bytes of locked memory are good for."""
    if not gpu or limit == resource.RLIM_INFINITY or limit >= RING_NBYTES:
        return ok("memlock", f"{_limit(limit)} bytes may be locked")
    return warning(
        "memlock",
        f"{limit} bytes may be locked; pinned buckets and RDMA may be refused",
        "raise it: ulimit -l unlimited, docker run --ulimit memlock=-1",
    )


def look_at_ray() -> Sequence[Finding]:
    """Whether Ray is there, and new enough."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return [ok("ray", "not installed; needed for Ray actors alone (weightsync[ray])")]
    if _numbers(version) < OLDEST_RAY:
        oldest = ".".join(map(str, OLDEST_RAY))
        return [warning("ray", f"ray {version} is too old", f"install ray {oldest} or later")]
    return [ok("ray", f"ray {version}")]


def look_at_ports(host: str, ports: Sequence[int]) -> Sequence[Finding]:
    """Whether a server could listen there; without ports, on any."""
    return [look_at_port(host, port) for port in ports or (0,)]


def look_at_port(host: str, port: int) -> Finding:
    """Bind and let go, as a server would bind."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(1)
    except OSError as exc:
        where = f"{host} port {port}" if port else f"{host}"
        return problem(
            "port", f"cannot listen on {where}: {exc.strerror}", "give another port or address"
        )
    return ok("port", f"{host} port {port} is free" if port else f"{host} has free ports")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])
