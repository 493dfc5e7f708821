"""A trainer in a process of its own, which sends a given number of updates and times each."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import nn

import weightsync as ws
from tests.e2e import models
from tests.soak import victims
from weightsync.shm.segment import live_segments


@dataclass
class _Trainer:
    model: nn.Module
    sender: ws.WeightSender


_here: list[_Trainer] = []


def begin(where: tuple[str, str]) -> None:
    """Connect to the receiver at a URL, by a path."""
    url, path = where
    model = models.make("tied", seed=1)
    _here.append(_Trainer(model, ws.connect(model, to=url, **victims.PATHS[path])))


def send(how: tuple[int, int]) -> dict[str, Any]:
    """Fill the model from a seed and send it `count` times; return digests and seconds."""
    seed, count = how
    (trainer,) = _here
    models.fill(trainer.model, seed=seed)
    seconds: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        trainer.sender.send_weights()
        seconds.append(time.perf_counter() - started)
    return {"digests": models.digests(trainer.model), "seconds": seconds}


def segments(_: object) -> list[str]:
    """The segments that this process holds."""
    return sorted(segment.name for segment in live_segments())


def end(_: object) -> None:
    """Close the sender."""
    _here.pop().sender.close()
