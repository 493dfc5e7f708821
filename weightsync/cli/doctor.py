"""`weightsync doctor`: tries each path on this machine, and gives the reason where one fails."""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
import typer
from rich.console import Console
from rich.text import Text

from weightsync.backends.base import Endpoint, Trial, TrialPart
from weightsync.backends.registry import backend_names, choose_backends, endpoints, get_backend
from weightsync.backends.ring import HOST_BUCKET_NBYTES, HOST_BUCKETS
from weightsync.cli.child import Child
from weightsync.cli.doctor_helper import Gpu, TrialAnswer
from weightsync.cli.output import FAILED, OK, ending, one_line, print_json
from weightsync.cli.terminal import text_console
from weightsync.cuda.devices import driver_version
from weightsync.cuda.handles import expandable_setting, has_gpu, is_gpu_attached
from weightsync.errors import BackendUnavailableError, SegmentError, WeightSyncError
from weightsync.integrations.sglang.files import list_homes, remove_stale_homes
from weightsync.shm.host_keys import host_key
from weightsync.shm.segment import DIRECTORY, PATTERN, find_leftovers, remove_leftovers
from weightsync.shm.store_order import order_stores
from weightsync.update.paths import reaches

CHECK_S = 20.0
TRIAL_S = 60.0
PTRACE = "ptrace"

_MIB = 1 << 20
RING_NBYTES = HOST_BUCKET_NBYTES * HOST_BUCKETS
ROOMY_NBYTES = 1 << 30
"""Free bytes that shared memory should have, because `connect` moves CPU parameters into it."""

LOW_FILES = 256
ROOMY_FILES = 1024
OLDEST_TORCH = (2, 11)
OLDEST_RAY = (2, 40)
# linux/proc_ns.h: the inodes of the first namespaces of a kernel.
_FIRST_NAMESPACES = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}
_STAGED = "GPU weights go through host memory instead (the shared_memory path)"
_ENLARGE = "docker run --shm-size=…, a Memory emptyDir in Kubernetes, or mount -o remount,size=…"

T = TypeVar("T")


class Level(StrEnum):
    """Severity: a warning costs speed or a path, a problem stops weightsync from working."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of output: the observation of a check, and the remedy.

    `works` is None except in checks that try a path and have its name.
    """

    check: str
    level: Level
    seen: str
    remedy: str = ""
    works: bool | None = None


def ok(check: str, seen: str, *, works: bool | None = None) -> Finding:
    """Return a finding that needs no remedy."""
    return Finding(check, Level.OK, seen, works=works)


def warning(check: str, seen: str, remedy: str, *, works: bool | None = None) -> Finding:
    """Return a finding that costs speed, or a path that another path replaces."""
    return Finding(check, Level.WARNING, seen, remedy, works)


def problem(check: str, seen: str, remedy: str, *, works: bool | None = None) -> Finding:
    """Return a finding that makes something fail."""
    return Finding(check, Level.PROBLEM, seen, remedy, works)


@dataclass(frozen=True, slots=True)
class Check:
    """A function that examines one thing, and its time limit. `is_path` if it tries a path."""

    name: str
    run: Callable[[], Sequence[Finding]]
    limit_s: float = CHECK_S
    is_path: bool = False


