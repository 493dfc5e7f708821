"""The work of a rank whose updates are traced, and shown as progress."""

from __future__ import annotations

from typing import Any
from unittest import mock

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import weightsync as ws
from tests.e2e import ranks_at_work as work
from tests.e2e.ranks_at_work import Digests, Seen
from weightsync.observe import ProgressObserver


def send_traced(
    rank: int,
) -> tuple[Seen, Digests, dict[str, list[Any]], list[tuple[Any, ...]]]:
    """Send beside a tracer and a progress callback; return what both have of the ranks' bytes."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    shown: list[tuple[Any, ...]] = []

    def show(p: ws.Progress) -> None:
        shown.append((p.phase, p.done_nbytes, p.total_nbytes, dict(p.receivers)))

    observer = ProgressObserver(show)
    observers = work.kept().sender._group.observers
    observers.append(observer)
    with mock.patch.object(trace, "get_tracer", provider.get_tracer):
        outcome, full = work.step_and_send(rank)
    observers.remove(observer)
    keys = ("weightsync.from_ranks", "weightsync.from_ranks_nbytes")
    spans = {
        span.name: [span.attributes[key] for key in keys]
        for span in exporter.get_finished_spans()
        if span.attributes and keys[0] in span.attributes
    }
    return outcome, full, spans, shown
