"""What each rank of OpenRLHF's trainer does in these tests, in a process of its own."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

from torch import nn

from tests.e2e.models import digests
from tests.e2e.ranks_at_work import Digests, Seen, seen
from tests.openrlhf.on_cpu import pretend
from tests.weights.trainer_models import plain

KEPT: list[Any] = []
OTHER: dict[str, Any] = {
    "a base in 4 bits": {"load_in_4bit": True},
    "another timeout": {"timeout_s": 61.0},
    "another model": {"model": nn.Linear(3, 5)},
    "no engine": {"to": []},
}


class Engine(nn.Module):
    """Has a model where DeepSpeed's engine has it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def make(rank: int, to: str, other: str = "") -> None:
    """Make the trainer's half of OpenRLHF; `other` is what the last rank has unlike the others."""
    pretend()
    with warnings.catch_warnings():  # of DeepSpeed, which are errors in these processes
        warnings.simplefilter("ignore")
        from weightsync.integrations.openrlhf import trainer

    unlike = OTHER[other] if other and rank == (0 if other == "no engine" else 1) else {}
    model = unlike.get("model", plain())

    class Trainer(trainer.with_options({"timeout_s": unlike.get("timeout_s", 60.0)})):  # type: ignore[misc]
        def _targets(self) -> Any:
            return unlike.get("to", [to]) if rank == 0 else []

    made = Trainer.__new__(Trainer)
    made.args = SimpleNamespace(
        ds=SimpleNamespace(
            zero_stage=0, tensor_parallel_size=1, load_in_4bit=unlike.get("load_in_4bit", False)
        )
    )
    made.actor = SimpleNamespace(model=Engine(model))
    KEPT[:] = [made]


def broadcast(rank: int) -> tuple[Seen, Digests]:
    """Change the weights and send them, as OpenRLHF calls it; return what the model has."""
    module = KEPT[0].actor.model.module
    for parameter in module.parameters():
        parameter.data.add_(1)
    outcome = seen(KEPT[0].broadcast_to_vllm)
    return outcome, digests(module.state_dict().items())


def close(rank: int) -> None:
    if KEPT[0]._sender is not None:
        KEPT[0]._sender.close()
