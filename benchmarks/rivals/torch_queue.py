"""A torch.multiprocessing queue, tuned as its notes on best practices say.

`shared once`: the trainer's parameters are moved into shared memory once and each update sends the
same state dict, so that the sender copies nothing. Readers read the trained memory, as unpacked
weightsync does. `copied each time`: a state dict of copies per update, so the trainer need not
wait. Readers keep the last state dict of each option, so that it stays mapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.multiprocessing
from torch import nn

from benchmarks.rivals.contract import Job, Reader, Rival
from benchmarks.rivals.crew import CONTEXT, Crew
from benchmarks.rivals.parameters import load, parameters_of


class Trainer(Rival):
    """`option` is the sharing strategy."""

    def setup(self, job: Job, module: nn.Module) -> None:
        _share_by(self.option)
        self._queues = [CONTEXT.SimpleQueue() for _ in range(job.readers)]
        extras = [(self.option, queue) for queue in self._queues]
        self._crew = Crew(job, Taker, extras)
        self._crew.ready()
        module.share_memory()
        self._state = parameters_of(module)

    def update(self, way: str) -> None:
        self._crew.tell("load", way, None)
        state = self._state
        if way == "copied each time":
            state = {name: tensor.clone() for name, tensor in state.items()}
        for queue in self._queues:
            queue.put(state)
        self._crew.hear()

    def held(self) -> list[Mapping[str, str]]:
        return self._crew.held()

    def close(self) -> None:
        if hasattr(self, "_crew"):
            self._crew.close()


class Taker(Reader):
    """Takes state dicts from its queue."""

    def __init__(self, module: nn.Module, extra: Any) -> None:
        super().__init__(module, extra)
        strategy, self._queue = extra
        _share_by(strategy)
        self._kept: dict[str, dict[str, torch.Tensor]] = {}

    def load(self, way: str, message: Any) -> object:
        state = self._queue.get()
        self._kept[way] = state
        return len(load(self.parameters, state.items()))


def _share_by(strategy: str) -> None:
    untyped: Any = torch.multiprocessing
    untyped.set_sharing_strategy(strategy)
