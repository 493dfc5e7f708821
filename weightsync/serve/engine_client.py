"""The interface between the routes and an engine, and the engine's Prometheus metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from weightsync.errors import WeightSyncError
from weightsync.serve.messages import Delta, EngineStats, Job, ModelCard


class EngineClient(Protocol):
    """An engine with one or more replicas, used from one event loop."""

    @property
    def card(self) -> ModelCard:
        """The model that is served."""

    def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        """Yield the tokens of a job as they arrive, each completion up to its finish_reason.

        Ends after the last completion. Closing the generator early cancels the job. Raises
        NotReadyError when the weights may not be used, ConfigError for a prompt that the model
        cannot take, and other errors of the engine.
        """

    def cancel(self, request_id: str, index: int) -> None:
        """Stop one completion of a job. Its last delta still arrives, as "abort"."""

    async def stats(self) -> list[EngineStats]:
        """Return the statistics of each replica."""


logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 2.0

_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
_SHOWN: tuple[tuple[_Family, str, str, Callable[[EngineStats], float]], ...] = (
    (GaugeMetricFamily, "requests_running", "Completions at work.", lambda s: s.running),
    (GaugeMetricFamily, "requests_waiting", "Completions that wait.", lambda s: s.waiting),
    (CounterMetricFamily, "requests", "Prompts to be completed.", lambda s: s.requests_total),
    (CounterMetricFamily, "tokens", "Tokens generated.", lambda s: s.tokens_total),
    (
        GaugeMetricFamily,
        "tokens_per_second",
        "Tokens generated, by the last seconds.",
        lambda s: s.tokens_per_s,
    ),
)


def engine_metrics(engine: EngineClient) -> Callable[[], Awaitable[list[Metric]]]:
    """Return a function that reads all replicas' metrics, for `weight_router(more_metrics=)`.

    It returns no metrics for an engine that does not reply in time, so that the metrics of the
    weights are shown in any case.
    """

    async def read_metrics() -> list[Metric]:
        try:
            stats = await asyncio.wait_for(engine.stats(), STATS_TIMEOUT_S)
        except (TimeoutError, WeightSyncError) as exc:
            logger.info("the engine has no metrics: %s", str(exc) or "it does not answer")
            return []
        return list(metrics_of(stats))

    return read_metrics


def metrics_of(replicas: Sequence[EngineStats]) -> Iterator[Metric]:
    """Yield the metrics of all replicas, with the replica's index as label."""
    for kind, name, text, read in _SHOWN:
        metric = kind(f"weightsync_{name}", text, labels=["replica"])
        for index, stats in enumerate(replicas):
            metric.add_metric([str(index)], read(stats))
        yield metric
