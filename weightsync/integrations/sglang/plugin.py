"""SGLang's plug-in entry point: makes the model runners of a server receivers.

    WEIGHTSYNC_SGLANG=device python -m sglang.launch_server --model-path …

SGLang 0.5.23 loads it in its scheduler processes, where weightsync is installed. Without the
variable it changes nothing. Written from that release's source, and tried with its own hook
registry, weight updater and models on a CPU: **no server has run it**.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weightsync.errors import BackendUnavailableError, ConfigError, TransferError
from weightsync.integrations.sglang.memory import ROUND
from weightsync.integrations.sglang.receiving import (
    FAMILIES,
    SchedulerReceiver,
    gather_texts,
)
from weightsync.weights.sinks.base import NamedTensor

logger = logging.getLogger(__name__)

VARIABLE = "WEIGHTSYNC_SGLANG"
"""`device`: weights wait for their commit beside the model, on its device. `host`: on the CPU."""

TRIED = ("0.5.23",)
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
NAMES = (
    f"{_MANAGER}.check_weights",
    f"{_STATE}.get_internal_state",
    f"{_MANAGER}.release_memory_occupation",
    f"{_MANAGER}.resume_memory_occupation",
    f"{_SCHEDULER}.pause_generation",
    f"{_SCHEDULER}.continue_generation",
    f"{_SCHEDULER}.flush_cache",
    f"{_UPDATER}.WeightUpdater.begin_weight_update",
    f"{_UPDATER}.WeightUpdater.load_weights_from_distributed",
    f"{_UPDATER}.WeightUpdater.end_weight_update",
    f"{_UPDATER}._unsupported_derived_weight_cache_error",
    "sglang.srt.managers.io_struct.CheckWeightsReqOutput",
    "sglang.srt.managers.io_struct.PauseGenerationReqInput",
    "sglang.srt.managers.io_struct.ContinueGenerationReqInput",
    "sglang.srt.runtime_context.get_exec",
    "sglang.srt.runtime_context.get_model",
    "sglang.srt.runtime_context.get_parallel",
)
"""Names of SGLang that are used."""

_receiver: SchedulerReceiver | None = None


def register() -> None:
    """Register our hooks with SGLang. Called by SGLang in each of its processes.

    Raises ConfigError for a value of the variable that is none, and BackendUnavailableError for an
    SGLang that lacks a name that is used: SGLang logs both, and serves without the plug-in.
    """
    stage = os.environ.get(VARIABLE, "")
    if not stage:
        return
    if stage not in ("device", "host"):
        raise ConfigError(f"{VARIABLE} must be device or host, not {stage!r}")
    seen = version("sglang")
    missing = [name for name in NAMES if not _exists(name)]
    if missing:
        raise BackendUnavailableError(
            f"SGLang {seen} lacks {', '.join(missing)}, which weightsync's plug-in uses: it was "
            f"tried with {', '.join(TRIED)}; this server takes weights by files"
        )
    if seen not in TRIED:
        logger.warning(
            "weightsync's plug-in was tried with SGLang %s, not with %s", ", ".join(TRIED), seen
        )
    from sglang.srt.plugins.hook_registry import (  # noqa: PLC0415  # only in a server of SGLang
        HookRegistry,
        HookType,
    )

    HookRegistry.register(f"{_MANAGER}.check_weights", answer_check, HookType.AROUND)
    for name, hook in (("release", release_memory), ("resume", resume_memory)):
        HookRegistry.register(f"{_MANAGER}.{name}_memory_occupation", hook, HookType.AROUND)
    HookRegistry.register(f"{_STATE}.get_internal_state", announce, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.continue_generation", continue_if_whole, HookType.AROUND)


def answer_check(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Answer /weights_checker, on every rank; a request of ours is a round of a sender."""
    global _receiver  # noqa: PLW0603  # one scheduler a process
    if not str(request.action).startswith(ROUND):
        return original(manager, request)
    from sglang.srt.managers.io_struct import (  # noqa: PLC0415  # as above
        CheckWeightsReqOutput,
    )

    if _receiver is None:
        engine = SglangEngine(manager)
        on_device = os.environ.get(VARIABLE) == "device"
        _receiver = SchedulerReceiver(engine, engine.device if on_device else "cpu")
        if _frees(manager):
            _receiver.note_asleep(manager.offload_tags, keeps=_keeps_weights())
    answers = _receiver.answer(request.action.removeprefix(ROUND))
    return CheckWeightsReqOutput(success=True, message=answers)


