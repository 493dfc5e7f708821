"""SkyRL's configuration for a tiny model on a CPU."""

from __future__ import annotations

from typing import Any

from skyrl.train.config import SkyRLTrainConfig

from weightsync.integrations.skyrl import use

ENGINES = "generator.inference_engine"
SETTINGS = {
    "trainer.strategy": "fsdp",
    "trainer.logger": "console",
    "trainer.placement.colocate_all": "false",
    f"{ENGINES}.model_dtype": "float32",
    f"{ENGINES}.served_model_name": "tiny",
    f"{ENGINES}.gpu_memory_utilization": "0.1",
    f"{ENGINES}.enforce_eager": "true",
    f"{ENGINES}.max_num_seqs": "8",
    f"{ENGINES}.max_num_batched_tokens": "256",
    f"{ENGINES}.engine_init_kwargs.max_model_len": "256",
    f"{ENGINES}.engine_init_kwargs.worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker",
}


def arguments(model: object, **others: str) -> list[str]:
    """Return the words of a command line of SkyRL."""
    given = {"trainer.policy.model.path": str(model), **SETTINGS, **others}
    return [f"{name}={value}" for name, value in given.items()]


def configuration(model: object, **others: str) -> Any:
    """Return the configuration of a run with weightsync."""
    cfg = SkyRLTrainConfig.from_cli_overrides(arguments(model, **others))
    use(cfg)
    return cfg
