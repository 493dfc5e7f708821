"""What routes need of an engine, and its figures for Prometheus."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from weightsync.errors import WeightSyncError
from weightsync.serve.engine_messages import Delta, EngineStats, Job
from weightsync.serve.steps import ModelCard


class EngineClient(Protocol):
    """An engine, or several replicas of one, as one event loop sees it."""

    @property
    def card(self) -> ModelCard:
        """The model that is served."""

    def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        """Yield the tokens of a job as they come, each completion up to its finish_reason.

        Ends after the last completion has ended. Closing it early cancels the job. Raises what the
        engine raises: NotReadyError where the weights may not be used, ConfigError for a prompt
        that the model cannot take.
        """

    def cancel(self, request_id: str, index: int) -> None:
        """Stop one completion of a job: its last delta, finish_reason "abort", still comes."""

    async def stats(self) -> list[EngineStats]:
        """How each replica is doing."""


logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0

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
    """Return what asks every replica, for `weight_router(more_metrics=)`.

    An engine that does not answer in time has no metrics; those of the weights are shown anyway.
    """

    async def ask() -> list[Metric]:
        try:
            stats = await asyncio.wait_for(engine.stats(), ANSWER_TIMEOUT_S)
        except (TimeoutError, WeightSyncError) as exc:
            logger.info("the engine has no metrics: %s", str(exc) or "it does not answer")
            return []
        return list(metrics_of(stats))

    return ask


def metrics_of(replicas: Sequence[EngineStats]) -> Iterator[Metric]:
    """Yield the metrics of all replicas, which are numbered by a label."""
    for kind, name, text, read in _SHOWN:
        metric = kind(f"weightsync_{name}", text, labels=["replica"])
        for index, stats in enumerate(replicas):
            metric.add_metric([str(index)], read(stats))
        yield metric
