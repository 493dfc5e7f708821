"""What `weightsync bench` measures: updates, and broadcasts of messages."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from weightsync.cli.bench_model import make_model, shapes_of, total_nbytes
from weightsync.cli.bench_receiver import (
    Carrier,
    PipeCallback,
    Place,
    SinkKind,
    hear_ready,
    receive,
)
from weightsync.cli.child import end_with
from weightsync.errors import RemoteError
from weightsync.report import SyncReport
from weightsync.sender import WeightSender, connect
from weightsync.tensors import TORCH_DTYPES, as_bytes

_WAIT_S = 120.0
_LOOPBACK = "127.0.0.1"


@contextmanager
def raw_broadcast(nbytes: int) -> Iterator[Callable[[], float]]:
    """Yield a call that broadcasts `nbytes` as one flat tensor to another process.

    It returns the seconds that took, until the other side has everything.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory() as directory:
        meeting = str(Path(directory) / "store")
        arguments = (theirs, os.getpid(), meeting, nbytes)
        process = spawn.Process(target=_take_part, args=arguments, daemon=True)
        process.start()
        theirs.close()
        try:
            broadcast = _broadcaster(meeting, 0)
            flat = torch.ones(nbytes, dtype=torch.uint8)
            yield lambda: _timed(broadcast, flat, ours)
        finally:
            ours.close()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _timed(
    broadcast: Callable[[torch.Tensor], None], flat: torch.Tensor, other: Connection
) -> float:
    other.send_bytes(b"again")
    _hear(other)
    started = time.perf_counter()
    broadcast(flat)
    _hear(other)
    return time.perf_counter() - started


def _hear(other: Connection) -> None:
    if not other.poll(_WAIT_S):
        raise RemoteError("the other process of the raw broadcast does not answer")
    other.recv_bytes()


def _take_part(parent: Connection, parent_pid: int, meeting: str, nbytes: int) -> None:
    end_with(parent_pid)
    torch.set_num_threads(1)
    broadcast = _broadcaster(meeting, 1)
    flat = torch.zeros(nbytes, dtype=torch.uint8)
    with suppress(EOFError):
        while parent.recv_bytes():
            parent.send_bytes(b"ready")
            broadcast(flat)
            parent.send_bytes(b"done")


def _broadcaster(meeting: str, rank: int) -> Callable[[torch.Tensor], None]:
    c10d: Any = dist  # torch types half of what it exports
    gloo = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_LOOPBACK)]
    options._timeout = timedelta(seconds=_WAIT_S)
    group = gloo(c10d.FileStore(meeting, 2), rank, 2, options)

    def broadcast(flat: torch.Tensor) -> None:
        group.broadcast([flat], dist.BroadcastOptions()).wait()

    return broadcast


START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSetup:
    """What to move and how. `warmup` updates are not counted: the first ones touch memory."""

    nbytes: int = 512 << 20
    tensors: int = 300
    dtype: str = "bfloat16"
    shapes: str | None = None
    packed: bool = False
    backend: Literal["auto", "ipc", "distributed"] = "auto"
    transport: Carrier = "http"
    readers: int = 1
    sink: SinkKind = "module"
    apply: Literal["auto", "staged", "in_place"] = "auto"
    rounds: int = 7
    warmup: int = 2
    bucket_nbytes: int | None = None
    num_buckets: int | None = None


