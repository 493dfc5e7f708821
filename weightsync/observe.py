"""Observers of a sender: a progress callback or bar, and a trace of each update."""

from __future__ import annotations

import importlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby, pairwise
from operator import itemgetter
from os import PathLike
from pathlib import Path

from weightsync.backends.ipc.sender import Mark, ReaderProgress
from weightsync.errors import BackendUnavailableError, ConfigError, WeightSyncError
from weightsync.progress import OnProgress, Phase, Progress
from weightsync.ranks.group import RankGroup
from weightsync.ranks.observers import ObservedCall
from weightsync.ranks.worker import (
    RELAY_READER,
    AnyCommand,
    Begin,
    End,
    KeepAlive,
    RankWorker,
    Transfer,
)
from weightsync.weights.layout import StreamLayout
from weightsync.wire.messages import (
    CALLS,
    FinishRequest,
    Reply,
    StartRequest,
    StepReply,
    UpdateRequest,
)

logger = logging.getLogger(__name__)

INTERVAL_S = 0.1
_LAST_WORD_S = 1.0
"""A callback that takes longer than this over the last word is no longer waited for."""


class ProgressObserver:
    """Calls `callback` about ten times a second during an update, and at its end.

    All calls come from one thread at a time; the sender only waits for the last. A callback that
    raises is logged once, and not called again.
    """

    def __init__(self, worker: RankWorker, callback: OnProgress) -> None:
        self._worker = worker
        self._callback: OnProgress | None = callback
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._clear()

    def _clear(self) -> None:
        self._phase: Phase = "transfer"
        self._end: Phase = "done"
        self._version: int | None = None
        self._total = 0
        self._started = 0.0
        self._reader_progress: ReaderProgress | None = None
        self._calls: dict[str, ObservedCall] = {}
        self._done: dict[str, int] = {}
        self._relayed = False

    def on_command_start(self, command: AnyCommand) -> None:
        if isinstance(command, End):
            self._reader_progress = None

    def on_command_end(self, command: AnyCommand) -> None:
        """An update has begun: the engine knows its stream, and the first call may follow."""
        if not isinstance(command, Begin):
            return
        engine = self._worker.engine
        self._phase = "transfer"
        self._calls, self._done = {}, {}
        manifest = self._worker.source.manifest
        if engine is not None and command.places.get(0):
            self._reader_progress = engine.reader_progress
            manifest = engine.reader_progress.plan.manifest
        self._total = manifest.nbytes
        self._relayed = RELAY_READER in command.places.get(0, [])
        if self._thread is None:
            self._start()

    def on_request(self, call: ObservedCall) -> None:
        request = call.request
        if isinstance(request, StartRequest):
            self._version = request.version
        elif isinstance(request, UpdateRequest):
            self._version = request.start.version if request.start else self._version
            self._calls[call.target] = call
        elif isinstance(request, FinishRequest) and self._thread is not None:
            self._phase = "finish"

    def on_reply(self, call: ObservedCall, answer: Reply | WeightSyncError | None) -> None:
        if isinstance(call.request, UpdateRequest) and not isinstance(answer, WeightSyncError):
            self._done[call.target] = self._total

    def on_done(self, error: BaseException | None) -> None:
        """Say the last word, from the thread that said the others."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._end = "done" if error is None else "failed"
        self._stop.set()
        thread.join(_LAST_WORD_S)
        if thread.is_alive():
            logger.warning("the progress callback still works on an update that is over")
        self._clear()

    def _start(self) -> None:
        self._started = time.perf_counter()
        stop = self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(stop,), name="weightsync-progress", daemon=True
        )
        self._thread.start()

    def _run(self, stop: threading.Event) -> None:
        while True:
            last = stop.is_set()
            if last:
                self._phase = self._end
            self._say(self._look())
            if last or self._callback is None:
                return
            stop.wait(INTERVAL_S)

    def _look(self) -> Progress:
        total, calls = self._total, dict(self._calls)
        done = {target: self._done.get(target, 0) for target in calls}
        if self._phase == "done":
            done = dict.fromkeys(done, total)
        reader_progress = self._reader_progress
        if reader_progress is not None:
            for target, call in calls.items():
                place = RELAY_READER if self._relayed and call.place is None else call.place
                if place is not None and not done[target]:
                    done[target] = min(_taken(reader_progress, place), total)
        finished = self._phase == "done" or (self._phase == "finish" and not done)
        slowest = total if finished else min(done.values(), default=0)
        return Progress(
            phase=self._phase,
            version=self._version,
            done_nbytes=slowest,
            total_nbytes=total,
            seconds=time.perf_counter() - self._started,
            receivers=done,
        )

    def _say(self, progress: Progress) -> None:
        try:
            if self._callback is not None:
                self._callback(progress)
        except Exception:
            self._callback = None
            logger.warning("the progress callback failed and is not called again", exc_info=True)


def _taken(reader_progress: ReaderProgress, place: int) -> int:
    """Between two updates the ring may just be closed: then nothing is known."""
    try:
        return reader_progress.taken_nbytes(place)
    except (ValueError, IndexError):
        return 0


Args = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted: name, begin and end in seconds, and what else is known."""

    name: str
    start_s: float
    stop_s: float
    args: Args = field(default_factory=dict)


