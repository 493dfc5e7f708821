"""`weightsync doctor`: tries each path of this machine, and says why one does not work."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import queue
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import torch
import typer
from rich.console import Console
from rich.text import Text

from weightsync.backends.gloo.group import GroupRendezvous, PrivateGroup, data_lane
from weightsync.backends.ipc.memory import ProbeMemory
from weightsync.backends.ipc.sender import HOST_BUCKET_NBYTES, HOST_BUCKETS
from weightsync.backends.registry import backend_names, load_backend
from weightsync.cli.answers import FAILED, OK, ending, one_line, print_json
from weightsync.cli.child import Child
from weightsync.cli.doctor_helper import GLOO_S, START_S, Gpu, GpuOffer
from weightsync.cuda.handles import expandable_setting
from weightsync.errors import (
    BackendUnavailableError,
    ConnectError,
    SegmentError,
    TransferError,
    WeightSyncError,
)
from weightsync.integrations.sglang.files import list_homes, remove_stale_homes
from weightsync.shm.host_keys import host_key
from weightsync.shm.segment import DIRECTORY, PATTERN, find_leftovers, remove_leftovers
from weightsync.shm.store_order import order_stores
from weightsync.wire.offers import ProbeInfo


class Level(StrEnum):
    """How bad it is: a warning costs speed or a path, a problem stops weightsync from working."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was seen, and what to do about it.

    `works` is said by the checks that try a path, and that have its name.
    """

    check: str
    level: Level
    seen: str
    remedy: str = ""
    works: bool | None = None

    def to_dict(self) -> dict[str, object]:
        """Return it as plain data."""
        return {**asdict(self), "level": self.level.value}


def ok(check: str, seen: str) -> Finding:
    """All is well."""
    return Finding(check, Level.OK, seen)


def warning(check: str, seen: str, remedy: str) -> Finding:
    """Something costs speed, or a path that another one replaces."""
    return Finding(check, Level.WARNING, seen, remedy)


def problem(check: str, seen: str, remedy: str) -> Finding:
    """Something will fail."""
    return Finding(check, Level.PROBLEM, seen, remedy)


@dataclass(frozen=True, slots=True)
class Check:
    """A function that looks at one thing, and how long it may take."""

    name: str
    look: Callable[[], Sequence[Finding]]
    limit_s: float


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """Run all checks at once, yield what they find in their order.

    A check that raises, or takes longer than its limit, is a problem of its own and not an error.
    """
    started = time.monotonic()
    running = [(check, _start(check)) for check in checks]
    for check, answers in running:
        left = started + check.limit_s - time.monotonic()
        try:
            yield from answers.get(timeout=max(left, 0.001))
        except queue.Empty:
            yield problem(
                check.name,
                f"this check did not end within {check.limit_s:g} s",
                "look for what hangs: a driver, a mount, a name server",
            )


def _start(check: Check) -> queue.Queue[Sequence[Finding]]:
    answers: queue.Queue[Sequence[Finding]] = queue.Queue()
    # A daemon, or a check that hangs would keep the process from ending.
    thread = threading.Thread(target=lambda: answers.put(_look(check)), daemon=True)
    thread.start()
    return answers


def _look(check: Check) -> Sequence[Finding]:
    try:
        return check.look()
    except Exception as exc:  # noqa: BLE001 - a check that crashes is a finding
        text = " ".join(f"{type(exc).__name__}: {exc}".split())
        return [problem(check.name, f"this check failed: {text}", "report it, with this line")]


TRIAL_S = 60.0
CONNECT_S = 5.0
LOOPBACK = "127.0.0.1"
SHARED_MEMORY, DISTRIBUTED, CUDA_IPC, PTRACE = "shared_memory", "distributed", "cuda_ipc", "ptrace"
T = TypeVar("T")


def run_helper(trial: str, *arguments: str) -> Child:
    """Start the other process of `trial`, see doctor_helper."""
    module = "weightsync.cli.doctor_helper"
    return Child("other process", module, trial, *arguments, quoted_lines=1)


def receive(helper: Child, kind: type[T]) -> T:
    """Return the next answer of a helper process. Raises as Child.receive does."""
    return msgspec.json.decode(helper.receive(TRIAL_S), type=kind)


def try_shared_memory() -> Sequence[Finding]:
    """Another process opens a segment of this one, and checks its bytes."""
    with ExitStack() as stack:
        try:
            order_stores()
            probe = ProbeMemory()
            stack.callback(probe.close)
            reason = opened_by_another([probe.info()])
        except WeightSyncError as exc:
            reason = str(exc)
    if not reason:
        seen = "another process opened a segment of this one and read its bytes"
        return [Finding(SHARED_MEMORY, Level.OK, seen, works=True)]
    remedy = "look at /dev/shm: mounted, writable by this user, not full"
    return [Finding(SHARED_MEMORY, Level.PROBLEM, reason, remedy, works=False)]


def opened_by_another(probes: Sequence[ProbeInfo]) -> str:
    """Have another process open `probes`; return the reason why that failed, or ""."""
    with run_helper("open") as helper:
        helper.send(msgspec.json.encode(probes))
        return receive(helper, str)


def try_gloo() -> Sequence[Finding]:
    """A private group of two processes over loopback, and bytes there and back."""
    try:
        order_stores()
        _gloo_round()
    except WeightSyncError as exc:
        remedy = "look at the loopback interface (ip link set lo up), firewalls, and torch's Gloo"
        seen = f"no group of two processes over {LOOPBACK}: {exc}"
        return [Finding(DISTRIBUTED, Level.WARNING, seen, remedy, works=False)]
    seen = f"two processes exchanged bytes by Gloo over {LOOPBACK}"
    return [Finding(DISTRIBUTED, Level.OK, seen, works=True)]


def check_loopback(address: str) -> None:
    """Connect to a socket of this process. Raises ConnectError, where torch would write pages."""
    try:
        with socket.create_server((address, 0)) as listener:
            port = listener.getsockname()[1]
            socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError as exc:
        raise ConnectError(f"no process can connect to {address}: {exc}") from exc


def _gloo_round() -> None:
    check_loopback(LOOPBACK)
    meeting = GroupRendezvous.host(LOOPBACK, epoch=1, timeout_s=GLOO_S)
    with run_helper("gloo", LOOPBACK, str(meeting.port)) as helper:
        if meeting.gather([1], START_S, given_up=lambda: helper.has_ended):
            raise TransferError("the other process did not come")
        group = PrivateGroup(meeting, 0, 2, GLOO_S)
        try:
            sent = torch.frombuffer(bytearray(os.urandom(64)), dtype=torch.uint8)
            echoed = torch.zeros_like(sent)
            arriving = group.receive(echoed, 1, data_lane(1))
            group.send(sent, 1, data_lane(0)).wait(GLOO_S)
            arriving.wait(GLOO_S)
        finally:
            group.abort()
            group.close()
    if not torch.equal(sent, echoed):
        raise TransferError("other bytes came back than were sent")


def try_ptrace(*, gpu: bool) -> Sequence[Finding]:
    """Another process takes a file descriptor of this one, as CUDA IPC does with memory."""
    read, write = os.pipe()
    try:
        with run_helper("take", str(os.getpid()), str(read)) as helper:
            reason = receive(helper, str)
    finally:
        os.close(read)
        os.close(write)
    return [judge_ptrace(reason, _ptrace_scope(), gpu=gpu)]


def judge_ptrace(reason: str, scope: str, *, gpu: bool) -> Finding:
    """Say what it means that a file descriptor was taken, or was not."""
    if not reason:
        return ok(PTRACE, f"pidfd_getfd works between processes (ptrace_scope {scope})")
    seen = f"pidfd_getfd is refused ({reason}; ptrace_scope {scope})"
    if not gpu:
        return ok(PTRACE, f"{seen}; only CUDA IPC needs it, and there is no GPU")
    remedy = "sysctl kernel.yama.ptrace_scope=0, docker run --cap-add=SYS_PTRACE"
    return warning(PTRACE, f"{seen}: CUDA IPC of expandable segments fails", remedy)


def _ptrace_scope() -> str:
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    return path.read_text(encoding="ascii").strip() if path.exists() else "none"


_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
_STAGED = "GPU weights go through host memory instead (the shared_memory path)"


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is attached and torch can use such GPUs; asks no driver."""
    return torch.version.cuda is not None and _attached()


