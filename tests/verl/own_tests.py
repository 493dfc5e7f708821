"""verl's own test of its checkpoint engines, with ours in their place. Run by test_verl.py.

The workers are those of verl's `tests/checkpoint_engine/test_utils.py`, with FSDP on the trainer's
side. That test asks Ray for GPUs, and torch for NCCL; here it gets CPUs and Gloo.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from torch.distributed.fsdp import CPUOffloadPolicy
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayResourcePool
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import (
    CheckpointEngineConfig,
    FSDPEngineConfig,
    HFModelConfig,
    RolloutConfig,
)
from verl.workers.engine.fsdp import transformer_impl
from verl_tests.checkpoint_engine import test_utils

from tests.ray.sandbox import start
from tests.vllm.tiny import make_model, save


class Trainer(test_utils.TrainingWorkerTest):  # type: ignore[misc]  # verl has no types here
    """verl's trainer of tests, whose process group has no device but the CPU."""

    def __init__(self, **arguments: Any) -> None:
        initialize_global_process_group_ray(backend="cpu:gloo")
        import_external_libs(arguments["checkpoint_engine_config"].custom_backend_module)
        # Pinned memory needs an accelerator.
        transformer_impl.CPUOffloadPolicy = lambda **_: CPUOffloadPolicy(pin_memory=False)
        super().__init__(**arguments)


def fsdp2(**arguments: Any) -> FSDPEngineConfig:
    """Return the config of verl's tests with FSDP2: torch's FSDP1 refuses to run on a CPU."""
    return FSDPEngineConfig(**arguments | {"strategy": "fsdp2"})


async def main(folder: str) -> None:
    """Send three times, and have verl's workers compare what they hold with the checkpoint."""
    config = CheckpointEngineConfig(
        backend="weightsync",
        update_weights_bucket_megabytes=1,
        custom_backend_module="weightsync.integrations.verl",
    )
    model_config = HFModelConfig(
        path=folder,
        use_remove_padding=False,
        override_config={"attn_implementation": "eager"},
    )
    rollout_config = RolloutConfig(name="vllm", checkpoint_engine=config)
    pools = [
        RayResourcePool([size], max_colocate_count=1, name_prefix=str(size))
        for size in (2, 4)  # two replicas of two workers
    ]
    test_utils.TrainingWorkerTest, test_utils.FSDPEngineConfig = Trainer, fsdp2
    actor = test_utils.create_trainer_worker_group(pools[0], model_config, config)
    actor.reset()
    rollout, replicas = await test_utils.create_rollout_worker_group(
        pools[1], model_config, rollout_config
    )
    manager = CheckpointEngineManager(config=config, actor_wg=actor, replicas=replicas)
    for _ in range(3):
        await manager.update_weights()
        rollout.check_weights()
    ray.get(actor.execute_checkpoint_engine(["close"] * actor.world_size))


if __name__ == "__main__":
    start(cpus=8)
    with tempfile.TemporaryDirectory() as made:
        save(make_model(Path(made), tied=False).bfloat16(), Path(made))  # as verl's test has it
        asyncio.run(main(made))
    ray.shutdown()
    print("three updates are equal")
    sys.exit(0)
