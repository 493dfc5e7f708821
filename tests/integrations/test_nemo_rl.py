"""The engine for NeMo-RL, against its abstract class as its source of 22 August 2026 has it.

NeMo-RL itself needs CUDA. Only names and arguments are taken from it.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch

from weightsync.errors import BackendUnavailableError, ConfigError, ProtocolError, WeightSyncError

NAME = "weightsync.integrations.nemo_rl"
Weights = dict[str, torch.Tensor]


class CheckpointEngine(ABC):
    """What NeMo-RL calls of an engine."""

    shard_expert_weights: bool = False

    @abstractmethod
    def prepare(self) -> Any: ...

    @abstractmethod
    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None: ...

    @abstractmethod
    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None: ...

    def finalize(self) -> None:
        return

    @abstractmethod
    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None]
    ) -> None: ...

    @abstractmethod
    def receive_weight_batches(
        self,
    ) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]: ...


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    names = ["nemo_rl", "nemo_rl.utils", "nemo_rl.utils.checkpoint_engines"]
    for name in (*names, f"{names[-1]}.base"):
        made = ModuleType(name)
        made.__path__ = []
        monkeypatch.setitem(sys.modules, name, made)
    vars(sys.modules[f"{names[-1]}.base"])["CheckpointEngine"] = CheckpointEngine
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


@pytest.fixture
def engines(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """One of a policy worker, and two of vLLM's, connected as NeMo-RL's synchronizer does it."""
    monkeypatch.setattr("weightsync.integrations.rollouts.node_address", lambda: "127.0.0.1")
    options = {"timeout_s": 20, "device": "cpu", "release_after_refit": False}
    made = [module.WeightsyncCheckpointEngine(bucket_size=1 << 20, **options) for _ in range(3)]
    metadata = [{**engine.prepare(), "rank": 0} for engine in made]
    topology = {"train_world_size": 1, "rollout_world_size": 2, "metadata": metadata}
    made[0].init_policy_process_group(worker_rank=0, **topology)
    for rank, engine in enumerate(made[1:]):
        engine.init_rollout_process_group(rollout_rank=rank, **topology)
    yield made
    made[0].close()
    for engine in made[1:]:
        engine._rollout.close()


def weights(step: int) -> Weights:
    torch.manual_seed(step)
    return {f"layer.{i}.weight": torch.randn(64, 48) for i in range(5)}


def refit(engines: list[Any], given: Any) -> list[Weights]:
    """Send once, as NeMo-RL does: all workers at the same time; return what vLLM's loaded."""

    async def load(engine: Any) -> Weights:
        loaded: Weights = {}
        async for batch in engine.receive_weight_batches():
            loaded |= {name: tensor.clone() for name, tensor in batch}
        return loaded

    with ThreadPoolExecutor(3) as pool:
        received = [pool.submit(asyncio.run, load(engine)) for engine in engines[1:]]
        sent = pool.submit(asyncio.run, engines[0].send_weights(given))
        sent.result(60)
        return [future.result(60) for future in received]


def test_all_workers_of_vllm_load_each_step(engines: list[Any]) -> None:
    for step in range(3):
        wanted = weights(step)
        for loaded in refit(engines, iter(wanted.items())):
            assert loaded.keys() == wanted.keys()
            assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
        for engine in engines:
            engine.finalize()


def test_a_failed_step_fails_on_all_and_the_next_one_is_whole(engines: list[Any]) -> None:
    refit(engines, iter(weights(0).items()))

    def fails() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(1).items())[:2]
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        refit(engines, fails())
    wanted = weights(2)
    for loaded in refit(engines, iter(wanted.items())):
        assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)


def test_ranks_that_disagree_are_refused(module: Any, engines: list[Any]) -> None:
    own = [engine.prepare() for engine in engines[1:]]
    topology = {"train_world_size": 1, "rollout_world_size": 2}
    with pytest.raises(ProtocolError, match="named 1 endpoints of workers for 2 rollout ranks"):
        engines[0].init_policy_process_group(worker_rank=0, metadata=[{}, own[0]], **topology)
    with pytest.raises(ProtocolError, match="the ranks of vLLM and the policy disagree"):
        engines[1].init_rollout_process_group(rollout_rank=1, metadata=[{}, *own], **topology)


def test_settings_that_it_does_not_take_are_named(module: Any) -> None:
    for options, said in (
        ({"shard_expert_weights": True}, "shard_expert_weights is not supported"),
        ({"timeout": 3}, "timeout"),
        ({"dtype": "bfloat16"}, "NeMo-RL's trainer says which tensors there are"),
    ):
        with pytest.raises((ConfigError, WeightSyncError, TypeError), match=said):
            module.WeightsyncCheckpointEngine(bucket_size=1 << 20, **options)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nemo_rl", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(BackendUnavailableError, match="a NeMo-RL with checkpoint engines"):
        importlib.import_module(NAME)
