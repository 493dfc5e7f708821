"""The data of the status page: read from every worker and replica, at most twice a second."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import anyio
import anyio.to_thread
import msgspec
from msgspec.structs import asdict

from weightsync.serve.engine_client import EngineClient
from weightsync.serve.messages import EngineStats
from weightsync.server.dispatcher import Receiver
from weightsync.server.workers import merge_statuses
from weightsync.update.history import WorkerReport
from weightsync.update.lifecycle import State
from weightsync.wire.messages import OpenUpdate, SharedMemoryUsage, Status, UpdateRecord

T = TypeVar("T")

FRESH_S = 0.5
"""The least time between two reads of the workers, however many pages are open."""
REPLY_TIMEOUT_S = 2.0
SHOWN_UPDATES = 50
NO_ANSWER = "NO ANSWER"


class Mapped(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a worker has mapped of one sender, or of all control segments (sender "").

    `path` is the path of a connected sender, otherwise "".
    """

    sender: str
    nbytes: int
    path: str = ""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one worker, or the reason why it is unknown (`error`)."""

    name: str
    state: str = NO_ANSWER
    version: int | None = None
    label: str | None = None
    may_generate: bool = False
    busy: bool = False
    orphaned: bool = False
    paused: bool = False
    apply: str = ""
    detail: str = ""
    updates_total: dict[str, int] = {}  # msgspec copies it
    open_update: OpenUpdate | None = None
    mapped: list[Mapped] = []  # msgspec copies it
    error: str = ""

    @property
    def remark(self) -> str:
        """The reason why the worker does not generate, or "" if there is none."""
        return self.error or self.detail or ("paused" if self.paused else "")

    @property
    def waits_for(self) -> str:
        """The step that an open update is at, or the event that it waits for."""
        if self.state == State.ABORTING:
            return "is aborted; waits for the loader to stop"
        if self.orphaned:
            return "its sender is dead; waits for the next sender to end it"
        if self.state == State.PREPARED:
            if self.busy:
                return "waits for the end of the current decode step, then swaps"
            return "everything arrived and was checked; waits for its sender to finish it"
        return "loads what its sender shared" if self.busy else "waits for its sender to send more"


class UpdateView(UpdateRecord, frozen=True, kw_only=True):
    """A committed update over its workers: the times of the slowest, the bytes of the largest."""

    workers: int
    bytes_per_s: float


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All data of the page, and the body of `/status.json`.

    `at` is Unix time in seconds. `versions` are the weight versions of the workers. `updates` are
    ordered by time, the oldest first.
    """

    at: float
    model: str
    state: str
    versions: list[int]
    label: str | None
    detail: str
    workers: list[WorkerView]
    replicas: list[EngineStats]
    updates: list[UpdateView]
    engine_error: str = ""

    @property
    def troubles(self) -> list[str]:
        """One line for each problem of a worker, the engine or a replica."""
        return [
            *(f"worker {worker.name}: {worker.error}" for worker in self.workers if worker.error),
            *([f"engine: {self.engine_error}"] if self.engine_error else []),
            *([self.detail] if self.detail else []),
            *(
                f"replica {index} does not generate: {replica.why_not}"
                for index, replica in enumerate(self.replicas)
                if replica.why_not
            ),
        ]


class _RepeatedCall(Generic[T]):
    """A repeated asynchronous call, of which at most one is in progress."""

    def __init__(self, call: Callable[[], Coroutine[object, object, T]]) -> None:
        self._call = call
        self._task: asyncio.Task[T] | None = None
        self._since = 0.0

    def start(self) -> asyncio.Task[T]:
        """Start the call, unless the last one is still in progress."""
        if self._task is None or self._task.done():
            self._since = time.monotonic()
            self._task = asyncio.ensure_future(self._call())
        return self._task

    def result(self) -> tuple[T | None, str]:
        """Return the result of the last call, or None and the reason why there is none."""
        task = self._task
        if task is None or not task.done():
            return None, f"has not answered for {time.monotonic() - self._since:.0f} s"
        if task.cancelled():
            return None, "was not called: the server is shutting down"
        if (failure := task.exception()) is not None:
            return None, str(failure) or type(failure).__name__
        return task.result(), ""


