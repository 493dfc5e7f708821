"""Workers of verl on a CPU: a sharded trainer, and rollout workers that keep what they get."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.checkpoint_engine import (
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
    ColocatedCheckpointEngine,
)
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout import BaseRollout, RolloutReplica

from weightsync.tensors import as_bytes
from weightsync.weights.copying.fingerprint import mix64, to_hex

SIZES = (64, 48, 7, 33)


def make_model(step: int) -> nn.Module:
    """Return the same model in every process: layers of several sizes, and a buffer of bfloat16."""
    torch.manual_seed(step)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(SIZES)]
    layers[1].to(torch.bfloat16)
    return nn.Sequential(*layers)


def digests(step: int) -> dict[str, str]:
    """Return the fingerprint of every tensor of `make_model(step)`."""
    return {name: digest(tensor) for name, tensor in make_model(step).state_dict().items()}


def digest(tensor: torch.Tensor) -> str:
    """Return the fingerprint of a tensor's bytes, dtype and shape."""
    held = to_hex(mix64(as_bytes(tensor.detach().cpu().contiguous())))
    return f"{held} {tensor.dtype} {list(tensor.shape)}"


class Trainer(Worker):  # type: ignore[misc]  # verl has no types here
    """A rank of a trainer, with the two methods that verl's checkpoint manager calls."""

    def __init__(self, config: CheckpointEngineConfig, *, sharded: bool = True) -> None:
        super().__init__()
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.model = make_model(0)
        self.fails_at = self.lacks = ""
        if sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in self.model.children():
                fully_shard(layer, mesh=mesh)
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=dist.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs.get(config.backend, {}),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, step: int, fails_at: str = "", lacks: str = "") -> None:
        """Make the weights those of `make_model(step)`; fail at a tensor, or leave one out."""
        self.fails_at, self.lacks = fails_at, lacks
        wanted = make_model(step).state_dict()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                full = wanted[name]
                local = getattr(parameter, "to_local", lambda held=parameter: held)()
                if local is not parameter:
                    size, rank = dist.get_world_size(), dist.get_rank()
                    full = (*full.chunk(size), *[full[:0]] * size)[rank]
                local.copy_(full)

    def weights(self) -> Any:
        """Yield full tensors, gathered by all ranks, as verl's engines do."""
        for name, parameter in self.model.named_parameters():
            if name == self.fails_at:
                raise RuntimeError("planted: the trainer fails")
            if name == self.lacks:
                continue
            gather = getattr(parameter, "full_tensor", None)
            yield name, gather() if gather else parameter.detach()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def held_by_naive(self) -> dict[str, str]:
        """Return the fingerprints of what verl's engine for one process gives its adapter."""
        naive = ColocatedCheckpointEngine(bucket_size=1 << 20)
        naive.send_weights(self.weights())
        return {name: digest(tensor) for name, tensor in naive.receive_weights()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Send the weights. Called by verl's manager."""
        return await self.checkpoint_engine.send_weights(self.weights(), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the engine. Called by verl's manager."""
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Adapter(BaseRollout):  # type: ignore[misc]  # as above
    """Keeps the fingerprints of what it is given; `fails_at` and `dies_at` name tensors."""

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig) -> None:
        super().__init__(config, model_config, device_mesh=None)
        self.replica_rank, self.is_leader_rank = 0, True
        self.held: dict[str, str] = {}
        self.steps: list[int | None] = []
        self.fails_at = self.dies_at = ""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing."""

    async def release(self) -> None:
        """Do nothing."""

    async def update_weights(
        self,
        weights: AsyncIterator[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Take the weights of one step."""
        self.held = {}
        async for name, tensor in weights:
            if name == self.dies_at:
                os._exit(1)
            if name == self.fails_at:
                raise RuntimeError("planted: the adapter fails")
            self.held[name] = digest(tensor)
        self.steps.append(global_steps)


class Rollout(CheckpointEngineWorker):  # type: ignore[misc]  # as above
    """verl's worker with that adapter."""

    def __init__(self, rollout_config: RolloutConfig, model_config: HFModelConfig) -> None:
        super().__init__(rollout_config, model_config, Adapter(rollout_config, model_config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def held(self) -> Any:
        """Return the fingerprints held, and the steps so far."""
        return self.server_adapter.held, self.server_adapter.steps

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def plant(self, fails_at: str = "", dies_at: str = "") -> None:
        """Fail, or die, at a tensor of the next step."""
        self.server_adapter.fails_at, self.server_adapter.dies_at = fails_at, dies_at


class Replica(RolloutReplica):  # type: ignore[misc]  # as above
    """A replica whose workers exist already; its server is not started."""

    async def launch_servers(self) -> None:
        """Do nothing."""

    def get_ray_class_with_init_args(self) -> Any:
        """Unused."""

    async def abort_all_requests(self, **_: Any) -> None:
        """Do nothing: no requests."""

    async def resume_generation(self) -> None:
        """Do nothing."""

    async def release_kv_cache(self) -> None:
        """Do nothing."""

    async def resume_kv_cache(self) -> None:
        """Do nothing."""