def doctor(
    clean: Annotated[
        bool, typer.Option("--clean", help="remove shared memory whose owner is dead")
    ] = False,
    port: Annotated[
        list[int] | None,
        typer.Option(min=1, max=65535, help="check whether a server can listen on it"),
    ] = None,
    host: Annotated[str, typer.Option(help="address for --port")] = "127.0.0.1",
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Check this machine, try every path, and give the remedy where one fails."""
    with ending(as_json=json_):
        findings: list[Finding] = []
        console = text_console()
        checks = make_checks(clean=clean, host=host, ports=port or [])
        for finding in examine(checks):
            findings.append(finding)
            if not json_:
                _print_finding(console, finding)
    worst = max((f.level for f in findings), key=list(Level).index, default=Level.OK)
    paths = {
        check.name: any(finding.works for finding in findings if finding.check == check.name)
        for check in checks
        if check.is_path
    }
    if json_:
        answer = {
            "level": worst,
            "paths": paths,
            "findings": [asdict(finding) for finding in findings],
        }
        print_json(answer)
    else:
        working = [path for path, works in paths.items() if works]
        console.print(_summary(findings, working), style=_STYLES[worst])
    raise typer.Exit(FAILED if worst is Level.PROBLEM else OK)


def _print_finding(console: Console, finding: Finding) -> None:
    line = Text(f"{finding.level:<8} ", style=_STYLES[finding.level])
    line.append(f"{finding.check:<14} ", style="bold").append(finding.seen, style="default")
    console.print(line)
    if finding.remedy:
        console.print(f"{'':<24}-> {finding.remedy}", style="default")


def _summary(findings: Sequence[Finding], working: Sequence[str]) -> str:
    counted = [(sum(f.level is level for f in findings), level) for level in Level]
    counts = ", ".join(
        f"{count} {level}{'s' if count > 1 and level is not Level.OK else ''}"
        for count, level in counted
        if count
    )
    return f"paths that work here: {', '.join(working) or 'none'} ({counts})"


def make_checks(*, clean: bool, host: str, ports: Sequence[int]) -> list[Check]:
    """Return every check, those that try paths last."""
    gpu = has_gpu()
    return [
        Check("cpu", check_cpu),
        Check("versions", check_versions),
        Check("host", check_host),
        Check("gpu", check_gpus, TRIAL_S),
        Check("allocator", lambda: [check_allocator()]),
        Check("shm", check_shm),
        Check("leftovers", lambda: check_leftovers(clean=clean)),
        Check("namespaces", lambda: check_namespaces(gpu=gpu)),
        Check("limits", lambda: check_limits(gpu=gpu)),
        Check("ray", check_ray),
        Check("backend", check_backends),
        # Without a port, whether any port is free.
        Check("port", lambda: [check_port(host, port) for port in ports or (0,)]),
        Check(PTRACE, lambda: try_ptrace(gpu=gpu), TRIAL_S),
        Check("auto", lambda: [check_auto()]),
        *make_path_checks(),
    ]


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """Run all checks at once; yield their findings in the order of the checks.

    A check that raises, or takes longer than its limit, becomes a finding of level PROBLEM.
    """
    started = time.monotonic()
    running = [(check, _start(check)) for check in checks]
    for check, results in running:
        left = started + check.limit_s - time.monotonic()
        try:
            yield from results.get(timeout=max(left, 0.001))
        except queue.Empty:
            yield problem(
                check.name,
                f"this check did not end within {check.limit_s:g} s",
                "look for a driver, a mount or a name server that hangs",
            )


def _start(check: Check) -> queue.Queue[Sequence[Finding]]:
    results: queue.Queue[Sequence[Finding]] = queue.Queue()

    def run() -> None:
        try:
            results.put(check.run())
        except Exception as exc:  # noqa: BLE001 - a check that raises is a finding
            text = one_line(f"{type(exc).__name__}: {exc}")
            results.put(
                [problem(check.name, f"this check failed: {text}", "report this line as a bug")]
            )

    # A daemon thread, because a check that hangs must not keep the process from ending.
    threading.Thread(target=run, daemon=True).start()
    return results


# Checks of the host.


def check_cpu() -> Sequence[Finding]:
    """Check the architecture: rings of shared memory need x86-64 or aarch64."""
    try:
        order_stores()
    except BackendUnavailableError as exc:
        return [problem("cpu", str(exc), "run trainer and servers on x86-64 or aarch64")]
    return [ok("cpu", f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores")]


def check_versions() -> Sequence[Finding]:
    """Check the versions of Python, torch, and the CUDA that torch was built for."""
    python = ".".join(map(str, sys.version_info[:3]))
    seen = f"Python {python}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    if _numbers(torch.__version__) < OLDEST_TORCH:
        remedy = f"install torch {_dotted(OLDEST_TORCH)} or later"
        return [problem("versions", f"{seen}: torch is too old", remedy)]
    return [ok("versions", f"{seen}; have the same torch on trainers and servers")]


def check_host() -> Sequence[Finding]:
    """Report the key by which receivers recognise that they share memory with this host."""
    return [ok("host", f"{host_key()}: receivers with this key may share memory with you")]


def check_shm(directory: Path = DIRECTORY) -> Sequence[Finding]:
    """Check the size and the free bytes of shared memory."""
    if not directory.is_dir():
        return [problem("shm", f"{directory} does not exist", f"mount a tmpfs there ({_ENLARGE})")]
    space = os.statvfs(directory)
    size, free = (blocks * space.f_frsize for blocks in (space.f_blocks, space.f_bavail))
    return [judge_shm(free, f"{directory}: {size / _MIB:,.0f} MiB, {free / _MIB:,.0f} MiB free")]


def judge_shm(free: int, seen: str) -> Finding:
    """Return the finding for `free` bytes of shared memory."""
    if free < RING_NBYTES:
        needed = f"at least {RING_NBYTES // _MIB} MiB are needed"
        return problem("shm", f"{seen}; {needed}", f"enlarge it: {_ENLARGE}")
    if free < ROOMY_NBYTES:
        return warning(
            "shm",
            f"{seen}; enough for packed=True, too little for a model's parameters",
            f"enlarge it by the model's size, or connect(adopt=False): {_ENLARGE}",
        )
    return ok("shm", seen)


def check_leftovers(*, clean: bool, directory: Path = DIRECTORY) -> Sequence[Finding]:
    """Look for shared memory of dead owners; with `clean` remove it, never that of living ones."""
    if not directory.is_dir():
        return []
    try:
        dead = remove_leftovers(directory) if clean else find_leftovers(directory)
    except SegmentError as exc:
        return [problem("leftovers", str(exc), f"check the permissions of {directory}")]
    homes = [home for home in list_homes(directory) if not home.owner_alive]
    if clean:
        remove_stale_homes(directory)
    names = {leftover.name for leftover in dead}
    found = [path.name for path in directory.iterdir() if PATTERN.fullmatch(path.name)]
    alive = f"{sum(name not in names for name in found)} segments in use"
    sizes = {
        "segments": [one.nbytes for one in dead if PATTERN.fullmatch(one.name)],
        "sockets": [one.nbytes for one in dead if not PATTERN.fullmatch(one.name)],
        "directories of weights for SGLang": [home.nbytes for home in homes],
    }
    seen = ", ".join(
        f"{len(nbytes)} {kind} of dead owners, {sum(nbytes) / _MIB:,.1f} MiB"
        for kind, nbytes in sizes.items()
        if nbytes
    )
    if not seen:
        return [ok("leftovers", f"none; {alive}")]
    if clean:
        return [ok("leftovers", f"removed {seen}; {alive}")]
    remedy = "weightsync doctor --clean removes them; so does the next connect()"
    return [warning("leftovers", f"{seen}; {alive}", remedy)]


def check_namespaces(*, gpu: bool) -> Sequence[Finding]:
    """Check whether this is a container, whose processes other containers cannot see."""
    own = [
        kind.upper()
        for kind, first in _FIRST_NAMESPACES.items()
        if Path(f"/proc/self/ns/{kind}").stat().st_ino != first
    ]
    if not own:
        return [ok("namespaces", "PID and IPC namespaces are the host's")]
    seen = f"{' and '.join(own)} namespace of its own (a container)"
    if not gpu:
        seen = f"{seen}; other containers need the same /dev/shm to share memory"
        return [ok("namespaces", seen)]
    return [
        warning(
            "namespaces",
            f"{seen}: CUDA IPC works inside it, not to processes of other containers",
            "start both containers with --ipc=host --pid=host, or trainer and server in one",
        )
    ]


def check_limits(*, gpu: bool) -> Sequence[Finding]:
    """Check the limits of open files, and of memory that may be locked for GPUs."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return [judge_files(files), judge_memlock(locked, gpu=gpu)]


def judge_files(limit: int) -> Finding:
    """Return the finding for a limit of open files."""
    if limit == resource.RLIM_INFINITY or limit >= ROOMY_FILES:
        return ok("files", f"{_limit(limit)} open files allowed")
    seen = f"{limit} open files allowed, and every segment, connection and worker takes some"
    make = problem if limit < LOW_FILES else warning
    return make("files", seen, "raise it: ulimit -n 65536, or LimitNOFILE= of the service")


def judge_memlock(limit: int, *, gpu: bool) -> Finding:
    """Return the finding for a limit of locked bytes."""
    if not gpu or limit == resource.RLIM_INFINITY or limit >= RING_NBYTES:
        return ok("memlock", f"{_limit(limit)} bytes may be locked")
    return warning(
        "memlock",
        f"{limit} bytes may be locked; pinned buckets and RDMA may be refused",
        "raise it: ulimit -l unlimited, docker run --ulimit memlock=-1",
    )


def check_ray() -> Sequence[Finding]:
    """Check whether Ray is installed, and new enough."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return [ok("ray", "not installed; needed for Ray actors alone (extra ray)")]
    if _numbers(version) < OLDEST_RAY:
        remedy = f"install ray {_dotted(OLDEST_RAY)} or later"
        return [warning("ray", f"ray {version} is too old", remedy)]
    return [ok("ray", f"ray {version}")]


def check_backends() -> Sequence[Finding]:
    """Return a warning for each backend that cannot be imported or tried, none for the others."""
    findings = []
    for name in backend_names():
        try:
            list(get_backend(name).trials())
        except Exception as exc:  # noqa: BLE001 - a native library can fail in any way
            seen = f"{name}: {one_line(exc) or type(exc).__name__}"
            remedy = f"install what the reason names, or use another backend than {name!r}"
            findings.append(warning("backend", seen, remedy))
    return findings


def check_auto() -> Finding:
    """Report the order in which `auto` takes paths to another host, and the reason."""
    backends, _ = choose_backends("auto")
    facts, _ = endpoints(backends, torch.device("cpu"))
    found = []
    for backend in backends:
        if backend.name in facts:
            here = Endpoint(keys=[host_key()], facts=facts[backend.name])
            there = replace(here, keys=["another host"])
            found += [reach for reach in reaches(backend, here, there) if not reach.why_not]
    listed = ", then ".join(
        f"{reach.path} (cost {reach.cost:g}{f': {reach.why}' if reach.why else ''})"
        for reach in sorted(found, key=lambda reach: reach.cost)
    )
    return ok("auto", f"to another host: {listed or 'no path'}")


def check_port(host: str, port: int) -> Finding:
    """Check whether a server can listen on a port, 0 for any, by doing so for a moment."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(1)
    except OSError as exc:
        where = f"{host} port {port}" if port else host
        return problem(
            "port", f"cannot listen on {where}: {exc.strerror}", "give another port or address"
        )
    return ok("port", f"{host} port {port} is free" if port else f"{host} has free ports")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _numbers(version: str) -> tuple[int, ...]:
    """Return major and minor number of a version."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# Checks of GPUs.


def check_gpus() -> Sequence[Finding]:
    """Check GPUs with their UUIDs, MIG, and the driver beside torch."""
    attached, cuda = is_gpu_attached(), torch.version.cuda
    if cuda is None:
        if not attached:
            return [ok("gpu", "none: torch is built without CUDA")]
        seen = f"an NVIDIA GPU is attached, and torch {torch.__version__} is built without CUDA"
        return [warning("gpu", seen, "install torch's CUDA build (see pytorch.org)")]
    if not attached:
        return [ok("gpu", "no NVIDIA GPU is attached")]
    with run_helper("list-gpus") as helper:
        gpus = receive(helper, list[Gpu])
    if not gpus:
        seen = "an NVIDIA GPU is attached, and torch finds none"
        remedy = "check nvidia-smi, CUDA_VISIBLE_DEVICES, and docker run --gpus"
        return [problem("gpu", seen, remedy)]
    return [*map(judge_gpu, gpus), judge_driver(driver_version(), cuda)]


def judge_gpu(gpu: Gpu) -> Finding:
    """Return the finding for one GPU."""
    seen = f"{gpu.ordinal}: {gpu.name}, {gpu.total_nbytes / 1e9:.0f} GB, {gpu.key}"
    if gpu.key.startswith("MIG-") or " MIG " in gpu.name:
        remedy = "turn MIG off for CUDA IPC: nvidia-smi -mig 0"
        return warning("gpu", f"{seen}: a MIG slice, not shared by handle; {_STAGED}", remedy)
    return ok("gpu", seen)


def judge_driver(driver: tuple[int, int] | None, built_for: str) -> Finding:
    """Compare the newest CUDA of the driver with the CUDA that torch was built for."""
    if driver is None:
        return warning("driver", "libcuda.so.1 cannot be loaded", "install the NVIDIA driver")
    wanted = _numbers(built_for)[0]
    seen = f"the driver supports CUDA {_dotted(driver)}, torch is built for {built_for}"
    if driver[0] < wanted:
        return problem(
            "driver", seen, f"update the driver, or install a torch for CUDA {driver[0]}"
        )
    return ok("driver", seen)


def check_allocator() -> Finding:
    """Check whether torch allocates memory that has no handle."""
    setting = expandable_setting()
    if setting is None:
        return ok("allocator", "expandable segments are off")
    return warning(
        "allocator",
        f"{setting} asks for expandable segments, whose memory is not shared by handle; {_STAGED}",
        f"remove expandable_segments:True from {setting} on the trainer",
    )


# Trials, each with another process.


def run_helper(task: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Child:
    """Start another process with a task, see doctor_helper."""
    module = "weightsync.cli.doctor_helper"
    return Child("other process", module, task, *arguments, environment=environment, quoted_lines=1)


def receive(helper: Child, kind: type[T]) -> T:
    """Return the next answer of a helper process. Raises as Child.receive does."""
    return msgspec.json.decode(helper.receive(TRIAL_S), type=kind)


def try_ptrace(*, gpu: bool) -> Sequence[Finding]:
    """Have another process take a file descriptor of this one, as CUDA IPC does with memory."""
    read, write = os.pipe()
    try:
        with run_helper("take", str(os.getpid()), str(read)) as helper:
            reason = receive(helper, str)
    finally:
        os.close(read)
        os.close(write)
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    shown = scope.read_text(encoding="ascii").strip() if scope.exists() else "none"
    return [judge_ptrace(reason, shown, gpu=gpu)]


def judge_ptrace(reason: str, scope: str, *, gpu: bool) -> Finding:
    """Return the finding for a file descriptor that was taken, or was not for `reason`."""
    if not reason:
        return ok(PTRACE, f"pidfd_getfd works between processes (ptrace_scope {scope})")
    seen = f"pidfd_getfd is refused ({reason}; ptrace_scope {scope})"
    if not gpu:
        return ok(PTRACE, f"{seen}; only CUDA IPC needs it, and there is no GPU")
    remedy = "sysctl kernel.yama.ptrace_scope=0, docker run --cap-add=SYS_PTRACE"
    return warning(PTRACE, f"{seen}: CUDA IPC of expandable segments fails", remedy)


def make_path_checks() -> Iterator[Check]:
    """Yield a check for each path that a backend has trials of."""
    for name in backend_names():
        with suppress(Exception):  # check_backends gives the reason
            trials = list(get_backend(name).trials())
            for path in dict.fromkeys(trial.path for trial in trials):
                own = [trial for trial in trials if trial.path == path]
                limit_s = (1 + len(own)) * TRIAL_S
                yield Check(path, partial(try_path, name, own), limit_s, is_path=True)


def try_path(backend: str, trials: Sequence[Trial]) -> list[Finding]:
    """Run the trials of one path, one after the other because they are timed."""
    return [finding for trial in trials for finding in run_trial(backend, trial)]


def run_trial(backend: str, trial: Trial) -> list[Finding]:
    """Have one process offer memory, and another one read it."""
    if trial.why_not:
        return [ok(trial.path, f"not tried: {trial.why_not}", works=False)]
    environment = {**os.environ, **trial.environment}
    title = f"{trial.title}: " if trial.title else ""
    try:
        with (
            run_helper("offer", backend, trial.path, environment=environment) as owner,
            run_helper("read", backend, trial.path, environment=environment) as reader,
        ):
            reader.send(msgspec.json.encode(_answer(owner)))
            found = msgspec.convert(_answer(reader), str | list[TrialPart])
    except WeightSyncError as exc:
        make = problem if trial.is_essential else warning
        works = None if trial.environment else False
        return [make(trial.path, f"{title}{one_line(exc)}", trial.remedy, works=works)]
    first, *parts = [TrialPart(seen=found)] if isinstance(found, str) else found
    works = None if trial.environment else True
    return [
        ok(trial.path, f"{title}{first.seen}", works=works),
        *(judge_part(trial.path, part) for part in parts),
    ]


def judge_part(path: str, part: TrialPart) -> Finding:
    """Return the finding for one of several results of a trial: it decides nothing about a path."""
    if part.why_not:
        return warning(path, f"{part.title}: {one_line(part.why_not)}", part.remedy)
    return ok(path, f"{part.title}: {part.seen}")


def _answer(helper: Child) -> Any:
    answer = receive(helper, TrialAnswer)
    if answer.why_not:
        raise BackendUnavailableError(answer.why_not)
    return answer.value
