"""What each rank does that DeepSpeed trains with ZeRO-3, in a process of its own."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import weightsync as ws
from tests.e2e.models import digests
from tests.e2e.ranks_at_work import TIMEOUT_S, TOKENS, Digests, Seen, seen
from tests.weights.test_docs_sources import EXAMPLES, FLAT
from tests.weights.trainer_models import plain
from weightsync.weights.sinks.module_sink import strip_wrappers

PLACE = f"{sys.prefix}/deepspeed"
"""Where `make venv` puts DeepSpeed: what finds it among other packages imports it, too."""
KEPT: list[ZeroTrainer] = []


@contextmanager
def their_warnings() -> Iterator[None]:
    """Let DeepSpeed use what torch has deprecated, which is an error in tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class ZeroTrainer:
    """A decoder under DeepSpeed's engine, and its sender."""

    sender: ws.WeightSender

    def __init__(self, settings: dict[str, Any]) -> None:
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=rank, RANK=rank, WORLD_SIZE=size)
        if PLACE not in sys.path:
            sys.path.append(PLACE)
        with their_warnings():
            self.engine = self.make_engine(settings)

    def make_engine(self, settings: dict[str, Any]) -> Any:
        import deepspeed

        # It would compile an extension for half a minute, for faster collectives on one host.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo")
        self.gathered = deepspeed.zero.GatheredParameters
        model = plain()
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **settings}
        bf16 = zero.pop("bf16", False)
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": zero,
                "bf16": {"enabled": bf16},
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
        )
        return engine

    @their_warnings()
    def step(self) -> None:
        loss = self.engine(TOKENS).float().square().mean()
        self.engine.backward(loss)
        self.engine.step()

    @their_warnings()
    def full(self) -> Digests:
        """Digests of the unsharded model, tied names included."""
        found: dict[str, torch.Tensor] = {}
        module = self.engine.module
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
        for name, tensor in named:
            with self.gathered([tensor], enabled=hasattr(tensor, "ds_tensor")):
                found[strip_wrappers(name)] = tensor.detach().clone()
        return digests(found.items())


def start(rank: int, to: list[str], settings: dict[str, Any], options: dict[str, Any]) -> Seen:
    def make() -> None:
        KEPT[:] = [ZeroTrainer(settings)]
        KEPT[0].sender = ws.connect(KEPT[0].engine, to=to, timeout_s=TIMEOUT_S, **options)

    return seen(make)


def step_and_send(rank: int) -> tuple[Seen, Digests]:
    KEPT[0].step()
    return seen(KEPT[0].sender.send_weights), KEPT[0].full()


@their_warnings()
def run_page(rank: int, to: str) -> Digests:
    """Run the example of docs/sources.md with an engine, and return the model after it."""
    trainer = ZeroTrainer({})

    def train(engine: Any, _: object) -> None:
        assert engine is trainer.engine
        trainer.step()

    names = {"ws": ws, "trained": trainer.engine, "url": to, "batches": range(2), "train": train}
    exec(EXAMPLES[FLAT], names)
    return trainer.full()


def train_alone(rank: int, settings: dict[str, Any], steps: int) -> Digests:
    """Return the model after some steps that nobody watches."""
    trainer = ZeroTrainer(settings)
    for _ in range(steps):
        trainer.step()
    return trainer.full()
