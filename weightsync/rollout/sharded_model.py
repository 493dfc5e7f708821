"""The model of one worker: whole, or the shard of a tensor-parallel replica."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Any

import torch

from weightsync.errors import BackendUnavailableError, ConfigError
from weightsync.rollout.model import LoadedModel, load_model

try:
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig
except ImportError as exc:
    raise BackendUnavailableError(
        f"tensor parallel models need transformers ({exc}); pip install 'weightsync[hf]'"
    ) from exc


def load_for_worker(name: str, *, dtype: torch.dtype, shards: int, folder: Path) -> LoadedModel:
    """Load a model, or with more than one of `shards` this rank's part of it.

    transformers cuts it by the plan that the model brings. A built-in model is written into
    `folder` first. Raises ConfigError for a model that brings no plan, or does not divide.
    """
    whole = load_model(name, dtype=dtype)
    if shards == 1:
        return whole
    own = folder / f"model-{secrets.token_hex(4)}"
    try:
        whole.model.save_pretrained(own)
        model = _load_shard(own, dtype, name, shards)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return LoadedModel(model=model.eval(), tokenizer=whole.tokenizer, name=whole.name)


def _load_shard(directory: Path, dtype: torch.dtype, name: str, shards: int) -> Any:
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            local_files_only=True,
            distributed_config=DistributedConfig(tp_plan="auto"),
        )
    except (ValueError, RuntimeError, NotImplementedError) as exc:
        raise ConfigError(
            f"{name} cannot be cut into {shards} shards: {exc}; give another --tensor-parallel"
        ) from exc
    _own_memory(model)
    return model


def _own_memory(model: torch.nn.Module) -> None:
    # What was loaded may be views of a mapped file that is about to be removed.
    for tensor in (*model.parameters(), *model.buffers()):
        local = getattr(tensor, "_local_tensor", None)
        if local is None:
            tensor.data = tensor.data.clone()
        else:
            local.data = local.data.clone()
