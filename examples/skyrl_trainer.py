"""SkyRL's own entry point, with weightsync between trainer and engines; two lines are weightsync's.

python examples/skyrl_trainer.py trainer.policy.model.path=MODEL ...

The same without a program, by a word more on SkyRL's command line:

    trainer.override_entrypoint=weightsync.integrations.skyrl
"""

from __future__ import annotations

import sys

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import initialize_ray, validate_cfg

from weightsync.integrations.skyrl import BACKEND  # added


@ray.remote(num_cpus=1)
def train(cfg: SkyRLTrainConfig) -> None:
    """Train as the configuration says."""
    BasePPOExp(cfg).run()


def main(words: list[str]) -> None:
    """Read the configuration from the command line, and train in a task of Ray."""
    cfg = SkyRLTrainConfig.from_cli_overrides(words)
    cfg.generator.inference_engine.weight_sync_backend = BACKEND  # before: "nccl"
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(train.remote(cfg))


if __name__ == "__main__":
    main(sys.argv[1:])
