"""weightsync as a checkpoint engine of verl, between a trainer and separate rollout workers.

    actor_rollout_ref.rollout.checkpoint_engine.backend=weightsync
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=weightsync.integrations.verl

Each rollout worker is a receiver with an HTTP endpoint of its own; the ranks of the trainer are one
sender. With tensors on a GPU this has never run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from weightsync.errors import MissingExtraError, install_hint

try:
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

    from weightsync.integrations.rollouts import Endpoint, EngineSides, NamedTensor
except ImportError as exc:
    raise MissingExtraError(
        f"this needs the extra server and a verl with checkpoint engines, 0.9.1 ({exc}); "
        f"{install_hint('server')}"
    ) from exc

BACKEND = "weightsync"


@CheckpointEngineRegistry.register(BACKEND)
class WeightsyncCheckpointEngine(EngineSides, CheckpointEngine):  # type: ignore[misc]  # verl has no types here
    """verl makes one in each process of the trainer and of the rollout, and calls its methods.

    The options are those of `checkpoint_engine.engine_kwargs.weightsync`:

    - `timeout_s` bounds every wait for progress, also that of a rollout worker for the trainer.
    - `apply`: with `staged`, a worker is given tensors when all of them have arrived at all
      workers; this takes the memory of the model's bytes. `in_place` gives them as they come.
    - `transfer_backend` is the `backend` of `weightsync.connect`, whose other settings have their
      names; those about names and dtypes of tensors, ranks and endpoints are verl's to say.
    - `device` of the tensors that a rollout worker is given; by default the current GPU if torch
      has one.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **options: Any) -> None:
        super().__init__(bucket_size, options, of="engine_kwargs.weightsync", system="verl")

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Endpoint]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group`: for the trainer's ranks all endpoints."""
        targets = list(metadata[actor_wg_world_size:])
        return (
            {"targets": [targets] * actor_wg_world_size},
            {"targets": [None] * rollout_world_size},
        )

    def init_process_group(self, targets: Sequence[Endpoint] | None) -> None:
        """Serve as a receiver, or note the endpoints to which this rank sends."""
        if targets is None:
            self.serve()
        else:
            self.send_to(targets)

    async def send_weights(
        self, weights: Iterable[NamedTensor], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send full tensors to all rollout workers; return when these have loaded them.

        As `EngineSides.send`. Returns the figures of `SyncReport.metrics`.
        """
        report = await self.send(weights, label_of(global_steps))
        return report.metrics()

    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[NamedTensor]:
        """Yield the tensors of the next update, as `EngineSides.receive`."""
        return self.receive(label_of(global_steps))

    def finalize(self) -> None:
        """Do nothing: buffers and connection are used again by the next step."""


def label_of(global_steps: int | None) -> str | None:
    """Return the label of a step's weights, by which a rollout worker knows them."""
    return None if global_steps is None else f"step-{global_steps}"
