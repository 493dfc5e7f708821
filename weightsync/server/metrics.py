"""The `/metrics` of a receiver, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weightsync.update.lifecycle import State
from weightsync.wire.messages import SharedMemoryUsage, Status, StepReply, WorkerReport

MoreMetrics = Callable[[], Awaitable[Sequence[Metric]]]
"""Returns an app's own metrics; awaited in the app's event loop for every GET of `/metrics`."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(report: WorkerReport, more: Sequence[Metric] = ()) -> bytes:
    """Return the text of `/metrics` for a receiver's report, with `more` at its end."""
    return generate_latest(_Metrics(report, more))


class _Metrics(Collector):
    """The metrics of a report, and more, in the form that prometheus_client renders."""

    def __init__(self, report: WorkerReport, more: Sequence[Metric]) -> None:
        self._report = report
        self._more = more

    def collect(self) -> Iterator[Metric]:
        yield from _of_status(self._report.status)
        updates = CounterMetricFamily("weightsync_updates", "Updates by result.", labels=["result"])
        for result, count in sorted(self._report.updates_total.items()):
            updates.add_metric([result], count)
        yield updates
        if self._report.last_reply is not None:
            yield from _of_reply(self._report.last_reply)
        yield from self._more


def _of_status(status: Status) -> Iterator[Metric]:
    if status.workers:
        yield GaugeMetricFamily(
            "weightsync_workers",
            "Receivers behind this URL; each has metrics of its own below its path.",
            value=len(status.workers),
        )
    yield GaugeMetricFamily(
        "weightsync_version", "Version of the weights in use.", value=status.version
    )
    yield GaugeMetricFamily(
        "weightsync_may_generate",
        "1 where the weights in use are one whole version.",
        value=int(status.may_generate),
    )
    yield GaugeMetricFamily(
        "weightsync_paused", "1 while generation is paused.", value=int(status.paused)
    )
    state = GaugeMetricFamily("weightsync_state", "1 for the current state.", labels=["state"])
    for one in State:
        state.add_metric([one.value], int(one.value == status.state))
    yield state
    yield from _of_shared_memory(status.shared_memory)


def _of_shared_memory(usage: Sequence[SharedMemoryUsage]) -> Iterator[Metric]:
    """Mappings opened for senders, by kind; a kind that grows with each update is a leak."""
    nbytes = GaugeMetricFamily(
        "weightsync_shared_memory_bytes", "Bytes of memory opened for senders.", labels=["kind"]
    )
    entries = GaugeMetricFamily(
        "weightsync_shared_memory_entries", "Mappings opened for senders.", labels=["kind"]
    )
    oldest = GaugeMetricFamily(
        "weightsync_shared_memory_oldest_seconds", "Age of the oldest mapping.", labels=["kind"]
    )
    unreleased = GaugeMetricFamily(
        "weightsync_shared_memory_unreleased", "Readers that still hold a chunk.", labels=["kind"]
    )
    for kind in sorted({entry.kind for entry in usage}):
        of_kind = [entry for entry in usage if entry.kind == kind]
        nbytes.add_metric([kind], sum(entry.nbytes for entry in of_kind))
        entries.add_metric([kind], len(of_kind))
        oldest.add_metric([kind], max(entry.age_s for entry in of_kind))
        unreleased.add_metric([kind], sum(len(entry.unreleased) for entry in of_kind))
    yield from (nbytes, entries, oldest, unreleased)


def _of_reply(reply: StepReply) -> Iterator[Metric]:
    seconds = GaugeMetricFamily(
        "weightsync_last_update_seconds", "Seconds of the last update.", labels=["phase"]
    )
    for phase, value in sorted(reply.seconds.items()):
        seconds.add_metric([phase], value)
    yield seconds
    speed = GaugeMetricFamily(
        "weightsync_last_update_bytes_per_second",
        "Bytes of the last update per second of a phase.",
        labels=["phase"],
    )
    for phase, value in sorted(reply.seconds.items()):
        if value > 0 and phase != "wait":
            speed.add_metric([phase], reply.nbytes / value)
    yield speed
    yield GaugeMetricFamily(
        "weightsync_last_update_peak_extra_bytes",
        "Bytes held beside the model during the last update.",
        value=reply.peak_extra_nbytes,
    )
    yield GaugeMetricFamily(
        "weightsync_last_update_bytes", "Bytes of the last update.", value=reply.nbytes
    )
    yield GaugeMetricFamily(
        "weightsync_last_update_stall_seconds",
        "Seconds for which the last update stopped generation.",
        value=reply.stall_s,
    )
    if reply.sources:
        ranks = GaugeMetricFamily(
            "weightsync_last_update_bytes_from_rank",
            "Bytes that the last update copied from each rank of a trainer of several.",
            labels=["rank"],
        )
        for rank, nbytes in sorted(reply.sources.items()):
            ranks.add_metric([str(rank)], nbytes)
        yield ranks
