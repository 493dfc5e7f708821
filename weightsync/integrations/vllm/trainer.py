"""vLLM's own trainer API with our engine: one other init info, and `send_weights()` is ours.

engine = WeightTransferTrainerFactory.trainer_init(
    WeightsyncTrainerInitInfo(rank=rank), client=HTTPVLLMWeightSyncClient(url), source=source
)
engine.send_weights()
engine.shutdown()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch.distributed as dist

from weightsync.errors import ConfigError
from weightsync.integrations.vllm import plugin
from weightsync.integrations.vllm.actors import vllm_targets
from weightsync.integrations.vllm.server import SCHEME
from weightsync.ranks.comm import join_ranks
from weightsync.report import SyncReport
from weightsync.sender import DEFAULT_TIMEOUT_S, WeightSender, check_settings, connect
from weightsync.transports.base import Transport
from weightsync.transports.factory import Targets

plugin.register_trainer()

from vllm.distributed.weight_transfer import (  # noqa: E402  # refused above if too old
    HTTPVLLMWeightSyncClient,
    RayVLLMWeightSyncClient,
)
from vllm.distributed.weight_transfer.base import (  # noqa: E402  # as above
    TrainerInitInfo,
    TrainerWeightTransferEngine,
)

_OWN_ARGUMENTS = frozenset({"source", "to"})


@dataclass
class WeightsyncTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM has no types here
    """The init info of our trainer engine, for `WeightTransferTrainerFactory.trainer_init`.

    - `rank`: this process's rank in `process_group`. Rank 0 sends.
    - `options`: keyword arguments of `weightsync.connect`, for instance `{"packed": True}`.
    - `to`: the targets of `weightsync.connect`. None: what vLLM's client talks to.
    """

    backend: ClassVar[str] = plugin.BACKEND

    options: Mapping[str, Any] = field(default_factory=dict)
    to: Any = None


class WeightsyncTrainerEngine(
    TrainerWeightTransferEngine[WeightsyncTrainerInitInfo]  # type: ignore[misc]  # as above
):
    """A `WeightSender` behind vLLM's contract of trainer engines.

    `sender` is that sender, `report` the report of the last update. vLLM's client only names the
    server: our messages go to its workers, as those of `weightsync.connect` do.
    """

    init_info_cls = WeightsyncTrainerInitInfo

    def __init__(self, sender: WeightSender, *, client: Any, source: Any, is_sender: bool) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.sender = sender
        self.report: SyncReport | None = None

    @classmethod
    def trainer_init(
        cls, init_info: WeightsyncTrainerInitInfo, *, client: Any, source: Any = None
    ) -> WeightsyncTrainerEngine:
        """Connect to all workers behind `client`. Collective: every rank of the trainer calls it.

        `source` is vLLM's WeightSource, or any source of `weightsync.connect`. Raises ConfigError
        for arguments that do not fit, and the errors of `connect`.
        """
        timeout_s = init_info.options.get("timeout_s", DEFAULT_TIMEOUT_S)
        group = init_info.options.get("process_group")
        # A rank that refuses its arguments raises on all of them: none is left in `connect`.
        with closing(join_ranks(group, timeout_s=timeout_s, join_timeout_s=timeout_s)) as ranks:
            to = ranks.together(
                lambda: _checked_targets(init_info, client, source, cls._targets_of)
            )
        sender = connect(source, to, **init_info.options)
        return cls(sender, client=client, source=source, is_sender=init_info.is_sender)

    @staticmethod
    def _targets_of(client: Any) -> Targets:
        return targets_of(client)

    def send_weights(self) -> SyncReport:
        """Send the source's weights; all workers use them on return. Every rank calls it.

        Raises the errors of `WeightSender.send_weights`, on all ranks.
        """
        self.report = None
        self.report = self.sender.send_weights()
        return self.report

    def shutdown(self) -> None:
        """Disconnect and free all memory. Idempotent."""
        self.sender.close()


def targets_of(client: Any) -> str | list[Transport]:
    """Return the targets of `connect` that one of vLLM's clients talks to.

    `client` is an HTTPVLLMWeightSyncClient, a RayVLLMWeightSyncClient, an `LLM`, or an object with
    an `LLM` in its attribute `llm`. Raises ConfigError for others, also for subclasses of the two
    clients: one may talk to more servers than its base class knows.
    """
    if type(client) is HTTPVLLMWeightSyncClient:
        return SCHEME + str(client.base_url)
    if type(client) is RayVLLMWeightSyncClient:
        return [target for handle in client.handles for target in vllm_targets(handle)]
    for engine in (client, getattr(client, "llm", None)):
        if callable(getattr(engine, "collective_rpc", None)):  # an LLM, whose import takes seconds
            return list(vllm_targets(engine))
    raise ConfigError(
        f"a {type(client).__name__} does not show its servers: it is no HTTPVLLMWeightSyncClient, "
        "RayVLLMWeightSyncClient or LLM, and has no `llm`; give WeightsyncTrainerInitInfo(to=...), "
        "the URLs of all servers or vllm_targets(engine)"
    )


def _checked_targets(
    init_info: WeightsyncTrainerInitInfo,
    client: Any,
    source: Any,
    named_by: Callable[[Any], Targets],
) -> Targets:
    """Return the targets of `connect`, on rank 0. Raises ConfigError for what does not fit."""
    if source is None:
        raise ConfigError("trainer_init() needs source=: a WeightSource, a module, a state dict")
    own = sorted(_OWN_ARGUMENTS & init_info.options.keys())
    if own:
        raise ConfigError(f"options has {', '.join(own)}; trainer_init() has its own argument")
    check_settings(init_info.options, of=f"{type(init_info).__name__}.options")
    _check_rank(init_info)
    if not init_info.is_sender:
        return ()
    return named_by(client) if init_info.to is None else init_info.to


def _check_rank(init_info: WeightsyncTrainerInitInfo) -> None:
    """Raise ConfigError where the rank is not that of this process: two ranks would send."""
    group = init_info.options.get("process_group")
    rank, size = 0, 1
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(group), dist.get_world_size(group)
    if init_info.rank != rank:
        raise ConfigError(
            f"the init info has rank {init_info.rank}, and this process is rank {rank} of {size} "
            "in the process group; options={'process_group': group} names another group"
        )
