"""vLLM's trainer API on two ranks that hold different layers, with vLLM's own WeightSource."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)

import weightsync as ws
from tests.crew import Crew, crew
from weightsync.integrations.vllm.trainer import WeightsyncTrainerInitInfo
from weightsync.testing.conformance.vllm_server import HAS_ITER_FULL, as_metadata

NAMES = [f"model.layers.{layer}.{part}" for layer in range(3) for part in ("up", "down")]
NAMES = ["model.embed", *NAMES, "lm_head"]


def weights(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((3, i + 1), float(step * 10 + i)) for i, name in enumerate(NAMES)}


def stage_of(name: str) -> int:
    return 0 if "embed" in name or "layers.0" in name else 1


class Stage(WeightSource):  # type: ignore[misc]  # vLLM has no types here
    """A stage of a pipeline: the first holds the embedding and a layer, the second the rest."""

    def __init__(self, rank: int) -> None:
        self.held = [name for name in NAMES if stage_of(name) == rank]
        self.step, self.passes, self.fails = 0, 0, False

    @as_metadata
    def metadata(self) -> list[Any]:
        made = [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in weights(0).items()]
        return [replace(m, owners=(stage_of(m.name),)) for m in made] if HAS_ITER_FULL else made

    def held_names(self) -> list[str]:
        """Return the names of this stage; vLLM from 0.33 goes by the owners."""
        return self.held

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        named = dict(self.iter_full())
        yield from ((name, named.get(name)) for group in self.groups() for name in group)

    def iter_full(self) -> Iterator[tuple[str, Any]]:
        self.passes += 1
        if self.fails:
            raise RuntimeError("planted")
        made = weights(self.step)
        yield from ((name, made[name]) for name in self.held)


def updates(rank: int) -> Any:
    """Return what rank 0's receiver held after each update, and each rank's iterations."""
    source, held, right = Stage(rank), dict[str, torch.Tensor](), []
    receiver = ws.WeightReceiver(lambda pairs: held.update((n, t.clone()) for n, t in pairs))
    with closing(receiver):
        engine: Any = WeightTransferTrainerFactory.trainer_init(
            WeightsyncTrainerInitInfo(rank=rank, to=receiver.handle),
            client=object(),
            source=source,
        )
        for step in (1, 2, 3):
            source.step = step
            report = engine.send_weights()
            wanted = weights(step)
            right.append(rank > 0 or all(torch.equal(held[n], t) for n, t in wanted.items()))
            assert report.version == step
        source.fails = rank == 1
        with pytest.raises(ws.WeightSyncError, match="planted"):
            engine.send_weights()
        source.fails, source.step = False, 4
        engine.send_weights()
        right.append(rank > 0 or torch.equal(held["lm_head"], weights(4)["lm_head"]))
        engine.shutdown()
    return right, source.passes


def refused(rank: int, called: list[int], client: Any) -> str:
    """Return the error of ranks that call themselves `called`; rank 0 has the client."""
    info = WeightsyncTrainerInitInfo(rank=called[rank], options={"timeout_s": 60.0})
    began = time.monotonic()
    with pytest.raises(ws.ConfigError) as caught:
        WeightTransferTrainerFactory.trainer_init(info, client=client, source=Stage(rank))
    assert time.monotonic() - began < 30.0, "this rank waited for one that had failed"
    return str(caught.value)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(2) as made:
        yield made


def test_ranks_that_hold_different_layers_send_together_and_fail_together(ranks: Crew) -> None:
    # One iteration at connect, where each rank learns what it holds, and one for each update.
    assert ranks.run(updates) == [([True] * 4, 6)] * 2


def test_a_second_rank_that_calls_itself_the_first_is_refused_on_both(ranks: Crew) -> None:
    errors = ranks.run(refused, [0, 0], HTTPVLLMWeightSyncClient("http://127.0.0.1:9"))
    assert all("rank 0, and this process is rank 1 of 2" in error for error in errors)


def test_a_client_that_the_first_rank_refuses_ends_both(ranks: Crew) -> None:
    errors = ranks.run(refused, [0, 1], object())
    assert all("a object does not show its servers" in error for error in errors)