def look_at_gpus() -> Sequence[Finding]:
    """GPUs with their UUIDs, MIG, the driver beside torch, and expandable segments."""
    return [*_list_findings(), *look_at_allocator()]


def look_at_allocator() -> Sequence[Finding]:
    """Whether torch was asked for memory that has no handle."""
    setting = expandable_setting()
    if setting is None:
        return [ok("allocator", "expandable segments are off")]
    return [
        warning(
            "allocator",
            f"{setting} asks for expandable segments, whose memory is not shared by handle; "
            f"{_STAGED}",
            f"take expandable_segments:True out of {setting} on the trainer",
        )
    ]


def try_cuda_ipc() -> Sequence[Finding]:
    """One process offers memory of every GPU, another opens it and checks its bytes."""
    if not has_gpu():
        return [Finding(CUDA_IPC, Level.OK, "not tried: there is no GPU", works=False)]
    try:
        with run_helper("offer-gpu-memory") as owner:
            offer = receive(owner, GpuOffer)
            why = offer.why_not or opened_by_another(offer.probes)
    except WeightSyncError as exc:
        why = str(exc)
    if not why:
        seen = f"another process opened memory on {len(offer.probes)} GPUs and read its bytes"
        return [Finding(CUDA_IPC, Level.OK, seen, works=True)]
    remedy = (
        "one container for both (or --ipc=host --pid=host), --cap-add=SYS_PTRACE, no MIG, no "
        "expandable segments"
    )
    return [Finding(CUDA_IPC, Level.WARNING, f"{why}; {_STAGED}", remedy, works=False)]


