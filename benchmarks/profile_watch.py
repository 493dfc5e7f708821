"""Instrumentation of a profile: methods of both processes, timed by a clock that they share."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from benchmarks.rivals.contract import Reader
from benchmarks.rivals.ours import Receiver, Trainer

REST = "unexplained, in the receiver: "

SENDER = {
    "weightsync.update.outgoing:UpdateTransaction": {"_transfer": "transfer", "finish": "finish"},
    "weightsync.update.fleet:Fleet": {"begin": "leave"},
    "weightsync.backends.ipc.sender:IpcTrainerEngine": {"begin": "begin", "transfer": "own"},
    "weightsync.shm.ring:RingWriter": {"acquire": "own wait", "drain": "own wait"},
}
RECEIVER = {
    "weightsync.receiver:WeightReceiver": {"dispatch": "dispatch"},
    "weightsync.backends.ipc.transfer:IncomingTransfer": {
        "run": "run",
        "_published_table": "table",
        "_compile": "compile",
        "_compare": "compare",
    },
    "weightsync.update.session:ReceiverSession": {"_prepare": "prepare", "_finish": "commit"},
    "weightsync.shm.ring:RingReader": {"wait": "wait", "release": "release"},
    "weightsync.weights.copying.copy_plan:HostCopies": {"run": "copy"},
    "weightsync.weights.copying.copy_plan:CopyAndHash": {"run": "copy and fingerprint"},
    "weightsync.weights.copying.copy_plan:HostCopyUnit": {
        "copy": "copy",
        "fingerprint": "fingerprint",
        "copy_and_fingerprint": "copy and fingerprint",
    },
}
OPTIONAL = {"copy and fingerprint"}
"""Not in every version."""

INSIDE = {
    "compile": "look up the programs of copies",
    "copy": "copy",
    "copy and fingerprint": "copy and fingerprint, fused",
    "fingerprint": "fingerprint of what was written",
    "wait": "wait for the sender to fill a bucket",
    "release": "release of a bucket",
    "table": "wait for the sender's fingerprints",
    "compare": "compare fingerprints",
}


class Span(NamedTuple):
    """One call: its label, and its start and end in seconds of the shared clock."""

    name: str
    start: float
    stop: float

    @property
    def took(self) -> float:
        """Seconds."""
        return self.stop - self.start


SPANS: list[Span] = []
"""The spans of this process since the last reading."""


def watch(places: Mapping[str, Mapping[str, str]]) -> None:
    """Wrap these methods; methods that this version lacks are left out."""
    for place, methods in places.items():
        module, _, owner = place.partition(":")
        kind = getattr(importlib.import_module(module), owner)
        for method, name in methods.items():
            if hasattr(kind, method):
                setattr(kind, method, _timed(getattr(kind, method), name))


def _timed(method: Any, name: str) -> Any:
    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            SPANS.append(Span(name, began, time.perf_counter()))

    return timed


def taken() -> list[Span]:
    """Return the spans so far, and clear the list."""
    found = SPANS.copy()
    SPANS.clear()
    return found


class WatchedReceiver(Receiver):
    """Answers `load` with its spans."""

    def __init__(self, module: nn.Module, extra: Any) -> None:
        watch(RECEIVER)
        super().__init__(module, extra)

    def load(self, way: str, message: Any) -> object:
        return taken()


class WatchedTrainer(Trainer):
    """Computes the phases of each update."""

    def reader(self) -> type[Reader]:
        return WatchedReceiver

    def profile(self, way: str) -> dict[str, float]:
        """Send one update; return seconds by phase, in order; they add up to the update's."""
        taken()
        self._crew.ask("load", way, None)
        began = time.perf_counter()
        self.update(way)
        ended = time.perf_counter()
        (there,) = self._crew.ask("load", way, None)
        return phases(Span("send", began, ended), taken(), [Span(*span) for span in there])


def phases(send: Span, here: Sequence[Span], there: Sequence[Span]) -> dict[str, float]:
    """Return seconds by phase of one update, and the sender's concurrent work under `beside: `."""

    def all_of(spans: Sequence[Span], name: str) -> list[Span]:
        return [span for span in spans if span.name == name]

    def total(spans: Sequence[Span], name: str) -> float:
        return sum(span.took for span in all_of(spans, name))

    (transfer,), (finish,), leave = (all_of(here, n) for n in ("transfer", "finish", "leave"))
    update, finishing = all_of(there, "dispatch")
    (run,) = all_of(there, "run")
    inside = {title: total(there, name) for name, title in INSIDE.items()}
    prepare, commit = total(there, "prepare"), total(there, "commit")
    begin = total(here, "begin")
    return {
        "greeting, ids, terms": leave[0].start - send.start - begin,
        "have tensors moved, plan": begin,
        "start message on its way": update.start - leave[0].start,
        "receiver opens the update": run.start - update.start,
        **inside,
        "prepare": prepare,
        "answer on its way": transfer.stop - update.stop,
        "between the two messages": finish.start - transfer.stop,
        "finish message on its way": finishing.start - finish.start,
        "commit: swap": commit,
        "answer to finish": finish.stop - finishing.stop,
        "report": send.stop - finish.stop,
        REST + "between copies": run.took - sum(inside.values()),
        REST + "around prepare": update.stop - run.stop - prepare,
        REST + "around the swap": finishing.took - commit,
        "beside: the sender's packing or fingerprints": total(here, "own")
        - total(here, "own wait"),
        "beside: the sender's wait for readers": total(here, "own wait"),
    }
