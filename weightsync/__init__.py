"""weightsync moves the weights of a model from its trainer to the servers that generate with it.

    sender = weightsync.connect(model, to="http://127.0.0.1:8000")
    report = sender.send_weights()

On the other side, `weightsync.WeightReceiver(model)` and `weightsync.server.weight_router`.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from weightsync.errors import (
    AuthError,
    BackendUnavailableError,
    ConfigError,
    ConnectError,
    DeltaError,
    HandleError,
    ManifestMismatchError,
    MissingExtraError,
    NotReadyError,
    ProtocolError,
    RemoteError,
    SegmentError,
    SenderConflictError,
    SenderReplacedError,
    SourceBusyError,
    SourceLostError,
    StaleVersionError,
    TransferError,
    TransferTimeout,
    TransportError,
    TransportTimeout,
    UnknownSenderError,
    UpdateConflictError,
    VerificationError,
    WeightSyncError,
)
from weightsync.report import DeltaReport, GpuPair, MergeReport, ReceiverReport, SyncReport
from weightsync.runtime.provided import provide as _provide
from weightsync.specs import Manifest, TensorSpec

if TYPE_CHECKING:  # loaded by __getattr__ on first use: a receiver needs no modules of the sender
    from weightsync.backends.base import (
        Backend,
        TrainerWeightTransferEngine,
        WeightTransferEngine,
    )
    from weightsync.backends.registry import register_backend
    from weightsync.backends.ring import RingEngine
    from weightsync.integrations.adapters import AdapterSource
    from weightsync.integrations.megatron import MegatronSource
    from weightsync.integrations.vllm.ipc_engine import (
        IPCTrainerSendWeightsArgs,
        IPCWeightTransferEngine,
        IPCWeightTransferInitInfo,
        IPCWeightTransferUpdateInfo,
    )
    from weightsync.observe import Progress
    from weightsync.receiver import WeightReceiver, fetch
    from weightsync.sender import WeightSender, close, connect, send_weights
    from weightsync.set_sender import SetSender, connect_set
    from weightsync.weights.lines.patches import SparseWeightPatch
    from weightsync.weights.sinks.base import HookSink, WeightSink
    from weightsync.weights.sinks.module_sink import ModuleSink, ShardedModuleSink
    from weightsync.weights.sources.base import ModuleSource, StateDictSource, WeightSource
    from weightsync.weights.sources.declared import Holding
    from weightsync.weights.sources.dequantized import DequantizedSource
    from weightsync.weights.sources.experts import FusedExpertsSource, PerExpertSource
    from weightsync.weights.sources.quantized import QuantizationScheme, QuantizedSource
    from weightsync.weights.sources.safetensors_source import SafetensorsSource
    from weightsync.weights.sources.wrapping import WrappingSource

__version__ = "0.1.0"

# Otherwise logging's last resort would print warnings in programs that configure no logging.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "AdapterSource",
    "AuthError",
    "Backend",
    "BackendUnavailableError",
    "ConfigError",
    "ConnectError",
    "DeltaError",
    "DeltaReport",
    "DequantizedSource",
    "FusedExpertsSource",
    "GpuPair",
    "HandleError",
    "Holding",
    "HookSink",
    "IPCTrainerSendWeightsArgs",
    "IPCWeightTransferEngine",
    "IPCWeightTransferInitInfo",
    "IPCWeightTransferUpdateInfo",
    "Manifest",
    "ManifestMismatchError",
    "MegatronSource",
    "MergeReport",
    "MissingExtraError",
    "ModuleSink",
    "ModuleSource",
    "NotReadyError",
    "PerExpertSource",
    "Progress",
    "ProtocolError",
    "QuantizationScheme",
    "QuantizedSource",
    "ReceiverReport",
    "RemoteError",
    "RingEngine",
    "SafetensorsSource",
    "SegmentError",
    "SenderConflictError",
    "SenderReplacedError",
    "SetSender",
    "ShardedModuleSink",
    "SourceBusyError",
    "SourceLostError",
    "SparseWeightPatch",
    "StaleVersionError",
    "StateDictSource",
    "SyncReport",
    "TensorSpec",
    "TrainerWeightTransferEngine",
    "TransferError",
    "TransferTimeout",
    "TransportError",
    "TransportTimeout",
    "UnknownSenderError",
    "UpdateConflictError",
    "VerificationError",
    "WeightReceiver",
    "WeightSender",
    "WeightSink",
    "WeightSource",
    "WeightSyncError",
    "WeightTransferEngine",
    "WrappingSource",
    "__version__",
    "close",
    "connect",
    "connect_set",
    "fetch",
    "register_backend",
    "send_weights",
]

_provide("servers", "weightsync.integrations.servers:ServerTransports")
_provide("source", "weightsync.integrations.given:source_of")
_provide("update", "weightsync.integrations.vllm.handles:HandlesUpdate")

_MODULES = {
    "backends.base": ("Backend", "TrainerWeightTransferEngine", "WeightTransferEngine"),
    "backends.registry": ("register_backend",),
    "backends.ring": ("RingEngine",),
    "integrations.adapters": ("AdapterSource",),
    "integrations.megatron": ("MegatronSource",),
    "integrations.vllm.ipc_engine": (
        "IPCTrainerSendWeightsArgs",
        "IPCWeightTransferEngine",
        "IPCWeightTransferInitInfo",
        "IPCWeightTransferUpdateInfo",
    ),
    "observe": ("Progress",),
    "receiver": ("WeightReceiver", "fetch"),
    "sender": ("WeightSender", "close", "connect", "send_weights"),
    "set_sender": ("SetSender", "connect_set"),
    "weights.sources.declared": ("Holding",),
    "weights.sources.experts": ("FusedExpertsSource", "PerExpertSource"),
    "weights.sinks.module_sink": ("ModuleSink", "ShardedModuleSink"),
    "weights.lines.patches": ("SparseWeightPatch",),
    "weights.sources.dequantized": ("DequantizedSource",),
    "weights.sources.quantized": ("QuantizationScheme", "QuantizedSource"),
    "weights.sources.safetensors_source": ("SafetensorsSource",),
    "weights.sinks.base": ("HookSink", "WeightSink"),
    "weights.sources.base": ("ModuleSource", "StateDictSource", "WeightSource"),
    "weights.sources.wrapping": ("WrappingSource",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
_SUBMODULES = ("ray", "server", "testing")
_MODULE_OF |= {name: name for name in _SUBMODULES}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'weightsync' has no attribute {name!r}")
    module = _MODULE_OF[name]
    try:
        loaded = importlib.import_module(f"weightsync.{module}")
    except MissingExtraError as exc:
        raise AttributeError(str(exc)) from exc  # or hasattr() and inspect would raise
    value = loaded if module == name else getattr(loaded, name)
    globals()[name] = value  # later lookups do not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
