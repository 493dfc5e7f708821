"""SkyRL 0.4 with weightsync: one value of its setting, no fork.

    from weightsync.integrations.skyrl import BACKEND

    cfg.generator.inference_engine.weight_sync_backend = BACKEND  # before: "nccl"

The import registers weightsync with SkyRL and vLLM. SkyRL sends its configuration to each process
of a run, and `BACKEND` imports this module in each that receives it. From the command line:

    python -m skyrl.train.entrypoints.main_base \
        trainer.override_entrypoint=weightsync.integrations.skyrl ...
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module, metadata
from typing import Any

from weightsync.errors import BackendUnavailableError, ConfigError, MissingExtraError, shorten

__all__ = ["BACKEND", "main", "register", "use"]

logger = logging.getLogger(__name__)

TRIED = ("0.4",)
"""The versions of SkyRL with which the tests have run."""

NAME = "weightsync"
"""The value of `weight_sync_backend`, and the engine of vLLM's workers."""

_OVERRIDE = "trainer.override_entrypoint="
_SYNC = "skyrl.backends.skyrl_train.weight_sync"
_SENDERS = f"{_SYNC}.weight_senders"
_USED: Mapping[str, tuple[str, ...]] = {
    _SYNC: ("_VLLM_RECEIVE_BACKENDS", "get_transfer_strategy"),
    _SENDERS: ("SkyrlTrainerCapabilities", "_build_sender_init_info", "build_trainer_engine"),
    f"{_SYNC}.control_plane": ("SkyrlWeightSyncClient",),
    f"{_SYNC}.sources": ("FsdpWeightSource",),
}
"""The names of SkyRL that are used, by module. Some are private there."""


class _Backend(str):
    """A text that imports this module, and so registers weightsync, where it is unpickled."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[[], _Backend], tuple[()]]:
        return _received, ()


BACKEND = _Backend(NAME)
"""The value for SkyRL's setting `generator.inference_engine.weight_sync_backend`."""


def register() -> None:
    """Have SkyRL in this process know the backend, and vLLM the engines. Idempotent.

    Called when this module is imported. SkyRL takes the text "weightsync" for NCCL in a process
    that has not: `BACKEND` imports it wherever the setting goes.

    Raises MissingExtraError without SkyRL or vLLM, and BackendUnavailableError for a version of
    SkyRL that lacks what is used of it. A version that was not tried is a warning in the log.
    """
    parts = _parts()
    sync, senders = parts[_SYNC], parts[_SENDERS]
    if NAME in sync._VLLM_RECEIVE_BACKENDS:
        return
    _note_version()
    import_module("weightsync.integrations.skyrl.trainer").register_engines()
    _show_as_text()
    senders._build_sender_init_info = _knowing_ours(senders._build_sender_init_info)
    sync.get_transfer_strategy = _resolving_ours(sync.get_transfer_strategy)
    sync._VLLM_RECEIVE_BACKENDS[NAME] = NAME


def use(cfg: Any) -> None:
    """Set the backend in a SkyRLTrainConfig. Raises ConfigError for what cannot be combined."""
    engines = cfg.generator.inference_engine
    if engines.weight_sync_backend not in ("nccl", NAME):
        raise ConfigError(
            f"weight_sync_backend is {engines.weight_sync_backend!r}, and this entry point is "
            f"weightsync's: leave it out, or set {NAME!r}"
        )
    if cfg.trainer.strategy != "fsdp":
        raise ConfigError(
            f"trainer.strategy={cfg.trainer.strategy!r} was not tried with weightsync; fsdp was"
        )
    check(engines, colocate_all=cfg.trainer.placement.colocate_all)
    engines.weight_sync_backend = BACKEND


def check(ie_cfg: Any, *, colocate_all: bool = False) -> None:
    """Raise ConfigError for settings of SkyRL with which its engines cannot be updated yet."""
    refused = {
        "trainer.placement.colocate_all": (
            colocate_all,
            "the engines sleep while the trainer connects; give them other GPUs",
        ),
        "offload_kv_for_weight_sync": (
            getattr(ie_cfg, "offload_kv_for_weight_sync", False),
            "updates of engines whose cache sleeps were not tried",
        ),
        "speculative_config": (
            getattr(ie_cfg, "speculative_config", None) is not None,
            "the drafter would keep its first weights",
        ),
        "fp8_weight_sync_mode": (
            getattr(ie_cfg, "fp8_weight_sync_mode", None) is not None,
            'SKYRL_WEIGHTSYNC_OPTIONS=\'{"quantize": "receiver"}\' quantizes on the way',
        ),
    }
    for name, (is_set, why) in refused.items():
        if is_set:
            raise ConfigError(f"weight_sync_backend={NAME!r} does not go with {name}: {why}")


def main() -> None:
    """Train with SkyRL's configuration from the command line, as its `main_base` does.

    Called by that for `trainer.override_entrypoint=weightsync.integrations.skyrl`.
    """
    base: Any = import_module("skyrl.train.entrypoints.main_base")
    given = [word for word in sys.argv[1:] if not word.startswith(_OVERRIDE)]
    cfg = base.SkyRLTrainConfig.from_cli_overrides(given)
    use(cfg)
    base.validate_cfg(cfg)
    base.initialize_ray(cfg)
    base.ray.get(base.skyrl_entrypoint.remote(cfg))


def _received() -> _Backend:
    return BACKEND


def _resolving_ours(theirs: Callable[[str, bool], str]) -> Callable[[str, bool], str]:
    @wraps(theirs)
    def get_transfer_strategy(weight_sync_backend: str, colocate_all: bool) -> str:
        if weight_sync_backend != NAME:
            return theirs(weight_sync_backend, colocate_all)
        check(None, colocate_all=colocate_all)
        return NAME

    return get_transfer_strategy


def _knowing_ours(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(theirs)
    def _build_sender_init_info(*, backend: str, ie_cfg: Any, rank: int, **others: Any) -> Any:
        if backend != NAME:
            return theirs(backend=backend, ie_cfg=ie_cfg, rank=rank, **others)
        trainer = import_module("weightsync.integrations.skyrl.trainer")
        return trainer.init_info(ie_cfg, rank), None  # the same for every server

    return _build_sender_init_info


def _parts() -> dict[str, Any]:
    """Return the modules of SkyRL that are used, complete. Raises as `register` says."""
    try:
        parts = {name: import_module(name) for name in _USED}
    except ImportError as exc:
        raise MissingExtraError(
            f"this needs SkyRL {' or '.join(TRIED)} with its extra fsdp ({exc})"
        ) from exc
    lacking = [
        f"{module.rpartition('.')[2]}.{name}"
        for module, names in _USED.items()
        for name in names
        if not hasattr(parts[module], name)
    ]
    if lacking:
        raise BackendUnavailableError(
            f"SkyRL {_version()} lacks {shorten(lacking)}: use {' or '.join(TRIED)}"
        )
    return parts


def _version() -> str:
    try:
        return metadata.version("skyrl")
    except metadata.PackageNotFoundError:
        return "of no installed package"


def _note_version() -> None:
    version = _version()
    if not version.startswith(tuple(f"{tried}." for tried in TRIED)):
        logger.warning(
            "SkyRL is %s, and weightsync was tried with %s; compare the weights after the first "
            "update, and see docs/migrating-from-skyrl.md",
            version,
            ", ".join(TRIED),
        )


def _show_as_text() -> None:
    """Have PyYAML show `BACKEND` as the text that it is: SkyRL logs its configuration so."""
    yaml: Any = import_module("yaml")
    yaml.add_representer(_Backend, lambda dumper, backend: dumper.represent_str(str(backend)))


register()
