"""The names of vLLM that weightsync uses, and whether the installed vLLM has them.

vLLM moves what is not in its documentation from one month to the next. A name that is gone is
found when vLLM loads our plug-in, and not in the middle of an update.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from weightsync.errors import BackendUnavailableError, shorten

logger = logging.getLogger(__name__)

TESTED = ("0.29", "0.30", "0.31", "0.32", "0.33")
"""The versions of vLLM against which the tests were run; see docs/vllm.md."""

Part = Literal["updates", "pauses", "trainer", "engines", "adapters", "models"]
"""The part that needs a name: a worker's engine, the end of a dead trainer's pause, vLLM's trainer
API, an engine without a server, adapters, and their names in requests."""

_RELOAD = "vllm.model_executor.model_loader.reload"

USED: Mapping[Part, Mapping[str, tuple[str, ...]]] = {
    "updates": {
        "vllm.config": ("set_current_vllm_config",),
        "vllm.config.model": (
            "ModelConfig.hf_config",
            "ModelConfig.hf_text_config",
            "ModelConfig.model",
            "ModelConfig.quantization",
        ),
        "vllm.config.parallel": (
            "ParallelConfig.data_parallel_index",
            "ParallelConfig.pipeline_parallel_size",
            "ParallelConfig.rank",
            "ParallelConfig.world_size",
            "ParallelConfig.world_size_across_dp",
        ),
        "vllm.distributed.weight_transfer": ("WeightTransferEngineFactory",),
        "vllm.distributed.weight_transfer.base": (
            "WeightTransferEngine.reset_weight_update_target",
        ),
        "vllm.distributed.weight_transfer.factory": (
            "WeightTransferEngineFactory.register_engine",
        ),
        "vllm.model_executor.layers.attention": ("is_deferred_attention_layer",),
        _RELOAD: ("finalize_layerwise_reload", "initialize_layerwise_reload"),
        f"{_RELOAD}.layerwise": (
            "_layerwise_process",
            "get_layerwise_info",
            "get_numel_loaded",
            "make_online_process_loader.online_process_loader",
        ),
        f"{_RELOAD}.meta": (
            "SKIP_LOAD_TENSORS",
            "SKIP_MODULES",
            "materialize_meta_tensor",
            "to_meta_tensor",
        ),
        f"{_RELOAD}.types": (
            "LayerReloadingInfo.can_load",
            "LayerReloadingInfo.kernel_non_persistent_buffers",
            "LayerReloadingInfo.load_numel",
            "LayerReloadingInfo.load_numel_total",
            "LayerReloadingInfo.loaded_weights",
            "LayerReloadingInfo.reset",
            "LayerReloadingInfo.restore_device",
            "LayerReloadingInfo.restore_metadata",
        ),
        f"{_RELOAD}.utils": ("get_layer_tensors",),
        "vllm.v1.worker.gpu_worker": (
            "Worker._weight_update_active",
            "Worker.finish_weight_update",
            "Worker.init_weight_transfer_engine",
            "Worker.start_weight_update",
            "Worker.update_weights",
            "Worker.weight_transfer_engine",
        ),
        "vllm.v1.worker.worker_base": ("WorkerBase",),
    },
    "pauses": {
        "vllm.v1.core.sched.scheduler": ("Scheduler.finish_requests",),
        "vllm.v1.engine": ("EngineCoreRequestType.UTILITY",),
        "vllm.v1.engine.core": (
            "EngineCore.add_request",
            "EngineCore.collective_rpc",
            "EngineCore.is_scheduler_paused",
            "EngineCore.model_executor",
            "EngineCore.reset_prefix_cache",
            "EngineCore.resume_scheduler",
            "EngineCore.vllm_config",
            "EngineCore.wake_up",
            "EngineCoreProc._send_error_outputs_to_client",
            "EngineCoreProc.input_queue",
            "EngineCoreProc.is_running",
        ),
        "vllm.v1.executor.abstract": ("Executor.is_sleeping",),
        "vllm.v1.request": ("RequestStatus.FINISHED_ERROR",),
    },
    "trainer": {
        "vllm.distributed.weight_transfer": (
            "HTTPVLLMWeightSyncClient",
            "RayVLLMWeightSyncClient",
            "WeightTransferTrainerFactory",
        ),
        "vllm.distributed.weight_transfer.base": (
            "TrainerInitInfo.rank",
            "TrainerWeightTransferEngine",
        ),
        "vllm.distributed.weight_transfer.clients": (
            "HTTPVLLMWeightSyncClient.base_url",
            "RayVLLMWeightSyncClient.handles",
        ),
        "vllm.distributed.weight_transfer.factory": (
            "WeightTransferTrainerFactory.register_engine",
        ),
    },
    "engines": {
        "vllm.entrypoints.llm": (
            "LLM.collective_rpc",
            "LLM.reset_prefix_cache",
            "LLM.update_weight_version",
            "LLM.wake_up",
        ),
        "vllm.v1.engine.async_llm": (
            "AsyncLLM.collective_rpc",
            "AsyncLLM.is_paused",
            "AsyncLLM.pause_generation",
            "AsyncLLM.reset_prefix_cache",
            "AsyncLLM.resume_generation",
            "AsyncLLM.update_weight_version",
            "AsyncLLM.wake_up",
        ),
    },
    "adapters": {
        "vllm.config.lora": ("LoRAConfig.lora_dtype", "LoRAConfig.max_lora_rank"),
        "vllm.lora.layers.base_linear": ("BaseLinearLayerWithLoRA.base_layer",),
        "vllm.lora.lora_model": (
            "LoRAModel.clone",
            "LoRAModel.from_lora_tensors",
            "LoRAModel.loras",
        ),
        "vllm.lora.lora_weights": (
            "LoRALayerWeights.lora_a",
            "LoRALayerWeights.lora_b",
            "LoRALayerWeights.rank",
        ),
        "vllm.lora.model_manager": (
            "LoRAModelManager.model",
            "LoRAModelManager.modules",
            "LoRAModelManager.packed_modules",
        ),
        "vllm.lora.peft_helper": ("PEFTHelper.from_dict", "PEFTHelper.validate_legal"),
        "vllm.lora.request": (
            "LoRARequest.lora_int_id",
            "LoRARequest.lora_name",
            "LoRARequest.lora_path",
        ),
        "vllm.lora.utils": ("parse_fine_tuned_lora_name",),
        "vllm.lora.worker_manager": (
            "WorkerLoRAManager._adapter_manager",
            "WorkerLoRAManager._load_adapter",
            "WorkerLoRAManager.lora_config",
            "WorkerLoRAManager.max_position_embeddings",
            "WorkerLoRAManager.remove_adapter",
            "WorkerLoRAManager.vocab_size",
        ),
        "vllm.model_executor.layers.linear": (
            "LinearBase.input_size",
            "LinearBase.output_size",
            "MergedColumnParallelLinear.output_sizes",
            "QKVParallelLinear.head_size",
            "QKVParallelLinear.output_sizes",
            "QKVParallelLinear.total_num_kv_heads",
        ),
        "vllm.model_executor.layers.vocab_parallel_embedding": (
            "VocabParallelEmbedding.embedding_dim",
            "VocabParallelEmbedding.org_vocab_size",
        ),
        "vllm.v1.core.sched.scheduler": ("Scheduler.requests",),
        "vllm.v1.engine": ("EngineCoreRequest.lora_request", "EngineCoreRequest.request_id"),
        "vllm.v1.engine.core": (
            "EngineCore.add_lora",
            "EngineCore.add_request",
            "EngineCore.collective_rpc",
            "EngineCore.preprocess_add_request",
            "EngineCore.scheduler",
        ),
        "vllm.v1.request": ("Request.lora_request",),
        "vllm.v1.worker.lora_model_runner_mixin": ("LoRAModelRunnerMixin.lora_manager",),
    },
    "models": {
        "vllm.entrypoints.openai.models.serving": (
            "OpenAIServingModels.is_base_model",
            "OpenAIServingModels.lora_requests",
            "OpenAIServingModels.unload_lora_adapter",
        ),
        "vllm.exceptions": ("VLLMNotFoundError",),
        "vllm.outputs": (
            "CompletionOutput.finish_reason",
            "CompletionOutput.token_ids",
            "RequestOutput.outputs",
        ),
        "vllm.v1.engine.async_llm": (
            "AsyncLLM.collective_rpc",
            "AsyncLLM.dead_error",
            "AsyncLLM.errored",
            "AsyncLLM.generate",
        ),
        "vllm.v1.engine.llm_engine": ("LLMEngine.abort_request", "LLMEngine.add_request"),
    },
}
"""Modules of vLLM, and what is used of each: a name, or a class and its member."""


@cache
def missing(part: Part) -> tuple[str, ...]:
    """Return the names of a part that the installed vLLM does not have.

    The source of a module is read, not imported, unless a name is not found: these modules take
    seconds, in processes that do not need them.
    """
    return tuple(
        f"{module}.{name}"
        for module, names in USED[part].items()
        for name in sorted(set(names) - _written_in(module))
        if not is_importable(module, name)
    )


def require(part: Part, consequence: str) -> None:
    """Raise BackendUnavailableError that names what the installed vLLM lacks."""
    if lacking := missing(part):
        raise BackendUnavailableError(_lacks(lacking, consequence))


@cache
def warn(part: Part, consequence: str) -> bool:
    """Log what the installed vLLM lacks, once a process; return whether it has everything."""
    lacking = missing(part)
    if lacking:
        logger.warning(_lacks(lacking, consequence))
    return not lacking


@cache
def note_version() -> None:
    """Log a version of vLLM that was not tested. Once a process."""
    version = installed_version()
    if not any(version == known or version.startswith(f"{known}.") for known in TESTED):
        logger.warning(
            "weightsync was tested with vLLM %s to %s, and this is vLLM %s",
            TESTED[0],
            TESTED[-1],
            version,
        )


def installed_version() -> str:
    """Return the version of the installed vLLM."""
    return str(getattr(import_module("vllm"), "__version__", "of an unknown version"))


def _lacks(names: Iterable[str], consequence: str) -> str:
    return (
        f"vLLM {installed_version()} has no {shorten(names)}: {consequence}; weightsync was tested "
        f"with vLLM {TESTED[0]} to {TESTED[-1]}"
    )


def is_importable(module: str, name: str) -> bool:
    """Whether a name is there when the module is imported; a class may inherit it."""
    try:
        found: Any = import_module(module)
        for step in name.split("."):
            found = getattr(found, step)
    except Exception:  # noqa: BLE001  # another vLLM's modules may raise anything
        return False
    return True


def _written_in(module: str) -> frozenset[str]:
    """Return the names that the source of a module defines or imports."""
    root, *path = module.split(".")
    for folder in import_module(root).__path__:
        place = Path(folder, *path)
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return frozenset(names_in(ast.parse(file.read_bytes()).body))
    return frozenset()


def names_in(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Yield the names of classes, functions, variables and imports, members as `Class.member`."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
            yield from names_in(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (prefix + (alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from _targets(targets, prefix)
        else:
            blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            blocks += [handler.body for handler in getattr(node, "handlers", [])]
            for block in blocks:
                yield from names_in(block, prefix)


def _targets(targets: Iterable[ast.expr], prefix: str) -> Iterator[str]:
    for target in targets:
        if isinstance(target, ast.Name):
            yield prefix + target.id
        elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            yield f"{prefix[:-1].rpartition('.')[0]}.{target.attr}"  # of the class, not the method
