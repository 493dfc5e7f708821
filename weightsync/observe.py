"""Observers of a sender: a progress callback or bar, and spans of OpenTelemetry."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from weightsync.backends.base import TransferProgress
from weightsync.errors import (
    ConfigError,
    MissingExtraError,
    WeightSyncError,
    install_hint,
)
from weightsync.wire.messages import (
    CALL_OF,
    AbortRequest,
    FinishRequest,
    PrepareRequest,
    Reply,
    Request,
    StartRequest,
    StepReply,
    UpdateRequest,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars

    from weightsync.report import SyncReport

logger = logging.getLogger(__name__)


@contextmanager
def call_span(
    call: str, report: Callable[[], SyncReport | None], observers: Observers
) -> Iterator[None]:
    """Open an OpenTelemetry span around a call of a sender, if this program has imported it.

    The span is `weightsync.` and the method's name. An error of the block is recorded in it, else
    the figures of `report`, called after the block. Below it is a span for each message of an
    update to a receiver. Errors of OpenTelemetry, for instance of a span processor, are logged, and
    do not affect the call.
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
    messages = _MessageSpans(trace, span)
    observers.append(messages)
    try:
        with trace.use_span(span):
            yield
            with _logged("a span has no figures"):
                span.set_attributes(_figures(report()))
    finally:
        observers.remove(messages)
        with _logged("a span was not ended"):
            span.end()


@contextmanager
def _logged(said: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.warning("OpenTelemetry: %s", said, exc_info=True)


def _figures(report: SyncReport | None) -> dict[str, int | float | str | list[int]]:
    if report is None:
        return {}
    return {
        **report.metrics("weightsync."),
        "weightsync.nbytes": report.nbytes,
        "weightsync.path": report.path,
        "weightsync.verified": report.verified,
        "weightsync.delta": report.delta is not None and report.delta.sent,
        "weightsync.update_id": report.update_id,
        **_by_rank(report.sources),
    }


def _by_rank(sources: Mapping[int, int]) -> dict[str, list[int]]:
    """Return the ranks that sent, and the bytes that were copied from each; {} where they gather.

    As two lists: a span has at most 128 attributes.
    """
    ranks = sorted(sources)
    if not ranks:
        return {}
    nbytes = [sources[rank] for rank in ranks]
    return {"weightsync.from_ranks": ranks, "weightsync.from_ranks_nbytes": nbytes}


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


class Observer:
    """Hooks of one observer of rank 0. None of them may block.

    The sender's thread calls the hooks of commands and transfers; any thread calls `on_request` and
    `on_reply`. `on_done` is called at the end of the user's call, with the error that the call
    raises.
    """

    def on_command(self, name: str) -> None:
        """Called when all ranks have executed a command."""

    def on_transfer_start(self, engines: Mapping[str, TransferProgress], nbytes: int) -> None:
        """Called when rank 0's engines, by backend, have begun an update of `nbytes`."""

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
    def user_call(self) -> Iterator[None]:
        """Observe one call of the sender's user."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as exc:
            error = exc
            raise
        finally:
            self.notify(lambda observer: observer.on_done(error))


_STEPS = StartRequest | UpdateRequest | PrepareRequest | FinishRequest | AbortRequest


class _MessageSpans(Observer):
    """Observer that records a span for each message of an update, below the span of the call.

    It has the receiver's target and the seconds in its reply, by phase; or the error.
    """

    def __init__(self, trace: Any, span: Any) -> None:
        self._trace = trace
        self._tracer = trace.get_tracer("weightsync")
        self._around = trace.set_span_in_context(span)

    def on_reply(self, call: ObservedCall, reply: Reply | WeightSyncError | None) -> None:
        if not isinstance(call.request, _STEPS):
            return
        stop = time.time_ns()
        seconds = reply.seconds if isinstance(reply, StepReply) else {}
        sources = reply.sources if isinstance(reply, StepReply) else {}
        span = self._tracer.start_span(
            f"weightsync.{CALL_OF[type(call.request)]}",
            context=self._around,
            start_time=stop - int((time.perf_counter() - call.sent_s) * 1e9),
            attributes={
                "weightsync.target": call.target,
                **{f"weightsync.{phase}_s": spent_s for phase, spent_s in seconds.items()},
                **_by_rank(sources),
            },
        )
        if isinstance(reply, WeightSyncError):
            span.record_exception(reply)
            span.set_status(self._trace.StatusCode.ERROR, str(reply))
        span.end(stop)


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

    def on_transfer_start(self, engines: Mapping[str, TransferProgress], nbytes: int) -> None:
        """Start the calls: the engines know the stream of the update now."""
        update = self._update
        update.phase = "transfer"
        update.calls, update.done = {}, set()
        update.engines = dict(engines)
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
