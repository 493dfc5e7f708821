"""weightsync as a checkpoint engine of NeMo-RL, between policy and vLLM workers apart from them.

    policy.generation.refit_transport=weightsync.integrations.nemo_rl:WeightsyncCheckpointEngine

Each rank of vLLM is a receiver with an HTTP endpoint of its own; the ranks of the policy are one
sender. Written against the abstract class of commit 7ea279abf (22 August 2026), version
0.6.0. **It has never run inside NeMo-RL**, nor with tensors on a GPU.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any

from weightsync.errors import ConfigError, MissingExtraError, ProtocolError, install_hint

try:
    from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

    from weightsync.integrations.rollouts import EngineSides, NamedTensor
except ImportError as exc:
    raise MissingExtraError(
        "this needs the extra server and a NeMo-RL with checkpoint engines of other modules "
        f"({exc}); {install_hint('server')}"
    ) from exc

_OF = "refit_cfg of weightsync.integrations.nemo_rl:WeightsyncCheckpointEngine"


class WeightsyncCheckpointEngine(EngineSides, CheckpointEngine):  # type: ignore[misc]  # no types
    """NeMo-RL makes one in each worker of the policy and of vLLM, and calls its methods.

    The options stand in `refit_cfg` under the engine's name: those of the engine for verl.
    `release_after_refit`, which NeMo-RL adds, changes nothing: connections stay, and buffers are
    used again. Raises ConfigError for `shard_expert_weights`: each worker takes whole tensors.
    """

    def __init__(self, *, bucket_size: int, **options: Any) -> None:
        options.pop("release_after_refit", None)
        if options.pop("shard_expert_weights", False):
            raise ConfigError(f"{_OF}: shard_expert_weights is not supported; set it to false")
        super().__init__(bucket_size, options, of=_OF, system="NeMo-RL")

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Mapping[str, Any]],
    ) -> None:
        """Be a rank of the policy, which sends to all workers of vLLM.

        Raises ProtocolError where the workers that NeMo-RL names are not those it counts.
        """
        targets = _endpoints(metadata, train_world_size, rollout_world_size)
        self.send_to(targets)

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Mapping[str, Any]],
    ) -> None:
        """Be a worker of vLLM. Raises ProtocolError as `init_policy_process_group`."""
        own = _endpoints(metadata, train_world_size, rollout_world_size)[rollout_rank]
        if own != dict(self.prepare()):
            raise ProtocolError(
                f"NeMo-RL gave rollout rank {rollout_rank} the endpoint {own['url']}, which is "
                "another worker's: the ranks of vLLM and the policy disagree"
            )
        self.serve()

    async def send_weights(self, weights: Iterable[NamedTensor]) -> None:
        """Send full tensors to all workers of vLLM; return when these have loaded them."""
        await self.send(weights, None)

    async def receive_weight_batches(self) -> AsyncGenerator[list[NamedTensor], None]:
        """Yield the tensors of the next update, each alone, as `EngineSides.receive` does."""
        async for pair in self.receive(None):
            yield [pair]


def _endpoints(
    metadata: Sequence[Mapping[str, Any]], train_world_size: int, rollout_world_size: int
) -> list[dict[str, str]]:
    """Return the endpoints of vLLM's workers, by rollout rank. Raises ProtocolError."""
    given = metadata[train_world_size:]
    if len(given) != rollout_world_size or not all({"url", "token"} <= set(one) for one in given):
        raise ProtocolError(
            f"NeMo-RL named {len(given)} endpoints of workers for {rollout_world_size} rollout "
            "ranks: do all of them have weightsync's engine?"
        )
    return [{"url": str(one["url"]), "token": str(one["token"])} for one in given]
