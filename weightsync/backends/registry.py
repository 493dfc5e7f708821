"""Backends by name, loaded when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from weightsync.backends.base import TrainerWeightTransferEngine, WeightTransferEngine
from weightsync.errors import BackendUnavailableError, ConfigError

Engines = tuple[type[TrainerWeightTransferEngine], type[WeightTransferEngine]]


def _ipc() -> Engines:
    sender = import_module("weightsync.backends.ipc.sender")
    receiver = import_module("weightsync.backends.ipc.receiver")
    return sender.IpcTrainerEngine, receiver.IpcWeightTransferEngine


def _distributed() -> Engines:
    """The sender packs into the ring of its own host; a Chain reads it beside local receivers."""
    sender, _ = _ipc()
    receiver = import_module("weightsync.backends.gloo.receiver")
    return sender, receiver.DistributedWeightTransferEngine


_BUILTIN: dict[str, Callable[[], Engines]] = {"ipc": _ipc, "distributed": _distributed}
_loaded: dict[str, Engines] = {}


def register_backend(
    name: str,
    trainer: type[TrainerWeightTransferEngine],
    receiver: type[WeightTransferEngine],
) -> None:
    """Add a third-party backend. Raises ConfigError when the name is taken."""
    if name in _BUILTIN or name in _loaded:
        raise ConfigError(f"backend {name!r} is registered already; choose another name")
    _loaded[name] = (trainer, receiver)


def backend_names() -> list[str]:
    """Every backend that `load_backend` knows."""
    return sorted({*_BUILTIN, *_loaded})


def load_backend(name: str) -> Engines:
    """Return both engine classes. Raises ConfigError for an unknown name."""
    if name not in _loaded:
        if name not in _BUILTIN:
            known = ", ".join(["auto", *backend_names()])
            raise ConfigError(f"there is no backend {name!r}; known: {known}")
        try:
            _loaded[name] = _BUILTIN[name]()
        except ImportError as exc:
            raise BackendUnavailableError(f"backend {name!r} cannot be loaded: {exc}") from exc
    return _loaded[name]