class Timeline:
    """Lanes of spans, by process and thread. `zero_s` is where the time line begins.

    Processes are numbered by the order in which they are named; they need not be processes.
    """

    def __init__(self, zero_s: float) -> None:
        self._zero_s = zero_s
        self._events: list[dict[str, object]] = []

    def process(self, pid: int, name: str) -> None:
        """Name a process; those of lower `pid` are shown above."""
        self._about(pid, 0, "process_name", name=name)
        self._about(pid, 0, "process_sort_index", sort_index=pid)

    def lane(self, pid: int, tid: int, name: str, spans: Sequence[Span]) -> None:
        """Add one lane; a span that outlasts the one that it begins in is cut to its end."""
        self._about(pid, tid, "thread_name", name=name)
        for span in nested(spans):
            self._add("X", pid, tid, span.name, span.start_s, dict(span.args))
            self._events[-1]["dur"] = round((span.stop_s - span.start_s) * 1e6, 3)

    def count(self, pid: int, name: str, values: Sequence[tuple[float, float]]) -> None:
        """Add a curve of (seconds, value)."""
        for at_s, value in values:
            self._add("C", pid, 0, name, at_s, {name: value})

    def write(self, path: Path, about: Args) -> None:
        """Write the file; events lie in it in order of time. Raises OSError."""
        events = sorted(self._events, key=_order)
        document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}
        path.write_text(json.dumps(document) + "\n", encoding="utf-8")

    def _about(self, pid: int, tid: int, kind: str, **args: object) -> None:
        event = {"ph": "M", "pid": pid, "tid": tid, "name": kind, "ts": 0, "args": args}
        self._events.append(event)

    def _add(
        self, kind: str, pid: int, tid: int, name: str, at_s: float, args: dict[str, object]
    ) -> None:
        ts = round(max(at_s - self._zero_s, 0.0) * 1e6, 3)
        event = {"ph": kind, "pid": pid, "tid": tid, "name": name, "ts": ts, "args": args}
        self._events.append(event)


def nested(spans: Sequence[Span]) -> list[Span]:
    """Return spans in order of time, each cut so that it ends within every one it began in."""
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


def _order(event: Mapping[str, object]) -> tuple[bool, float, float]:
    """Names first; then by time, what encloses before what it encloses."""
    at, lasts = event["ts"], event.get("dur", 0.0)
    assert isinstance(at, int | float)
    assert isinstance(lasts, int | float)
    return event["ph"] != "M", at, -lasts


SAMPLE_S = 0.5e-3
_VERBS = {kind: name for name, kind in CALLS.items()}
_TRAINER, _RING, _READERS = 1, 2, 3


