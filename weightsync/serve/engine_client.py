"""What the HTTP side needs of an engine: jobs in, tokens out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

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
