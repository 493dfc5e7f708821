"""Observers of a sender: a progress callback or bar, and a Chrome trace of each update."""

from __future__ import annotations

import importlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from math import inf
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weightsync.backends.base import Mark, TransferProgress
from weightsync.errors import (
    ConfigError,
    MissingExtraError,
    WeightSyncError,
    install_hint,
)
from weightsync.wire.messages import (
    CALL_OF,
    FinishRequest,
    Reply,
    Request,
    StartRequest,
    StartTerms,
    StepReply,
    UpdateRequest,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars

    from weightsync.report import SyncReport

logger = logging.getLogger(__name__)


@contextmanager
def call_span(call: str, report: Callable[[], SyncReport | None]) -> Iterator[None]:
    """Open an OpenTelemetry span around a call of a sender, if this program has imported it.

    The span is `weightsync.` and the method's name. An error of the block is recorded in it, else
    the figures of `report`, called after the block. Errors of OpenTelemetry, for instance of a
    span processor, are logged, and do not affect the call.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        yield
        return
    span = None
    with _logged("a span was not opened"):
        span = trace.get_tracer("weightsync").start_span(f"weightsync.{call.partition('(')[0]}")
    if span is None:
        yield
        return
    try:
        with trace.use_span(span):
            yield
            with _logged("a span has no figures"):
                span.set_attributes(_figures(report()))
    finally:
        with _logged("a span was not ended"):
            span.end()


@contextmanager
def _logged(said: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.warning("OpenTelemetry: %s", said, exc_info=True)


def _figures(report: SyncReport | None) -> dict[str, int | float | str]:
    if report is None:
        return {}
    return {
        **report.metrics("weightsync."),
        "weightsync.nbytes": report.nbytes,
        "weightsync.path": report.path,
        "weightsync.verified": report.verified,
        "weightsync.delta": report.delta is not None and report.delta.sent,
        "weightsync.update_id": report.update_id,
    }


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """One message to one member: the member's target, its rank, backend and reader; the request.

    `sent_s` is the `perf_counter()` of the call.
    """

    target: str
    rank: int
    backend: str
    reader: int
    request: Request
    sent_s: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class ObservedTransfer:
    """One engine's part of an update on rank 0.

    `readers` are members of the fleet; `relays` are readers that pass on to others what they read.
    `dependent` engines are built on another engine, which shows the same bytes.
    """

    backend: str
    progress: TransferProgress
    readers: Sequence[int]
    relays: Sequence[int]
    dependent: bool


class Observer:
    """Hooks of one observer of rank 0. None of them may block.

    The sender's thread calls the hooks of commands and transfers; any thread calls `on_request` and
    `on_reply`. `on_done` is called at the end of the user's call, with the error that the call
    raises.
    """

    def on_command(self, name: str, start_s: float) -> None:
        """Called when all ranks have executed a command, which began at `start_s`."""

    def on_transfer_start(self, transfers: Sequence[ObservedTransfer], nbytes: int) -> None:
        """Called when the engines have begun an update of a model of `nbytes`."""

    def on_transfer_end(self) -> None:
        """Called before the engines end the update: their progress is not readable afterwards."""

    def on_request(self, call: ObservedCall) -> None:
        """Called when a message is sent."""

    def on_reply(self, call: ObservedCall, reply: Reply | WeightSyncError | None) -> None:
        """Called with the reply to a message, or with the error of the call."""

    def on_done(self, error: BaseException | None) -> None:
        """Called at the end of the user's call."""


class Observers(list[Observer]):
    """The observers of rank 0. Their errors are logged, and do not affect the update."""

    def notify(self, call: Callable[[Observer], None]) -> None:
        """Call one hook of every observer."""
        for observer in self:
            try:
                call(observer)
            except Exception:
                logger.warning("%s failed", type(observer).__name__, exc_info=True)

    @contextmanager
    def user_call(self, trace: TracePath | None = None) -> Iterator[None]:
        """Observe one call of the sender's user, with a trace if a path is given."""
        tracer = None if trace is None else TraceObserver(trace_path(trace))
        if tracer is not None:
            self.append(tracer)
        error: BaseException | None = None
        try:
            yield
        except BaseException as exc:
            error = exc
            raise
        finally:
            self.notify(lambda observer: observer.on_done(error))
            if tracer is not None:
                self.remove(tracer)


Phase = Literal["transfer", "finish", "done", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of one update at one moment.

    `phase` is `transfer` while bytes move, `finish` when every receiver has them, and at the end
    `done` or `failed`. `done_nbytes` of `total_nbytes` have reached the slowest receiver.
    `receivers` has the bytes of each receiver by target. A receiver that another rank or host
    feeds may jump from 0 to all bytes when it replies. `version` is None until the first message
    contains it. `seconds` is the time since the start of the update.
    """

    phase: Phase
    version: int | None
    done_nbytes: int
    total_nbytes: int
    seconds: float
    receivers: Mapping[str, int] = field(default_factory=dict)

    @property
    def gbps(self) -> float:
        """Gigabytes (1e9 bytes) per second since the start of the update."""
        return self.done_nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Remaining time at this rate, in seconds; None while no bytes have arrived."""
        if not self.done_nbytes:
            return None
        return (self.total_nbytes - self.done_nbytes) * self.seconds / self.done_nbytes


OnProgress = Callable[[Progress], object]


class ProgressBar:
    """Progress callback that draws a bar on stderr: bytes, rate and time left. Needs rich.

    The bar disappears at the end of the update. Nothing is written if stderr is no terminal.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._rich = importlib.import_module("rich.progress")
        self._console = console or importlib.import_module("rich.console").Console(stderr=True)
        self._bars: Bars | None = None

    def __call__(self, progress: Progress) -> None:
        """Draw the bar. Called by the sender's progress thread."""
        if self._bars is None:
            self._bars = self._open()
            self._bars.add_task("", total=progress.total_nbytes)
        version = "…" if progress.version is None else progress.version
        self._bars.update(
            self._bars.task_ids[0],
            description=f"version {version}: {progress.phase}",
            completed=progress.done_nbytes,
            total=progress.total_nbytes,
            refresh=True,
        )
        if progress.phase in ("done", "failed"):
            bars, self._bars = self._bars, None
            bars.stop()

    def _open(self) -> Bars:
        rich = self._rich
        bars: Bars = rich.Progress(
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.DownloadColumn(),
            rich.TransferSpeedColumn(),
            rich.TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,  # each call draws once
            transient=True,
            disable=not self._console.is_terminal,  # rich would write a line break at the end
        )
        bars.start()
        return bars


Shown = bool | OnProgress


def progress_callback(progress: Shown) -> OnProgress | None:
    """Return the callback for the `progress` argument; True is a progress bar on stderr.

    Raises BackendUnavailableError if rich is missing, ConfigError for an object that is not
    callable.
    """
    if progress is True:
        try:
            return ProgressBar()
        except ImportError as exc:
            raise MissingExtraError(
                f"progress=True needs rich ({exc}); {install_hint('cli')}, or give a callback"
            ) from exc
    if progress and not callable(progress):
        raise ConfigError(f"progress must be True, False or a callback, not {progress!r}")
    return progress or None


INTERVAL_S = 0.1
_LAST_CALL_S = 1.0
"""Timeout of the wait for the callback's last call of an update."""


class _Update:
    """State of the update that is being sent, or of the next one."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.phase: Phase = "transfer"
        self.end: Phase = "done"
        self.version: int | None = None
        self.nbytes = 0
        self.started = 0.0
        self.engines: dict[str, TransferProgress] = {}
        self.calls: dict[str, ObservedCall] = {}
        self.done: set[str] = set()

    def snapshot(self) -> Progress:
        """Return its progress."""
        total, engines, done = self.nbytes, self.engines, dict[str, int]()
        for target, call in dict(self.calls).items():
            progress = engines.get(call.backend) if call.rank == 0 else None
            if self.phase == "done" or target in self.done:
                done[target] = total
            else:
                done[target] = min(_taken(progress, call.reader), total) if progress else 0
        finished = self.phase == "done" or (self.phase == "finish" and not done)
        return Progress(
            phase=self.phase,
            version=self.version,
            done_nbytes=total if finished else min(done.values(), default=0),
            total_nbytes=total,
            seconds=time.perf_counter() - self.started,
            receivers=done,
        )


class ProgressObserver(Observer):
    """Observer that calls `callback` about ten times a second during an update, and at its end.

    One thread makes all calls of an update; the sender waits for the last call only. An update
    that begins while a call of the former one still runs is not shown. After a callback raised, the
    error is logged and the callback is not called again.
    """

    def __init__(self, callback: OnProgress) -> None:
        self._callback: OnProgress | None = callback
        self._thread: threading.Thread | None = None
        self._update = _Update()

    def on_transfer_start(self, transfers: Sequence[ObservedTransfer], nbytes: int) -> None:
        """Start the calls: the engines know the stream of the update now."""
        update = self._update
        update.phase = "transfer"
        update.calls, update.done = {}, set()
        update.engines = {transfer.backend: transfer.progress for transfer in transfers}
        layouts = [progress.layout for progress in update.engines.values()]
        update.nbytes = layouts[-1].manifest.nbytes if layouts else nbytes
        if self._thread is None or not self._thread.is_alive():
            update.started = time.perf_counter()
            self._thread = threading.Thread(
                target=self._run,
                args=(update, update.snapshot()),
                name="weightsync-progress",
                daemon=True,
            )
            self._thread.start()

    def on_transfer_end(self) -> None:
        self._update.engines = {}

    def on_request(self, call: ObservedCall) -> None:
        update, request = self._update, call.request
        if isinstance(request, StartRequest):
            update.version = request.version
        elif isinstance(request, UpdateRequest):
            update.version = request.start.version if request.start else update.version
            update.calls[call.target] = call
        elif isinstance(request, FinishRequest):
            update.phase = "finish"

    def on_reply(self, call: ObservedCall, reply: Reply | WeightSyncError | None) -> None:
        if isinstance(call.request, UpdateRequest) and not isinstance(reply, WeightSyncError):
            self._update.done.add(call.target)

    def on_done(self, error: BaseException | None) -> None:
        """Make the last call of the update, from the thread that made the others."""
        update, self._update = self._update, _Update()
        update.end = "done" if error is None else "failed"
        update.stop.set()
        if self._thread is not None:
            self._thread.join(_LAST_CALL_S)
            if self._thread.is_alive():
                logger.warning("the progress callback still runs after the end of its update")

    def _run(self, update: _Update, progress: Progress) -> None:
        last = False
        while True:
            try:
                if self._callback is not None:
                    self._callback(progress)
            except Exception:
                self._callback = None
                logger.warning(
                    "the progress callback failed and is not called again", exc_info=True
                )
            if last or self._callback is None:
                return
            last = update.stop.wait(INTERVAL_S)
            if last:
                update.phase = update.end
            progress = update.snapshot()


def _taken(progress: TransferProgress, reader: int) -> int:
    """Return the bytes that a reader has read; 0 if the ring was closed meanwhile."""
    try:
        return progress.taken_nbytes(reader)
    except (ValueError, IndexError):
        return 0


Args = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Span:
    """A named time span of a trace: begin and end in seconds, and further arguments."""

    name: str
    start_s: float
    stop_s: float
    args: Args = field(default_factory=dict)


class Timeline:
    """Chrome trace document: lanes of spans by process and thread. Time 0 is `zero_s`.

    A "process" of the trace is any group of lanes.
    """

    def __init__(self, zero_s: float) -> None:
        self._zero_s = zero_s
        self._events: list[dict[str, Any]] = []

    def process(self, pid: int, name: str) -> None:
        """Name a process; processes with a lower `pid` are shown above."""
        self._add("M", pid, 0, "process_name", {"name": name})
        self._add("M", pid, 0, "process_sort_index", {"sort_index": pid})

    def lane(self, pid: int, tid: int, name: str, spans: Sequence[Span]) -> None:
        """Add one lane. A span that outlasts its enclosing span is cut to the enclosing end."""
        self._add("M", pid, tid, "thread_name", {"name": name})
        for span in nested(spans):
            dur = round((span.stop_s - span.start_s) * 1e6, 3)
            self._add("X", pid, tid, span.name, span.args, span.start_s, dur=dur)

    def count(self, pid: int, name: str, values: Sequence[tuple[float, float]]) -> None:
        """Add a counter track of (seconds, value) points."""
        for at_s, value in values:
            self._add("C", pid, 0, name, {name: value}, at_s)

    def write(self, path: Path, about: Args) -> None:
        """Write the file, with the events in order of time, outer spans first. Raises OSError."""
        events = sorted(self._events, key=lambda e: (e["ph"] != "M", e["ts"], -e.get("dur", 0.0)))
        document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
        path.write_text(json.dumps(document) + "\n", encoding="utf-8")

    def _add(
        self, kind: str, pid: int, tid: int, name: str, args: Args, at_s: float = 0.0, **more: float
    ) -> None:
        ts = round(max(at_s - self._zero_s, 0.0) * 1e6, 3)
        event = {"ph": kind, "pid": pid, "tid": tid, "name": name, "ts": ts, "args": args}
        self._events.append({**event, **more})


def nested(spans: Sequence[Span]) -> list[Span]:
    """Return the spans in order of time, each cut to the end of its enclosing span."""
    found: list[Span] = []
    around: list[float] = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.stop_s)):
        while around and around[-1] <= span.start_s:
            around.pop()
        stop_s = min([span.stop_s, *around[-1:]])
        if stop_s < span.start_s:
            continue
        found.append(Span(span.name, span.start_s, stop_s, span.args))
        around.append(stop_s)
    return found


SAMPLE_S = 0.5e-3
_TRAINER, _RING, _READERS = 1, 2, 3
TracePath = str | PathLike[str]


class _TransferTrace:
    """Recording of one engine's transfer: time marks of its chunks, samples of its readers."""

    def __init__(self, transfer: ObservedTransfer) -> None:
        self.backend = transfer.backend
        self.relays = transfer.relays
        self.packed = transfer.progress.packed
        self._chunks = transfer.progress.layout.chunks
        self._progress = transfer.progress
        self._marks: list[Mark] = []
        self._progress.marks = self._marks
        started = [(time.perf_counter(), 0)]
        self.samples = {n: started.copy() for n in (*transfer.readers, *transfer.relays)}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightsync-trace", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop sampling. Called before the ring may be closed; idempotent."""
        if not self._stop.is_set():
            self._progress.marks = None
            self._stop.set()
            self._thread.join()
            self._sample()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        """Record the progress of each reader if it has changed."""
        now = time.perf_counter()
        for reader, samples in self.samples.items():
            taken = self._progress.taken_nbytes(reader)
            if taken > samples[-1][1]:
                samples.append((now, taken))

    def times(self, mark: str) -> dict[int, float]:
        """Return the times of a mark, by chunk."""
        return {chunk: at_s for kind, chunk, at_s in self._marks if kind == mark}

    def spans(self, first: str, second: str, name: str) -> list[Span]:
        """Return the spans from the mark `first` to the mark `second` of each chunk."""
        starts, ends = self.times(first), self.times(second)
        return [Span(name, starts[c], s, {"chunk": c}) for c, s in ends.items() if c in starts]

    def buckets(self) -> Iterator[tuple[str, Span]]:
        """Yield each chunk's spans in its bucket: packing, then reading by the slowest reader."""
        acquired = self.times("acquired")
        num_buckets = self._progress.num_buckets
        for chunk, stop_s in self.times("published").items():
            if chunk not in acquired:
                continue
            lane = f"bucket {chunk % num_buckets}"
            start, stop = self._chunks[chunk].start, self._chunks[chunk].stop
            args = {"chunk": chunk, "nbytes": stop - start}
            yield lane, Span(f"pack chunk {chunk}", acquired[chunk], stop_s, args)
            released = [
                next((at_s for at_s, taken in samples if taken >= stop), inf)
                for samples in self.samples.values()
            ]
            # A sample may come late: a released bucket is acquired again.
            released_s = min(max(released, default=inf), acquired.get(chunk + num_buckets, inf))
            if released_s < inf:
                yield lane, Span(f"read chunk {chunk}", stop_s, max(stop_s, released_s), args)


@dataclass(frozen=True, slots=True)
class _Message:
    call: ObservedCall
    received_s: float
    reply: Reply | WeightSyncError | None

    @property
    def name(self) -> str:
        return CALL_OF[type(self.call.request)]


class TraceObserver(Observer):
    """Observer that traces one call of the sender and writes `path` at its end, also on errors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._wall = datetime.now(UTC)
        self._zero_s = time.perf_counter()
        self._commands: list[Span] = []
        self._transfers: list[_TransferTrace] = []
        self._messages: list[_Message] = []

    def on_command(self, name: str, start_s: float) -> None:
        if name != "keepalive":
            self._commands.append(Span(name, start_s, time.perf_counter()))

    def on_transfer_start(self, transfers: Sequence[ObservedTransfer], nbytes: int) -> None:
        self._transfers += [_TransferTrace(one) for one in transfers if not one.dependent]

    def on_transfer_end(self) -> None:
        for transfer in self._transfers:
            transfer.end()

    def on_reply(self, call: ObservedCall, reply: Reply | WeightSyncError | None) -> None:
        self._messages.append(_Message(call, time.perf_counter(), reply))

    def on_done(self, error: BaseException | None) -> None:
        """Write the trace file. Raises OSError."""
        stop_s = time.perf_counter()
        self.on_transfer_end()
        messages = sorted(self._messages, key=lambda message: message.call.sent_s)
        version = _version(messages)
        line = Timeline(self._zero_s)
        line.process(_TRAINER, "trainer")
        failed = {} if error is None else {"error": f"{type(error).__name__}: {error}"}
        whole = Span(f"update to version {version}", self._zero_s, stop_s, failed)
        phases = [whole, *self._commands, *_waits(self._commands), *_steps(messages)]
        line.lane(_TRAINER, 1, "update", phases)
        self._add_ring(line)
        self._add_readers(line, messages)
        about = {"version": version, "started": self._wall.isoformat(), **failed}
        line.write(self._path, about)

    def _add_ring(self, line: Timeline) -> None:
        waits: list[Span] = []
        lanes: dict[str, list[Span]] = {}
        for transfer in self._transfers:
            waits += transfer.spans("wanted", "acquired", "wait for a bucket")
            if transfer.packed:
                for name, span in transfer.buckets():
                    lanes.setdefault(name, []).append(span)
            else:
                found = transfer.spans("acquired", "published", "fingerprints")
                lanes.setdefault("fingerprints", []).extend(found)
        line.lane(_TRAINER, 2, "handing over", waits)
        line.process(_RING, "ring" if any(t.packed for t in self._transfers) else "memory")
        for tid, (name, spans) in enumerate(sorted(lanes.items()), 1):
            line.lane(_RING, tid, name, spans)

    def _add_readers(self, line: Timeline, messages: Sequence[_Message]) -> None:
        by_target: dict[str, list[_Message]] = {}
        for message in messages:
            by_target.setdefault(message.call.target, []).append(message)
        for pid, (target, own) in enumerate(by_target.items(), _READERS):
            line.process(pid, target)
            line.lane(pid, 1, "messages", list(_calls(own)))
            calls = [message.call for message in own if message.call.rank == 0]
            self._count_reads(line, pid, {(call.backend, call.reader) for call in calls})
        relays = {(t.backend, reader) for t in self._transfers for reader in t.relays}
        if relays:
            pid = _READERS + len(by_target)
            line.process(pid, "relay to other hosts")
            self._count_reads(line, pid, relays)

    def _count_reads(self, line: Timeline, pid: int, readers: Iterable[tuple[str, int]]) -> None:
        for transfer in self._transfers:
            for backend, reader in readers:
                if backend == transfer.backend:
                    line.count(pid, "read_nbytes", transfer.samples.get(reader, []))


def trace_path(path: TracePath) -> Path:
    """Return the path of a trace. Raises ConfigError, before any work, if the directory is missing.

    Called at the start of each traced call, on rank 0.
    """
    found = Path(path)
    if found.is_dir() or not found.parent.is_dir():
        raise ConfigError(f"trace={str(found)!r} is not a file in a directory that exists")
    return found


def _version(messages: Sequence[_Message]) -> int | None:
    requests = [message.call.request for message in messages]
    terms = [r.start if isinstance(r, UpdateRequest) else r for r in requests]
    starts = [t for t in terms if isinstance(t, StartTerms)]
    return next((start.version for start in starts if start.version is not None), None)


def _waits(commands: Sequence[Span]) -> Iterator[Span]:
    """Yield the waits for receivers: from the end of a transfer to the following end command."""
    for first, second in pairwise(commands):
        if (first.name, second.name) == ("transfer", "end"):
            yield Span("await receivers", first.stop_s, second.start_s)


def _steps(messages: Sequence[_Message]) -> Iterator[Span]:
    """Yield a span for each group of overlapping messages of one kind, except updates.

    Update messages have spans of their own.
    """
    groups: dict[str, list[Span]] = {}
    for message in messages:
        if isinstance(message.call.request, UpdateRequest):
            continue
        spans = groups.setdefault(message.name, [])
        start_s, stop_s = message.call.sent_s, message.received_s
        if spans and start_s <= spans[-1].stop_s:
            last = spans.pop()
            start_s, stop_s = last.start_s, max(last.stop_s, stop_s)
        spans.append(Span(message.name, start_s, stop_s))
    for spans in groups.values():
        yield from spans


def _calls(messages: Sequence[_Message]) -> Iterator[Span]:
    """Yield a span for each message to one receiver, and spans of the phases in its reply.

    A reply has seconds by phase but no start times, so the phases are laid out before its arrival.
    """
    known: Mapping[str, float] = {}
    for message in messages:
        reply = message.reply
        args = {"error": str(reply)} if isinstance(reply, WeightSyncError) else {}
        yield Span(message.name, message.call.sent_s, message.received_s, args)
        if not isinstance(reply, StepReply):
            continue
        seconds = {k: v - known.get(k, 0.0) for k, v in reply.seconds.items()}
        known = reply.seconds
        at_s = message.received_s
        for phase, spent_s in reversed(seconds.items()):
            if spent_s > 0:
                start_s = max(at_s - spent_s, message.call.sent_s)
                yield Span(phase, start_s, at_s, {"seconds": spent_s})
                at_s = start_s