def _list_findings() -> Sequence[Finding]:
    if torch.version.cuda is None:
        return [_without_cuda()]
    if not _attached():
        return [ok("gpu", "no NVIDIA GPU is attached")]
    with run_helper("list-gpus") as helper:
        gpus = receive(helper, list[Gpu])
    if not gpus:
        return [
            problem(
                "gpu",
                "an NVIDIA GPU is attached, and torch sees none",
                "look at nvidia-smi, CUDA_VISIBLE_DEVICES, and docker run --gpus",
            )
        ]
    return [*map(_judge_gpu, gpus), judge_driver(_driver_version(), torch.version.cuda)]


def _judge_gpu(gpu: Gpu) -> Finding:
    seen = f"{gpu.ordinal}: {gpu.name}, {gpu.total_nbytes / 1e9:.0f} GB, {gpu.key}"
    if gpu.key.startswith("MIG-") or " MIG " in gpu.name:
        remedy = "turn MIG off for CUDA IPC: nvidia-smi -mig 0"
        return warning("gpu", f"{seen}: a MIG slice, not shared by handle; {_STAGED}", remedy)
    return ok("gpu", seen)


def _without_cuda() -> Finding:
    if _attached():
        return warning(
            "gpu",
            f"an NVIDIA GPU is attached, and torch {torch.__version__} is built without CUDA",
            "install torch's CUDA build (see pytorch.org)",
        )
    return ok("gpu", "none: torch is built without CUDA")


def judge_driver(driver: tuple[int, int] | None, built_for: str) -> Finding:
    """Compare the newest CUDA that the driver knows with the one torch was built for."""
    wanted = tuple(int(n) for n in re.findall(r"\d+", built_for)[:2])
    if driver is None:
        return warning("driver", "libcuda.so.1 cannot be asked", "install the NVIDIA driver")
    seen = f"the driver knows CUDA {driver[0]}.{driver[1]}, torch is built for {built_for}"
    if driver[0] < wanted[0]:
        remedy = f"update the driver, or install a torch for CUDA {driver[0]}"
        return problem("driver", seen, remedy)
    return ok("driver", seen)


