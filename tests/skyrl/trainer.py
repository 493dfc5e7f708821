"""A trainer of two ranks: SkyRL's own FSDP worker around a model, without the rest of a run.

What cannot be had without CUDA: flash_attn, of which two functions are imported by the worker's
module and not called here, and so the worker's own start, which makes its model with NCCL.
"""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

import weightsync as ws
from tests.vllm.tiny import change

held: dict[str, Any] = {}
"""What a rank keeps from one call to the next."""


def load(rank: int) -> None:
    """Import what the other calls need: SkyRL's and vLLM's imports take a while, and warn."""
    warnings.simplefilter("ignore")
    if find_spec("flash_attn") is None:
        package, module = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
        package.__spec__ = ModuleSpec("flash_attn", None)  # transformers looks for it
        module.pad_input = module.unpad_input = None  # type: ignore[attr-defined]  # never called
        sys.modules |= {"flash_attn": package, "flash_attn.bert_padding": module}
    import skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker  # noqa: F401

    from weightsync.integrations.skyrl import register

    register()


def start(rank: int, cfg: Any, url: str, iterated: bool = False) -> None:
    """Make a sharded model and a worker of SkyRL, and connect it, as a run of SkyRL does."""
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
        RemoteInferenceClient,
    )
    from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase

    class Source(FsdpWeightSource):  # type: ignore[misc]  # SkyRL has no types here
        """One that may yield something else than its base class: it is iterated."""

    class PolicyWorker(FSDPPolicyWorkerBase):  # type: ignore[misc]  # as above
        def __init__(self) -> None:
            path = cfg.trainer.policy.model.path
            self.model = SimpleNamespace(model=sharded(path))
            self.cfg = cfg.trainer
            self._is_lora = self._is_multimodal_lm_only = False

        def _set_expandable_segments(self, enable: bool) -> None:
            """Do nothing: there is no allocator of CUDA."""

        def _build_weight_source(self, dtype: torch.dtype, backend: str) -> Any:
            assert backend == "weightsync"
            made = super()._build_weight_source(dtype, backend)
            assert type(made) is FsdpWeightSource
            return Source(made.model, dtype, made.weight_prefix) if iterated else made

    client = RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1)
    worker = PolicyWorker()
    asyncio.run(worker.init_weight_sync_state(client, cfg.generator.inference_engine))
    held.update(worker=worker, client=client, engines=cfg.generator.inference_engine)


def sharded(path: Path | str) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(model)
    return model


def train(rank: int, seed: int) -> None:
    """Give the model the weights that `change` gives an unsharded one."""
    model = held["worker"].model.model
    whole: nn.Module = cast(Any, Qwen3ForCausalLM(model.config)).float()
    change(whole, seed)
    wanted = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = parameter.to_local()
            rows = wanted[name].chunk(dist.get_world_size(), dim=0)
            if own.numel():
                own.copy_(rows[rank])


def sync(rank: int) -> tuple[int, str, bool]:
    """Update the servers as SkyRL does between two steps; return version, kind, gathered."""

    async def run() -> None:
        worker, client = held["worker"], held["client"]
        if rank == 0:
            await client.pause_generation()
        dist.barrier()
        try:
            await worker.broadcast_to_inference_engines(client, held["engines"])
        finally:
            if rank == 0:
                await client.resume_generation()

    asyncio.run(run())
    report = held["worker"]._weight_sync_engine.report
    return report.version, report.verified, bool(report.gathered)


def stop(rank: int) -> None:
    """Tear the engine down, as SkyRL does at the end of a run."""
    from skyrl.backends.skyrl_train.weight_sync.weight_senders import teardown_engine

    teardown_engine(held.pop("worker")._weight_sync_engine)


def refused(rank: int, cfg: Any, url: str, options: list[str], ranks: list[int]) -> str:
    """Return the error of the real build_trainer_engine, by the options and ranks of each."""
    from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource
    from skyrl.backends.skyrl_train.weight_sync.weight_senders import build_trainer_engine

    os.environ["SKYRL_WEIGHTSYNC_OPTIONS"] = options[rank]
    try:
        build_trainer_engine(
            ie_cfg=cfg.generator.inference_engine,
            colocate_all=False,
            rank=ranks[rank],
            inference_world_size=1,
            source_factory=lambda dtype, _: FsdpWeightSource(nn.Linear(2, 2), dtype, ""),
            draft_source_factory=lambda _: None,
            server_urls=[url],
            data_parallel_size=1,
        )
    except (ws.WeightSyncError, ValueError) as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        del os.environ["SKYRL_WEIGHTSYNC_OPTIONS"]
    return "connected"


def sent_and_yielded(rank: int, path: Path, dtype: torch.dtype, prefix: str) -> bool:
    """Whether a receiver gets the names, dtypes and values that SkyRL's source yields."""
    from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from weightsync.integrations.skyrl.trainer import SkyrlInitInfo

    got: dict[str, torch.Tensor] = {}

    def take(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        got.update((name, tensor.clone()) for name, tensor in pairs)

    source = FsdpWeightSource(sharded(path), dtype, prefix)
    receiver = ws.WeightReceiver(take)
    engine = WeightTransferTrainerFactory.trainer_init(
        SkyrlInitInfo(rank=rank, to=receiver.handle if rank == 0 else ()),
        client=None,
        source=source,
    )
    try:
        report = engine.send_weights()
        assert engine.source is source
        assert not report.gathered
        yielded = dict(source)
    finally:
        engine.shutdown()
        receiver.close()
    if rank:
        return True
    assert got.keys() <= yielded.keys()
    left_out = yielded.keys() - got.keys()  # tied to one that is sent
    tied = [n for n in left_out if any(torch.equal(yielded[n], each) for each in got.values())]
    assert sorted(tied) == sorted(left_out)
    return all(torch.equal(got[n], yielded[n]) and got[n].dtype == dtype for n in got)
