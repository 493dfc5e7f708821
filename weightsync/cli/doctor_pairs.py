"""Paths tried for real by `weightsync doctor`, each between two processes."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec
import torch

from weightsync.backends.gloo.group import GroupRendezvous, PrivateGroup, data_lane
from weightsync.backends.ipc.memory import ProbeMemory
from weightsync.cli.children import command
from weightsync.cli.doctor_findings import Finding, Level, ok, warning
from weightsync.errors import ConnectError, TransferError, WeightSyncError
from weightsync.shm.ring import require_ordered_stores
from weightsync.wire.offers import ProbeInfo

START_S = 45.0
"""How long a process may take to import torch and answer."""

TRIAL_S = 60.0
GLOO_S = 20.0
CONNECT_S = 5.0
END_S = 5.0
LOOPBACK = "127.0.0.1"
SHARED_MEMORY, DISTRIBUTED, CUDA_IPC, PTRACE = "shared_memory", "distributed", "cuda_ipc", "ptrace"


class Answer(msgspec.Struct, kw_only=True):
    """What the other process of a trial said: whether it worked, and else why not."""

    works: bool
    why: str = ""
    seen: list[str] = []


class Gpu(msgspec.Struct, kw_only=True):
    """One GPU that torch sees, by its device key."""

    ordinal: int
    key: str
    name: str
    total_nbytes: int


class GpuOffer(msgspec.Struct, kw_only=True):
    """Probes in the memory of every GPU, or why senders would not try to share it."""

    probes: list[ProbeInfo]
    why: str = ""


class HelperProcess:
    """The other process of a trial. It answers with lines, and ends with this block."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.process, self._log = process, log

    def tell(self, line: bytes = b"") -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def hear(self) -> bytes:
        """Return its next line. Raises TransferError with its last words when it ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line.endswith(b"\n"):
            return line
        status = self.process.wait(END_S)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()
        raise TransferError(
            f"the other process ended with status {status}{': ' + said[-1] if said else ''}"
        )

    def answer(self) -> Answer:
        """Return its next line as an Answer."""
        return msgspec.json.decode(self.hear(), type=Answer)


@contextmanager
def partner(trial: str, *arguments: str) -> Iterator[HelperProcess]:
    """Start the other side of `trial` (see doctor_partner); it is ended with the block."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command("weightsync.cli.doctor_partner", trial, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends the other
        )
        watchdog = threading.Timer(TRIAL_S, process.kill)  # whoever reads then reads an end
        watchdog.daemon = True
        watchdog.start()
        try:
            yield HelperProcess(process, log)
        finally:
            watchdog.cancel()
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):
            if stream is not None:
                stream.close()
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def try_shared_memory() -> Sequence[Finding]:
    """Another process opens a segment of this one, and checks its bytes."""
    with ExitStack() as stack:
        try:
            require_ordered_stores()
            probe = ProbeMemory()
            stack.callback(probe.close)
            answer = opened_by_another([probe.info()])
        except WeightSyncError as exc:
            answer = Answer(works=False, why=str(exc))
    if answer.works:
        seen = "another process opened a segment of this one and read its bytes"
        return [Finding(SHARED_MEMORY, Level.OK, seen, works=True)]
    remedy = "look at /dev/shm: mounted, writable by this user, not full"
    return [Finding(SHARED_MEMORY, Level.PROBLEM, answer.why, remedy, works=False)]


def opened_by_another(probes: Sequence[ProbeInfo]) -> Answer:
    """Return what a process says that opens `probes`."""
    with partner("open") as other:
        other.tell(msgspec.json.encode(probes))
        return other.answer()


def try_gloo() -> Sequence[Finding]:
    """A private group of two processes over loopback, and bytes there and back."""
    try:
        require_ordered_stores()
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
    with partner("gloo", LOOPBACK, str(meeting.port)) as other:
        gone = other.process.poll
        if meeting.gather([1], START_S, given_up=lambda: gone() is not None):
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
        with partner("take", str(os.getpid()), str(read)) as other:
            answer = other.answer()
    finally:
        os.close(read)
        os.close(write)
    return [judge_ptrace(answer, _ptrace_scope(), gpu=gpu)]


def judge_ptrace(answer: Answer, scope: str, *, gpu: bool) -> Finding:
    """Say what it means that a file descriptor was taken, or was not."""
    if answer.works:
        return ok(PTRACE, f"pidfd_getfd works between processes (ptrace_scope {scope})")
    seen = f"pidfd_getfd is refused ({answer.why}; ptrace_scope {scope})"
    if not gpu:
        return ok(PTRACE, f"{seen}; only CUDA IPC needs it, and there is no GPU")
    remedy = "sysctl kernel.yama.ptrace_scope=0, docker run --cap-add=SYS_PTRACE"
    return warning(PTRACE, f"{seen}: CUDA IPC of expandable segments fails", remedy)


def _ptrace_scope() -> str:
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    return path.read_text(encoding="ascii").strip() if path.exists() else "none"
