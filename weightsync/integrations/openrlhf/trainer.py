"""OpenRLHF's trainer of the actor, as a sender to its engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import GatherReplacedLayerParams
from openrlhf.trainer.ray import ppo_actor
from peft import PeftModel
from torch import nn

from weightsync.cuda import devices
from weightsync.errors import ConfigError
from weightsync.integrations.huggingface import MergedSource
from weightsync.integrations.vllm.actors import vllm_targets
from weightsync.integrations.vllm.server import VllmWorkerTransport
from weightsync.ranks.comm import JOIN_TIMEOUT_S, join_ranks
from weightsync.report import SyncReport
from weightsync.sender import DEFAULT_TIMEOUT_S, WeightSender, check_settings, connect

logger = logging.getLogger(__name__)

_Trainer: Any = ppo_actor.ActorPPOTrainer
_NOT_TAKEN: Mapping[str, str] = {
    "dtype": "each tensor is cast to what the engines keep",
    "rename": "OpenRLHF's models and its engines have the names of the checkpoint",
    "quantize": "OpenRLHF makes its engines in bfloat16",
    "token": "the engines are Ray actors",
    "verify_tls": "the engines are Ray actors",
    "process_group": "the ranks are those of the default group",
    "at": "the model itself is sent",
}


class WeightsyncPPOTrainer(_Trainer):  # type: ignore[misc]  # OpenRLHF has no types
    """An ActorPPOTrainer that sends its weights to the engines of WeightsyncRolloutActor.

    `report` is that of the last update. `connect_options` are further settings of `connect`.
    """

    connect_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    report: SyncReport | None = None
    _sender: WeightSender | None = None

    def _init_vllm_sync_group(self, backend: str) -> None:
        """Make no group: the first update connects, when engines that sleep were woken."""

    def broadcast_to_vllm(self) -> None:
        """Send the weights; all engines hold them on return. Every rank calls it.

        The prefix cache of the engines is reset with each update, and what OpenRLHF has paused
        stays paused. Raises the errors of `connect` and `send_weights`, on all ranks.
        """
        # As OpenRLHF's own: what torch keeps may be what an engine on the same GPU needs.
        devices.empty_cache()
        self.report = None
        if self._sender is None:
            self._sender = self._connect()
        self.report = self._sender.send_weights()
        devices.empty_cache()
        if dist.get_rank() == 0:
            logger.info("%s", self.report)

    def _connect(self) -> WeightSender:
        timeout_s = self.connect_options.get("timeout_s", DEFAULT_TIMEOUT_S)
        # A rank that cannot send raises on all of them, and none is left in `connect`.
        with closing(join_ranks(None, timeout_s=JOIN_TIMEOUT_S, join_timeout_s=timeout_s)) as ranks:
            source, to = ranks.together(lambda: (source_of(self.actor, self.args), self._targets()))
        return connect(source, to, dtype="receiver", **self.connect_options)

    def _targets(self) -> list[VllmWorkerTransport]:
        """Return the workers of all engines, on rank 0, which alone talks to them."""
        if dist.get_rank() != 0:
            return []
        return list(chain.from_iterable(map(vllm_targets, self.vllm_engines)))


def with_options(options: Mapping[str, Any]) -> type[WeightsyncPPOTrainer]:
    """Return the trainer's class with settings of `connect`.

    Ray carries a class that no module has by its attributes, and so the settings to all ranks.
    Raises ConfigError for names that are no settings, or none that OpenRLHF leaves open.
    """
    check_settings(options, of="install()", without=_NOT_TAKEN)
    if not options:
        return WeightsyncPPOTrainer
    name = WeightsyncPPOTrainer.__name__
    return type(name, (WeightsyncPPOTrainer,), {"connect_options": dict(options)})


def source_of(actor: Any, args: Any) -> object:
    """Return what `connect` is given of OpenRLHF's Actor; `args` are OpenRLHF's.

    Adapters are merged. Of ZeRO-3 each rank gives what it holds; DeepSpeed's tensor parallelism
    gathers each parameter. Raises ConfigError for what cannot be sent.
    """
    engine = actor.model
    has_adapters = isinstance(engine.module, PeftModel)
    is_split = args.ds.tensor_parallel_size > 1
    if getattr(args.ds, "load_in_4bit", False):
        raise ConfigError(
            "--ds.load_in_4bit: weights that bitsandbytes has quantized are none that vLLM loads; "
            "train without it"
        )
    if has_adapters and (is_split or args.ds.zero_stage == 3):
        how = "tensor parallelism" if is_split else "ZeRO-3"
        raise ConfigError(
            f"--ds.lora.rank with DeepSpeed's {how}: an adapter is merged into whole tensors; "
            "train with --ds.zero_stage 2 and --ds.tensor_parallel_size 1"
        )
    if has_adapters:
        return MergedSource(engine)
    return gathered(engine.module) if is_split else engine


def gathered(module: nn.Module) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """Return a source of a model that DeepSpeed's tensor parallelism splits, on every rank.

    A parameter is whole while its pair is read.
    """

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in module.named_parameters():
            with GatherReplacedLayerParams([parameter], module, enabled=True):
                yield name, parameter.detach()

    return pairs