@dataclass(slots=True)
class Series:
    """Seconds of one kind of work, round by round, the trainer's share of a CPU, and reports."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    reports: list[SyncReport] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median second."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: copies inside one process, updates without and with verification."""

    setup: BenchSetup
    nbytes: int
    tensors: int
    memcpy: Series
    plain: Series
    verified: Series
    broadcast: Series
    connect_seconds: Mapping[str, float]

    def ratio(self, series: Series) -> float:
        """A series as a multiple of the copies."""
        return series.median / self.memcpy.median

    def to_dict(self) -> dict[str, object]:
        """The figures as plain data; the keys of issue trackers and of `--json`."""
        report = self.plain.reports[-1]
        phases = [phase for phase in report.seconds if phase != "total"]
        seconds = {
            phase: statistics.median(r.seconds[phase] for r in self.plain.reports)
            for phase in phases
        }
        return {
            "ratio_to_memcpy": self.ratio(self.plain),
            "ratio_verified": self.ratio(self.verified),
            "seconds": {**seconds, "total": self.plain.median, "memcpy": self.memcpy.median},
            "seconds_verified": self.verified.median,
            "connect_seconds": dict(self.connect_seconds),
            "trainer_cpu_s": statistics.median(self.plain.cpu_seconds),
            "written_nbytes": report.written_nbytes,
            **self._beside_broadcast(),
            "gbps": self.nbytes / self.plain.median / 1e9,
            "control_nbytes": report.control_nbytes,
            "control_messages": report.control_messages,
            "peak_extra_nbytes": report.peak_extra_nbytes,
            "stall_s": statistics.median(r.stall_s for r in self.plain.reports),
            "path": report.path,
            "apply": report.apply,
            "verified": self.verified.reports[-1].verified,
            "nbytes": self.nbytes,
            "tensors": self.tensors,
            "dtype": self.setup.dtype,
            "packed": self.plain.reports[-1].packed,
            "backend": self.setup.backend,
            "transport": self.setup.transport,
            "readers": self.setup.readers,
            "sink": self.setup.sink,
            "rounds": {
                "memcpy": self.memcpy.seconds,
                "plain": self.plain.seconds,
                "verified": self.verified.seconds,
            },
        }

    def _beside_broadcast(self) -> dict[str, object]:
        if not self.broadcast.seconds:
            return {}
        return {
            "ratio_to_broadcast": self.plain.median / self.broadcast.median,
            "seconds_broadcast": self.broadcast.median,
            "rounds_broadcast": self.broadcast.seconds,
        }


def measure(setup: BenchSetup, progress: Callable[[int, int], None] | None = None) -> Measured:
    """Run the bench: in every round one copy, one update without and one with verification."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    token = secrets.token_urlsafe(16)
    dtype = TORCH_DTYPES[setup.dtype]
    shapes = shapes_of(setup.shapes, nbytes=setup.nbytes, tensors=setup.tensors, dtype=dtype)
    try:
        with ExitStack() as stack:
            targets = [
                stack.enter_context(_receiver_process(setup, shapes, token))
                for _ in range(setup.readers)
            ]
            model = make_model(shapes, setup.dtype, value=1)
            copied = [torch.ones_like(p) for p in model.parameters()]
            raw = None
            if setup.backend == "distributed":
                raw = stack.enter_context(raw_broadcast(total_nbytes(shapes, dtype)))
            sender = stack.enter_context(
                connect(
                    model,
                    to=targets,
                    token=token,
                    backend=setup.backend,
                    packed=setup.packed or None if raw else setup.packed,
                    bucket_nbytes=setup.bucket_nbytes,
                    num_buckets=setup.num_buckets,
                )
            )
            series = (Series(), Series(), Series(), Series())
            connect_seconds = sender.connect_seconds
            for i in range(setup.warmup + setup.rounds):
                if progress is not None:
                    progress(i, setup.warmup + setup.rounds)
                counted = series if i >= setup.warmup else None
                _round(sender, model, copied, counted)
                if raw is not None:
                    seconds = raw()
                    series[3].seconds += [seconds] if counted else []
    finally:
        torch.set_num_threads(threads)
    nbytes = total_nbytes(shapes, dtype)
    return Measured(setup, nbytes, len(shapes), *series, connect_seconds=connect_seconds)


def _round(
    sender: WeightSender,
    model: torch.nn.Module,
    copied: list[torch.Tensor],
    series: tuple[Series, ...] | None,
) -> None:
    parameters = list(model.parameters())
    started = time.perf_counter()
    for target, source in zip(copied, parameters, strict=True):
        target.copy_(source)
    if series:
        series[0].seconds.append(time.perf_counter() - started)
    for verify in (False, True):
        for parameter in parameters[:: max(1, len(parameters) // 16)]:
            as_bytes(parameter)[0] ^= 1
        sender.verify = verify
        cpu, started = time.process_time(), time.perf_counter()
        report = sender.send_weights()
        if series:
            chosen = series[1 + verify]
            chosen.cpu_seconds.append(time.process_time() - cpu)
            chosen.seconds.append(time.perf_counter() - started)
            chosen.reports.append(report)


@contextmanager
def _receiver_process(
    setup: BenchSetup, shapes: list[tuple[int, ...]], token: str
) -> Iterator[str | PipeCallback]:
    """Run a receiver; yield what `connect(to=…)` wants."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    place = Place(setup.transport, setup.sink, setup.apply, token)
    arguments = (theirs, os.getpid(), shapes, setup.dtype, place)
    process = spawn.Process(target=receive, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        said = hear_ready(ours, START_TIMEOUT_S)
        yield said if setup.transport == "http" else PipeCallback(ours)
    finally:
        ours.close()
        process.terminate()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
