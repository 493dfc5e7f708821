"""A step of verl by our checkpoint engine beside one of `weightsync.connect`, on Ray actors.

`python -m benchmarks.verl_engine [--megabytes 512]`, where verl is installed (`make test-verl`
makes such an environment in .venv-verl). One trainer rank and one rollout worker, which copies each
tensor; the receivers of both ways do the same, and steps take turns. Prints medians of `--turns`
turns, and their ratio: of the transfer alone, and of all that verl's manager does for a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import ray
import torch
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

import weightsync as ws
from tests.verl import workers
from weightsync.integrations.rollouts import Options, RolloutReceiver
from weightsync.transports.http import HttpTransport

ROW = 1 << 12
"""Elements of a row: each tensor of the model has 16 MiB."""


class Trainer(workers.Trainer):
    """A rank whose model is large, and a connection of its own to another receiver."""

    def __init__(self, config: CheckpointEngineConfig, tensors: int) -> None:
        super().__init__(config, sharded=False)
        self.model = torch.nn.ParameterList(torch.randn(1 << 10, ROW) for _ in range(tensors))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect(self, endpoint: dict[str, str]) -> None:
        """Connect to a receiver outside of verl, with the same generator as source."""
        target = HttpTransport(endpoint["url"], endpoint["token"])
        self.sender = ws.connect(self.weights, to=target, delta="off")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send(self) -> float:
        """Send to it; return the seconds."""
        return float(self.sender.send_weights().seconds["total"])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """End both connections."""
        self.sender.close()
        self.checkpoint_engine.close()


class Adapter(workers.Adapter):
    """Copies each tensor, as the adapter of vLLM copies into its buffer."""

    async def update_weights(self, weights: Any, **_: Any) -> None:
        async for name, tensor in weights:
            copy(self.held, name, tensor)


class Rollout(workers.Rollout):
    """verl's worker with that adapter, and a receiver beside it with a hook that does the same."""

    def __init__(self, rollout_config: RolloutConfig, model_config: None) -> None:
        super().__init__(rollout_config, model_config)
        self.server_adapter = Adapter(rollout_config, model_config)
        self.copies: dict[str, torch.Tensor] = {}
        apply = rollout_config.checkpoint_engine.engine_kwargs["weightsync"]["apply"]
        self.plain = RolloutReceiver(Options(apply=apply, device="cpu"))
        self.plain.receiver.sink.load_weights = self.load

    def load(self, pairs: Any) -> None:
        """Copy each tensor."""
        for name, tensor in pairs:
            copy(self.copies, name, tensor)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def endpoint(self) -> dict[str, str]:
        """Serve the receiver outside of verl."""
        self.plain.serve()
        return dict(self.plain.endpoint)


def copy(held: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
    """Copy a tensor into memory that is kept from step to step."""
    if name in held:
        held[name].copy_(tensor)
    else:
        held[name] = tensor.clone()


def group(kind: Any, **arguments: Any) -> Any:
    """Return a worker group of one worker on the CPU."""
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1, name_prefix=kind.__name__)
    made = RayClassWithInitArgs(cls=ray.remote(kind), **arguments)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")


def main() -> None:
    """Measure, and print a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--apply", default="auto", choices=["auto", "staged", "in_place"])
    given = parser.parse_args()
    config = CheckpointEngineConfig(
        backend="weightsync",
        custom_backend_module="weightsync.integrations.verl",
        engine_kwargs={"weightsync": {"apply": given.apply}},
    )
    ray.init(num_cpus=4, object_store_memory=80 << 20, include_dashboard=False)
    rollout_config = RolloutConfig(
        name="vllm", tensor_model_parallel_size=1, checkpoint_engine=config
    )
    actor = group(Trainer, config=config, tensors=max(1, given.megabytes >> 4))
    rollout = group(Rollout, rollout_config=rollout_config, model_config=None)
    replica = workers.Replica(0, rollout_config, None)
    replica.workers = rollout.workers
    manager = CheckpointEngineManager(config, actor, [replica])
    actor.connect(rollout.endpoint()[0])
    seconds: dict[str, list[float]] = {"connect": [], "verl": [], "manager": []}
    for turn in range(given.turns + 2):
        plain = actor.send()[0]
        started = time.perf_counter()
        metrics = manager.update_weights(global_steps=turn)
        if turn >= 2:  # the first step finds out what there is, the second connects
            seconds["connect"].append(plain)
            seconds["verl"].append(metrics["sync/seconds"])
            seconds["manager"].append(time.perf_counter() - started)
    ours, theirs, whole = (statistics.median(found) * 1e3 for found in seconds.values())
    print(
        f"{given.megabytes} MiB: connect {ours:.1f} ms, verl {theirs:.1f} ms, {theirs / ours:.2f} x"
        f"; a step of verl's manager {whole:.1f} ms"
    )
    actor.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
