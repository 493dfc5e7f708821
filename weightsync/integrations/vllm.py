"""vLLM's plugin entry point: makes `--weight-transfer-config '{"backend":"weightsync"}'` known."""

from __future__ import annotations

from weightsync.errors import BackendUnavailableError

try:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
except ImportError as exc:
    raise BackendUnavailableError(
        f"this needs a vLLM with weight transfer engines ({exc}); pip install 'weightsync[vllm]'"
    ) from exc

BACKEND = "weightsync"


def register() -> None:
    """Register our engine with vLLM. Called by vLLM in each of its processes; may be repeated.

    The engine's module is imported by the workers of a server that asks for it, and by nobody else.
    """
    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "weightsync.integrations.vllm_engine", "WeightsyncEngine"
        )
    except ValueError:  # it is registered already
        return