def announce(result: Any, *_: object) -> Any:
    """Say in /server_info that this server takes rounds."""
    result.internal_state["weightsync"] = True
    return result


def continue_if_whole(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Continue generation, unless the ranks hold no single version of the weights."""
    if _receiver is None or _receiver.note_start():
        return original(scheduler, request)
    logger.error(
        "this server stays paused: its ranks hold no single version of the weights, which a full "
        "update gives them; call send_weights() again"
    )
    return None


def release_memory(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Give memory back, /release_memory_occupation, on every rank; the receiver is told."""
    if _receiver is None or not _frees(manager):
        return original(manager, request)
    call = partial(original, manager, request)
    return _receiver.release(call, request.tags, keeps=_keeps_weights())


def resume_memory(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Take memory again, /resume_memory_occupation, on every rank; the receiver is told."""
    if _receiver is None or not _frees(manager):
        return original(manager, request)
    return _receiver.resume(partial(original, manager, request), request.tags)


def _frees(manager: Any) -> bool:
    """Whether SGLang gives memory back: without --enable-memory-saver it does nothing."""
    return bool(getattr(manager.memory_saver_adapter, "enabled", True))


def _keeps_weights() -> bool:
    """Whether SGLang has a copy of the weights on the host: --enable-weights-cpu-backup."""
    from sglang.srt.runtime_context import get_exec  # noqa: PLC0415  # only in a server of SGLang

    return bool(get_exec().features.enable_weights_cpu_backup)


class SglangEngine:
    """One scheduler process of SGLang; see receiving.Engine."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._runner = manager.tp_worker.model_runner
        self._group = manager.tp_cpu_group
        self.rank = dist.get_rank(self._group)
        self.world = dist.get_world_size(self._group)

    @property
    def model(self) -> nn.Module:
        """The model in use."""
        model: nn.Module = self._runner.model
        return model

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    @property
    def paused(self) -> bool:
        return bool(self._manager.scheduler._engine_paused)

    def check(self) -> None:
        from sglang.srt.runtime_context import (  # noqa: PLC0415  # as above
            get_disagg,
            get_model,
            get_parallel,
        )

        family, parallel = type(self.model).__name__, get_parallel()
        refusals = {
            f"the model family {family}: its loader was not read by weightsync's authors, who know "
            f"{', '.join(sorted(FAMILIES))}": family not in FAMILIES,
            "pipeline parallelism": parallel.pp_size > 1,
            "data parallel replicas: start one server for each": parallel.num_dp_ranks > 1,
            "a draft model": self._manager.draft_worker is not None,
            "separate servers for prefill and decode": get_disagg().disaggregation_mode
            not in (None, "null"),
            "a weight cache shared with other engines": get_model().weight_cache_mode != "off",
            "quantized weights": getattr(self.model, "quant_config", None) is not None,
            "weights that are packed for AMX": any(
                getattr(module, "use_intel_amx_backend", False) for module in self.model.modules()
            ),
        }
        found = [what for what, is_so in refusals.items() if is_so]
        updater = importlib.import_module(_UPDATER)
        derived = updater._unsupported_derived_weight_cache_error(self.model)
        if found or derived:
            raise ConfigError(
                f"this SGLang server has {'; '.join([*found, *([derived] if derived else [])])}. "
                f"Its weights are not updated in memory; start it without {VARIABLE}, which has it "
                "read files"
            )

    def gather(self, text: bytes) -> list[bytes]:
        return gather_texts(text, self._group)

    def stop(self) -> None:
        from sglang.srt.managers.io_struct import (  # noqa: PLC0415  # as above
            PauseGenerationReqInput,
        )

        self._manager.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)

    def start(self) -> None:
        from sglang.srt.managers.io_struct import (  # noqa: PLC0415  # as above
            ContinueGenerationReqInput,
        )

        scheduler = self._manager.scheduler
        scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def flush_cache(self) -> bool:
        return bool(self._manager.flush_cache(empty_cache=False))

    def load(self, pairs: Iterable[NamedTensor]) -> None:
        updater = self._runner.weight_updater
        updater.begin_weight_update()
        succeeded, message = updater.load_weights_from_distributed(list(pairs))
        if not succeeded:
            raise TransferError(f"SGLang did not load the weights: {message}")
        updater.end_weight_update(run_post_load=False)


def _exists(name: str) -> bool:
    """Whether a class or function of SGLang, or a method of a class, can be imported."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as exc:
            if not ".".join(parts[:end]).startswith(exc.name or " "):
                raise
            continue
        return all((found := getattr(found, part, None)) is not None for part in parts[end:])
    return False
