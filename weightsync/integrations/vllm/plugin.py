"""vLLM's plugin entry point: makes `--weight-transfer-config '{"backend":"weightsync"}'` known."""

from __future__ import annotations

import logging
from contextlib import suppress

from weightsync.errors import BackendUnavailableError, MissingExtraError, install_hint
from weightsync.integrations.vllm import pauses

try:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
except ImportError as exc:
    raise MissingExtraError(
        f"this needs a vLLM with weight transfer engines ({exc}); {install_hint('vllm')}"
    ) from exc

logger = logging.getLogger(__name__)

BACKEND = "weightsync"


def register() -> None:
    """Register our engines with vLLM. Called by vLLM in each of its processes. Idempotent.

    The worker's, and the trainer's where this vLLM has trainer engines. Only the workers of a
    server that is configured for the engine, and trainers that name it, import its module.
    """
    _guard_pauses()
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
    try:
        from vllm.distributed.weight_transfer import (  # noqa: PLC0415  # older ones lack it
            WeightTransferTrainerFactory,
        )
    except ImportError as exc:
        raise BackendUnavailableError(
            f"vLLM {_version()} has no trainer engines, and 0.32 has; weightsync.connect() works "
            "with older ones"
        ) from exc
    with suppress(ValueError):  # already registered
        WeightTransferTrainerFactory.register_engine(
            BACKEND, "weightsync.integrations.vllm.trainer", "WeightsyncTrainerEngine"
        )


def _version() -> str:
    import vllm  # noqa: PLC0415  # as above

    return str(getattr(vllm, "__version__", "of an unknown version"))


def _guard_pauses() -> None:
    """Make the engine core end the pauses of dead senders. Any process may be the core's."""
    try:
        from vllm.v1.engine import EngineCoreRequestType  # noqa: PLC0415  # may be elsewhere
        from vllm.v1.engine.core import EngineCore  # noqa: PLC0415  # in another vLLM
        from vllm.v1.request import RequestStatus  # noqa: PLC0415  # than those tried

        pauses.install(
            EngineCore, utility=EngineCoreRequestType.UTILITY, refused=RequestStatus.FINISHED_ERROR
        )
    except (ImportError, AttributeError) as exc:
        logger.warning("a trainer that dies may leave this vLLM paused: %s", exc)