@dataclass(slots=True)
class _Round:
    """The bytes of one message: the ring, what became of its chunks, how far readers were when."""

    reader_progress: ReaderProgress
    plan: StreamLayout
    packed: bool
    places: tuple[int, ...]
    marks: list[Mark] = field(default_factory=list)
    samples: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def sample(self) -> None:
        """Note for each reader how far it is, where that has changed."""
        now = time.perf_counter()
        for place in self.places:
            taken, seen = (
                self.reader_progress.taken_nbytes(place),
                self.samples.setdefault(place, [(now, 0)]),
            )
            if taken > seen[-1][1]:
                seen.append((now, taken))

    def run(self) -> None:
        """Sample until told to stop."""
        while not self.stop.wait(SAMPLE_S):
            self.sample()

    def end(self) -> None:
        """Stop, before the ring may close."""
        self.reader_progress.marks = None
        self.stop.set()
        if self.thread is not None:
            self.thread.join()
            self.sample()
            self.thread = None


@dataclass(frozen=True, slots=True)
class _Message:
    call: ObservedCall
    asked_s: float
    answered_s: float
    answer: Reply | WeightSyncError | None


class TraceObserver:
    """Looks on at one call of the sender, and writes `path` when it is over, well or not."""

    def __init__(self, worker: RankWorker, path: Path) -> None:
        self._worker = worker
        self._path = path
        self._wall = datetime.now(UTC)
        self._zero_s = time.perf_counter()
        self._commands: list[Span] = []
        self._began_s = 0.0
        self._rounds: list[_Round] = []
        self._asked: dict[int, float] = {}
        self._messages: list[_Message] = []

    def on_command_start(self, command: AnyCommand) -> None:
        if isinstance(command, End) and self._rounds:
            self._rounds[-1].end()
        self._began_s = time.perf_counter()

    def on_command_end(self, command: AnyCommand) -> None:
        if not isinstance(command, KeepAlive):
            name = type(command).__name__.lower()
            self._commands.append(Span(name, self._began_s, time.perf_counter()))
        engine = self._worker.engine
        if isinstance(command, Begin) and engine is not None and command.places.get(0):
            self._look_at(
                _Round(
                    engine.reader_progress,
                    engine.reader_progress.plan,
                    engine.reader_progress.packed,
                    tuple(command.places[0]),
                )
            )

    def on_request(self, call: ObservedCall) -> None:
        self._asked[id(call)] = time.perf_counter()

    def on_reply(self, call: ObservedCall, answer: Reply | WeightSyncError | None) -> None:
        asked_s = self._asked.pop(id(call))
        self._messages.append(_Message(call, asked_s, time.perf_counter(), answer))

    def on_done(self, error: BaseException | None) -> None:
        """Write the file. Raises OSError."""
        stop_s = time.perf_counter()
        for round_ in self._rounds:
            round_.end()
        messages = sorted(self._messages, key=lambda message: message.asked_s)
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

    def _look_at(self, round_: _Round) -> None:
        self._rounds.append(round_)
        round_.reader_progress.marks = round_.marks
        round_.sample()
        round_.thread = threading.Thread(target=round_.run, name="weightsync-trace", daemon=True)
        round_.thread.start()

    def _add_ring(self, line: Timeline) -> None:
        waits: list[Span] = []
        lanes: dict[str, list[Span]] = {}
        for round_ in self._rounds:
            waits += _pairs(round_.marks, "wanted", "acquired", "wait for a bucket")
            if not round_.packed:
                found = _pairs(round_.marks, "acquired", "published", "fingerprints")
                lanes.setdefault("fingerprints", []).extend(found)
                continue
            for name, span in _chunks(round_):
                lanes.setdefault(name, []).append(span)
        line.lane(_TRAINER, 2, "handing over", waits)
        line.process(_RING, "ring" if any(r.packed for r in self._rounds) else "memory")
        for tid, (name, spans) in enumerate(sorted(lanes.items()), 1):
            line.lane(_RING, tid, name, spans)

    def _add_readers(self, line: Timeline, messages: Sequence[_Message]) -> None:
        by_target: dict[str, list[_Message]] = {}
        for message in messages:
            by_target.setdefault(message.call.target, []).append(message)
        for pid, (target, own) in enumerate(by_target.items(), _READERS):
            line.process(pid, target)
            line.lane(pid, 1, "messages", list(_calls(own)))
            places = {message.call.place for message in own} - {None}
            self._add_reading(line, pid, [place for place in places if place is not None])
        if any(RELAY_READER in round_.places for round_ in self._rounds):
            pid = _READERS + len(by_target)
            line.process(pid, "relay to other hosts")
            self._add_reading(line, pid, [RELAY_READER])

    def _add_reading(self, line: Timeline, pid: int, places: Sequence[int]) -> None:
        samples = [(r, r.samples.get(place, [])) for r in self._rounds for place in places]
        line.lane(pid, 2, "bytes", [span for r, seen in samples for span in _reads(r, seen)])
        line.count(pid, "read_nbytes", [point for _, seen in samples for point in seen])


