"""The trainer's half in SkyRL: vLLM's trainer API with what SkyRL's workers ask of an engine."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import vllm.distributed.weight_transfer as vllm_api
from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient
from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource
from skyrl.backends.skyrl_train.weight_sync.weight_senders import SkyrlTrainerCapabilities

from weightsync.errors import ConfigError
from weightsync.integrations.skyrl import check
from weightsync.integrations.vllm import plugin
from weightsync.integrations.vllm.server import SCHEME
from weightsync.integrations.vllm.trainer import (
    WeightsyncTrainerEngine,
    WeightsyncTrainerInitInfo,
)
from weightsync.report import SyncReport
from weightsync.sender import check_settings

logger = logging.getLogger(__name__)

OPTIONS = "SKYRL_WEIGHTSYNC_OPTIONS"
"""The environment variable with settings of `connect`, as JSON. SkyRL passes on what begins so."""

_BACKEND = "skyrl_weightsync"
_NOT_TAKEN: Mapping[str, str] = {
    "dtype": "generator.inference_engine.model_dtype says it",
    "rename": "the names are those of SkyRL's source",
    "process_group": "the ranks are those of SkyRL's default group",
    "at": "SkyRL sends the model itself",
}


@dataclass
class SkyrlInitInfo(WeightsyncTrainerInitInfo):
    """The init info of a trainer of SkyRL: a name of its own for vLLM's factory."""

    backend: ClassVar[str] = _BACKEND


class SkyrlTrainerEngine(
    SkyrlTrainerCapabilities,  # type: ignore[misc]  # SkyRL has no types here
    WeightsyncTrainerEngine,
):
    """A `WeightSender` behind SkyRL's contract of trainer engines.

    An FsdpWeightSource is sent as its model, which no rank gathers; other sources are iterated.
    """

    init_info_cls = SkyrlInitInfo

    skyrl_handles_prefix_cache_reset = True
    """Each update resets it when it commits."""
    skyrl_force_disable_expandable_segments = True
    """Their memory is not shared by handle, as the path cuda_ipc does it."""
    skyrl_empty_cache_after_send = True

    @classmethod
    def trainer_init(
        cls, init_info: WeightsyncTrainerInitInfo, *, client: Any, source: Any = None
    ) -> SkyrlTrainerEngine:
        """Connect to all servers of `client`. Collective; see WeightsyncTrainerEngine."""
        sent, cast = source, {}
        if type(source) is FsdpWeightSource:
            sent, cast = source.model, _as_yielded(source)
        info = replace(init_info, options={**init_info.options, **cast})
        engine = super().trainer_init(info, client=client, source=sent)
        engine.source = source
        return engine

    @staticmethod
    def _targets_of(client: Any) -> list[str]:
        return targets_of(client)

    def send_weights(self) -> SyncReport:
        """Send the source's weights, and log the report; see WeightsyncTrainerEngine."""
        report = super().send_weights()
        if self.is_sender:
            logger.info("%s", report)
        return report


def targets_of(client: Any) -> list[str]:
    """Return the targets of `connect` that a SkyrlWeightSyncClient talks to: all its servers.

    Raises ConfigError for another client, also for a subclass: it may talk to others.
    """
    urls = getattr(client, "_urls", None)
    if type(client) is not SkyrlWeightSyncClient or not isinstance(urls, list):
        raise ConfigError(
            f"a {type(client).__name__} does not show its servers: it is no SkyrlWeightSyncClient "
            "of a SkyRL that was tried; connect() takes the URLs of all servers"
        )
    return [SCHEME + url.rstrip("/") for url in urls]


def init_info(ie_cfg: Any, rank: int) -> SkyrlInitInfo:
    """Return what SkyRL's `build_trainer_engine` hands to vLLM's factory.

    `ie_cfg` is SkyRL's InferenceEngineConfig. Raises ConfigError for settings that cannot be
    combined, and for options that are no settings of `connect`.
    """
    check(ie_cfg)
    return SkyrlInitInfo(rank=rank, options=_options())


def register_engines() -> None:
    """Register the engines of workers and trainers with vLLM. Idempotent."""
    plugin.register()
    with suppress(ValueError):  # already registered
        vllm_api.WeightTransferTrainerFactory.register_engine(
            _BACKEND, __name__, SkyrlTrainerEngine.__name__
        )


def _options() -> dict[str, Any]:
    """Return the settings of `connect` in the environment. Raises ConfigError."""
    text = os.environ.get(OPTIONS, "{}")
    try:
        options = json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"{OPTIONS} is no JSON: {exc}") from exc
    if not isinstance(options, dict):
        raise ConfigError(f'{OPTIONS} is an object with settings of connect(): {{"packed": true}}')
    check_settings(options, of=OPTIONS, without=_NOT_TAKEN)
    return options


def _as_yielded(source: Any) -> dict[str, Any]:
    """Return the settings that send the model under the names and in the dtype of `source`."""
    prefix = source.weight_prefix
    settings: dict[str, Any] = {"dtype": source._dtype}
    if prefix:
        settings["rename"] = lambda name: prefix + name
    return settings
