"""The backend between hosts: a chain of hosts, connected by torch.distributed's Gloo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, cast

from weightsync.backends.base import (
    Backend,
    Endpoint,
    Reach,
    TrainerWeightTransferEngine,
    TransferOptions,
    WeightTransferEngine,
)
from weightsync.weights.source import WeightSource

GLOO_COST = 5.8
BUCKET_NBYTES = 16 << 20
BUCKETS = 4


class GlooBackend(Backend):
    """Path `gloo`: rank 0 sends to the first host, and each host to the next one."""

    name: ClassVar[str] = "gloo"
    requires: ClassVar[Mapping[str, str]] = {"ipc": "shared_memory"}
    collective: ClassVar[bool] = True

    def reach(self, trainer: Endpoint, receiver: Endpoint) -> Sequence[Reach]:
        """Return the path, for rank 0 only. The join of the group shows whether it works."""
        return [Reach("gloo", GLOO_COST)] if trainer.rank == 0 else []

    def adjust(self, options: TransferOptions) -> TransferOptions:
        """Set `packed`, and the same buckets for every ring of the sender: one table fits all."""
        return replace(
            options,
            packed=True,
            bucket_nbytes=options.bucket_nbytes or BUCKET_NBYTES,
            num_buckets=options.num_buckets or BUCKETS,
        )

    def trainer_engine(
        self,
        source: WeightSource,
        path: str,
        options: TransferOptions,
        bases: Mapping[str, TrainerWeightTransferEngine],
    ) -> TrainerWeightTransferEngine:
        """Return the engine that reads the ring of `bases["ipc"]`."""
        # Each half is imported only where it is used: both import torch.distributed.
        from weightsync.backends.gloo.trainer import GlooTrainerEngine  # noqa: PLC0415
        from weightsync.backends.ipc.sender import IpcTrainerEngine  # noqa: PLC0415

        return GlooTrainerEngine(cast(IpcTrainerEngine, bases["ipc"]), options)

    def receiver_engine(self, device_keys: Sequence[str]) -> WeightTransferEngine:
        """Return the engine that joins the group, or reads the ring of a member."""
        from weightsync.backends.gloo.receiver import (  # noqa: PLC0415  # as above
            GlooWeightTransferEngine,
        )

        return GlooWeightTransferEngine(device_keys)