def trace_path(path: str | PathLike[str]) -> Path:
    """Return where a trace goes. Raises ConfigError where no file can be written, before any work.

    Called by the sender's user's call, on every rank.
    """
    found = Path(path)
    if found.is_dir() or not found.parent.is_dir():
        raise ConfigError(f"trace={str(found)!r} is not a file in a directory that exists")
    return found


def _version(messages: Sequence[_Message]) -> int | None:
    terms = (
        m.call.request.start if isinstance(m.call.request, UpdateRequest) else m.call.request
        for m in messages
        if isinstance(m.call.request, UpdateRequest | StartRequest)
    )
    return next((t.version for t in terms if t is not None and t.version is not None), None)


def _waits(commands: Sequence[Span]) -> Iterator[Span]:
    """Between the last byte and the last answer the sender waits for its receivers."""
    transfer, end = Transfer.__name__.lower(), End.__name__.lower()
    for first, second in pairwise(commands):
        if (first.name, second.name) == (transfer, end):
            yield Span("await receivers", first.stop_s, second.start_s)


def _steps(messages: Sequence[_Message]) -> Iterator[Span]:
    """Messages of one kind that were on their way together, as one; loading has its own spans."""
    runs: dict[str, list[Span]] = {}
    for message in messages:
        if isinstance(message.call.request, UpdateRequest):
            continue
        verb = _VERBS[type(message.call.request)]
        spans = runs.setdefault(verb, [])
        if spans and message.asked_s <= spans[-1].stop_s:
            stop_s = max(spans[-1].stop_s, message.answered_s)
            spans[-1] = Span(verb, spans[-1].start_s, stop_s)
        else:
            spans.append(Span(verb, message.asked_s, message.answered_s))
    for spans in runs.values():
        yield from spans


def _calls(messages: Sequence[_Message]) -> Iterator[Span]:
    """The messages to one receiver; in each, what its reply says that it spent, to the reply."""
    known: Mapping[str, float] = {}
    for message in messages:
        verb, answer = _VERBS[type(message.call.request)], message.answer
        args = {"error": str(answer)} if isinstance(answer, WeightSyncError) else {}
        yield Span(verb, message.asked_s, message.answered_s, args)
        if not isinstance(answer, StepReply):
            continue
        seconds = {k: v - known.get(k, 0.0) for k, v in answer.seconds.items()}
        known = answer.seconds
        at_s = message.answered_s
        for phase, spent_s in reversed(seconds.items()):
            if spent_s > 0:
                start_s = max(at_s - spent_s, message.asked_s)
                yield Span(phase, start_s, at_s, {"seconds": spent_s})
                at_s = start_s


def _pairs(marks: Sequence[Mark], first: str, second: str, name: str) -> list[Span]:
    """Spans from one mark of a chunk to another."""
    on_command_start = {chunk: at_s for what, chunk, at_s in marks if what == first}
    ended = [
        (chunk, at_s) for what, chunk, at_s in marks if what == second and chunk in on_command_start
    ]
    return [Span(name, on_command_start[chunk], at_s, {"chunk": chunk}) for chunk, at_s in ended]