def _driver_version() -> tuple[int, int] | None:
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion
    except (OSError, AttributeError):
        return None
    version = ctypes.c_int()
    if ask(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10


def _attached() -> bool:
    return any(Path(device).exists() for device in _DEVICES)


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
    """Whether rings work: by the processor's store order, or by membarrier(2)."""
    try:
        order_stores()
    except BackendUnavailableError as exc:
        return [problem("cpu", str(exc), "run trainer and servers on x86-64 or aarch64")]
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


def look_at_backends() -> Sequence[Finding]:
    """Registered backends whose modules cannot be imported; nothing where all can."""
    findings = []
    for name in backend_names():
        try:
            load_backend(name)
        except Exception as exc:  # noqa: BLE001 - a native library can fail in any way
            seen = f"{name}: {one_line(exc) or type(exc).__name__}"
            remedy = f"install what the reason names, or do not ask for backend={name!r}"
            findings.append(warning("backend", seen, remedy))
    return findings


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


LOOK_S = 20.0
PATHS = (CUDA_IPC, SHARED_MEMORY, DISTRIBUTED)
_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}


def doctor(
    clean: Annotated[
        bool, typer.Option("--clean", help="remove shared memory whose owner is dead")
    ] = False,
    port: Annotated[
        list[int] | None,
        typer.Option(min=1, max=65535, help="see whether a server can listen there"),
    ] = None,
    host: Annotated[str, typer.Option(help="address for --port")] = "127.0.0.1",
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Look at this machine and try every path, and say what to do where one fails."""
    with ending(as_json=json_):
        findings: list[Finding] = []
        console = Console(soft_wrap=True, highlight=False, markup=False)
        for finding in examine(make_checks(clean=clean, host=host, ports=port or [])):
            findings.append(finding)
            if not json_:
                _print_finding(console, finding)
    level = worst(findings)
    if json_:
        answer = {
            "level": level.value,
            "paths": {path: _works(path, findings) for path in PATHS},
            "findings": [finding.to_dict() for finding in findings],
        }
        print_json(answer)
    else:
        console.print(_summary(findings), style=_STYLES[level])
    raise typer.Exit(FAILED if level is Level.PROBLEM else OK)


def make_checks(*, clean: bool, host: str, ports: Sequence[int]) -> list[Check]:
    """Return every check, those that try paths last."""
    gpu = has_gpu()
    return [
        Check("cpu", look_at_cpu, LOOK_S),
        Check("versions", look_at_versions, LOOK_S),
        Check("host", look_at_host, LOOK_S),
        Check("gpu", look_at_gpus, TRIAL_S),
        Check("shm", look_at_shm, LOOK_S),
        Check("leftovers", lambda: look_at_leftovers(clean=clean), LOOK_S),
        Check("namespaces", lambda: look_at_namespaces(gpu=gpu), LOOK_S),
        Check("limits", lambda: look_at_limits(gpu=gpu), LOOK_S),
        Check("ray", look_at_ray, LOOK_S),
        Check("backend", look_at_backends, LOOK_S),
        Check("port", lambda: look_at_ports(host, ports), LOOK_S),
        Check(PTRACE, lambda: try_ptrace(gpu=gpu), TRIAL_S),
        Check(CUDA_IPC, try_cuda_ipc, 2 * TRIAL_S),
        Check(SHARED_MEMORY, try_shared_memory, TRIAL_S),
        Check(DISTRIBUTED, try_gloo, TRIAL_S),
    ]


def worst(findings: Sequence[Finding]) -> Level:
    """Return the level of the worst finding."""
    levels = [finding.level for finding in findings]
    return max(levels, key=list(Level).index, default=Level.OK)


def _works(path: str, findings: Sequence[Finding]) -> bool:
    return any(finding.works for finding in findings if finding.check == path)


def _print_finding(console: Console, finding: Finding) -> None:
    line = Text(f"{finding.level:<8} ", style=_STYLES[finding.level])
    line.append(f"{finding.check:<14} ", style="bold").append(finding.seen, style="default")
    console.print(line)
    if finding.remedy:
        console.print(f"{'':<24}-> {finding.remedy}", style="default")


def _summary(findings: Sequence[Finding]) -> str:
    working = [path for path in PATHS if _works(path, findings)]
    counted = [(sum(f.level is level for f in findings), level) for level in Level]
    counts = ", ".join(
        f"{count} {level}{'s' if count > 1 and level is not Level.OK else ''}"
        for count, level in counted
        if count
    )
    return f"paths that work here: {', '.join(working) or 'none'} ({counts})"
