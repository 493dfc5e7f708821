"""OpenRLHF with weightsync in place of its broadcast to vLLM, in engines and trainer.

    python -m weightsync.integrations.openrlhf openrlhf.cli.train_ppo_ray --…

or, in a program of your own, before it makes actors:

    from weightsync.integrations.openrlhf import install

    install()

Both replace two classes of OpenRLHF in the program that starts its actors: Ray carries them to the
actors' processes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module, metadata
from typing import Any

from weightsync.errors import (
    BackendUnavailableError,
    MissingExtraError,
    install_hint,
    shorten,
)

__all__ = ["install"]

logger = logging.getLogger(__name__)

TRIED = ("0.11",)
"""The versions of OpenRLHF with which the tests have run, on a CPU; see `make test-openrlhf`."""

_ENGINES = "openrlhf.trainer.ray.vllm_engine"
_ACTOR = "openrlhf.trainer.ray.ppo_actor"
_USED = {
    f"{_ENGINES}.RolloutRayActor": (
        "__init__",
        "init_process_group",
        "pause_generation",
        "reset_prefix_cache",
        "resume_generation",
        "update_weight",
        "update_weight_cuda_ipc",
    ),
    f"{_ACTOR}.ActorPPOTrainer": ("_init_vllm_sync_group", "broadcast_to_vllm"),
}
"""The names of OpenRLHF that are replaced, or built on."""


def install(**options: Any) -> None:
    """Have OpenRLHF's trainer and engines move weights by weightsync, in actors made from now on.

    `options` are settings of `connect`: `timeout_s`, `on_failure`, `verify` and others. To be
    called in the program that makes the actors, which OpenRLHF's command does. Raises ConfigError
    for names that are no such settings, and BackendUnavailableError for an OpenRLHF without the
    names that are replaced. One of a version that was not tried is logged.
    """
    version = _check_openrlhf()
    _note_version(version)
    ray: Any = import_module("ray")
    # Each imports what its own actors need: that of the engines no DeepSpeed.
    engine = import_module("weightsync.integrations.openrlhf.engine").WeightsyncRolloutActor
    trainer = import_module("weightsync.integrations.openrlhf.trainer").with_options(options)
    # OpenRLHF's functions look both up when they make actors.
    engines: Any = import_module(_ENGINES)
    engines.RolloutRayActor = ray.remote(engine)
    actor: Any = import_module(_ACTOR)
    actor.ActorPPOTrainer = trainer


def _check_openrlhf() -> str:
    """Return the version of OpenRLHF. Raises for one that is missing, or lacks what is used."""
    try:
        version = metadata.version("openrlhf")
        for module in (_ENGINES, _ACTOR):
            import_module(module)
    except ImportError as exc:  # PackageNotFoundError is one
        raise MissingExtraError(
            f"this needs OpenRLHF {TRIED[-1]} with its vLLM ({exc}); {install_hint('ray')}"
        ) from exc
    if lacking := list(_lacking()):
        raise BackendUnavailableError(
            f"OpenRLHF {version} has no {shorten(lacking)}, which weightsync replaces; it was "
            f"tried with OpenRLHF {', '.join(TRIED)}"
        )
    return version


def _lacking() -> Iterator[str]:
    for path, names in _USED.items():
        module, _, kind = path.rpartition(".")
        found = plain_class(getattr(import_module(module), kind, None))
        if found is None:
            yield path
        else:
            yield from (f"{path}.{name}" for name in names if not hasattr(found, name))


def plain_class(kind: Any) -> Any:
    """Return the class that `ray.remote` has made an actor of; another object as it is."""
    made = getattr(kind, "__ray_metadata__", None)
    return kind if made is None else made.modified_class.__ray_actor_class__


def _note_version(version: str) -> None:
    """Log a version of OpenRLHF that was not tried."""
    if not version.startswith(tuple(f"{tried}." for tried in TRIED)):
        logger.warning(
            "weightsync was tried with OpenRLHF %s, and this is OpenRLHF %s",
            ", ".join(TRIED),
            version,
        )
