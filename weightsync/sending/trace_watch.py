"""Records one update as a time line: trainer, ring and readers, each chunk on its way.

Everything is timed by this process's clock. What happens inside a receiver is known by the seconds
of its replies, which are laid so that they end when the reply came; how far it has read is looked
up in the ring every `SAMPLE_S`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby, pairwise
from operator import itemgetter
from os import PathLike
from pathlib import Path

from weightsync.backends.ipc.sender import Mark, ReaderProgress
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.sending.commands import AnyCommand, Begin, End, KeepAlive, Transfer
from weightsync.sending.feeder import RELAY_READER, RankWorker
from weightsync.sending.watch import ObservedCall
from weightsync.tracing import Span, Timeline
from weightsync.weights.layout import StreamLayout
from weightsync.wire.messages import CALLS, Reply, StartRequest, StepReply, UpdateRequest

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