class StatusReader:
    """Reads the state of an engine and its workers, for any number of pages of one event loop.

    A worker that does not reply in time is shown as such, and is not called again before it
    replies.
    """

    def __init__(self, engine: EngineClient, receivers: Sequence[Receiver]) -> None:
        threads = anyio.CapacityLimiter(max(1, len(receivers)))
        self._engine = engine
        self._stats = _RepeatedCall(engine.stats)
        self._workers = [_RepeatedCall(_in_thread(receiver, threads)) for receiver in receivers]
        self._reading: asyncio.Task[Snapshot] | None = None
        self._read_at = float("-inf")
        self._replicas = 1

    async def snapshot(self) -> Snapshot:
        """Return the current data, at most FRESH_S old. Errors of workers become part of it."""
        stale = time.monotonic() - self._read_at > FRESH_S
        if self._reading is None or (self._reading.done() and stale):
            self._reading = asyncio.ensure_future(self._read())
        return await asyncio.shield(self._reading)

    async def _read(self) -> Snapshot:
        calls = [self._stats.start(), *(worker.start() for worker in self._workers)]
        await asyncio.wait(calls, timeout=REPLY_TIMEOUT_S)
        replicas, engine_error = self._stats.result()
        self._replicas = len(replicas or ()) or self._replicas
        self._read_at = time.monotonic()
        return take_snapshot(
            self._engine.card.name,
            worker_names(len(self._workers), self._replicas),
            [worker.result() for worker in self._workers],
            replicas or [],
            engine_error,
            at=time.time(),
        )


def _in_thread(
    receiver: Receiver, limiter: anyio.CapacityLimiter
) -> Callable[[], Coroutine[object, object, WorkerReport]]:
    return lambda: anyio.to_thread.run_sync(
        receiver.report, limiter=limiter, abandon_on_cancel=True
    )


def worker_names(workers: int, replicas: int) -> list[str]:
    """Return the names `replica.rank` of all workers, as in the names of their processes."""
    ranks = workers // replicas if replicas and workers % replicas == 0 else workers
    return [f"{index // ranks}.{index % ranks}" for index in range(workers)]


def take_snapshot(
    model: str,
    names: Sequence[str],
    replies: Sequence[tuple[WorkerReport | None, str]],
    replicas: list[EngineStats],
    engine_error: str = "",
    *,
    at: float,
) -> Snapshot:
    """Combine the replies of the engine and of the workers, which are in the order of `names`."""
    reports = {name: report for name, (report, _) in zip(names, replies, strict=True) if report}
    statuses = {name: report.status for name, report in reports.items()}
    whole = merge_statuses(statuses) if statuses else None
    silent = len(reports) < len(names) or whole is None
    return Snapshot(
        at=at,
        model=model,
        state=NO_ANSWER if silent or whole is None else whole.state,
        versions=sorted({status.version for status in statuses.values()}),
        label=whole.label if whole else None,
        detail=whole.detail if whole else "",
        workers=[
            _worker_view(name, report.status, report)
            if report
            else WorkerView(name=name, error=error)
            for name, (report, error) in zip(names, replies, strict=True)
        ],
        replicas=replicas,
        updates=merge_updates(record for report in reports.values() for record in report.recent),
        engine_error=engine_error,
    )


def _worker_view(name: str, status: Status, report: WorkerReport) -> WorkerView:
    return WorkerView(
        name=name,
        state=status.state,
        version=status.version,
        label=status.label,
        may_generate=status.may_generate,
        busy=status.busy,
        orphaned=status.orphaned,
        paused=status.paused,
        apply=status.apply,
        detail=status.detail,
        updates_total=report.updates_total,
        open_update=report.open_update,
        mapped=mapped_by_sender(status.shared_memory, status.senders),
    )


def mapped_by_sender(usage: Iterable[SharedMemoryUsage], paths: Mapping[str, str]) -> list[Mapped]:
    """Return the mapped bytes of each sender. Control segments have no sender's name."""
    sums: dict[str, int] = defaultdict(int)
    for entry in usage:
        sums["" if entry.kind == "control" else entry.name] += entry.nbytes
    return [
        Mapped(sender=sender, nbytes=nbytes, path=paths.get(sender, ""))
        for sender, nbytes in sorted(sums.items())
    ]


def merge_updates(records: Iterable[UpdateRecord]) -> list[UpdateView]:
    """Return the last updates, the oldest first, each combined from the records of its workers."""
    groups: dict[tuple[str, int], list[UpdateRecord]] = defaultdict(list)
    for record in records:
        groups[record.update_id, record.version].append(record)
    views = sorted(map(_update_view, groups.values()), key=lambda view: view.at)
    return views[-SHOWN_UPDATES:]


def _update_view(group: list[UpdateRecord]) -> UpdateView:
    slowest = max(group, key=lambda record: record.duration_s)
    nbytes = max(record.nbytes for record in group)
    fields = asdict(slowest) | {
        "at": max(record.at for record in group),
        "nbytes": nbytes,
        "stall_s": max(record.stall_s for record in group),
    }
    return UpdateView(
        **fields, workers=len(group), bytes_per_s=nbytes / max(slowest.duration_s, 1e-9)
    )
