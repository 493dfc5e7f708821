"""Spans of OpenTelemetry around the calls of a sender, by its real SDK."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from torch import nn

import weightsync as ws


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_each_call_is_a_span_with_the_figures_of_its_report(spans: InMemorySpanExporter) -> None:
    receiver = ws.WeightReceiver(nn.Linear(4, 4))
    with ws.connect(nn.Linear(4, 4), to=receiver.handle) as sender:
        report = sender.send_weights()
        assert trace.get_current_span() is trace.INVALID_SPAN
        with sender.update(partial=True) as update:
            update.send([("bias", nn.Linear(4, 4).bias)])
    found = by_name(spans)
    calls = {name for name, span in found.items() if span.parent is None}
    assert calls == {f"weightsync.{n}" for n in ("connect", "send_weights", "update", "close")}
    assert found["weightsync.send_weights"].attributes == {
        "weightsync.version": 1,
        "weightsync.seconds": report.seconds["total"],
        "weightsync.gbps": report.gbps,
        "weightsync.stall_s": report.stall_s,
        "weightsync.nbytes": 80,
        "weightsync.path": "shared_memory",
        "weightsync.verified": "held",
        "weightsync.delta": False,
        "weightsync.update_id": report.update_id,
    }
    assert (found["weightsync.update"].attributes or {})["weightsync.version"] == 2


def test_each_message_of_an_update_is_a_span_below_its_call(spans: InMemorySpanExporter) -> None:
    def slow(pairs: Iterable[object]) -> None:
        for _ in pairs:
            time.sleep(0.1)

    receivers = [ws.WeightReceiver(nn.Linear(4, 4)), ws.WeightReceiver(slow, apply="in_place")]
    with ws.connect(nn.Linear(4, 4), to=[one.handle for one in receivers]) as sender:
        targets = sender.targets
        sender.send_weights()
    call = by_name(spans)["weightsync.send_weights"]
    assert call.context is not None
    below = [one for one in spans.get_finished_spans() if one.parent is not None]
    assert {one.parent.span_id for one in below if one.parent} == {call.context.span_id}
    took: dict[str, dict[str, float]] = {target: {} for target in targets}
    for one in below:
        assert (call.start_time or 0) <= (one.start_time or 0) <= (one.end_time or 0)
        assert (one.end_time or 0) <= (call.end_time or 0)
        assert one.attributes is not None
        took[str(one.attributes["weightsync.target"])][one.name] = float(
            str(one.attributes.get("weightsync.load_s", 0.0))
        )
    steps = {"weightsync.update_weights", "weightsync.finish_weight_update"}
    assert [set(one) for one in took.values()] == [steps, steps]
    assert took[targets[1]]["weightsync.update_weights"] >= 2 * 0.1


def test_an_error_is_recorded(spans: InMemorySpanExporter) -> None:
    def load(pairs: object) -> None:
        raise RuntimeError("planted")

    receiver = ws.WeightReceiver(load)
    with (
        ws.connect(nn.Linear(4, 4), to=receiver.handle) as sender,
        pytest.raises(ws.RemoteError, match="planted"),
    ):
        sender.send_weights()
    span = by_name(spans)["weightsync.send_weights"]
    assert span.status.status_code is StatusCode.ERROR
    assert [event.name for event in span.events] == ["exception"]
    message = by_name(spans)["weightsync.finish_weight_update"]
    assert message.status.status_code is StatusCode.ERROR
    assert [event.name for event in message.events] == ["exception"]


class Broken(SpanProcessor):
    """A processor that raises when a span begins, or when it ends."""

    def __init__(self, at: str) -> None:
        self._at = at

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self._at == "start":
            raise RuntimeError("planted")

    def on_end(self, span: ReadableSpan) -> None:
        if self._at == "end":
            raise RuntimeError("planted")


@pytest.mark.parametrize("at", ["start", "end"])
def test_a_processor_that_raises_does_not_affect_the_update(
    at: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    provider = TracerProvider()
    provider.add_span_processor(Broken(at))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    receiver = ws.WeightReceiver(nn.Linear(4, 4))
    with (
        caplog.at_level(logging.WARNING, "weightsync"),
        ws.connect(nn.Linear(4, 4), to=receiver.handle) as sender,
    ):
        assert sender.send_weights().version == 1
    assert receiver.version == 1
    assert any("OpenTelemetry: a span was not" in r.message for r in caplog.records)
    provider.shutdown()


def test_it_is_not_imported_for_programs_without_it() -> None:
    code = (
        "import sys, torch, weightsync as ws\n"
        "receiver = ws.WeightReceiver(torch.nn.Linear(2, 2))\n"
        "with ws.connect(torch.nn.Linear(2, 2), to=receiver.handle) as sender:\n"
        "    sender.send_weights()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