def _chunks(round_: _Round) -> Iterator[tuple[str, Span]]:
    """Each chunk in its bucket: while it is packed, and then until the last reader let it go."""
    chunks, slots = round_.plan.chunks, round_.reader_progress.slots
    for span in _pairs(round_.marks, "acquired", "published", "pack"):
        j = span.args["chunk"]
        assert isinstance(j, int)
        lane = f"bucket {j % slots}"
        nbytes = chunks[j].stop - chunks[j].start
        args = {"chunk": j, "nbytes": nbytes}
        yield lane, Span(f"pack chunk {j}", span.start_s, span.stop_s, args)
        let_go = [_let_go(round_, seen, j) for seen in round_.samples.values()]
        known = [at_s for at_s in let_go if at_s is not None]
        if known:
            yield lane, Span(f"read chunk {j}", span.stop_s, max(span.stop_s, *known), args)


def _reads(round_: _Round, seen: Sequence[tuple[float, int]]) -> Iterator[Span]:
    """What one reader read: by chunk where there are chunks, else between two looks."""
    if not round_.packed:
        for (before_s, start), (at_s, stop) in pairwise(seen):
            yield Span("read", before_s, at_s, {"from": start, "to": stop})
        return
    published = _times(round_, "published")
    free_s = seen[0][0] if seen else 0.0
    let_go = [(_let_go(round_, seen, j), j) for j in range(len(round_.plan.chunks))]
    for at_s, group in groupby(let_go, key=itemgetter(0)):
        chunks = [j for _, j in group]
        if at_s is None or chunks[0] not in published:
            return
        name = f"read chunk {chunks[0]}" + (f" to {chunks[-1]}" if chunks[1:] else "")
        start_s = min(max(published[chunks[0]], free_s), at_s)
        yield Span(name, start_s, at_s, {"chunk": chunks[0], "chunks": len(chunks)})
        free_s = at_s


def _let_go(round_: _Round, seen: Sequence[tuple[float, int]], j: int) -> float | None:
    """When a reader was seen to have let a chunk go, or its bucket was taken for another before."""
    position = round_.plan.chunks[j].stop
    looked = [at_s for at_s, taken in seen if taken >= position][:1]
    reused = _times(round_, "acquired").get(j + round_.reader_progress.slots)
    return min([*looked, *([] if reused is None else [reused])], default=None)


def _times(round_: _Round, what: str) -> dict[int, float]:
    return {chunk: at_s for kind, chunk, at_s in round_.marks if kind == what}


Shown = bool | OnProgress
TracePath = str | PathLike[str]


def progress_callback(progress: Shown) -> OnProgress | None:
    """Return whom to tell; True is a bar on stderr.

    Raises BackendUnavailableError where that needs rich, ConfigError for what cannot be called.
    """
    if progress is True:
        try:
            bar: OnProgress = importlib.import_module("weightsync.progress_bar").ProgressBar()
        except ImportError as exc:
            raise BackendUnavailableError(
                f"progress=True needs rich ({exc}); pip install 'weightsync[cli]', or give a "
                "callback"
            ) from exc
        return bar
    if progress and not callable(progress):
        raise ConfigError(f"progress must be True, False or a callback, not {progress!r}")
    return progress or None


def watch_progress(group: RankGroup, callback: OnProgress | None) -> None:
    """Have `callback` told of every update of this ensemble. Called on rank 0 alone."""
    if callback is not None:
        group.observers.observers.append(ProgressObserver(group.worker, callback))


@contextmanager
def watching(group: RankGroup, trace: TracePath | None) -> Iterator[None]:
    """Around one call of the user, on rank 0 alone: those who look on learn when it is over."""
    tracer = TraceObserver(group.worker, trace_path(trace)) if trace is not None else None
    with group.observers.also(tracer), group.observers.looking():
        yield
