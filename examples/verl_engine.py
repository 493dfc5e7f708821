"""A trainer and two rollout workers under verl's checkpoint manager; two lines are weightsync's.

It runs without a GPU. In a run of verl.trainer.main_ppo the same two lines are its configuration:

    actor_rollout_ref.rollout.checkpoint_engine.backend=weightsync
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=weightsync.integrations.verl

python examples/verl_engine.py
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import nn
from verl.checkpoint_engine import (
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.rollout import BaseRollout, RolloutReplica

PROMPT = torch.full((4,), 0.5)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class Trainer(Worker):  # type: ignore[misc]  # verl has no types here
    """Fits a small model to a line."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        dist.init_process_group("gloo")
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            is_master=dist.get_rank() == 0,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self) -> list[float]:
        """Take a step, and return what the model answers."""
        x = torch.randn(32, 4)
        loss = (self.model(x) - x[:, :2]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.inference_mode():
            return list(self.model(PROMPT).tolist())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Send the weights. verl's manager calls it."""
        weights = ((n, p.detach()) for n, p in self.model.named_parameters())
        return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the engine. verl's manager calls it."""
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Adapter(BaseRollout):  # type: ignore[misc]  # as above
    """The place of a vLLM or an SGLang server: a model in the worker itself."""

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config, None, device_mesh=None)
        self.replica_rank, self.is_leader_rank = 0, True
        self.model = make_model()

    async def update_weights(
        self, weights: AsyncIterator[tuple[str, torch.Tensor]], **_: Any
    ) -> None:
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            async for name, tensor in weights:
                own[name].copy_(tensor)

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...


class Rollout(CheckpointEngineWorker):  # type: ignore[misc]  # as above
    """verl's worker with that adapter."""

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config, None, Adapter(config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generate(self) -> list[float]:
        with torch.inference_mode():
            return list(self.server_adapter.model(PROMPT).tolist())


class Replica(RolloutReplica):  # type: ignore[misc]  # as above
    """A replica without a server to pause."""

    async def launch_servers(self) -> None: ...

    def get_ray_class_with_init_args(self) -> None: ...

    async def abort_all_requests(self, **_: Any) -> None: ...

    async def resume_generation(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...


def group(kind: type, size: int, **arguments: Any) -> RayWorkerGroup:
    """Start workers on CPUs."""
    pool = RayResourcePool(process_on_nodes=[size], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(kind), **arguments)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")


def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False)  # on a cluster: ray.init()
    config = CheckpointEngineConfig(
        backend="weightsync",  # before: "nccl"
        custom_backend_module="weightsync.integrations.verl",  # before: none
    )
    rollout_config = RolloutConfig(name="vllm", checkpoint_engine=config)
    trainer = group(Trainer, 1, config=config)
    rollout = group(Rollout, 2, config=rollout_config)
    replicas = [Replica(rank, rollout_config, None) for rank in range(2)]
    for replica, worker in zip(replicas, rollout.workers, strict=True):
        replica.workers = [worker]
    manager = CheckpointEngineManager(config, trainer, replicas)
    for step in (1, 2, 3):
        (trained,) = trainer.step()
        metrics = manager.update_weights(global_steps=step)
        print(f"version {metrics['sync/version']} in {metrics['sync/seconds']:.3f} s")
        for generated in rollout.generate():
            print("the rollout's answer is the trainer's:", generated == trained)
    ray.get(trainer.execute_checkpoint_engine(["close"]))  # frees its shared memory
    ray.shutdown()


if __name__ == "__main__":
    main()
