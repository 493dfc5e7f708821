"""A time line in Chrome's trace format, which Perfetto and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
