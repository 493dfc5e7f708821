"""The model of one worker: whole, or the shard of a tensor-parallel replica."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weightsync.errors import ConfigError
from weightsync.serve.hugging_face import hf, hf_logging
from weightsync.serve.model import LoadedModel, load_model, own_memory
from weightsync.serve.model_choice import check_heads
from weightsync.serve.model_reader import load_reader

_HEADS = ("num_attention_heads", "num_key_value_heads")
"""Of a config; also where its file calls them otherwise."""


def load_for_worker(name: str, *, dtype: torch.dtype, shards: int, folder: Path) -> LoadedModel:
    """Load a model, or with several `shards` this rank's part of it; called by all its ranks.

    transformers cuts it by the plan that the model brings. A built-in model is written into
    `folder` first, which all ranks see. Raises ConfigError for a model that brings no plan, or does
    not divide.
    """
    hf_logging.disable_progress_bar()  # several processes write to one terminal
    if shards == 1:
        return load_model(name, dtype=dtype)
    directory = Path(name).expanduser()
    if (directory / "config.json").is_file():
        return _load_shard(directory, name, dtype, shards)
    first = dist.get_rank() == 0
    if first:
        load_model(name, dtype=dtype).model.save_pretrained(folder, is_main_process=True)
    dist.barrier()
    try:
        return _load_shard(folder, name, dtype, shards)
    finally:
        dist.barrier()
        if first:
            shutil.rmtree(folder, ignore_errors=True)


def _load_shard(directory: Path, name: str, dtype: torch.dtype, shards: int) -> LoadedModel:
    tokenizer, processor = load_reader(name)
    auto = hf.AutoModelForCausalLM if processor is None else hf.AutoModelForImageTextToText
    plan = hf.distributed.configuration_utils.DistributedConfig(tp_plan="auto")
    try:
        model: Any = auto.from_pretrained(
            directory, dtype=dtype, local_files_only=True, distributed_config=plan
        )
    except (OSError, ValueError, RuntimeError, NotImplementedError) as exc:
        raise ConfigError(
            f"{name} cannot be cut into {shards} shards: {exc}; give another --tensor-parallel"
        ) from exc
    text = model.config.get_text_config()
    heads, kv_heads = (getattr(text, key, None) for key in _HEADS)
    check_heads(name, heads, kv_heads, shards)
    own_memory(model)
    return LoadedModel(model=model.eval(), tokenizer=tokenizer, name=name, processor=processor)
