"""weightsync moves the weights of a model from its trainer to the servers that generate with it.

    sender = weightsync.connect(model, to="http://127.0.0.1:8000")
    report = sender.send_weights()

On the other side, `weightsync.WeightReceiver(model)` and `weightsync.server.weight_router`.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from weightsync.compat import (
    IPCTrainerSendWeightsArgs,
    IPCWeightTransferEngine,
    IPCWeightTransferInitInfo,
    IPCWeightTransferUpdateInfo,
)
from weightsync.errors import (
    AuthError,
    BackendUnavailableError,
    ConfigError,
    ConnectError,
    HandleError,
    ManifestMismatchError,
    NotReadyError,
    ProtocolError,
    RemoteError,
    SegmentError,
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
from weightsync.oneshot import close, send_weights
from weightsync.progress import Progress
from weightsync.receiver import WeightReceiver
from weightsync.report import ReceiverReport, SyncReport
from weightsync.specs import Manifest, TensorSpec
from weightsync.trainer import WeightSender, connect
from weightsync.weights.hook_sink import HookSink
from weightsync.weights.module_sink import ModuleSink
from weightsync.weights.sharded_sink import ShardedModuleSink
from weightsync.weights.sink import WeightSink
from weightsync.weights.source import ModuleSource, StateDictSource, WeightSource

__version__ = "0.1.0"

# Or logging's last resort would print warnings of programs that set nothing up.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "AuthError",
    "BackendUnavailableError",
    "ConfigError",
    "ConnectError",
    "HandleError",
    "HookSink",
    "IPCTrainerSendWeightsArgs",
    "IPCWeightTransferEngine",
    "IPCWeightTransferInitInfo",
    "IPCWeightTransferUpdateInfo",
    "Manifest",
    "ManifestMismatchError",
    "ModuleSink",
    "ModuleSource",
    "NotReadyError",
    "Progress",
    "ProtocolError",
    "ReceiverReport",
    "RemoteError",
    "SafetensorsSource",
    "SegmentError",
    "ShardedModuleSink",
    "StaleVersionError",
    "StateDictSource",
    "SyncReport",
    "TensorSpec",
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
    "__version__",
    "close",
    "connect",
    "ray",
    "send_weights",
    "server",
    "testing",
]

_LAZY = {
    "SafetensorsSource": ("weights.safetensors_source", "hf"),
    "ray": ("ray", "ray"),
    "server": ("server", "server"),
    "testing": ("testing", "dev"),
}
"""What needs an extra or is rarely wanted: the module that is it, or has it, and its extra."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'weightsync' has no attribute {name!r}")
    module, extra = _LAZY[name]
    try:
        loaded = importlib.import_module(f"weightsync.{module}")
    except ImportError as exc:
        raise BackendUnavailableError(
            f"weightsync.{name} needs more packages ({exc}): pip install 'weightsync[{extra}]'"
        ) from exc
    return loaded if module == name else getattr(loaded, name)
