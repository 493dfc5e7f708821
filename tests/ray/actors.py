"""The actors of these tests, and files by which a test controls blocked actors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
import torch

import weightsync as ws
from tests.e2e.models import digests, make
from weightsync.ray import WeightSyncActor

WAIT_S = 60.0


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.01)


class Holding:
    """A gate at which an actor waits until the test opens it; the file `free` opens it for all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stand(self, label: str) -> None:
        (self.folder / f"{label}.at").touch()
        if not (self.folder / "free").exists():
            wait_for(self.folder / f"{label}.go")

    def wait_until_stands(self, label: str) -> None:
        wait_for(self.folder / f"{label}.at")

    def let_go(self, label: str) -> None:
        (self.folder / f"{label}.go").touch()


class PlainRollout(WeightSyncActor):
    """A model, and a method that is busy for as long as a test wants."""

    def __init__(self, model: str = "everything", seed: int = 0, folder: Path = Path()) -> None:
        self.model = make(model, seed)
        self.gate = Holding(folder)
        self.weightsync_receiver = ws.WeightReceiver(self.model, apply="staged")

    def held(self) -> tuple[int, dict[str, str]]:
        return self.weightsync_receiver.version, digests(self.model)

    def where(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def work(self, label: str) -> str:
        self.gate.stand(label)
        return label


class HookRollout(WeightSyncActor):
    """Loads through a hook that waits at the gate with the first tensor of each update."""

    def __init__(self, folder: Path) -> None:
        self.gate = Holding(folder)
        self.loaded: dict[str, torch.Tensor] = {}
        self.weightsync_receiver = ws.WeightReceiver(self.load, apply="in_place")

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.gate.stand(f"load{self.weightsync_receiver.version}")
        new = {name: tensor.clone() for name, tensor in pairs}
        self.loaded.update(new)
        return set(new)

    def held(self) -> tuple[int, dict[str, str]]:
        return self.weightsync_receiver.version, digests(self.loaded.items())


class AsyncHookRollout(HookRollout):
    """The same with an event loop."""

    async def ticks(self) -> int:
        for _ in range(3):
            await asyncio.sleep(0.01)
        return 3


class Recorder(PlainRollout):
    """Records the types of all arguments and results of its method."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def weightsync_handle(self, message: Mapping[str, object]) -> dict[str, object]:
        answer = super().weightsync_handle(message)
        self.seen |= types_in(message) | types_in(answer)
        return answer

    def types(self) -> set[str]:
        return self.seen


class Empty(WeightSyncActor):
    """An actor without a receiver."""


def types_in(value: Any) -> set[str]:
    """Return the names of all exact types in a tree of data."""
    found = {type(value).__name__}
    if isinstance(value, dict):
        return found.union(*map(types_in, value), *map(types_in, value.values()))
    if isinstance(value, list | tuple | set):
        return found.union(*map(types_in, value))
    return found


Rollout = ws.ray.remote(num_cpus=0)(PlainRollout)
Slow = ws.ray.remote(num_cpus=0)(HookRollout)
SlowAsync = ws.ray.remote(num_cpus=0)(AsyncHookRollout)
Recording = ws.ray.remote(num_cpus=0)(Recorder)
WithoutReceiver = ws.ray.remote(Empty)
