"""vLLM's plugin entry point: makes `--weight-transfer-config '{"backend":"weightsync"}'` known."""

from __future__ import annotations

from contextlib import suppress

from weightsync.errors import BackendUnavailableError, MissingExtraError, install_hint
from weightsync.integrations.vllm import adapter_models, adapter_versions, names, pauses, rpc

try:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
except ImportError as exc:
    raise MissingExtraError(
        f"this needs a vLLM with weight transfer engines ({exc}); {install_hint('vllm')}"
    ) from exc

BACKEND = rpc.BACKEND


def register() -> None:
    """Register our engines with vLLM. Called by vLLM in each of its processes. Idempotent.

    The worker's, and the trainer's where this vLLM has trainer engines. Only the workers of a
    server that is configured for the engine, and trainers that name it, import its module. What
    this vLLM lacks of the names that we use is logged, and so is a version that was not tested.
    """
    names.note_version()
    names.warn("updates", "a server with weightsync's engine does not start")
    _guard_pauses()
    _serve_adapters()
    with suppress(ValueError):  # already registered
        WeightTransferEngineFactory.register_engine(
            BACKEND, "weightsync.integrations.vllm.engine", "WeightsyncEngine"
        )
    with suppress(BackendUnavailableError):
        register_trainer()


def register_trainer() -> None:
    """Register our trainer engine with vLLM. Idempotent.

    Importing `…vllm.trainer` calls it too: a trainer's process may load no plug-ins.

    Raises BackendUnavailableError for a vLLM without trainer engines.
    """
    names.note_version()
    names.require("trainer", "its trainer API cannot be used, and weightsync.connect() can")
    from vllm.distributed.weight_transfer import (  # noqa: PLC0415  # older ones lack it
        WeightTransferTrainerFactory,
    )

    with suppress(ValueError):  # already registered
        WeightTransferTrainerFactory.register_engine(
            BACKEND, "weightsync.integrations.vllm.trainer", "WeightsyncTrainerEngine"
        )


def _guard_pauses() -> None:
    """Make the engine core end the pauses of dead senders. Any process may be the core's."""
    if not names.warn("pauses", "a trainer that dies may leave it paused"):
        return
    from vllm.v1.engine import EngineCoreRequestType  # noqa: PLC0415  # may be elsewhere
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415  # in another vLLM
    from vllm.v1.request import RequestStatus  # noqa: PLC0415  # than those tried

    pauses.install(
        EngineCore, utility=EngineCoreRequestType.UTILITY, refused=RequestStatus.FINISHED_ERROR
    )


def _serve_adapters() -> None:
    """Have the engine core and the API server know the adapters that trainers send."""
    if not names.warn("adapters", "it takes no adapters from trainers"):
        return
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415  # as above

    adapter_versions.install(EngineCore)
    if not names.warn("models", "its server does not show adapters as models"):
        return
    from vllm.entrypoints.openai.models.serving import (  # noqa: PLC0415  # as above
        OpenAIServingModels,
    )
    from vllm.exceptions import VLLMNotFoundError  # noqa: PLC0415  # as above
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415  # as above
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415  # as above

    adapter_models.install(AsyncLLM, OpenAIServingModels, VLLMNotFoundError)
    adapter_models.install_offline(LLMEngine)
