"""Models and objects of other systems that `connect` takes as sources."""

from __future__ import annotations

import logging

from torch import nn

from weightsync.arguments import Dtype
from weightsync.integrations.deepspeed import zero_source
from weightsync.integrations.vllm.source import described_source
from weightsync.weights.sinks.module_sink import Rename
from weightsync.weights.sources.base import WeightSource
from weightsync.weights.sources.flat import fsdp1_source

logger = logging.getLogger(__name__)


def source_of(given: object, *, dtype: Dtype | None, rename: Rename | None) -> WeightSource | None:
    """Return the source of a model or an object of another system, None of any other one."""
    if isinstance(given, nn.Module):
        _note_names_of_megatron(given)
        makers = (fsdp1_source, zero_source)
        made = (maker(given, dtype=dtype, rename=rename) for maker in makers)
        return next((source for source in made if source is not None), None)
    return described_source(given, dtype=dtype, rename=rename)


def _note_names_of_megatron(model: nn.Module) -> None:
    """Say that a model of Megatron-Core is sent under its own names, as this rank has it."""
    if any(type(part).__module__.startswith("megatron.core.") for part in model.modules()):
        logger.warning(
            "the model is one of Megatron-Core, and is sent under Megatron's names, as each rank "
            "has it; for receivers with the names of Hugging Face give "
            "weightsync.MegatronSource(model, checkpoint)"
        )
